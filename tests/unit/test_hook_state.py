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
from elastic_agent.worker.state.hook_state import Bucket, HookState, Layout, due

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
        results = []
        for index, numbers in enumerate(buckets):
            gradients = [torch.full((2,), float(number + 1)) for number in numbers]
            bucket: Any = Bucket(index, gradients, is_last=index + 1 == len(buckets))
            bucket.parameters = lambda order=numbers: [self.parameters[number] for number in order]
            results.append(self._hook(self.power, bucket))
        assert all(result.done() for result in results), "DDP waits for them, and brings no more buckets"
        return {
            number: value
            for numbers, result in zip(buckets, results, strict=True)
            for number, value in zip(numbers, result.wait()[::2].tolist(), strict=True)
        }


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
    assert restarted.state._buckets.layout == dict(enumerate(LATER))


@pytest.mark.parametrize(
    "buckets", [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[3], [1], [0, 2]], [[3, 1]]], ids=str
)
def test_other_buckets_are_refused_where_the_state_belongs_to_them(buckets: list[list[int]]) -> None:
    restarted = Model()
    restarted.state.load_state_dict(trained(4).state.state_dict())
    with pytest.raises(CheckpointError, match="belongs to other buckets than DDP has now"):
        restarted.backward(*buckets)
    before = Model()
    before.state.load_state_dict(trained(2).state.state_dict())
    before.backward(*buckets)  # nothing belongs to any bucket yet
    assert not before.power.error_dict, "DDP may make others after this step"
    independent = Model(use_error_feedback=False, warm_start=False)
    independent.state.load_state_dict(
        trained(4, use_error_feedback=False, warm_start=False).state.state_dict()
    )
    independent.backward(*buckets)


@pytest.mark.parametrize("iter_", [1, 2, 5])
def test_what_was_saved_before_ddp_had_its_buckets_is_compressed_when_it_has_them(iter_: int) -> None:
    """As by generations of one step each, the last of which had nothing left to wait for."""
    saved, restarted = trained(1), Model()
    saved.power.iter = iter_
    restarted.state.load_state_dict(saved.state.state_dict())
    restarted.backward(*FIRST)
    assert not restarted.power.error_dict
    restarted.backward(*LATER)
    assert restarted.power.error_dict.keys() == {0, 1}
    restarted.backward(*LATER)
    again = Model()
    again.state.load_state_dict(restarted.state.state_dict())
    assert again.backward(*FIRST) == restarted.backward(*LATER)


ALTERNATING = [[3], [2], [1], [0]]


@pytest.mark.parametrize("first", [[[0, 2], [3, 1]], [[1, 3], [0, 2]]], ids=str)
@pytest.mark.parametrize("saved_after", [2, 3, 5])
def test_buckets_of_two_dtypes_take_their_turns(saved_after: int, first: list[list[int]]) -> None:
    undisturbed, restarted = Model(), Model()
    for buckets in [first, *[ALTERNATING] * (saved_after - 1)]:
        undisturbed.backward(*buckets)
    restarted.state.load_state_dict(undisturbed.state.state_dict())
    for buckets in (first, ALTERNATING, ALTERNATING):
        now = restarted.backward(*buckets)
        assert now == undisturbed.backward(*ALTERNATING)
        assert restarted.called[-4:] == undisturbed.called
        assert restarted.power.iter == undisturbed.power.iter
        assert str(restarted.power.error_dict) == str(undisturbed.power.error_dict)


def test_a_bucket_that_waits_when_the_rest_does_not_fit_is_sent_as_it_is() -> None:
    saved, restarted = Model(), Model()
    for buckets in [FIRST, [[2], [3], [1], [0]]]:
        saved.backward(*buckets)
    restarted.state.load_state_dict(saved.state.state_dict())
    assert restarted.backward([3], [2, 1], [0]) == {3: 4, 2: 3, 1: 2, 0: 1}


@pytest.mark.parametrize(
    ("layout", "called", "arrived", "is_last", "expected"),
    [
        ({0: [1], 1: [0]}, 0, [[1]], False, [0]),
        ({0: [1], 1: [0]}, 1, [[1], [0]], True, [1]),
        ({0: [1], 1: [0]}, 0, [[0]], False, []),
        ({0: [1], 1: [0]}, 0, [[0], [1]], True, [0, 1]),
        ({0: [1], 1: [0]}, 0, [[0, 1]], True, [0, 1]),
        ({0: [3], 1: [2], 2: [1], 3: [0]}, 0, [[1, 3]], False, [0]),
        ({0: [3], 1: [2], 2: [1], 3: [0]}, 1, [[1, 3], [0, 2]], True, [1, 2, 3]),
        ({0: [1, 0]}, 0, [[1]], False, None),
        ({0: [1], 1: [0]}, 0, [[1, 2]], True, None),
        ({0: [2], 1: [1], 2: [0]}, 1, [[2], [1]], True, None),
    ],
    ids=str,
)
def test_which_buckets_are_due(
    layout: Layout, called: int, arrived: list[list[int]], is_last: bool, expected: list[int] | None
) -> None:
    found = due(layout, called, arrived, is_last=is_last)
    assert (None if found is None else list(found)) == expected


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


class Linear(torch.nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.to(self.weight.dtype))


class Training:
    """By torch's own DDP, which has one bucket in its first step and several from then on."""

    def __init__(
        self, wrapper: Any = None, bucket_cap_mb: float = 0.008, second: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        layers = [Linear(32, 32, dtype=(torch.float32, second)[place % 2]) for place in range(4)]
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
def test_ddp_goes_on_with_buckets_of_two_dtypes() -> None:
    before, after = Training(second=torch.float64), Training(second=torch.float64)
    before.train(0, 5)
    for name, part in after.parts.items():
        part.load_state_dict(before.parts[name].state_dict())
    assert after.train(5, 8) == Training(second=torch.float64).train(0, 8)


@pytest.mark.usefixtures("group_of_one")
def test_ddp_with_other_buckets_raises_in_backward() -> None:
    before, after = Training(), Training(bucket_cap_mb=0.001)
    before.train(0, 5)
    after.hook.load_state_dict(before.hook.state_dict())
    after.train(5, 6)
    with pytest.raises(CheckpointError, match="belongs to other buckets than DDP has now"):
        after.train(6, 7)
