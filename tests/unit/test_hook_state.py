"""What a communication hook knows: taken out, put back, and refused where it belongs to other parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from elastic_agent.worker import CheckpointError
from elastic_agent.worker.collectives import register_comm_hook
from elastic_agent.worker.ranks.comparison import tensors_in
from elastic_agent.worker.state.hook_state import HookState

pytest.importorskip("numpy")


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_each_kind_of_state_keeps() -> None:
    nothing = HookState(None, [])
    assert nothing.state_dict() == {}
    nothing.load_state_dict({})
    local, counter, plain = PostLocalSGDState(None, None, 7), Counter(), {"a": 1}
    local.iter = counter.count = 5
    for one, fresh in ((local, PostLocalSGDState(None, None, 7)), (counter, Counter()), (plain, {"b": 2})):
        saved = HookState(one, []).state_dict()
        HookState(fresh, []).load_state_dict(saved)
        assert HookState(fresh, []).state_dict() == saved


def test_the_random_numbers_of_power_sgd_go_on() -> None:
    one, other = PowerSGDState(None), PowerSGDState(None)
    one.rng.rand(3)
    HookState(other, []).load_state_dict(HookState(one, []).state_dict())
    assert one.rng.rand() == other.rng.rand()


@pytest.mark.parametrize(
    ("state", "saved", "text"),
    [
        (None, {"iter": 1}, "this hook has no state"),
        (PostLocalSGDState(None, None, 7), {}, "of another hook, this one is PostLocalSGDState"),
        (Counter(), {"iter": 1}, "of another hook"),
        (PowerSGDState(None, 2), HookState(PowerSGDState(None), []).state_dict(), "make them the same"),
    ],
)  # fmt: skip
def test_the_state_of_another_hook_is_refused(state: object, saved: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HookState(state, []).load_state_dict(saved)


def test_a_state_of_an_unknown_kind_is_refused_when_it_is_saved_and_no_sooner() -> None:
    hook = register_comm_hook(torch.nn.Linear(1, 1), object(), lambda *_: torch.futures.Future())
    with pytest.raises(CheckpointError, match="is a object, of which it is not known what to keep"):
        hook.state_dict()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Linear(torch.nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.to(self.weight.dtype))


class Training:
    """By torch's own DDP, with several buckets."""

    def __init__(
        self,
        wrapper: Any = None,
        bucket_cap_mb: float = 0.008,
        second: torch.dtype = torch.float32,
        keeps_buckets: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = [Linear(32, 32, dtype=(torch.float32, second)[place % 2]) for place in range(4)]
        self.model = DistributedDataParallel(
            torch.nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=keeps_buckets
        )
        power = PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=1, **options)
        self.hook = register_comm_hook(self.model, power, powerSGD_hook, wrapper)
        self.parts: dict[str, Any] = {"model": self.model.module, "hook": self.hook}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randn(4, 32, generator=generator)).square().mean().backward()
            self.optimizer.step()

    def load(self, other: Training) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(other.parts[name].state_dict())

    def state(self) -> list[tuple[str, Any]]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return [(key, tensor.tolist()) for key, tensor in tensors_in(states, "")]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrapper", [None, default_hooks.fp16_compress_wrapper], ids=["", "fp16"])
@pytest.mark.parametrize("second", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("restarted_after", [1, 2, 3, 5])
def test_a_restarted_process_goes_on_where_ddp_keeps_its_buckets(
    wrapper: Any, second: torch.dtype, restarted_after: int
) -> None:
    undisturbed, before, after = (Training(wrapper, second=second) for _ in range(3))
    undisturbed.train(0, 9)
    before.train(0, restarted_after)
    after.load(before)
    after.train(restarted_after, 9)
    assert after.state() == undisturbed.state()
    assert len(after.hook.state_dict()["buckets"]) > 1
    assert after.hook.state_dict()["error_dict"], "PowerSGD has begun"


@pytest.mark.usefixtures("group_of_one")
def test_buckets_that_change_after_the_first_step_are_refused_at_the_first_save() -> None:
    training = Training(keeps_buckets=False)
    training.train(0, 2)
    with pytest.raises(CheckpointError, match="find_unused_parameters=True"):
        training.hook.state_dict()
    independent = Training(keeps_buckets=False, use_error_feedback=False, warm_start=False)
    independent.train(0, 5)
    assert independent.hook.state_dict()["iter"] == 5


@pytest.mark.usefixtures("group_of_one")
def test_ddp_with_other_buckets_raises_in_backward() -> None:
    before, after = Training(), Training(bucket_cap_mb=0.001)
    before.train(0, 5)
    after.load(before)
    with pytest.raises(CheckpointError, match="belongs to other buckets than DDP has now"):
        after.train(5, 6)
