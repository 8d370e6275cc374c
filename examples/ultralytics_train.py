"""Train a small detector with Ultralytics; a kill costs the epoch that is under way. `pip install ultralytics`, then

    elastic-agent --nproc-per-node gpu examples/ultralytics_train.py

Ultralytics sees LOCAL_RANK, and starts no processes of its own. Without GPUs it trains with one worker.
"""

import os
import shutil
import time
from pathlib import Path

import cv2
import numpy as np
import torch
from ultralytics import YOLO

EPOCHS = 5
FOLDER = Path("runs/ultralytics").absolute()
RESUME = FOLDER / "resume.pt"


def main() -> None:
    on_gpu, workers = torch.cuda.is_available(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Ultralytics makes a world of these devices, so of one node.
    device = ",".join(map(str, range(workers))) if on_gpu else "cpu"
    resumes = RESUME.exists()
    model = YOLO(RESUME if resumes else "yolov8n.yaml")
    model.add_callback("on_model_save", keep)
    model.train(
        resume=resumes,
        data=squares(),
        epochs=EPOCHS,
        imgsz=64,
        batch=16,
        device=device,
        project=str(FOLDER),
        name="train",
        exist_ok=True,
        plots=False,
    )


def keep(trainer: object) -> None:
    """A copy of last.pt, which Ultralytics overwrites in place: a kill meanwhile would leave half a file.

    What the last epoch has saved cannot be resumed.
    """
    if trainer.epoch + 1 < trainer.epochs:
        scratch = RESUME.with_suffix(".tmp")
        shutil.copyfile(trainer.last, scratch)
        scratch.replace(RESUME)


def squares() -> str:
    """Images with one bright square each, written by the first worker: the path of their YAML file."""
    data = FOLDER / "squares.yaml"
    if os.environ.get("LOCAL_RANK", "0") == "0" and not data.exists():
        random = np.random.default_rng(0)
        for kind, count in (("train", 64), ("val", 16)):
            for folder in ("images", "labels"):
                (FOLDER / folder / kind).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                image = random.integers(0, 96, (64, 64, 3), dtype=np.uint8)
                size, x, y = random.integers(12, 24), *random.integers(0, 40, 2)
                image[y : y + size, x : x + size] = 255
                box = " ".join(f"{value / 64:.4f}" for value in (x + size / 2, y + size / 2, size, size))
                cv2.imwrite(str(FOLDER / "images" / kind / f"{number}.png"), image)
                (FOLDER / "labels" / kind / f"{number}.txt").write_text(f"0 {box}\n")
        scratch = data.with_suffix(".tmp")
        scratch.write_text(f"path: {FOLDER}\ntrain: images/train\nval: images/val\nnames: [square]\n")
        scratch.replace(data)
    while not data.exists():
        time.sleep(0.1)
    return str(data)


if __name__ == "__main__":
    main()
