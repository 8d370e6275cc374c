"""What a communication hook knows: taken out, put back, and applied to the parameters to which it belongs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
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
from elastic_agent.worker.ranks.fingerprint import tensors_in
from elastic_agent.worker.state.hook_state import HookState, _Bucket

pytest.importorskip("numpy")


class Model:
    """Four parameters of two numbers each, and a hook that adds to a bucket what its state has for it."""

    def __init__(self, **options: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
        self.power = PowerSGDState(None, 1, start_powerSGD_iter=2, **options)
        self.state = HookState(self.power, self.parameters)
        self.called: list[tuple[int, list[float]]] = []
        self._hook = self.state.watching(self._add)

    def _add(self, power: PowerSGDState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.called.append((bucket.index(), bucket.buffer()[::2].tolist()))
        if power.iter >= power.start_powerSGD_iter and power.use_error_feedback:
            known = power.error_dict.setdefault(bucket.index(), torch.zeros_like(bucket.buffer()))
            bucket.buffer().add_(known)
            power.error_dict[bucket.index()] = known + bucket.buffer()
        power.maybe_increase_iter(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def backward(self, *buckets: Sequence[int]) -> dict[int, float]:
        """The gradients that the optimizer gets, by parameter: before, a parameter's is one more than its number."""
        self.called.clear()
        found = {}
        for index, numbers in enumerate(buckets):
            gradients = [torch.full((2,), float(number + 1)) for number in numbers]
            bucket: Any = _Bucket(index, gradients, is_last=index + 1 == len(buckets))
            bucket.parameters = lambda order=numbers: [self.parameters[number] for number in order]
            result = self._hook(self.power, bucket).wait()
            found.update(zip(numbers, result[::2].tolist(), strict=True))
        return found


FIRST = [[0, 1, 2, 3]]
LATER = [[3, 1], [0, 2]]


def trained(steps: int, **options: Any) -> Model:
    model = Model(**options)
    for buckets in [FIRST, *[LATER] * (steps - 1)]:
        model.backward(*buckets)
    return model


@pytest.mark.parametrize("saved_after", [2, 3, 5])
def test_a_restarted_process_goes_on_with_the_buckets_that_it_had(saved_after: int) -> None:
    undisturbed, saved, restarted = trained(saved_after), trained(saved_after), Model()
    restarted.state.load_state_dict(saved.state.state_dict())
    for buckets in (FIRST, LATER, LATER):
        assert restarted.backward(*buckets) == undisturbed.backward(*LATER)
        assert restarted.called == undisturbed.called
        assert restarted.power.iter == undisturbed.power.iter
        assert str(restarted.power.error_dict) == str(undisturbed.power.error_dict)


def test_buckets_that_stay_as_they_are_are_torchs_own() -> None:
    model = trained(5)
    restarted = Model()
    restarted.state.load_state_dict(model.state.state_dict())
    assert restarted.backward(*LATER) == model.backward(*LATER)
    assert restarted.state._buckets == dict(enumerate(LATER))


@pytest.mark.parametrize(
    "buckets", [[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[0, 1, 2], [3]], [[3], [1], [0, 2]]], ids=str
)
def test_other_buckets_are_refused_where_the_state_belongs_to_them(buckets: list[list[int]]) -> None:
    restarted = Model()
    restarted.state.load_state_dict(trained(4).state.state_dict())
    with pytest.raises(CheckpointError, match="belongs to other buckets than DDP has now"):
        restarted.backward(*buckets)
    before = Model()
    before.state.load_state_dict(trained(2).state.state_dict())
    before.power.iter = 0
    before.backward(*buckets)  # nothing belongs to any bucket yet
    independent = Model(use_error_feedback=False, warm_start=False)
    independent.state.load_state_dict(
        trained(4, use_error_feedback=False, warm_start=False).state.state_dict()
    )
    independent.backward(*buckets)


def test_what_was_saved_before_ddp_had_its_buckets_cannot_be_compressed_at_once() -> None:
    saved, restarted = trained(1), Model()
    restarted.state.load_state_dict(saved.state.state_dict())
    restarted.power.iter = 2
    with pytest.raises(CheckpointError, match="start from another checkpoint"):
        restarted.backward(*FIRST)


def test_without_a_checkpoint_the_hook_gets_what_ddp_has() -> None:
    model = trained(4)
    other = [[0, 1], [2, 3]]
    model.backward(*other)
    assert model.called == [(0, [1, 2]), (1, [3, 4])]


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
    one, other = Model(), Model()
    one.power.rng.rand(3)
    other.state.load_state_dict(one.state.state_dict())
    assert one.power.rng.rand() == other.power.rng.rand()


@pytest.mark.parametrize(
    ("state", "saved", "text"),
    [
        (None, {"iter": 1}, "this hook has no state"),
        (PostLocalSGDState(None, None, 7), {}, "of another hook, this one is PostLocalSGDState"),
        (Counter(), {"iter": 1}, "of another hook"),
        (PowerSGDState(None, 2), Model().state.state_dict(), "make them the same"),
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


@functools.wraps(powerSGD_hook)
def one_by_one(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The callbacks of several buckets at once wait in gloo's threads for collectives that need these threads."""
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


class Training:
    """By torch's own DDP, which has one bucket in its first step and several from then on."""

    def __init__(self, wrapper: Any = None, bucket_cap_mb: float = 0.008) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 32) for _ in range(4)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
        power = PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=1)
        self.hook = register_comm_hook(self.model, power, one_by_one, wrapper)
        self.parts: dict[str, Any] = {"model": self.model.module, "hook": self.hook}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, first: int, end: int) -> list[tuple[str, Any]]:
        for step in range(first, end):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randn(4, 32, generator=generator)).square().mean().backward()
            self.optimizer.step()
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return [(key, tensor.tolist()) for key, tensor in tensors_in(states, "")]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrapper", [None, default_hooks.fp16_compress_wrapper], ids=["", "fp16"])
@pytest.mark.parametrize("restarted_after", [2, 5])
def test_ddp_goes_on_with_the_buckets_that_it_had(wrapper: Any, restarted_after: int) -> None:
    before, after = Training(wrapper), Training(wrapper)
    before.train(0, restarted_after)
    for name, part in after.parts.items():
        part.load_state_dict(before.parts[name].state_dict())
    assert len(after.hook.state_dict()["buckets"]) > 1
    assert after.train(restarted_after, 9) == Training(wrapper).train(0, 9)


@pytest.mark.usefixtures("group_of_one")
def test_ddp_with_other_buckets_raises_in_backward() -> None:
    before, after = Training(), Training(bucket_cap_mb=0.001)
    before.train(0, 5)
    after.hook.load_state_dict(before.hook.state_dict())
    after.train(5, 6)
    with pytest.raises(CheckpointError, match="belongs to other buckets than DDP has now"):
        after.train(6, 7)
