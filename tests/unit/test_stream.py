"""The stream of epochs from which libraries deal out batches."""

from __future__ import annotations

import pytest
from torch.utils.data import DistributedSampler

from elastic_agent.worker.steps.stream import Order, Rhythm, StreamSampler


@pytest.mark.parametrize(
    ("rhythm", "finished"),
    [
        (Rhythm(batches=3, samples=4), [0, 4, 8, 12, 16]),
        (Rhythm(batches=4, samples=4, per_step=2), [0, 8, 16, 24, 32]),
        (Rhythm(batches=5, samples=4, per_step=2), [0, 8, 16, 20, 28]),
        (Rhythm(batches=1, samples=4, per_step=8), [0, 4, 8, 12, 16]),
    ],
)
def test_the_last_step_of_an_iteration_has_what_is_left(rhythm: Rhythm, finished: list[int]) -> None:
    assert [rhythm.finished(steps) for steps in range(5)] == finished


def test_an_iteration_goes_on_into_the_next_epoch() -> None:
    order = Order(length=5, seed=3, shuffle=True)
    epochs = [order.of_epoch(epoch).tolist() for epoch in range(3)]
    assert list(order.between(3, 12)) == epochs[0][3:] + epochs[1] + epochs[2][:2]
    sampler = StreamSampler(order, Rhythm(batches=2, samples=3))
    assert [list(sampler), list(sampler)] == [list(order.between(0, 6)), list(order.between(6, 12))]
    assert len(sampler) == 6
    assert sampler.epoch(5) == 3


def test_the_order_of_an_epoch_is_that_of_distributed_sampler() -> None:
    theirs = DistributedSampler(range(7), num_replicas=1, rank=0, seed=4)
    theirs.set_epoch(2)
    assert Order(length=7, seed=4, shuffle=True).of_epoch(2).tolist() == list(theirs)
