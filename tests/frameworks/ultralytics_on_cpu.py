"""Trainings of Ultralytics on CPUs, whose batches are written down in the job's history. Not a test.

    ultralytics_on_cpu.py EXAMPLE     run by elastic-agent: the example as it stands
    ultralytics_on_cpu.py 2           starts elastic-agent with two workers, by a start file

Ultralytics trains with several workers on GPUs only. On CPUs it makes no process group, gives DDP the number of a
device, and looks for a GPU when it has trained: just these three are replaced here.
"""

import os
import runpy
import sys
from pathlib import Path

# A worker of a start file has the paths of the process that has started it.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch.distributed as dist
from recorded import record, stepped
from torch import nn
from trainer_start import start_file
from ultralytics.models.yolo import detect
from ultralytics.utils import DEFAULT_CFG_DICT

from elastic_agent.launcher import LaunchConfig, run_agent, words_of

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class OnCpu(detect.DetectionTrainer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.world_size = WORLD_SIZE if WORLD_SIZE > 1 else 0
        self.batches = 0
        self.add_callback("on_train_start", OnCpu.count_on)
        self.add_callback("on_train_batch_end", OnCpu.end_batch)

    def _setup_ddp(self):
        dist.init_process_group("gloo")

    def final_eval(self):
        if WORLD_SIZE == 1:
            super().final_eval()

    def count_on(self):
        self.batches = self.start_epoch * len(self.train_loader)

    def end_batch(self):
        self.batches += 1
        stepped(self.batches)


class OfCpuModules(nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, **options):
        super().__init__(module, **options)


if WORLD_SIZE > 1:
    nn.parallel.DistributedDataParallel = OfCpuModules


class Recorded(OnCpu):
    """For a start file, whose workers run nothing but the trainer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        record("start", env=dict(os.environ), argv=sys.argv)


def start(workers: int) -> None:
    import ultralytics_train as example

    example.FOLDER.mkdir(parents=True)
    overrides = {
        "model": "yolov8n.yaml",
        "data": example.squares(),
        "epochs": example.EPOCHS,
        "imgsz": 64,
        "batch": 16,
        "device": "cpu",
        "save_dir": str(example.FOLDER / "train"),
        "plots": False,
    }
    last = example.FOLDER / "train" / "weights" / "last.pt"
    arguments = {"cfg": {**DEFAULT_CFG_DICT, "save_dir": ""}, "overrides": overrides}
    resume = {"overrides": {"resume": str(last)}}
    with start_file(Recorded, arguments, on_restart=resume, if_exists=last) as path:
        run_agent([*words_of(LaunchConfig(nproc_per_node=workers)), str(path)])


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        os.chdir(os.environ["TEST_FOLDER"])
        start(int(sys.argv[1]))
    else:
        sys.argv = sys.argv[1:]
        detect.DetectionTrainer = OnCpu
        runpy.run_path(sys.argv[0], run_name="__main__")
