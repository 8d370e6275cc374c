"""The collectives for scripts: on three ranks of gloo, and in a process that is alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker.collectives import all_gather, gather_all_tensors, reduce, register_comm_hook

RANKS = 3


FORMS = ("0-d", "even", "uneven", "3-d", "empty")


def shape_of(form: str, rank: int) -> tuple[int, ...]:
    uneven = {"uneven": (rank + 1, 3), "3-d": (2, rank + 1, 4 - rank), "empty": (rank, 2)}
    return {"0-d": (), "even": (2, 3), **uneven}[form]


def of_rank(form: str, rank: int) -> torch.Tensor:
    return torch.full(shape_of(form, rank), float(rank))


def weighted_gradient(rank: int) -> torch.Tensor:
    """Each rank's loss weighs the gathered rows by its own rank."""
    leaf = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(RANKS, dtype=torch.float64).unsqueeze(1) + 10 * rank
    (all_gather(leaf * (rank + 1), sync_grads=True) * weights).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def passes_gradcheck() -> bool:
    """With the same input on each rank, as all move theirs at the same time, and a result in which all count alike."""
    leaf = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda x: all_gather(x**2, sync_grads=True).pow(3).sum(0), (leaf,))


def upper_gradient(group: Any) -> torch.Tensor:
    leaf = torch.ones(2, requires_grad=True)
    all_gather(leaf, group, sync_grads=True).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


HOOKS: dict[str, tuple[Any, Any]] = {
    "fp16": (default_hooks.fp16_compress_hook, None),
    "in fp16": (default_hooks.allreduce_hook, default_hooks.fp16_compress_wrapper),
}
"""torch lets bf16 be used with NCCL only, and says so."""


def gradients(rank: int, hook: Any, wrapper: Any = None, state: Any = None, steps: int = 1) -> list[float]:
    """Of each step, in which each rank's loss weighs the one weight by its rank."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model.module.weight)
    register_comm_hook(model, state, hook, wrapper)
    found = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.tensor([[float(rank)]])).sum().backward()
        found.append(model.module.weight.grad.item())
    return found


def local_gradients(rank: int, wrapper: Any) -> list[float]:
    """Of post-local SGD: in the first step all ranks', then those of the ranks of one machine, here of each alone."""
    alone, _ = dist.new_subgroups(1)
    state = PostLocalSGDState(None, alone, start_localSGD_iter=1)
    return gradients(rank, post_localSGD_hook, wrapper, state, steps=3)


def raises(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def results(rank: int) -> dict[str, Any]:
    half, upper = dist.new_group([0, 1]), dist.new_group([1, 2])
    return {
        "gathered": {form: gather_all_tensors(of_rank(form, rank)) for form in FORMS},
        "of two": gather_all_tensors(of_rank("uneven", rank), half) if rank < 2 else None,
        "bools": gather_all_tensors(torch.ones(rank, dtype=torch.bool)),
        "unlike": raises(lambda: gather_all_tensors(torch.zeros((1,) * (rank + 1)))),
        "stacked": all_gather(of_rank("even", rank).requires_grad_()),
        "gradient": weighted_gradient(rank),
        "gradcheck": passes_gradcheck(),
        "sum": reduce(of_rank("even", rank)),
        "mean": reduce(torch.tensor(rank + 1), op="mean"),
        "number": reduce(rank, op="sum"),
        "mean of numbers": reduce(rank, op="avg"),
        "torch's": reduce(torch.tensor(rank), op=dist.ReduceOp.MAX),
        "torch's mean": reduce(torch.tensor(float(rank)), op=dist.ReduceOp.AVG),
        "hooks": {name: gradients(rank, *hook) for name, hook in HOOKS.items()},
        "bf16": raises(lambda: gradients(rank, default_hooks.bf16_compress_hook)),
        "local": local_gradients(rank, None),
        "local in fp16": local_gradients(rank, default_hooks.fp16_compress_wrapper),
        "int and float": reduce(0 if rank == 0 else 0.5),
        "outside": raises(lambda: reduce(1, {0: upper, 2: half}[rank], "mean")) if rank != 1 else "",
        "upper gradient": upper_gradient(upper) if rank else None,
        "conj": all_gather(torch.tensor([1j * rank]).conj()),
    }


def run_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(results(rank), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.start_processes(run_rank, (str(folder),), nprocs=RANKS, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_uneven_sizes_are_gathered_by_rank(
    on_three_ranks: list[dict[str, Any]], form: str
) -> None:
    for found in on_three_ranks:
        assert [(row.shape, row.tolist()) for row in found["gathered"][form]] == [
            (of_rank(form, rank).shape, of_rank(form, rank).tolist()) for rank in range(RANKS)
        ]


def test_a_group_gathers_what_its_ranks_have(on_three_ranks: list[dict[str, Any]]) -> None:
    assert [row.shape for row in on_three_ranks[0]["of two"]] == [(1, 3), (2, 3)]
    assert [row.tolist() for row in on_three_ranks[0]["bools"]] == [[], [True], [True, True]]


def test_tensors_of_unlike_form_are_refused_on_every_rank(on_three_ranks: list[dict[str, Any]]) -> None:
    problems = {found["unlike"] for found in on_three_ranks}
    assert len(problems) == 1
    assert "rank 1: 2 dimensions" in problems.pop()


def test_a_gathered_tensor_has_a_row_for_each_rank(on_three_ranks: list[dict[str, Any]]) -> None:
    stacked = on_three_ranks[0]["stacked"]
    assert stacked.shape == (RANKS, 2, 3)
    assert [row[0][0].item() for row in stacked] == [0, 1, 2]
    assert not stacked.requires_grad


def test_gradients_flow_back_from_every_rank(on_three_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(on_three_ranks):
        of_all_losses = sum(rank + 10 * other for other in range(RANKS))
        assert found["gradient"].tolist() == [of_all_losses * (rank + 1)] * 2
        assert found["gradcheck"]


def test_a_subgroup_has_gradients_too_and_others_are_refused(on_three_ranks: list[dict[str, Any]]) -> None:
    assert [found["upper gradient"].tolist() for found in on_three_ranks[1:]] == [[2.0, 2.0]] * 2
    assert ["not in the group" in found["outside"] for found in on_three_ranks] == [True, False, True]


def test_reductions(on_three_ranks: list[dict[str, Any]]) -> None:
    for found in on_three_ranks:
        assert found["sum"].tolist() == torch.full((2, 3), 3.0).tolist()
        assert found["mean"].item() == 2.0
        assert (found["number"], found["mean of numbers"], found["int and float"]) == (3.0, 1.0, 1.0)
        assert found["conj"].flatten().tolist() == [0, -1j, -2j]
        assert (found["torch's"].item(), found["torch's mean"].item()) == (2, 1.0)


def test_ddp_reduces_by_the_hook_that_was_given(on_three_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(on_three_ranks):
        assert found["hooks"] == {name: [1.0] for name in HOOKS}
        assert "BF16 all reduce communication hook required" in found["bf16"]
        assert found["local"] == found["local in fp16"] == [1.0, rank, rank]


def test_a_process_that_is_alone_gets_what_it_gave() -> None:
    tensor = torch.arange(3.0, requires_grad=True)
    assert gather_all_tensors(tensor)[0].tolist() == [0, 1, 2]
    assert all_gather(tensor).shape == (1, 3)
    torch.autograd.gradcheck(
        lambda x: all_gather(x, sync_grads=True), (tensor.detach().double().requires_grad_(),)
    )
    assert reduce(tensor).tolist() == [0, 1, 2]
    assert reduce(tensor) is not tensor
    assert (reduce(3), reduce(3, op="mean"), reduce(0.1)) == (3.0, 3.0, 0.1)
    model = torch.nn.Linear(1, 1)
    register_comm_hook(model, None, default_hooks.fp16_compress_hook)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of sum, min, max, product, avg, mean"):
        reduce(1, op="median")
    with pytest.raises(ValueError, match="goes with a hook"):
        register_comm_hook(torch.nn.Linear(1, 1), None, None, default_hooks.fp16_compress_wrapper)
