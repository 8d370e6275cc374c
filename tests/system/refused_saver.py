"""A worker whose disk refuses the last save, or takes it after one that it has refused, and which ends with success."""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elastic_agent.worker import Checkpointer, init_process_group

directory, form, ends = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
init_process_group("gloo")
model = torch.nn.Linear(2, 2)
if form == "sharded":
    fully_shard(model)
checkpoints = Checkpointer(directory, {"model": model})
checkpoints.load()
assert checkpoints.save(1)
assert checkpoints.wait()
shutil.rmtree(directory)
directory.write_text("no directory")
assert not checkpoints.save(2)
assert not checkpoints.wait()
if ends == "saved":
    directory.unlink()
    assert checkpoints.save(3)
    assert checkpoints.wait()
dist.destroy_process_group()
