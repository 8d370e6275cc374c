"""What an agent counts is what happened (I14): one job whose every step, fault and save is known, number by number.

generation 1   a and b     steps 1 to 6, saved at 4; b's worker dies, a's has to be killed
generation 2   a and b     from 4: steps 5 and 6 again, to 10, saved at 8; that checkpoint is damaged, and b leaves
generation 3   a           from 4 again: steps 5 to 10 again, to 12, saved at 8 and 12; c joins
generation 4   a and c     from 12: to 14; c is killed, agent and all
generation 5   a           from 12: steps 13 and 14 again, to 16, saved at 16
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.agent.workers.causes import NAMES
from elastic_agent.health.metrics import (
    LOST_TIME_CAUSES,
    MEMBERSHIP_CHANGES,
    RECOVERY_PHASES,
)

from .harness import PATIENCE_S, Agent, Job

CAUSES = NAMES

pytestmark = pytest.mark.usefixtures("in_etcd")

SCRIPT = Path(__file__).with_name("scripted_training.py")
PLAN = {1: 6, 2: 10, 3: 12, 4: 14, 5: 16}
"""The last step of each generation, at which it stands still."""
AGAIN = {2: (5, 6), 3: (5, 10), 5: (13, 14)}
"""First and last step that a generation does again."""
OPTIONS = ("--nnodes=1:2", "--last-call=60", "--lease-ttl=4", "--stop-grace=9")
STARTUP = ("start", "init", "load", "step")
MOMENTS_S = 0.25
"""What passes between a worker's note of an instant and the event itself, four times on two busy cores."""
CLOCKS_S = 1.0
"""How far the agent's view of the whole story may be from the workers', on two busy cores."""


class Page:
    """One scrape of one agent."""

    def __init__(self, agent: Agent) -> None:
        _, text = agent.get("/metrics")
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def of(self, name: str, **labels: str) -> float | None:
        """The sum over all samples with these labels; None where there is none."""
        name = f"elastic_agent_{name}"
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(found) if found else None

    def all_of(self, *names: str) -> list[float | None]:
        return [self.of(name) for name in names]

    def counted(self, name: str, label: str, values: Sequence[str]) -> dict[str, float]:
        """What of a counter is not zero."""
        counts = {value: self.of(name, **{label: value}) for value in values}
        return {value: count for value, count in counts.items() if count}


class Story:
    """Plays it, and looks at the agents where they stand still."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.checkpoints = job.folder / "checkpoints"

    def join(self, name: str) -> Agent:
        plan = ",".join(map(str, PLAN.values()))
        script = (SCRIPT, self.checkpoints, plan)
        return self._job.join(name, *OPTIONS, f"--log-dir={self._job.folder / name}", script=script)

    def stands_still(self, generation: int, *agents: Agent, saved: int) -> list[Page]:
        """What the agents show when the generation is at its last step, and they know it."""
        job = self._job
        job.wait_for(
            lambda: len(job.history(what="hold", generation=generation)) == len(agents),
            f"generation {generation} to stand still",
            within_s=2 * PATIENCE_S,  # there may have been another before it
        )
        for agent in agents:
            job.wait_for(lambda agent=agent: self._has_heard(agent), f"agent {agent.name} to hear all of it")  # type: ignore[misc]
        job.wait_for(
            lambda: Page(agents[0]).of("checkpoint_last_step", tier="local") == saved,
            f"step {saved} to be saved",
        )
        return [Page(agent) for agent in agents]

    def _has_heard(self, agent: Agent) -> bool:
        """Whoever stands still has sent something that is no report after everything else."""
        holds = self._job.history(what="hold", node=agent.name)
        return Page(agent).all_of("step", "dropped_total") == [holds[-1]["step"], len(holds)]

    def damage(self, step: int) -> None:
        [data] = self.checkpoints.glob(f"step-{step:012}-*/__0_0.distcp")
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 0xFF
        data.write_bytes(content)

    def seconds(self, generation: int, first: int, last: int, node: str) -> float:
        """Between the ends of these two steps, as the node's worker saw it."""
        return self.step_at(generation, last, node) - self.step_at(generation, first, node)

    def step_at(self, generation: int, step: int, node: str) -> float:
        return self.instant(generation, node, what="step", step=step)

    def instant(self, generation: int, node: str, **what: object) -> float:
        [record] = self._job.history(generation=generation, node=node, **what)
        return float(record["at"])


@pytest.fixture
def story(job: Job) -> Story:
    return Story(job)


@pytest.mark.long
@pytest.mark.timeout(300)  # five generations, each with an import of torch
def test_every_number_is_what_happened(job: Job, story: Story) -> None:
    a = story.join("a")
    job.wait_for_text(a, "last call")  # so that it is the first, and rank 0
    b = story.join("b")
    story.stands_still(2, a, b, saved=8)
    check_the_node_whose_worker_died(Page(b))
    assert (Page(a).of("coordinator"), Page(a).of("nodes", state="active")) == (1, 2)
    story.damage(8)
    b.signal(signal.SIGTERM)
    story.stands_still(3, a, saved=12)
    assert b.exit_code() == 143
    c = story.join("c")
    story.stands_still(4, a, c, saved=12)
    check_the_node_that_came_later(Page(c))
    c.kill()
    [page] = story.stands_still(5, a, saved=16)

    check_changes_of_the_job(page)
    check_workers(page)
    check_steps_and_checkpoints(page)
    check_time(page, story)
    check_timeline(page, story)


def check_the_node_whose_worker_died(page: Page) -> None:
    assert page.counted("worker_exits_total", "reason", ("ok", *CAUSES)) == {"killed": 1}
    assert page.of("recovery_duration_seconds_count", kind="process") == 1
    assert page.all_of("steps_total", "lost_steps_total") == [10, 2]
    assert page.all_of("checkpoint_saves_total", "checkpoint_blocked_seconds_total") == [0, 0]
    assert page.of("checkpoint_interval_seconds") is None
    assert [page.of("nodes", state=state) for state in ("active", "standby", "lost")] == [2, None, None]
    assert page.of("coordinator") == 0


def check_the_node_that_came_later(page: Page) -> None:
    assert page.all_of("steps_total", "lost_steps_total") == [2, 0]
    assert page.of("recovery_duration_seconds_count") == 0
    assert page.counted("lost_time_seconds_total", "cause", ("waiting", "startup")).keys() == {
        "waiting",
        "startup",
    }
    assert page.all_of("lost_time_seconds_total")[0] == sum_of_waiting_and_startup(page)


def sum_of_waiting_and_startup(page: Page) -> float:
    return sum(page.counted("lost_time_seconds_total", "cause", ("waiting", "startup")).values())


def check_changes_of_the_job(page: Page) -> None:
    assert page.counted("restarts_total", "reason", (*MEMBERSHIP_CHANGES, *CAUSES)) == {
        "killed": 1,
        "leave": 1,
        "join": 1,
        "lost": 1,
    }
    kinds = ("process", "leave", "join", "node")
    assert page.counted("recovery_duration_seconds_count", "kind", kinds) == dict.fromkeys(kinds, 1)
    assert page.counted("recovery_phase_duration_seconds_count", "phase", RECOVERY_PHASES) == dict.fromkeys(
        RECOVERY_PHASES, 4
    )
    assert page.of("recovery_phase_duration_seconds_sum") == pytest.approx(
        page.of("recovery_duration_seconds_sum")
    )
    assert page.of("rendezvous_generation") == 5
    assert [page.of("nodes", state=state) for state in ("active", "standby", "waiting", "lost")] == [
        1,
        0,
        0,
        0,
    ]
    assert page.all_of("coordinator", "world_size", "backoff_seconds", "store_errors_total") == [1, 1, 0, 0]
    for operation in ("grant", "transact", "read", "keep_alive"):
        assert page.counted("store_request_duration_seconds_count", "operation", (operation,)), operation
    lease_age_s = page.of("lease_age_seconds")
    assert lease_age_s is not None
    assert 0 <= lease_age_s < 4


def check_workers(page: Page) -> None:
    assert page.of("worker_exits_total") == 0


def check_steps_and_checkpoints(page: Page) -> None:
    assert page.all_of("steps_total", "lost_steps_total") == [16, 2 + 6 + 2]
    steps = {1: 6, 2: 6, 3: 8, 4: 2, 5: 4}
    assert page.of("step_duration_seconds_count") == sum(number - 1 for number in steps.values())
    assert page.of("step_duration_seconds_bucket", le="0.1") == 0
    assert page.counted("checkpoint_saves_total", "result", ("ok", "error", "corrupt")) == {"ok": 5}
    assert page.of("checkpoint_verify_failures_total") == 1
    assert page.of("checkpoint_blocked_seconds_total") == page.of("checkpoint_save_duration_seconds_sum")
    assert page.of("checkpoint_save_duration_seconds_count") == 5
    interval_s = page.of("checkpoint_interval_seconds")
    assert interval_s is not None
    assert interval_s > 4, "between the saves of step 12 and 16 the lease of c ended"


def check_time(page: Page, story: Story) -> None:
    lost_s = page.counted("lost_time_seconds_total", "cause", LOST_TIME_CAUSES)
    productive_s, all_lost_s, up_since = page.all_of(
        "productive_time_seconds_total", "lost_time_seconds_total", "up_since_timestamp_seconds"
    )
    assert productive_s is not None
    assert up_since is not None
    assert all_lost_s == pytest.approx(sum(lost_s.values()))
    last_step_at = page.of("last_step_timestamp_seconds")
    assert last_step_at is not None
    assert productive_s + all_lost_s == pytest.approx(last_step_at - up_since, abs=CLOCKS_S)

    for phase in ("stop", "rendezvous"):
        assert lost_s[phase] == pytest.approx(page.of("recovery_phase_duration_seconds_sum", phase=phase))
    recovered_s = [page.of("recovery_phase_duration_seconds_sum", phase=phase) for phase in STARTUP]
    assert lost_s["startup"] > sum(seconds or 0.0 for seconds in recovered_s), (
        "the first start is no recovery"
    )
    assert "backoff" not in lost_s, "all made progress"
    assert page.of("recovery_phase_duration_seconds_sum", phase="detect") == 0, "nothing failed on this node"
    assert lost_s["detect"] >= 1.0, "workers stood still at their last step; once until a lease had ended"
    again_s = sum(story.seconds(generation, *steps, node="a") for generation, steps in AGAIN.items())
    assert lost_s["recompute"] == pytest.approx(again_s, abs=CLOCKS_S)
    new = {1: 1, **{generation: last for generation, (_, last) in AGAIN.items()}, 4: 13}
    new_s = sum(story.seconds(each, first, PLAN[each], node="a") for each, first in new.items())
    assert productive_s == pytest.approx(new_s, abs=CLOCKS_S)


def check_timeline(page: Page, story: Story) -> None:
    """The parts of all four recoveries that a's worker can tell the time of."""
    start_s, init_s, load_s, step_s = (
        page.of("recovery_phase_duration_seconds_sum", phase=phase) for phase in STARTUP
    )
    first_steps = {2: 5, 3: 5, 4: 13, 5: 13}
    began, loading, loaded = (
        sum(story.instant(generation, "a", what=what) for generation in first_steps)
        for what in ("began", "loading", "loaded")
    )
    stepped = sum(story.step_at(generation, step, "a") for generation, step in first_steps.items())
    assert load_s == pytest.approx(loaded - loading, abs=MOMENTS_S)
    assert step_s == pytest.approx(stepped - loaded, abs=MOMENTS_S)
    assert init_s is not None
    assert start_s is not None
    assert -MOMENTS_S < init_s + start_s - (loading - began) < 4 * CLOCKS_S, "what runs before the first line"
