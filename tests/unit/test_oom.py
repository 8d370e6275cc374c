"""Whether the out-of-memory killer struck: the kernel counts, in files of both versions; and what it takes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.workers.post_mortem import LATELY_S, OomKills, find_counter


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A process in /sys/fs/cgroup's pod/job, and in pod of version 1's memory controller."""
    (tmp_path / "cgroup" / "pod" / "job").mkdir(parents=True)
    (tmp_path / "v1" / "pod").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cgroup").write_text("4:cpu,memory:/pod\n3:cpuset:/\n0::/pod/job\n")
    (tmp_path / "proc" / "mountinfo").write_text(
        f"34 25 0:29 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
        f"35 25 0:30 / {tmp_path}/none rw - cgroup cgroup rw,cpuset\n"
        f"36 25 0:31 / {tmp_path}/v1 rw - cgroup cgroup rw,cpu,memory\n"
    )
    return tmp_path / "proc"


def test_the_counter_is_the_own_cgroups_or_the_nearest_around_it(proc: Path) -> None:
    assert find_counter(proc) is None
    first = proc.parent / "v1/pod/memory.oom_control"
    around, own = (proc.parent / "cgroup" / place / "memory.events" for place in ("pod", "pod/job"))
    for counter in (first, around, own):
        counter.write_text("oom_kill 0\n")
        assert find_counter(proc) == counter


@pytest.mark.parametrize(
    "before", ["low 0\nmax 9\noom 1\noom_kill 2\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"]
)
def test_a_strike_is_new_for_a_minute(tmp_path: Path, before: str) -> None:
    counter = tmp_path / "counter"
    counter.write_text(before)
    kills = OomKills(counter)
    assert not kills.lately(100.0)
    counter.write_text(before.replace("oom_kill 2", "oom_kill 3"))
    kills.update(100.5)
    assert kills.lately(102.0)
    assert kills.lately(102.0 + LATELY_S)
    assert not kills.lately(102.1 + LATELY_S)
    assert OomKills(counter).lately(0.0) is False, "what was before this agent is none of its workers"


def test_without_a_counter_no_kill_is_seen(tmp_path: Path) -> None:
    for counter in (None, tmp_path / "none"):
        assert not OomKills(counter).lately(1.0)


def test_a_counter_that_cannot_be_read_for_a_while_makes_no_strike(tmp_path: Path) -> None:
    """Out of descriptors, say: what was counted before is not new when it can be read again."""
    counter, away = tmp_path / "counter", tmp_path / "away"
    counter.write_text("oom_kill 2\n")
    kills = OomKills(counter)
    counter.rename(away)
    late = OomKills(counter)
    assert not kills.lately(1.0)
    away.rename(counter)
    assert not kills.lately(2.0)
    assert not late.lately(2.0)
    counter.write_text("oom_kill 3\n")
    assert kills.lately(3.0)
    assert late.lately(3.0)
