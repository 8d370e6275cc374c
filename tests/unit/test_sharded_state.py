"""A sharded state, taken by four ranks and given back: to the same, to another mesh, to fewer; and to DCP itself."""

from __future__ import annotations

import math
from collections import OrderedDict
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
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_agent.worker.errors import (
    CheckpointMismatch,
    NotPlainData,
    OtherWorldSize,
    Sharded,
)
from elastic_agent.worker.state.kinds import is_sharded
from elastic_agent.worker.state.sharding import reading
from elastic_agent.worker.state.sharding.layout import ShardLayouts
from elastic_agent.worker.state.sharding.parts import ShardedParts, refuse_names
from elastic_agent.worker.state.sharding.reading import OpenCopy
from elastic_agent.worker.state.sharding.table import Table
from elastic_agent.worker.storage.disk.sharded_save import metadata_of

WORLD = 4
STEPS = 3

Parts = dict[str, Any]


def model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    """The last layer has fewer elements than there are ranks."""
    return nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 12), nn.Linear(12, 3), nn.PReLU(3)).to(dtype)


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


def momentum(mesh: DeviceMesh, seed: int) -> Parts:
    net = fsdp(mesh, seed, torch.bfloat16)
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)}


GROUPS: dict[Any, Any] = {}
"""Of fewer ranks, by their number; and those that HYBRID_SHARD has, as "hybrid"."""


def fsdp1(group: Any, seed: int, *, orig: bool, strategy: str = "FULL_SHARD") -> nn.Module:
    """The unit of the root has most parameters, that of the last layer fewer elements than there are ranks."""
    net = model(seed)
    net.register_buffer("seen", torch.tensor([float(seed)]))
    more = {
        "use_orig_params": orig,
        "process_group": group,
        "sharding_strategy": ShardingStrategy[strategy],
        "device_id": torch.device("cpu"),
    }
    net[3] = FullyShardedDataParallel(net[3], **more)
    return FullyShardedDataParallel(net, **more)


def fsdp1_on(ranks: int, seed: int, *, orig: bool) -> Parts:
    return with_adam(fsdp1(dist.group.WORLD if ranks == WORLD else GROUPS[ranks], seed, orig=orig))


KINDS: dict[str, Callable[[int], Parts]] = {
    "fsdp": lambda seed: with_adam(fsdp(flat(WORLD), seed)),
    "hsdp": lambda seed: with_adam(fsdp(square(), seed)),
    "tp": lambda seed: with_adam(tensor_parallel(flat(WORLD), seed), foreach=False),
    "fsdp and tp": lambda seed: with_adam(both(seed), foreach=False),
    "bf16": lambda seed: momentum(flat(WORLD), seed),
    "fsdp1": lambda seed: fsdp1_on(WORLD, seed, orig=False),
    "fsdp1 with original parameters": lambda seed: fsdp1_on(WORLD, seed, orig=True),
    "fsdp1 in two": lambda seed: with_adam(fsdp1(GROUPS["hybrid"], seed, orig=True, strategy="HYBRID_SHARD")),
    "fsdp1 of all": lambda seed: with_adam(fsdp1(None, seed, orig=False, strategy="NO_SHARD")),
}
"""As four ranks have it."""

OTHERS: list[tuple[str, str]] = [
    ("fsdp", "hsdp"),
    ("hsdp", "fsdp and tp"),
    ("fsdp and tp", "tp"),
    ("tp", "fsdp"),
    ("fsdp1", "fsdp1 with original parameters"),
    ("fsdp1 with original parameters", "fsdp1 in two"),
    ("fsdp1 in two", "fsdp1 of all"),
    ("fsdp1 of all", "fsdp1"),
]
"""Saved as the first, loaded as the second."""

SMALLER: dict[str, Callable[[int, int], Parts]] = {
    "fsdp": lambda ranks, seed: with_adam(fsdp(flat(ranks), seed)),
    "fsdp and tp": lambda ranks, seed: with_adam(fsdp(flat(ranks), seed), foreach=False),
    "bf16": lambda ranks, seed: momentum(flat(ranks), seed),
    "fsdp1": lambda ranks, seed: fsdp1_on(ranks, seed, orig=True),
    "fsdp1 with original parameters": lambda ranks, seed: fsdp1_on(ranks, seed, orig=False),
}


def train(parts: Parts, steps: int, ranks: int = WORLD) -> None:
    dtype = next(parts["model"].parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        parts["model"](
            torch.randn(8, getattr(parts["model"], "width", 7), dtype=dtype)
        ).square().sum().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        if "scheduler" in parts:
            parts["scheduler"].step()


def full(parts: Parts) -> dict[str, Any]:
    """The whole state, as any one process would have it."""
    optimizer = parts["optimizer"]
    if isinstance(parts["model"], FullyShardedDataParallel):
        return full_of_fsdp1(parts)
    of_model, of_optimizer = get_state_dict(parts["model"], optimizer)
    found, _ = flatten_state_dict({"model": of_model, "optimizer": of_optimizer})
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in found.items()}
    return {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in whole.items()}


def full_of_fsdp1(parts: Parts) -> dict[str, Any]:
    """Not by `FSDP.optim_state_dict`: on a CPU the tensors that it returns have the memory of one (torch 2.13)."""
    net, optimizer = parts["model"], parts["optimizer"]
    found: dict[str, Any] = {}
    with FullyShardedDataParallel.summon_full_params(net, writeback=False):
        for name, one in (*net.named_parameters(), *net.named_buffers()):
            found[f"model.{name.replace('_fsdp_wrapped_module.', '')}"] = one.detach().clone()
    for unit in FullyShardedDataParallel.fsdp_modules(net):
        flat, group = unit._handle.flat_param, unit.process_group
        weights = flat._params or [flat]
        states = [optimizer.state.get(weight, {}) for weight in weights]
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            shard = torch.zeros_like(getattr(flat, "_local_shard", flat.detach()))
            for state, here in zip(states, flat._shard_param_infos, strict=False):
                if key in state:
                    place = here.offset_in_shard if flat._params else 0
                    shard[place : place + state[key].numel()] = state[key].flatten()
            whole = shard
            if unit._handle.uses_sharded_strategy:
                pieces = [torch.empty_like(shard) for _ in range(group.size())]
                dist.all_gather(pieces, shard, group=group)
                whole = torch.cat(pieces)
            at = 0
            numbers = iter(zip(flat._fqns, flat._shapes, strict=True))
            for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
                if not padding:
                    name, shape = next(numbers)
                    prefix = "3." if unit is not net else ""
                    found[f"optimizer.{prefix}{name}.{key}"] = whole[at : at + numel].view(shape).clone()
                at += numel
        steps: list[Any] = [None] * group.size()
        dist.all_gather_object(steps, {float(one["step"]) for one in states if "step" in one}, group=group)
        found[f"steps.{'tail' if unit is not net else 'root'}"] = set.union(*steps)
    return found | {"lr": optimizer.param_groups[0]["lr"]}


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
        layout = layouts.lay_out(
            sharded.take(rank, WORLD, step, common=rank == 0, own={rank: {("rng",): rng}})
        )
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
    before = {} if kind.startswith("fsdp1") else full(parts)
    ready = ShardedParts(parts, (), {}).prepare(
        {one: saved.copies[one] for one in {0, rank}}, rank, WORLD, WORLD
    )
    assert saved.read == 0
    if not kind.startswith("fsdp1"):  # of which a rank without any element asks others
        own = taken(old, rank=rank, world_size=WORLD)
        ShardedParts(KINDS[kind](1), (), {}).prepare({rank: own}, rank, WORLD, WORLD)
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
        (folder / ".metadata").write_bytes(metadata_of(tables))
    dist.barrier()
    if kind.startswith("fsdp1"):
        check_dcp_of_fsdp1(kind, folder, expected)
        return
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


def check_dcp_of_fsdp1(kind: str, folder: Path, expected: Mapping[str, Any]) -> None:
    state = {f"model.{name}": torch.empty_like(one) for name, one in model(0).named_parameters()}
    dcp.load(state, checkpoint_id=str(folder))
    assert_same(state, {key: expected[key] for key in state}, f"{kind}, read by dcp.load")


def stage(layers: Sequence[int], mesh: DeviceMesh, seed: int) -> Parts:
    """Of a pipeline: some layers of the model under their own names, sharded over the ranks that have them."""
    whole = model(seed)
    net = nn.Sequential(OrderedDict((str(number), whole[number]) for number in layers))
    net.width = 12 if layers[0] > 1 else 7  # type: ignore[assignment]
    for layer in net:
        fully_shard(layer, mesh=mesh)
    weights = dict(fully_shard(net, mesh=mesh).named_parameters())
    groups = [
        {"params": [one for name, one in weights.items() if "weight" in name], "weight_decay": 0.1},
        {"params": [one for name, one in weights.items() if "bias" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([one for one in groups if one["params"]], lr=1e-2)
    return {"model": net, "optimizer": optimizer, "counts": {"seen": 5}}


def tensors_of_stage(parts: Parts) -> dict[str, Any]:
    return {key: one for key, one in full(parts).items() if isinstance(one, torch.Tensor)}


def check_stages(rank: int, folder: Path) -> None:
    """A pipeline of two stages with two ranks each; loaded as it was, split elsewhere, as one stage, and back."""
    halves = square()["inner"]
    parts = stage(((0, 1), (2, 3))[rank // 2], halves, 0)
    train(parts, STEPS)
    save(parts, rank, folder / "stages")
    of_ranks: list[Any] = [None] * WORLD
    dist.all_gather_object(of_ranks, tensors_of_stage(parts))
    whole = {key: one for some in of_ranks for key, one in some.items()}
    assert len(whole) == 7 + 3 * 7

    def check(new: Parts, copies: Mapping[int, OpenCopy], ranks: int, what: str) -> None:
        ShardedParts(new, (), {}).prepare(copies, rank, ranks, WORLD).apply()
        got = tensors_of_stage(new)
        assert_same(got, {key: whole[key] for key in got}, what)
        assert [group["weight_decay"] for group in new["optimizer"].param_groups] == [0.1, 0.0]
        assert new["counts"] == {"seen": 5}

    copies = Saved(folder / "stages", mapped=(0, rank)).copies
    here = {one: copies[one] for one in {0, rank}}
    check(stage(((0, 1), (2, 3))[rank // 2], halves, 1), here, WORLD, "the same stages")
    other = stage(((0,), (1, 2, 3))[rank // 2], halves, 1)
    if rank == 3:
        with pytest.raises(CheckpointMismatch, match=r"'model\.1\.weight'"):
            ShardedParts(other, (), {}).prepare(here, rank, WORLD, WORLD)
    check(other, copies, WORLD, "split elsewhere")
    as_one = stage(range(4), flat(WORLD), 1)
    check(as_one, copies, WORLD + 1, "as one")
    save(as_one, rank, folder / "one")
    whole = tensors_of_stage(as_one)
    check(stage(((0,), (1, 2, 3))[rank // 2], halves, 1), Saved(folder / "one").copies, WORLD + 1, "as two")


def check_order(rank: int) -> None:
    """Each rank gets all keys of a dict back in their order, out of its own copy alone, also if it has no element of
    some tensors."""

    def state(seed: int) -> Parts:
        net = fsdp(flat(WORLD), seed)
        averages = {name: 2 * weight.detach() for name, weight in net.named_parameters()}
        more = {"best": 1.0, "last": torch.full((2,), float(seed)), "at": seed}
        return {
            "model": net,
            "ema": {"updates": seed, **averages, **more},
            "own": {"b": 1, "a": torch.ones(1)},
        }

    rules = {"own": None}
    old, new = state(0), state(1)
    names = [row.key for row in taken(old, rules, rank, WORLD).table.shards]
    assert "ema.3.weight" in names, "it has three elements"
    ready = ShardedParts(new, (), rules).prepare({rank: taken(old, rules, rank, WORLD)}, rank, WORLD, WORLD)
    ready.apply()
    assert [list(new[part]) for part in ("ema", "own")] == [list(old[part]) for part in ("ema", "own")]

    def whole(averages: Mapping[str, Any]) -> dict[str, Any]:
        """By a collective for each, in their order."""
        return {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in averages.items()}

    assert_same(whole(new["ema"]), whole(old["ema"]), "a dict of averages")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD)
    for ranks in (2, 3):
        GROUPS[ranks] = dist.new_group(list(range(ranks)))
        flat(ranks)
    halves = [[dist.new_group(ranks) for ranks in some] for some in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
    GROUPS["hybrid"] = halves[0][rank // 2], halves[1][rank % 2]
    wholes: dict[str, dict[str, Any]] = {}
    for number, kind in enumerate(KINDS):
        parts, place = KINDS[kind](0), Path(folder) / str(number)
        train(parts, STEPS)
        save(parts, rank, place)
        wholes[kind] = full(parts)
        check_same_placement(kind, rank, place, wholes[kind], parts)
        check_dcp(kind, rank, place, wholes[kind])
        if kind in ("hsdp", "fsdp1 in two"):
            digests = [(place / f"{one}.digest").read_text() for one in range(WORLD)]
            assert digests[0] == digests[2] != digests[1] == digests[3], "replica groups are twins"
    for old, new in OTHERS:
        saved = Saved(Path(folder) / str(list(KINDS).index(old)))
        parts = KINDS[new](3)
        ShardedParts(parts, (), {}).prepare(saved.copies, rank, WORLD, WORLD + 1).apply()
        assert_same(full(parts), wholes[old], f"{old} as {new}")
    check_stages(rank, Path(folder))
    check_order(rank)
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


@pytest.mark.long
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
    sharded = ShardedParts(parts, (), rules or {})
    layout = ShardLayouts().lay_out(
        sharded.take(rank, world_size, 1, common=True, own={rank: sharded.own_parts()})
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


def test_a_tensor_that_two_parts_have_lies_in_a_copy_once(alone: None) -> None:
    net = fsdp(flat(1), 0)
    copy = taken({"model": net, "best": {"bias": net[1].bias}})
    rows = {row.key: row for row in copy.table.shards}
    assert rows["best.bias"].begin == rows["model.1.bias"].begin
    new: Parts = {"model": fsdp(flat(1), 1), "best": {"bias": torch.zeros_like(net[1].bias)}}
    ShardedParts(new, (), {}).prepare({0: copy}, 0, 1, 1).apply()
    for one in (new["best"]["bias"], new["model"][1].bias):
        assert torch.equal(one.full_tensor(), net[1].bias.full_tensor())


class Doubled(nn.Module):
    """Its state is made anew each time, by methods that take no options, and holds a value that is no tensor."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.full((4,), start), flat(1), [Shard(0)]))
        self.seen = int(start)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"doubled": self.weight * 2, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state["doubled"] / 2)
        self.seen = state["seen"]


def test_a_module_with_a_state_dict_of_its_own_is_asked_each_time(alone: None) -> None:
    net = Doubled(3.0)
    sharded, layouts = ShardedParts({"model": net}, (), {}), ShardLayouts()
    for factor in (1, 2):
        with torch.no_grad():
            net.weight *= factor
        net.seen *= factor
        layout = layouts.lay_out(sharded.take(0, 1, factor, common=True, own={}))
        memory = bytearray(layout.size)
        layout.copy_to(memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8))
    other = Doubled(1.0)
    copy = OpenCopy(layout.table, lambda offset, view: None, memoryview(memory))
    ready = ShardedParts({"model": other}, (), {}).prepare({0: copy}, 0, 1, 1)
    assert (other.weight.full_tensor().tolist(), other.seen) == ([1.0] * 4, 1)
    ready.apply()
    assert (other.weight.full_tensor().tolist(), other.seen) == ([6.0] * 4, 6)


def test_parameters_that_a_script_has_replaced_are_saved(alone: None) -> None:
    net = fsdp(flat(1), 0)
    sharded = ShardedParts({"model": net}, (), {})
    before = sharded.take(0, 1, 1, common=True, own={})
    net[1].bias = nn.Parameter(net[1].bias.detach() + 7)
    net[1].register_buffer("late", torch.ones(2))
    after = sharded.take(0, 1, 2, common=True, own={})
    by_key = [{row.key: items.tensors[row.source] for row in items.form.rows} for items in (before, after)]
    assert torch.equal(by_key[1]["model.1.bias"], by_key[0]["model.1.bias"] + 7)
    assert by_key[1].keys() - by_key[0].keys() == {"model.1.late"}


@pytest.mark.parametrize(
    "state",
    [
        {"part": {1: torch.ones(2), "1": torch.zeros(2)}},
        {"part": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}},
        {"part": {"a.b": torch.ones(2), "a": {"b": 2}}},
        {"part": {"a.b": 1, "a": {"b": 2}}},
        {"part": {None: 1, "None": 2}},
        {"part": {"more.one": 1}, "part.more": {"one": 2}},
        {"part": {"more.one": torch.ones(2)}, "part.more": {"one": torch.zeros(2)}},
    ],
    ids=str,
)
def test_two_values_that_would_have_one_key_are_refused(alone: None, state: Parts) -> None:
    """Only one of them could come back, and as both."""
    with pytest.raises(NotPlainData, match=r"two values at 'part\.[\w.]+', by the keys"):
        taken({"model": fsdp(flat(1), 0), **state})


def test_what_only_another_rank_has_put_into_a_dict_is_not_lost(alone: None) -> None:
    """No rank should do so alone, and none can tell: each brings the structure that it knows."""
    net = fsdp(flat(1), 0)
    more, less = ({"meta": {"epoch": 1, **extra}, "model": net} for extra in ({"best": {"at": 2}}, {}))
    copies = {0: taken(less, rank=0, world_size=2), 1: taken(more, rank=1, world_size=2)}
    parts: Parts = {"model": net, "meta": {}}
    ShardedParts(parts, (), {}).prepare(copies, 0, 1, 2).apply()
    assert parts["meta"] == {"epoch": 1, "best": {"at": 2}}


def test_what_the_script_holds_of_a_dict_has_the_loaded_values(alone: None) -> None:
    net = fsdp(flat(1), 0)
    spread = distribute_tensor(torch.zeros(4), flat(1), [Shard(0)])
    ema = {"spread": spread, "queue": torch.zeros(2)}
    copies = {0: taken({"model": net, "more": {"ema": {"spread": spread + 3, "queue": torch.ones(2)}}})}
    parts: Parts = {"model": net, "more": {"ema": ema}}
    queue = ema["queue"]
    ShardedParts(parts, (), {}).prepare(copies, 0, 1, 1).apply()
    assert parts["more"]["ema"] is ema
    assert ema["spread"] is spread
    assert ema["queue"] is queue
    assert spread.full_tensor().tolist() == [3.0] * 4
    assert queue.tolist() == [1.0] * 2


def test_the_state_of_another_optimizer_is_refused(alone: None) -> None:
    parts = with_adam(fsdp(flat(1), 0))
    train(parts, 1, 1)
    copies = {0: taken(parts)}
    other = parts | {"optimizer": torch.optim.SGD(parts["model"].parameters(), momentum=0.9)}
    with pytest.raises(CheckpointMismatch, match=r"part 'optimizer' .*another optimizer's: it has .* of SGD"):
        ShardedParts(other, (), {}).prepare(copies, 0, 1, 1).apply()


def test_a_state_of_other_names_or_shapes_does_not_fit(alone: None) -> None:
    copies = {0: taken({"model": fsdp(flat(1), 0)})}
    smaller = fully_shard(
        nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 11), nn.Linear(11, 3), nn.PReLU(3)), mesh=flat(1)
    )
    with pytest.raises(CheckpointMismatch, match=r"'model\.1\.weight' was saved as float32 of shape"):
        ShardedParts({"model": smaller}, (), {}).prepare(copies, 0, 1, 1)
    with pytest.raises(
        CheckpointMismatch,
        match=r"has the parts \['model'\], which this script does not have, and lacks its parts \['net'\]: give",
    ):
        ShardedParts({"net": fsdp(flat(1), 0)}, (), {}).prepare(copies, 0, 1, 1)


def test_parts_that_a_script_no_longer_has_are_named_alone(alone: None) -> None:
    net = fsdp(flat(1), 0)
    copies = {0: taken({"model": net, "meta": {"seen": 1}, "more": {}})}
    with pytest.raises(
        CheckpointMismatch, match=r"has the parts \['meta'\], which this script does not have: give"
    ):
        ShardedParts({"model": net, "more": {}}, (), {}).prepare(copies, 0, 1, 1)


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
    assert questions() == [7], "each tensor is read into its place"
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
    with pytest.raises(CheckpointMismatch, match="same per_rank"):
        ShardedParts({"model": parts["model"]}, (), {}).prepare(copies, 0, 2, 2)


def test_what_a_script_puts_into_the_place_of_flat_parameters_is_taken(alone: None) -> None:
    net = fsdp1(None, 0, orig=True)
    net(torch.ones(1, 7)).sum().backward()
    net.module[2].bias.data = torch.full((3,), 7.0)
    copy = taken({"model": net})
    row = next(row for row in copy.table.shards if row.key == "model.2.bias")
    assert copy.mapped is not None
    assert torch.frombuffer(copy.mapped, dtype=torch.float32, count=3, offset=row.data).tolist() == [7.0] * 3


def test_flat_parameters_may_be_tied_and_buffers_of_another_precision_once_used(alone: None) -> None:
    def wrapped(seed: int) -> Parts:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net.register_buffer("seen", torch.rand(3))
        net[1].weight = net[0].weight
        half = MixedPrecision(buffer_dtype=torch.bfloat16)
        return {"model": FullyShardedDataParallel(net, device_id=torch.device("cpu"), mixed_precision=half)}

    old = wrapped(0)
    old["model"](torch.randn(4, 3)).sum().backward()
    copy = taken(old)
    rows = {row.key: row for row in copy.table.shards}
    assert {"model.0.weight", "model.1.weight"} <= rows.keys()
    new = wrapped(1)
    ShardedParts(new, (), {}).prepare({0: copy}, 0, 1, 1).apply()
    assert torch.equal(new["model"].module.seen, old["model"].module.seen.float())
    assert torch.equal(new["model"].module[0].weight, old["model"].module[0].weight)


def test_what_cannot_be_carried_is_refused_by_name(alone: None) -> None:
    sharded = fsdp(flat(1), 0)
    zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(Sharded, match="part 'zero' is a ZeroRedundancyOptimizer, which"):
        ShardedParts({"zero": zero}, (), {}).refuse()
    with pytest.raises(Sharded, match="part 'net' is spread over ranks, and declared to be rank 0's"):
        ShardedParts({"net": sharded}, ("net",), {}).refuse()
    for name in ("ranks", "ranks.0", "elastic_agent.structure"):
        with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
            refuse_names(["net", name])
    optimizer = torch.optim.AdamW(sharded.parameters())
    optimizer.state[next(sharded.parameters())]["blocks"] = torch.zeros(3)
    with pytest.raises(Sharded, match=r"'state.0.weight.blocks' of part 'optimizer' is a plain tensor"):
        ShardedParts({"net": sharded, "optimizer": optimizer}, (), {}).refuse()


@pytest.mark.filterwarnings("ignore")
def test_names_of_the_compiler_are_in_no_copy_of_fsdp1(alone: None) -> None:
    def compiled(seed: int) -> Parts:
        torch.manual_seed(seed)
        net = FullyShardedDataParallel(
            nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), nn.Linear(3, 2)),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        return {"model": net, "optimizer": torch.optim.AdamW(net.parameters())}

    old, new = compiled(0), compiled(1)
    old["model"](torch.ones(1, 3)).sum().backward()
    old["optimizer"].step()
    copy = taken(old)
    assert not [key for key in copy.table.paths if "_orig_mod" in key]
    ShardedParts(new, (), {}).prepare({0: copy}, 0, 1, 1).apply()
    for theirs, mine in zip(old["model"].parameters(), new["model"].parameters(), strict=True):
        assert torch.equal(theirs, mine)
        assert torch.equal(old["optimizer"].state[theirs]["exp_avg"], new["optimizer"].state[mine]["exp_avg"])


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_over_several_modules_of_fsdp1_is_refused_by_name(alone: None) -> None:
    cpu = torch.device("cpu")
    encoder, decoder = (FullyShardedDataParallel(nn.Linear(2, 2), device_id=cpu) for _ in range(2))
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    with pytest.raises(Sharded, match="is in another module than its FullyShardedDataParallel"):
        ShardedParts({"encoder": encoder, "decoder": decoder, "optimizer": optimizer}, (), {}).refuse()


@pytest.mark.filterwarnings("ignore")
def test_what_all_ranks_do_together_comes_before_what_one_may_refuse(alone: None) -> None:
    order: list[str] = []

    class Sampler:
        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            order.append("sampler")

    net = fsdp1(None, 0, orig=True)
    net.register_load_state_dict_post_hook(lambda *_: order.append("model"))
    parts: Parts = {"sampler": Sampler(), "model": net}
    ShardedParts(parts, (), {}).prepare({0: taken(parts)}, 0, 1, 1).apply()
    assert order == ["model", "sampler"]


@pytest.mark.filterwarnings("ignore")
def test_a_load_of_fsdp1_that_is_prepared_only_leaves_the_optimizer_without_a_state(alone: None) -> None:
    old, new = (with_adam(fsdp1(None, seed, orig=True)) for seed in (0, 1))
    train(old, 1, 1)
    sharded = ShardedParts(new, (), {})
    sharded.begin_load()
    ready = sharded.prepare({0: taken(old)}, 0, 1, 1)
    assert not new["optimizer"].state
    ready.apply()
    assert [one["step"].item() for one in new["optimizer"].state.values()] == [1.0] * len(
        old["optimizer"].state
    )
