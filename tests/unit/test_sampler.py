"""ElasticSampler: no sample of an epoch is repeated or lost, whatever happens to the world in the middle of it."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from elastic_agent.worker import (
    Checkpointer,
    CheckpointMismatch,
    ElasticSampler,
    SamplerError,
    SamplerMismatch,
    step,
)


def world(
    length: int, size: int, batch: int, state: dict[str, Any] | None, **more: Any
) -> list[ElasticSampler]:
    """One sampler for each of `size` ranks, which have all loaded the same state."""
    samplers = [
        ElasticSampler(range(length), batch_size=batch, num_replicas=size, rank=rank, **more)
        for rank in range(size)
    ]
    for sampler in samplers if state is not None else ():
        sampler.load_state_dict(state)
    return samplers


def batches(sampler: ElasticSampler, size: int) -> Iterator[list[int]]:
    """What a DataLoader makes of it, without reading ahead."""
    indices = iter(sampler)
    while batch := list(itertools.islice(indices, size)):
        yield batch


def train(samplers: list[ElasticSampler], batch: int, per_step: int, steps: int | None) -> list[list[int]]:
    """The samples of each finished step, over all ranks; every rank must have its share of each."""
    feeds = [batches(sampler, batch) for sampler in samplers]
    finished: list[list[int]] = []
    while steps is None or len(finished) < steps:
        shares = [list(itertools.islice(feed, per_step)) for feed in feeds]
        assert len({tuple(map(len, share)) for share in shares}) == 1, (
            "a rank would wait for the others for ever"
        )
        if not shares[0]:
            break
        step(len(finished) + 1)
        finished.append([index for share in shares for part in share for index in part])
    return finished


# --- Properties


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 120),
    lives=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6)), max_size=6
    ),
    last=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_every_sample_exactly_once_in_any_sequence_of_worlds(
    length: int,
    lives: list[tuple[int, int, int, int]],
    last: tuple[int, int, int],
    shuffle: bool,
    drop_last: bool,
    epoch: int,
    seed: int,
) -> None:
    """Worlds of any size do some steps each, with batches of any size; one that remains finishes the epoch."""
    state: dict[str, Any] | None = None
    done: list[int] = []
    extra = 0
    for size, batch, per_step, steps in [*lives, (*last, None)]:
        more = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "batches_per_step": per_step}
        samplers = world(length, size, batch, state, **more)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        before = len(set(done))
        for samples in train(samplers, batch, per_step, steps):
            assert not extra, "only the last step may fill up"
            done += samples
            extra = len(done) - len(set(done))
            assert extra < size
        states = [sampler.state_dict() for sampler in samplers]
        assert all(one == states[0] for one in states)
        assert states[0]["position"] == len(set(done)) >= before
        assert json.loads(json.dumps(states[0])) == states[0]
        state = states[0]
    counts = Counter(done)
    if drop_last:
        assert max(counts.values(), default=1) == 1
        assert length - len(done) < last[0]
    else:
        assert set(counts) == set(range(length))
        assert len(done) == length + extra


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_an_undisturbed_epoch_is_that_of_distributed_sampler(
    length: int, size: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    for rank in range(size):
        ours = ElasticSampler(
            range(length),
            batch_size=1,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_replicas=size,
            rank=rank,
        )
        theirs: DistributedSampler[Any] = DistributedSampler(
            range(length),  # type: ignore[arg-type]
            num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last,
        )  # fmt: skip
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert len(ours) == len(theirs)
        assert list(ours) == list(theirs)


# --- With torch's DataLoader


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_3_to_2_to_3_ranks_over_a_loader_that_reads_ahead(workers: int) -> None:
    """Two epochs. In the worlds that are cut short the loaders have read far beyond the last finished step."""
    seen: list[Counter[int]] = [Counter(), Counter()]
    orders = []
    state: dict[str, Any] | None = None
    done = 0
    for size, batch, steps in ((3, 4, 4), (2, 6, 3), (3, 4, None)):
        samplers = world(120, size, batch, state)
        loaders = [
            DataLoader(
                Numbers(),
                batch_size=batch,
                sampler=sampler,
                num_workers=workers,
                prefetch_factor=3 if workers else None,
                persistent_workers=bool(workers),
            )
            for sampler in samplers
        ]
        assert len(loaders[0]) == (120 - sum(seen[0].values())) // (size * batch)
        for epoch in range(samplers[0].epoch, 2):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            for shares in itertools.islice(zip(*loaders, strict=True), steps):
                samples = torch.cat(shares).tolist()
                seen[epoch].update(samples)
                orders.append((epoch, tuple(samples)))
                done += 1
                step(done)
            if steps is not None:
                break
        state = samplers[0].state_dict()
        assert state == samplers[-1].state_dict()
    assert [set(counter.values()) for counter in seen] == [{1}, {1}]
    assert [len(counter) for counter in seen] == [120, 120]
    first_of_each = [next(samples for epoch, samples in orders if epoch == wanted) for wanted in (0, 1)]
    assert first_of_each[0] != first_of_each[1], "the second epoch has another order"


def test_a_batch_that_the_loader_drops_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    (sampler,) = world(10, 1, 4, None)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for count, _ in enumerate(loader, start=1):
            step(count)
        assert sampler.position == 8
    assert not caplog.records


def test_a_checkpointer_keeps_the_place(tmp_path: Path) -> None:
    sampler = ElasticSampler(range(20), batch_size=2)
    sampler.set_epoch(3)
    undisturbed = list(sampler)
    sampler.set_epoch(0)
    sampler.set_epoch(3)
    train([sampler], 2, 1, 4)
    Checkpointer(tmp_path, {"sampler": sampler}).save(4)

    resumed = ElasticSampler(range(20), batch_size=2)
    assert Checkpointer(tmp_path, {"sampler": resumed}).load() == 4
    assert resumed.epoch == 3
    resumed.set_epoch(3)
    assert len(resumed) == 12
    assert list(resumed) == undisturbed[8:]

    with pytest.raises(CheckpointMismatch, match="had 20 samples, this sampler has 21"):
        Checkpointer(tmp_path, {"sampler": ElasticSampler(range(21), batch_size=2)}).load()


# --- When the position moves


@pytest.mark.parametrize("workers", [0, 1])
def test_the_tutorials_accumulation_steps_at_every_fourth_batch_and_at_the_last(workers: int) -> None:
    """Also in the rest of an epoch that is resumed in its middle, where `enumerate` begins at 0 again."""
    accum, found = 4, []
    state: dict[str, Any] | None = None
    for lives in range(2):
        (sampler,) = world(2 * 19, 1, 2, state, batches_per_step=accum)
        loader = DataLoader(range(2 * 19), batch_size=2, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        sampler.set_epoch(0)
        pending = 0
        for at, _ in enumerate(loader):
            pending += 1
            if (at + 1) % accum == 0 or (at + 1) == len(loader):
                found.append(pending)
                pending = 0
                step(len(found))
                if lives == 0 and len(found) == 2:
                    break
        state = sampler.state_dict()
        if lives:
            assert len(loader) == 11, "as long as it was, for a mean after the loop"
    assert found == [4, 4, 4, 4, 3]
    assert sampler.position == 38
    sampler.set_epoch(1)
    assert len(loader) == 19


def test_the_epoch_that_was_loaded_goes_on_and_the_next_begins_anew() -> None:
    (first,) = world(10, 1, 2, None)
    train([first], 2, 1, 2)
    (sampler,) = world(10, 1, 2, first.state_dict())
    sampler.set_epoch(0)
    assert sampler.position == 4
    sampler.set_epoch(1)
    assert sampler.position == 0


# --- Mistakes


@pytest.mark.parametrize(
    ("batch", "per_step", "loader_batch", "said"),
    [
        (4, 1, 2, "step() finishes 4 samples over all ranks, and 2 were drawn"),
        (2, 3, 2, "step() finishes 6 samples over all ranks, and 2 were drawn"),
        (2, 1, 4, "epoch 0 ended after 20 samples over all ranks, and step() has finished 10"),
    ],
)
def test_a_loop_with_other_batches_is_told_so_once(
    batch: int, per_step: int, loader_batch: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (sampler,) = world(20, 1, batch, None, batches_per_step=per_step)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train([sampler], loader_batch, 1, None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert said in record.getMessage()
    assert "batches_per_step of your loop" in record.getMessage()


def test_a_forgotten_set_epoch() -> None:
    (sampler,) = world(10, 1, 2, None)
    train([sampler], 2, 1, None)
    with pytest.raises(SamplerError, match=r"set_epoch\(epoch\) at the beginning of each epoch"):
        list(sampler)


@pytest.mark.parametrize("change", ["set_epoch", "load_state_dict", "iterate"])
def test_an_iterator_of_the_past_ends_with_an_error(change: str) -> None:
    (sampler,) = world(10, 1, 2, None)
    old = iter(sampler)
    next(old)
    if change == "set_epoch":
        sampler.set_epoch(1)
    elif change == "load_state_dict":
        sampler.load_state_dict(sampler.state_dict())
    else:
        next(iter(sampler))
    with pytest.raises(SamplerError, match="take a new iterator"):
        next(old)


GOOD = {"epoch": 1, "position": 4, "length": 10, "shuffle": True, "seed": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 11}, "had 11 samples, this sampler has 10.*same dataset"),
        ({"shuffle": False}, "had False as shuffle, this sampler has True"),
        ({"seed": 7}, "had 7 as seed, this sampler has 0"),
        ({"position": 11}, "position of the sampler's state is 11, expected 0 to 10"),
        ({"position": -1}, "position"),
        ({"position": True}, "position"),
        ({"epoch": "1"}, "epoch"),
        ({"more": 1}, "no state of ElasticSampler"),
        (None, "no state of ElasticSampler"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any] | None, said: str) -> None:
    (sampler,) = world(10, 1, 2, None)
    with pytest.raises(SamplerMismatch, match=said):
        sampler.load_state_dict(GOOD | change if change is not None else [])  # type: ignore[arg-type]
    assert (sampler.epoch, sampler.position) == (0, 0)
    sampler.load_state_dict(GOOD)
    assert (sampler.epoch, sampler.position) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1, "batches_per_step": 0}, "batches_per_step is 0"),
        ({"batch_size": 1, "num_replicas": 2, "rank": 2}, "rank is 2, expected 0 to 1"),
    ],
)
def test_impossible_arguments(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ElasticSampler(range(4), **arguments)


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SamplerError, match="init_process_group"):
        ElasticSampler(range(4), batch_size=1)
