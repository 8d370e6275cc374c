"""The stream of epochs from which libraries deal out batches."""

from __future__ import annotations

import pytest
from torch.utils.data import DistributedSampler

from elastic_agent.worker import SamplerMismatch
from elastic_agent.worker.steps.sampler import Order, StreamSampler, samples_between


def test_an_iteration_goes_on_into_the_next_epoch() -> None:
    order = Order(length=5, seed=3, shuffle=True)
    epochs = [order.of_epoch(epoch).tolist() for epoch in range(3)]
    assert samples_between(order, 3, 12) == epochs[0][3:] + epochs[1] + epochs[2][:2]
    sampler = StreamSampler(order, batches=2, samples=3)
    assert list(sampler) == list(sampler) == samples_between(order, 0, 6), "drawn is not done"
    for _ in range(2):
        sampler.batch_is_done()
    assert list(sampler) == samples_between(order, 6, 12)
    assert len(sampler) == 6
    assert sampler.epoch == 6 / 5


def test_each_rank_has_its_share_of_each_batch() -> None:
    order = Order(length=16, seed=3, shuffle=True)
    shares = [slice(rank * 2, rank * 2 + 2) for rank in range(3)]
    ranks = [list(StreamSampler(order, batches=2, samples=6, share=share)) for share in shares]
    assert ranks[0][:2] + ranks[1][:2] + ranks[2][:2] == samples_between(order, 0, 6)
    assert ranks[0][2:] + ranks[1][2:] + ranks[2][2:] == samples_between(order, 6, 12)
    assert {len(StreamSampler(order, batches=2, samples=6, share=share)) for share in shares} == {4}


def test_the_order_of_an_epoch_is_that_of_distributed_sampler() -> None:
    theirs = DistributedSampler(range(7), num_replicas=1, rank=0, seed=4)
    theirs.set_epoch(2)
    assert Order(length=7, seed=4, shuffle=True).of_epoch(2).tolist() == list(theirs)


@pytest.mark.parametrize("change", [{"position": True}, {"position": -1}, {"more": 1}, {"seed": 4}])
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, int]) -> None:
    sampler = StreamSampler(Order(length=5, seed=3, shuffle=True), batches=2, samples=3)
    good = sampler.state_dict() | {"position": 6}
    with pytest.raises(SamplerMismatch):
        sampler.load_state_dict(good | change)
    assert sampler.position == 0
    sampler.load_state_dict(good)
    assert sampler.position == 6
