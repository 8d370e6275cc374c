"""A script with FSDP2 that saves with `torch.distributed.checkpoint`: once, and the last step of a planned change.

`dcp_sharding.py FOLDER`: saves when FOLDER/save is there, and ends when FOLDER/finish is. Its history is that of
`sharding.py`, with the save.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharding import record  # type: ignore[import-not-found]  # it stands beside this script
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker import Drained, step
from elastic_agent.worker.dcp import ElasticStorageReader, ElasticStorageWriter


def main(folder: Path) -> None:
    record("start", env=dict(os.environ))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    done = 0

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "done": done}

    def whole() -> str:
        digest = hashlib.sha256(repr(done).encode())
        for weight in model.parameters():
            held = optimizer.state[weight]
            for tensor in (weight, *(held[name] for name in sorted(held) if name != "step")):
                digest.update(tensor.full_tensor().detach().numpy().tobytes())
        return digest.hexdigest()

    def save(*, durable: bool = False) -> None:
        writer = ElasticStorageWriter(folder / "disk", step=done, durable=durable)
        dcp.save(state(), storage_writer=writer)

    reader = ElasticStorageReader(folder / "disk")
    if reader.step is not None:
        found = state()
        dcp.load(found, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        done = found["done"]
        assert done == reader.step
    record("loaded", step=done, whole=whole())
    wishes, saved = torch.zeros(2), False
    while not wishes[0]:
        optimizer.zero_grad()
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        done += 1
        record("step", step=done, whole=whole())
        try:
            step(done)
        except Drained:
            save(durable=True)
            raise
        if wishes[1] and not saved:
            save()
            saved = True
            record("saved", step=done)
        wishes = torch.tensor([(folder / "finish").exists(), (folder / "save").exists()], dtype=torch.float32)
        dist.all_reduce(wishes)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
