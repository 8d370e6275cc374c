"""What leans on more of torch than torch promises: when a version changes that, one test here fails by its name."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils import dlpack

from elastic_agent.agent.workers.evidence import groups_of, read_pickle
from elastic_agent.worker.state.kinds import SHARDED_TENSORS, SHARDING_MODULES, SHARDING_OPTIMIZERS, Kind
from elastic_agent.worker.state.sharding.layout import _Template
from elastic_agent.worker.steps.torch_workarounds import finalizers_of_torch


@pytest.mark.parametrize("sizes", [(4, 256), (0, 3), ()])
def test_save_leaves_a_tensor_out_with_one_seek(sizes: tuple[int, ...]) -> None:
    """`worker/state/sharding/layout.py`: torch.serialization.skip_data."""
    archive = _Template.of(torch.float32, sizes)
    tensor = torch.rand(sizes)
    file = archive.head + tensor.numpy().tobytes() + archive.tail
    assert len(file) == archive.size
    assert torch.equal(torch.load(io.BytesIO(file), weights_only=True), tensor)


def test_the_finalizers_that_a_quick_end_leaves_out_are_found() -> None:
    """`worker/steps/torch_workarounds.py`: weakref.finalize keeps them by itself."""
    assert finalizers_of_torch()


def test_a_tensor_knows_how_many_hold_it() -> None:
    """`worker/ranks/group.py`: torch.Tensor._use_count()."""
    tensor = torch.zeros(1)
    alone = tensor._use_count()  # type: ignore[attr-defined]
    held = dlpack.to_dlpack(tensor)
    assert tensor._use_count() == alone + 1  # type: ignore[attr-defined]
    del held
    assert tensor._use_count() == alone  # type: ignore[attr-defined]


def test_the_store_of_the_process_group_can_be_had(tmp_path: Path) -> None:
    """`worker/ranks/comparison.py`: torch.distributed.distributed_c10d._get_default_store()."""
    with pytest.raises(ValueError, match="process group"):
        dist.distributed_c10d._get_default_store()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        store = dist.distributed_c10d._get_default_store()
        assert (store.add("count", 2), store.add("count", 0)) == (2, 2)
        store.set("key", "value")
        assert (store.multi_get(["key"]), store.check(["key"]), store.check(["none"])) == (
            [b"value"],
            True,
            False,
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [*SHARDED_TENSORS, *SHARDING_MODULES, *SHARDING_OPTIMIZERS])
def test_what_shards_a_state_has_this_name(kind: Kind) -> None:
    """`worker/state/kinds.py`."""
    assert isinstance(getattr(importlib.import_module(kind.module), kind.name), type)


def test_all_that_is_preloaded_is_there_but_what_some_versions_do_not_have() -> None:
    """`agent/workers/processes/imported.py`: DEFAULT_PRELOAD."""
    program = (
        "import sys; sys.modules['torch.profiler._cupti_monitor'] = None\n"
        "from elastic_agent.agent.workers.processes.imported import *\n"
        "assert Imported(['default']).skipped == {}\n"
        "print(*Imported([*DEFAULT_PRELOAD, 'torch.no_such_module']).skipped)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    missing = "torch.profiler._cupti_monitor torch.no_such_module\n"  # the first is in 2.13, and gone in 2.14
    assert (done.stdout, done.returncode) == (missing, 0), done.stderr


RECORDS = """
import json
import sys
import time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
pair = dist.new_group([0])
dist.all_reduce(torch.ones(3))
dist.broadcast(torch.ones(2), 0, group=pair)
dist.all_reduce(torch.ones(3))
while not all(entry["retired"] for entry in json.loads(_dump_fr_trace_json())["entries"]):
    time.sleep(0.01)  # a thread of gloo's notes that an operation has ended
sys.stdout.buffer.write(_dump_fr_trace())
"""


def test_the_flight_recorders_dumps_are_plain_pickles_of_a_known_form(tmp_path: Path) -> None:
    """`agent/workers/evidence.py`: as NCCL's thread writes them; here of gloo."""
    command = [sys.executable, "-c", RECORDS, str(tmp_path / "store")]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100)
    dump = read_pickle(done.stdout)
    assert [entry["profiling_name"] for entry in dump["entries"]] == [
        "gloo:all_reduce",
        "gloo:broadcast",
        "gloo:all_reduce",
    ]
    assert all(entry["frames"] for entry in dump["entries"])
    [world] = groups_of(dump)
    assert (world.group, world.size, world.entered, world.collective) == ("default_pg", None, 2, "all_reduce")
