"""The digest of a state: what makes it another one, what does not, and what is said where ranks differ."""

from __future__ import annotations

import json
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
from elastic_agent.worker.ranks.comparison import FEW_BYTES, ROW, Comparison, digests_of, tensors_in
from elastic_agent.worker.ranks.group import RECORDS, Group


def digest_of(tensor: torch.Tensor) -> str:
    return digests_of([tensor])[0]


NUMBERS = torch.randn(40, 1001, generator=torch.Generator().manual_seed(0))
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, FEW_BYTES, FEW_BYTES + 1, 30_011])
def test_each_bit_counts(dtype: torch.dtype, count: int) -> None:
    raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    before = digest_of(raw.view(dtype))
    assert digest_of(raw.clone().view(dtype)) == before
    for place in {0, len(raw) // 2, len(raw) - 1, *range(0, len(raw), len(raw) // 7 or 1)}:
        for bit in (1, 128) if dtype is not torch.bool else (1,):
            raw[place] ^= bit
            assert digest_of(raw.view(dtype)) != before
            raw[place] ^= bit


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.roll(1),
        lambda one: one.roll(ROW),
        lambda one: one.roll(ROW * ROW),
        lambda one: one.flip(0),
        lambda one: torch.cat([one[ROW : 2 * ROW], one[:ROW], one[2 * ROW :]]),
        lambda one: torch.cat([one[1:2], one[:1], one[2:]]),
        lambda one: -one,
        lambda one: one * 2,
    ],
)
def test_what_is_elsewhere_or_has_another_sign_is_another(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    one = torch.arange(1, 4 * ROW * ROW + 1, dtype=torch.float64)
    assert digest_of(one) != digest_of(change(one))


@pytest.mark.parametrize("count", [ROW << 10, 1 << 16, 1 << 20])
@pytest.mark.parametrize("value", [-0.0, 2.0, 4.0])
def test_what_is_the_same_everywhere_does_not_cancel_out(count: int, value: float) -> None:
    """The bits of some numbers are zero but for the highest, and as many as a power of two add up to zero."""
    zeros = torch.zeros(count, dtype=torch.float64)
    assert digest_of(zeros) != digest_of(torch.full_like(zeros, value))


@pytest.mark.parametrize("change", [1, -7, 1 << 31, 1 << 32, 1 << 52, 1 << 63], ids=hex)
@pytest.mark.parametrize("columns", [(0, 1), (3, 100), (0, 126)])
@pytest.mark.parametrize("rows", [(0, 127), (0, 128), (0, 255), (255, 510), (0, 127 * 255)])
def test_changes_in_two_rows_and_two_columns_do_not_cancel_out(
    rows: tuple[int, int], columns: tuple[int, int], change: int
) -> None:
    """As in a grid of any width: all sums of rows and of columns stay what they were."""
    one = torch.arange(100_000) * 2**40
    other = one.clone()
    for row, column, sign in zip(
        (rows[0], rows[0], rows[1], rows[1]), (*columns, *columns), (1, -1, -1, 1), strict=True
    ):
        other[row + column] += (sign * change + 2**63) % 2**64 - 2**63
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize("seed", range(5))
def test_no_two_elements_change_places(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(100_000, generator=generator)
    before = digest_of(one)
    for first, second in torch.randint(0, len(one), (20, 2), generator=generator).tolist():
        other = one.clone()
        other[[first, second]] = one[[second, first]]
        assert (digest_of(other) == before) == (first == second)


def test_only_values_count_and_not_how_they_lie() -> None:
    flat = torch.cat([torch.zeros(1, dtype=torch.int8), NUMBERS.view(torch.int8).flatten()])
    ways = [
        NUMBERS.t().contiguous().t(),
        torch.cat([NUMBERS[:1], NUMBERS])[1:],
        NUMBERS.expand(1, 40, 1001)[0],
    ]
    assert {digest_of(one) for one in ways} == {digest_of(NUMBERS)}
    assert digest_of(flat[1:]) == digest_of(NUMBERS), "also where words do not begin"
    complex_numbers = NUMBERS * 1j
    assert digest_of(complex_numbers.conj()) == digest_of(complex_numbers.conj().resolve_conj())
    assert digest_of(complex_numbers.conj()) != digest_of(complex_numbers)


def test_digests_come_in_the_order_of_the_tensors() -> None:
    some = [NUMBERS, torch.tensor(1.0), torch.empty(0), NUMBERS[0], torch.tensor(2.0)]
    assert digests_of(some) == [digest_of(one) for one in some]
    assert len(set(digests_of(some))) == len(some)


@dataclass(frozen=True)
class OneOf(Group):
    """A rank that gets at each gather what all have brought."""

    brought: list[list[bytes]]

    def gather(self, payload: bytes) -> list[bytes]:
        return self.brought.pop(0)


def states_of(*values: Any) -> list[dict[str, Any]]:
    return [{"log": {"a": value}} for value in values]


def compared(comparisons: list[Comparison], states: list[dict[str, Any]], step: int) -> str:
    """What rank 0 raises at a save of these states; empty: nothing."""
    groups = [OneOf(rank, len(states), torch.device("cpu"), []) for rank in range(len(states))]
    digests = [
        one.digest_of(
            lambda state=state: [  # type: ignore[misc]
                (part, key, tensor) for part in state for key, tensor in tensors_in(state[part], "")
            ],
            [part for part in state.values() if isinstance(part, nn.Module)],
            group,
        )
        for one, state, group in zip(comparisons, states, groups, strict=True)
    ]
    nothing = json.dumps({"v": RECORDS, "library": "0.1.0", "record": {"error": "", "reason": ""}}).encode()
    problems = set()
    for one, group in zip(comparisons, groups, strict=True):
        entries = [json.dumps(other._mine).encode() for other in comparisons]
        group.brought.extend([[nothing] * len(states), entries])
        try:
            one.compare(group, digests, step)
            problems.add("")
        except NotReplicated as problem:
            problems.add(str(problem))
    (problem,) = problems
    return problem


def compare_once(*states: dict[str, Any]) -> str:
    return compared([Comparison() for _ in states], list(states), 1)


def test_the_order_of_keys_is_each_ranks_own() -> None:
    one = {"log": {"a": torch.ones(2), "b": torch.zeros(3)}, "more": {}}
    assert not compare_once(one, {"log": {"b": torch.zeros(3), "a": torch.ones(2)}, "more": {}})


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"a": torch.ones(2)}, "'b' of part 'log' is on rank 0 only"),
        ({"a": torch.ones(2), "b": torch.zeros(3).half()}, "(3,) torch.float32 on rank 0 and (3,) torch.float16"),
        ({"a": torch.ones(3), "b": torch.zeros(3)}, "'a' of part 'log' is (2,) torch.float32 on rank 0"),
        ({"a": torch.ones(2), "b": torch.zeros(3), 0: torch.ones(1)}, "'0' of part 'log' is on rank 1 only"),
        ({"a": torch.ones(2), "b": -torch.zeros(3)}, "'b' of part 'log' has other values on rank 1 than on rank 0"),
    ],
)  # fmt: skip
def test_whatever_differs_has_a_name(other: dict[str, torch.Tensor], what: str) -> None:
    problem = compare_once({"log": {"a": torch.ones(2), "b": torch.zeros(3)}}, {"log": other})
    assert what in problem
    assert "from_rank_0=['log']" in problem


def test_all_parts_that_differ_are_declared_at_once() -> None:
    one, other = ({name: {"a": torch.tensor(rank)} for name in ("ema", "model")} for rank in range(2))
    assert "from_rank_0=['ema', 'model']" in compare_once(one, other)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ((1, 1, 2, 1), "on rank 2 than on rank 0 (ranks unlike rank 0: [2])"),
        ((2, 1, 1, 1), "on rank 0 than on rank 1 (ranks unlike rank 1: [0])"),
        ((1, 2, 1, 3), "on rank 1 than on rank 0 (ranks unlike rank 0: [1, 3])"),
    ],
)
def test_the_rank_that_computes_something_else_is_named(values: tuple[int, ...], ranks: str) -> None:
    assert ranks in compare_once(*states_of(*map(torch.tensor, values)))


def test_one_bit_of_a_large_tensor_is_found_that_no_sample_has() -> None:
    other = NUMBERS.clone()
    other.view(torch.int32)[7, 13] ^= 1
    assert "'a' of part 'log' has other values" in compare_once(*states_of(NUMBERS, other))


def test_of_buffers_forms_are_compared_only() -> None:
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.running_mean += 1  # type: ignore[operator]
    states = [{"model": module} for module in (one, other)]
    ranks = [Comparison(), Comparison()]
    found = [
        one.digest_of(
            lambda state=state: [("model", *item) for item in state["model"].state_dict().items()],  # type: ignore[misc]
            list(state.values()),
            OneOf(0, 2, torch.device("cpu"), []),
        )
        for one, state in zip(ranks, states, strict=True)
    ]
    assert found[0] == found[1]


def test_on_the_cpu_bits_are_compared_once_after_training_began_and_for_each_new_form() -> None:
    ranks = [Comparison(), Comparison()]
    for one in ranks:
        one.began(5)
    same, other = states_of(NUMBERS, NUMBERS), states_of(NUMBERS, NUMBERS + 1)
    assert not compared(ranks, same, 5), "all have just loaded the same"
    assert "has other values" in compared(ranks, other, 6)
    assert not compared(ranks, same, 6)
    assert not compared(ranks, other, 7)
    late = [{**state, "error": {"0": torch.full((2,), rank)}} for rank, state in enumerate(same)]
    assert "'0' of part 'error' has other values" in compared(ranks, late, 8)
    for one in ranks:
        one.began(8)
    assert "has other values" in compared(ranks, other, 9)


def quantized(value: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give them up
        return torch.quantize_per_tensor(torch.full((8,), value), 0.1, 0, torch.quint8)


def test_quantized_tensors_are_compared_and_carried(tmp_path: Path) -> None:
    problem = compare_once(*states_of(quantized(0.5), quantized(0.7)))
    assert "'a' of part 'log' has other values" in problem
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
