"""The fingerprint of a state: what makes it another one, and what does not."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic_agent.worker.checkpointing.checkpointer import Checkpointer
from elastic_agent.worker.errors import NotPlainData, NotReplicated, Sharded
from elastic_agent.worker.ranks.comparison import ReplicatedComparison
from elastic_agent.worker.ranks.fingerprint import difference, farthest, look_at
from elastic_agent.worker.ranks.group import RECORDS, Group


def test_the_order_of_keys_is_each_ranks_own() -> None:
    one = look_at({"log": {"a": torch.ones(2), "b": torch.zeros(3)}, "more": {}})
    other = look_at({"log": {"b": torch.zeros(3), "a": torch.ones(2)}, "more": {}})
    assert one.digest() == other.digest()


def test_whatever_makes_another_form_has_a_name() -> None:
    one = look_at({"log": {"a": torch.ones(2), "b": torch.zeros(3)}})
    halves = {"a": torch.ones(2), "b": torch.zeros(3).half()}
    for state in ({"a": torch.ones(2)}, halves, {"a": torch.ones(3)}):
        other = look_at({"log": state})
        assert one.digest() != other.digest()
        assert one.digest_of_forms() != other.digest_of_forms()
        part, what = difference(one.entries, other.entries, 1)
        assert part == "log"
        assert "of part 'log'" in what


NUMBERS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("mine", "other", "distance"),
    [
        (NUMBERS, NUMBERS, 0.0),
        (NUMBERS, NUMBERS * (1 + 1e-6), 1e-5),
        (NUMBERS.bfloat16(), (NUMBERS * 1.001).bfloat16(), 1e-2),
        (NUMBERS.to(torch.complex64) * 1j, NUMBERS.to(torch.complex64) * 1j * (1 + 1e-6), 1e-5),
        (torch.tensor(1.0), torch.tensor(0.9999999), 1e-5),
        (NUMBERS.nan_to_num() / 0, NUMBERS.nan_to_num() / 0, 0.0),
    ],
)  # fmt: skip
def test_numbers_that_have_drifted_apart_are_near(
    mine: torch.Tensor, other: torch.Tensor, distance: float
) -> None:
    one, two = look_at({"log": {"a": mine}}), look_at({"log": {"a": other}})
    assert one.digest_of_forms() == two.digest_of_forms()
    apart = farthest(one.entries, [one.sketches(), two.sketches()])
    assert apart is None or apart.distance <= distance


@pytest.mark.parametrize("seed", range(20))
def test_other_numbers_are_far_apart_also_where_one_of_many_differs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mine = torch.rand(64, generator=generator)
    one_other = mine.clone()
    one_other[seed] += 2.5
    for other in (torch.rand(64, generator=generator), one_other, mine * torch.nan, mine * 1e-3):
        looks = [look_at({"log": {"b": NUMBERS, "a": one}}) for one in (mine, mine, other)]
        apart = farthest(looks[0].entries, [look.sketches() for look in looks])
        assert apart is not None
        assert (apart.entry.key, apart.rank) == ("a", 2)
        assert apart.distance > 0.03


@pytest.mark.parametrize(("key", "dtype"), [("state.0.step", torch.float32), ("epoch", torch.int64)])
def test_counters_do_not_drift(key: str, dtype: torch.dtype) -> None:
    one, two = (look_at({"log": {key: torch.tensor(value, dtype=dtype)}}) for value in (1000, 1001))
    assert one.digest_of_forms() != two.digest_of_forms()


def records_of_a_rank(record: dict[str, Any]) -> bytes:
    return json.dumps({"v": RECORDS, "library": "0.1.0", "record": record}).encode()


@dataclass(frozen=True)
class TwoRanks(Group):
    """Rank 0 of two."""

    brought: list[bytes]
    """What the other rank brings to the gathers that come."""

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload, self.brought.pop(0)]


@pytest.mark.parametrize(("factor", "refused"), [(1 + 1e-5, False), (1.5, True)])
def test_a_save_of_what_has_drifted_apart_warns_once(
    factor: float, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    here, there = (ReplicatedComparison({"log": {"a": NUMBERS * one}}, ()) for one in (1.0, factor))
    for step in (1, 2):
        digests = [here.digest(), there.digest()]
        theirs = [
            records_of_a_rank({"error": "", "reason": ""}),
            there._mine.digest_of_forms(),
            there._mine.sketches(),
        ]
        group = TwoRanks(0, 2, torch.device("cpu"), theirs)
        if refused:
            with pytest.raises(
                NotReplicated, match=r"'a' of part 'log' has other values on rank 0 than on rank 1"
            ):
                here.compare(group, digests, step)
        else:
            here.compare(group, digests, step)
            assert here.proven
    assert caplog.text.count("ranks have drifted apart") == (not refused)


def quantized(value: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give them up
        return torch.quantize_per_tensor(torch.full((8,), value), 0.1, 0, torch.quint8)


def test_quantized_tensors_are_compared_and_carried(tmp_path: Path) -> None:
    one, other = (look_at({"log": {"q": quantized(value)}}) for value in (0.5, 0.7))
    part, what = difference(one.entries, other.entries, 1)
    assert (part, "'q' of part 'log' has other values" in what) == ("log", True)
    Checkpointer(tmp_path, {"log": {"q": quantized(0.5)}}).save(1)
    loaded: dict[str, torch.Tensor] = {}
    assert Checkpointer(tmp_path, {"log": loaded}).load() == 1
    assert torch.equal(loaded["q"].dequantize(), torch.full((8,), 0.5))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.empty(4, device="meta"), "on the meta device"),
        (torch.eye(4).to_sparse_bsr((2, 2)), "torch.sparse_bsr"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    ],
)
@pytest.mark.parametrize("from_rank_0", [(), ("log",)])
def test_a_tensor_that_cannot_be_carried_is_refused_by_name(
    tmp_path: Path, tensor: torch.Tensor, kind: str, from_rank_0: tuple[str, ...]
) -> None:
    checkpoints = Checkpointer(tmp_path, {"log": {"deep": [tensor]}}, from_rank_0=from_rank_0)
    with pytest.raises(NotPlainData, match=rf"'deep.0' of part 'log' is .*{kind}"):
        checkpoints.save(1)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_carried(tmp_path: Path, layout: torch.layout) -> None:
    Checkpointer(tmp_path, {"log": {"s": torch.eye(4).to_sparse(layout=layout)}}).save(1)
    loaded: dict[str, torch.Tensor] = {}
    assert Checkpointer(tmp_path, {"log": loaded}).load() == 1
    assert torch.equal(loaded["s"].to_dense(), torch.eye(4))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


class Average:
    """It has shards, and no type that shows it."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {"0": torch.ones(4)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def shard(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [Shard(0)])


def copied(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [Replicate()])


def by_fully_shard(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    fully_shard(parts["model"], mesh=mesh)


def by_fsdp1(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    parts["model"][1] = FullyShardedDataParallel(parts["model"][1], device_id=torch.device("cpu"))


def by_tensor_parallelism(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    """The first parameter is whole on every rank, as with SequenceParallel."""
    parts["model"][0].weight = nn.Parameter(copied(parts["model"][0].weight, mesh))
    parts["model"][1].weight = nn.Parameter(shard(parts["model"][1].weight, mesh))


def by_the_script(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    parts["log"]["rows"] = shard(torch.ones(4), mesh)


def in_an_object(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    parts["average"].values["0"] = shard(torch.ones(4), mesh)


def whole_in_a_module(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    parts["model"][0].weight = nn.Parameter(copied(parts["model"][0].weight, mesh))


def whole_in_a_dict(parts: dict[str, Any], mesh: DeviceMesh) -> None:
    parts["log"]["rows"] = copied(torch.ones(4), mesh)


@pytest.mark.parametrize(
    ("change", "what", "advice"),
    [
        (by_fully_shard, "part 'model' is a FSDPModule", "make the Checkpointer after fully_shard"),
        (by_fsdp1, "module '1' of part 'model' is a FullyShardedDataParallel", "make the Checkpointer after"),
        (by_tensor_parallelism, "'0.weight' of part 'model' is a DTensor", "make the Checkpointer after"),
        (by_the_script, "'rows' of part 'log' is a DTensor", "make the Checkpointer after"),
        (in_an_object, "'0' of part 'average' is a DTensor", "or these tensors in a dict"),
        (whole_in_a_module, "'0.weight' of part 'model' is a DTensor", "plain tensor"),
        (whole_in_a_dict, "'rows' of part 'log' is a DTensor", "plain tensor"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # FSDP's, that it is old and that there is one rank
def test_a_state_that_is_sharded_too_late_is_refused_with_what_to_do(
    tmp_path: Path,
    mesh: DeviceMesh,
    change: Callable[[dict[str, Any], DeviceMesh], None],
    what: str,
    advice: str,
) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    parts: dict[str, Any] = {"model": model, "log": {}, "average": Average()}
    checkpoints = Checkpointer(tmp_path, parts)
    change(parts, mesh)
    with pytest.raises(Sharded) as caught:
        checkpoints.save(1)
    assert what in str(caught.value)
    assert advice in str(caught.value)
