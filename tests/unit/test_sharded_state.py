"""A sharded state, taken by four ranks and given back: to the same, to another mesh, to fewer; and to DCP itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_agent.worker.errors import CheckpointMismatch, OtherWorldSize, Sharded
from elastic_agent.worker.state.kinds import is_sharded
from elastic_agent.worker.state.sharding import reading
from elastic_agent.worker.state.sharding.layout import ShardLayouts
from elastic_agent.worker.state.sharding.parts import ShardedParts
from elastic_agent.worker.state.sharding.reading import OpenCopy, metadata_of
from elastic_agent.worker.state.sharding.table import Table

WORLD = 4
STEPS = 3

Parts = dict[str, Any]


def model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 12), nn.Linear(12, 3)).to(dtype)


def with_adam(net: nn.Module, *, foreach: bool = True) -> Parts:
    """`foreach`: torch refuses it where tensor parallelism leaves some parameters plain tensors."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True, foreach=foreach)
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5]),
        "counts": {"seen": 5, "by_class": {1: torch.arange(3)}, "none": {}},
    }


def fsdp(mesh: DeviceMesh, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    net = model(seed, dtype)
    for layer in net:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh, seed: int) -> nn.Module:
    return parallelize_module(model(seed), mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})


@cache
def flat(ranks: int) -> DeviceMesh:
    """All ranks make it, also those that are not in it."""
    return DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("shard",))


def square() -> DeviceMesh:
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))


def both(seed: int) -> nn.Module:
    mesh = square()
    net = tensor_parallel(mesh["inner"], seed)
    return fully_shard(net, mesh=mesh["outer"])


def zero(ranks: int, seed: int) -> Parts:
    net = model(seed)
    group = dist.group.WORLD if ranks == WORLD else GROUPS[ranks]
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
    return {"model": net, "optimizer": optimizer, "counts": {"seen": 5}}


def momentum(mesh: DeviceMesh, seed: int) -> Parts:
    net = fsdp(mesh, seed, torch.bfloat16)
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)}


GROUPS: dict[int, Any] = {}

KINDS: dict[str, Callable[[int], Parts]] = {
    "fsdp": lambda seed: with_adam(fsdp(flat(WORLD), seed)),
    "hsdp": lambda seed: with_adam(fsdp(square(), seed)),
    "tp": lambda seed: with_adam(tensor_parallel(flat(WORLD), seed), foreach=False),
    "fsdp and tp": lambda seed: with_adam(both(seed), foreach=False),
    "zero": lambda seed: zero(WORLD, seed),
    "bf16": lambda seed: momentum(flat(WORLD), seed),
}
"""As four ranks have it."""

OTHERS: list[tuple[str, str]] = [
    ("fsdp", "hsdp"),
    ("hsdp", "fsdp and tp"),
    ("fsdp and tp", "tp"),
    ("tp", "fsdp"),
]
"""Saved as the first, loaded as the second."""

SMALLER: dict[str, Callable[[int, int], Parts]] = {
    "fsdp": lambda ranks, seed: with_adam(fsdp(flat(ranks), seed)),
    "fsdp and tp": lambda ranks, seed: with_adam(fsdp(flat(ranks), seed), foreach=False),
    "zero": zero,
    "bf16": lambda ranks, seed: momentum(flat(ranks), seed),
}


def train(parts: Parts, steps: int, ranks: int = WORLD) -> None:
    dtype = next(parts["model"].parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        parts["model"](torch.randn(8, 7, dtype=dtype)).square().sum().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        if "scheduler" in parts:
            parts["scheduler"].step()


def full(parts: Parts) -> dict[str, Any]:
    """The whole state, as any one process would have it."""
    optimizer = parts["optimizer"]
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        own = dict(parts["model"].named_parameters())
        state: dict[str, Any] = {f"model.{name}": weight.detach().clone() for name, weight in own.items()}
        gathered: list[Any] = [None] * dist.get_world_size(optimizer.process_group)
        mine = {
            f"{name}.{key}": value
            for name, weight in own.items()
            for key, value in optimizer.optim.state.get(weight, {}).items()
        }
        dist.all_gather_object(gathered, mine, group=optimizer.process_group)
        for one in gathered:
            state |= one
        return state | {"lr": optimizer.param_groups[0]["lr"]}
    of_model, of_optimizer = get_state_dict(parts["model"], optimizer)
    found, _ = flatten_state_dict({"model": of_model, "optimizer": of_optimizer})
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in found.items()}
    return {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in whole.items()}


def assert_same(got: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    assert got.keys() == expected.keys(), (what, got.keys() ^ expected.keys())
    for key, one in expected.items():
        if isinstance(one, torch.Tensor):
            assert got[key].dtype == one.dtype, (what, key)
            assert torch.equal(got[key], one), (what, key)
        else:
            assert got[key] == one, (what, key)


def save(parts: Parts, rank: int, folder: Path) -> None:
    """Twice, over what was there: the second time all that is known of the first is used."""
    sharded, layouts = ShardedParts(parts, (), {}), ShardLayouts()
    assert is_sharded(parts)
    sharded.refuse()
    memory = bytearray()
    for step in (1, 2):
        rng = torch.full((16,), rank, dtype=torch.uint8)
        layout = layouts.lay_out(sharded.take(rank, WORLD, step, common=rank == 0, own={"rng": rng}))
        if not memory:
            memory = bytearray(b"\xee" * layout.size)
            target = torch.frombuffer(memory, dtype=torch.uint8)
            train(parts, 1)  # what is taken at first is another state
        assert layout.size == len(memory)
        layout.copy_to(memoryview(memory), target)
    folder.mkdir(exist_ok=True)
    (folder / f"__{rank}_0.distcp").write_bytes(memory)
    begin, length = layout.table_place
    assert Table.from_bytes(memory[begin : begin + length]) == layout.table
    (folder / f"{rank}.place").write_text(f"{begin} {length}")
    (folder / f"{rank}.digest").write_text(layout.digest)
    dist.barrier()


class Saved:
    """All copies, and how many bytes were read of them."""

    def __init__(self, folder: Path, mapped: tuple[int, ...] = ()) -> None:
        self.read = 0
        self.copies = {}
        for rank in range(WORLD):
            raw = (folder / f"__{rank}_0.distcp").read_bytes()
            begin, length = map(int, (folder / f"{rank}.place").read_text().split())
            table = Table.from_bytes(raw[begin : begin + length])
            memory = memoryview(raw) if rank in mapped else None
            self.copies[rank] = OpenCopy(table, self._reader(raw), memory)

    def _reader(self, raw: bytes) -> Callable[[int, memoryview], None]:
        def read(offset: int, view: memoryview) -> None:
            self.read += len(view)
            view[:] = raw[offset : offset + len(view)]

        return read


def check_same_placement(kind: str, rank: int, folder: Path, expected: Mapping[str, Any], old: Parts) -> None:
    saved, parts = Saved(folder, mapped=(0, rank)), KINDS[kind](1)
    before = full(parts) if kind == "zero" else {}
    ready = ShardedParts(parts, (), {}).prepare(
        {one: saved.copies[one] for one in {0, rank}}, rank, WORLD, WORLD
    )
    assert saved.read == 0
    if before:
        assert_same(full(parts), before, f"{kind}, prepared only")
    ready.apply()
    assert_same(full(parts), expected, f"{kind}, same placement")
    assert ready.own["rng"].tolist() == [rank] * 16
    if "scheduler" in parts:
        assert parts["scheduler"].state_dict() == old["scheduler"].state_dict()
    assert str(parts.get("counts")) == str(old.get("counts"))
    # The copies' memory is another's: what the parts have must outlive it, and be no part of it.
    for copy in saved.copies.values():
        if copy.mapped is not None:
            torch.frombuffer(copy.mapped, dtype=torch.uint8).fill_(0)
    assert_same(full(parts), expected, f"{kind}, when the memory has gone")
    train(parts, 2)
    train(old, 2)
    assert_same(full(parts), full(old), f"{kind}, two steps on")


def check_dcp(kind: str, rank: int, folder: Path, expected: Mapping[str, Any]) -> None:
    if rank == 0:
        tables = {one: copy.table for one, copy in Saved(folder).copies.items()}
        (folder / ".metadata").write_bytes(metadata_of(tables, {one: f"__{one}_0.distcp" for one in tables}))
    dist.barrier()
    parts = KINDS[kind](2)
    of_model, of_optimizer = get_state_dict(parts["model"], parts["optimizer"])
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(
        parts["model"],
        parts["optimizer"],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert_same(full(parts), expected, f"{kind}, read by dcp.load")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD)
    for ranks in (2, 3):
        GROUPS[ranks] = dist.new_group(list(range(ranks)))
        flat(ranks)
    wholes: dict[str, dict[str, Any]] = {}
    for number, kind in enumerate(KINDS):
        parts, place = KINDS[kind](0), Path(folder) / str(number)
        train(parts, STEPS)
        save(parts, rank, place)
        wholes[kind] = full(parts)
        check_same_placement(kind, rank, place, wholes[kind], parts)
        if kind != "zero":
            check_dcp(kind, rank, place, wholes[kind])
        if kind in ("hsdp",):
            digests = [(place / f"{one}.digest").read_text() for one in range(WORLD)]
            assert digests[0] == digests[2] != digests[1] == digests[3], "replica groups are twins"
    for old, new in OTHERS:
        saved = Saved(Path(folder) / str(list(KINDS).index(old)))
        parts = KINDS[new](3)
        ShardedParts(parts, (), {}).prepare(saved.copies, rank, WORLD, WORLD + 1).apply()
        assert_same(full(parts), wholes[old], f"{old} as {new}")
    for ranks in (3, 2):
        for kind, make in SMALLER.items():
            if rank >= ranks:
                continue
            mesh_parts = make(ranks, 4)
            saved = Saved(Path(folder) / str(list(KINDS).index(kind)))
            ready = ShardedParts(mesh_parts, (), {}).prepare(saved.copies, rank, ranks, WORLD)
            assert ready.own == {}
            ready.apply()
            assert_same(full(mesh_parts), wholes[kind], f"{kind} on {ranks}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_every_kind_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), WORLD)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    flat.cache_clear()


def taken(
    parts: Parts, rules: Mapping[str, Any] | None = None, rank: int = 0, world_size: int = 1
) -> OpenCopy:
    layout = ShardLayouts().lay_out(
        ShardedParts(parts, (), rules or {}).take(rank, world_size, 1, common=True, own={})
    )
    memory = bytearray(layout.size)
    layout.copy_to(memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8))
    return OpenCopy(layout.table, lambda offset, view: None, memoryview(memory))


def test_tied_weights_lie_in_a_copy_once(alone: None) -> None:
    weight = distribute_tensor(torch.randn(8, 8), flat(1), [Shard(0)])
    net = nn.ModuleDict({"one": nn.Linear(8, 8, bias=False), "two": nn.Linear(8, 8, bias=False)})
    net["one"].weight = net["two"].weight = nn.Parameter(weight)
    rows = taken({"model": net}).table.shards
    assert [row.key for row in rows] == ["model.one.weight", "model.two.weight"]
    assert len({row.begin for row in rows}) == 1


def test_a_state_of_other_names_or_shapes_does_not_fit(alone: None) -> None:
    copies = {0: taken({"model": fsdp(flat(1), 0)})}
    smaller = fully_shard(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 11), nn.Linear(11, 3)), mesh=flat(1))
    with pytest.raises(CheckpointMismatch, match=r"'model\.1\.weight' was saved as float32 of shape"):
        ShardedParts({"model": smaller}, (), {}).prepare(copies, 0, 1, 1)
    with pytest.raises(CheckpointMismatch, match=r"has the parts \['model'\]"):
        ShardedParts({"net": fsdp(flat(1), 0)}, (), {}).prepare(copies, 0, 1, 1)


def test_what_no_copy_holds_is_missed_before_anything_changes(alone: None) -> None:
    copy = taken({"model": fsdp(flat(1), 0)})
    rows = tuple(row for row in copy.table.shards if row.key != "model.2.weight")
    half = next(row for row in copy.table.shards if row.key == "model.2.weight")
    torn = (*rows, *(type(half)(half.key, half.dtype, half.shape, half.offsets, (1, 12), *_place(half)),))
    copy.table = Table(torn, copy.table.values, copy.table.paths)
    net = fsdp(flat(1), 1)
    before = net[0].weight.full_tensor().clone()
    with pytest.raises(
        CheckpointMismatch, match=rf"24 of {math.prod(half.shape)} elements of 'model.2.weight'"
    ):
        ShardedParts({"model": net}, (), {}).prepare({0: copy}, 0, 1, 1)
    assert torch.equal(net[0].weight.full_tensor(), before)


def test_what_a_copy_elsewhere_has_is_asked_for_at_once(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question of its own would be a way there and back; of many small ranges only so many bytes are held."""
    old = fsdp(flat(1), 0)
    here = taken({"model": old})
    assert here.mapped is not None
    memory = here.mapped
    asked: list[int] = []

    def read_many(ranges: Sequence[tuple[int, memoryview]]) -> None:
        asked.append(len(ranges))
        for offset, view in ranges:
            view[:] = memory[offset : offset + len(view)]

    def questions() -> list[int]:
        asked.clear()
        net = fsdp(flat(1), 1)
        there = OpenCopy(here.table, here.read, None, read_many)
        ShardedParts({"model": net}, (), {}).prepare({0: there}, 0, 1, 2).apply()
        for one, other in zip(net.parameters(), old.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())  # type: ignore[attr-defined]
        return [count for count in asked if count]

    assert questions() == [1], "all are neighbours"
    monkeypatch.setattr(reading, "SMALL", 0)
    assert questions() == [6], "each tensor is read into its place"
    monkeypatch.undo()
    monkeypatch.setattr(reading, "MOST", 3 << 10)
    monkeypatch.setattr(reading, "AT_ONCE", 1)
    assert len(questions()) > 1


def _place(row: Any) -> tuple[int, int, int]:
    return row.begin, row.length, row.data


def test_a_part_of_each_rank_needs_a_rule_in_another_world(alone: None) -> None:
    parts = {"model": fsdp(flat(1), 0), "feedback": {"error": torch.arange(4.0), "steps": {7: 1}}}
    copies = {}
    for rank in range(2):
        own = {"feedback": {"error": torch.full((4,), rank), "steps": {7: rank}}}
        copies[rank] = taken({**parts, **own}, {"feedback": None}, rank)
    ShardedParts(parts, (), {"feedback": None}).prepare(copies, 1, 2, 2).apply()
    assert parts["feedback"]["error"].tolist() == [1] * 4
    assert parts["feedback"]["steps"] == {7: 1}
    with pytest.raises(OtherWorldSize, match="feedback"):
        ShardedParts(parts, (), {"feedback": None}).prepare(copies, 0, 1, 2)
    total = {"feedback": lambda states, rank, world: {"error": sum(one["error"] for one in states.values())}}
    ShardedParts(parts, (), total).prepare(copies, 0, 1, 2).apply()
    assert parts["feedback"]["error"].tolist() == [1] * 4
    with pytest.raises(CheckpointMismatch, match="same of_each_rank"):
        ShardedParts({"model": parts["model"]}, (), {}).prepare(copies, 0, 2, 2)


def test_what_cannot_be_carried_is_refused_by_name(alone: None) -> None:
    sharded = fsdp(flat(1), 0)
    with pytest.raises(Sharded, match="part 'old' is sharded by FullyShardedDataParallel"):
        ShardedParts(
            {"old": FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))}, (), {}
        ).refuse()
    with pytest.raises(Sharded, match="part 'net' is spread over ranks, and declared to be rank 0's"):
        ShardedParts({"net": sharded}, ("net",), {}).refuse()
    with pytest.raises(Sharded, match="cannot be called 'ranks'"):
        ShardedParts({"ranks": sharded}, (), {}).refuse()
    optimizer = torch.optim.AdamW(sharded.parameters())
    optimizer.state[next(sharded.parameters())]["blocks"] = torch.zeros(3)
    with pytest.raises(Sharded, match=r"'state.0.weight.blocks' of part 'optimizer' is a plain tensor"):
        ShardedParts({"net": sharded, "optimizer": optimizer}, (), {}).refuse()
