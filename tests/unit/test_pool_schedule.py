"""Which node runs which job next: the queue, gangs, surplus, refusals, ends; what a job waits for, and until when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.pool.records import (
    MAX_REASON,
    MAX_RECORD_CHARS,
    AllocationEnd,
    AllocationOutcome,
    Ending,
    Job,
    JobResult,
    Outcome,
    Plan,
    Pool,
    PoolNode,
    Refusal,
)
from elastic_agent.pool.schedule import (
    END_GRACE_S,
    MOST_AT_ONCE,
    MOST_ATTEMPTS,
    MOST_REFUSALS,
    MOST_RESULTS,
    REFUSAL_S,
    STEADY_S,
    Decision,
    decide,
    why_waiting,
)

NOW = 1.0e9


def job(
    name: str,
    least: int = 1,
    most: int | None = None,
    *,
    multiple_of: int = 1,
) -> Job:
    return Job(
        job=name,
        name=f"{name}.py",
        options=(),
        command=("train.py",),
        environment={},
        directory="/",
        min_nodes=least,
        max_nodes=most if most is not None else least,
        submitted_at=NOW,
        submitted_by="user@host",
        nodes_multiple_of=multiple_of,
    )


def node(name: str, ended: AllocationEnd | None = None, **facts: object) -> PoolNode:
    return replace(PoolNode(name, f"{name}-1", ended=ended), **facts)  # type: ignore[arg-type]


def nodes(names: str) -> tuple[PoolNode, ...]:
    return tuple(node(name) for name in names)


class Bench:
    """A pool whose coordinator decides, and whose nodes do what they are asked to when a test says so."""

    def __init__(self, names: str, *jobs: Job) -> None:
        self.now = NOW
        self.nodes = {name: node(name) for name in names}
        self.jobs = list(jobs)
        self.plan = Plan()
        self.cancelled: dict[str, str] = {}
        self.results: list[JobResult] = []
        self.lost: set[str] = set()

    @property
    def pool(self) -> Pool:
        ended = {result.job for result in self.results}
        return Pool(
            nodes=tuple(self.nodes.values()),
            jobs=tuple(one for one in self.jobs if one.job not in ended),
            plan=self.plan,
            cancelled=self.cancelled,
            results=tuple(result.job for result in self.results),
            lost=frozenset(self.lost),
        )

    def decide(self) -> dict[str, str]:
        """Until nothing is left to decide; the allocations of each run, as `allocations` shows them."""
        for _ in range(100):
            if (decision := decide(self.pool, self.now)) is None:
                return self.allocations
            self.plan = decision.plan
            self.results += decision.results
            self.results = [result for result in self.results if result.job not in decision.forgotten]
        raise AssertionError("the decision does not come to rest")

    @property
    def allocations(self) -> dict[str, str]:
        """The nodes of each run, with a minus where they are to leave."""
        return {
            run.job: "".join(allocation.node + "-" * allocation.leaving for allocation in run.allocations)
            for run in self.plan.runs
        }

    def run_all(self) -> None:
        """Every node takes the allocation that it has."""
        for run in self.plan.runs:
            for allocation in run.allocations:
                if allocation.incarnation == self.nodes[allocation.node].incarnation:
                    self.nodes[allocation.node] = replace(self.nodes[allocation.node], running=allocation.id)

    def end(self, name: str, outcome: AllocationOutcome, code: int = 0, reason: str = "why") -> None:
        """What runs on this node ends."""
        here = self.nodes[name]
        found = self.plan.allocation_of(name, here.incarnation)
        assert found is not None
        end = AllocationEnd(found[0].job, found[1].id, outcome, code, reason)
        self.nodes[name] = replace(here, running=0, ended=end)

    def restart(self, name: str) -> None:
        """The daemon of this node begins another life."""
        life = int(self.nodes[name].incarnation.partition("-")[2])
        del self.nodes[name]
        self.nodes[name] = replace(node(name), incarnation=f"{name}-{life + 1}")

    def lose(self, name: str) -> None:
        self.lost.add(self.nodes.pop(name).incarnation)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    @property
    def outcomes(self) -> dict[str, Outcome]:
        return {result.job: result.outcome for result in self.results}


# ---------------------------------------------------------------- the queue


@pytest.mark.parametrize(
    ("names", "jobs", "expected"),
    [
        ("abc", [], {}),
        ("", [job("x")], {}),
        ("abc", [job("x")], {"x": "a"}),
        ("abc", [job("x"), job("y"), job("z")], {"x": "a", "y": "b", "z": "c"}),
        ("abc", [job("x", 2), job("y", 1)], {"x": "ab", "y": "c"}),
        ("abc", [job("x", 2), job("y", 2), job("z", 1)], {"x": "ab"}),  # z does not overtake y
        ("abc", [job("x", 4), job("y", 2)], {"y": "ab"}),  # but passes what the pool cannot run
        ("abc", [job("x", 1, 9)], {"x": "abc"}),
        ("abc", [job("x", 1, 2)], {"x": "ab"}),
        ("abcd", [job("x", 1, 3), job("y", 1, 3)], {"x": "acd", "y": "b"}),  # first all least, then surplus
        ("abc", [job("x", 2, 4), job("y", 2)], {"x": "abc"}),  # lent until y can have two
    ],
)
def test_an_idle_pool_gives_its_nodes_to_the_first_that_they_are_enough_for(
    names: str, jobs: list[Job], expected: dict[str, str]
) -> None:
    assert Bench(names, *jobs).decide() == expected


@pytest.mark.parametrize(
    "facts",
    [{"leaving": True}, {"problem": "its disk is full"}, {"running": 7}],
    ids=lambda facts: str(*facts),
)
def test_a_node_that_takes_no_jobs_gets_none(facts: dict[str, object]) -> None:
    bench = Bench("ab", job("x"), job("y"))
    bench.nodes["a"] = node("a", **facts)
    assert bench.decide() == {"x": "b"}


def test_every_allocation_has_an_id_of_its_own_and_none_is_given_again() -> None:
    bench = Bench("ab", job("x", 2), job("y", 2))
    bench.decide()
    bench.run_all()
    assert [allocation.id for run in bench.plan.runs for allocation in run.allocations] == [1, 2]
    bench.end("a", AllocationOutcome.SUCCEEDED)
    bench.end("b", AllocationOutcome.SUCCEEDED)
    assert bench.decide() == {"y": "ab"}
    assert [allocation.id for run in bench.plan.runs for allocation in run.allocations] == [3, 4]


def test_a_plan_that_went_back_with_its_store_gives_no_id_again() -> None:
    """The store was restored: the plan knows allocations that have ended since, and not those that came after them."""
    bench = Bench("ab", job("x", 2))
    bench.decide()
    before = bench.plan
    for name, allocation_id in (("a", 7), ("b", 8)):
        bench.nodes[name] = node(
            name, ended=AllocationEnd("forgotten", allocation_id, AllocationOutcome.REFUSED, 64, "why")
        )
    for plan in (Plan(), before):
        bench.plan = plan
        assert bench.decide() == {"x": "ab"}
        assert [allocation.id for run in bench.plan.runs for allocation in run.allocations] == [
            9,
            10,
        ]
    assert not bench.outcomes, "what has ended was another job"


def test_nothing_is_decided_when_all_is_as_it_should_be() -> None:
    bench = Bench("ab", job("x", 1, 2))
    bench.decide()
    assert decide(bench.pool, NOW) is None
    bench.run_all()
    assert decide(bench.pool, NOW) is None


# ---------------------------------------------------------------- surplus


def test_a_run_gives_what_it_has_beyond_its_least_to_the_next_job_and_takes_it_back_later() -> None:
    bench = Bench("abc", job("x", 1, 3))
    assert bench.decide() == {"x": "abc"}
    bench.run_all()
    bench.jobs.append(job("y"))
    assert bench.decide() == {"x": "abc-"}, "the allocation is kept until its processes are gone"
    bench.end("c", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "ab", "y": "c"}
    bench.run_all()
    bench.end("c", AllocationOutcome.SUCCEEDED)
    assert bench.decide() == {"x": "abc"}
    assert bench.outcomes == {"y": Outcome.SUCCEEDED}
    assert not bench.plan.refusals_of("x"), "who leaves as it was asked to is not refused"


def test_the_youngest_run_gives_first() -> None:
    bench = Bench("abcd", job("x", 1, 2), job("y", 1, 2))
    assert bench.decide() == {"x": "ac", "y": "bd"}
    bench.jobs.append(job("z"))
    assert bench.decide() == {"x": "ac", "y": "bd-"}


def test_a_run_takes_no_surplus_that_makes_no_larger_multiple() -> None:
    bench = Bench("abc", job("x", 2, 6, multiple_of=2))
    assert bench.decide() == {"x": "ab"}, "c would stand by"
    bench.nodes["d"] = node("d")
    assert bench.decide() == {"x": "abcd"}
    bench.run_all()
    del bench.nodes["b"]
    bench.lost.add("b-1")
    bench.nodes |= {name: node(name) for name in "ef"}
    assert bench.decide() == {"x": "acde"}, "e makes four of three again; f would stand by"


def test_who_leaves_counts_until_it_has_left_where_another_would_be_surplus() -> None:
    bench = Bench("abc", job("x", 1, 3))
    bench.decide()
    bench.run_all()
    bench.nodes |= {"b": replace(bench.nodes["b"], leaving=True), "d": node("d")}
    assert bench.decide() == {"x": "ab-c"}
    bench.end("b", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "acd"}


def test_a_node_that_is_missing_is_nothing_to_give_back() -> None:
    bench = Bench("abc", job("x", 2, 3))
    bench.decide()
    bench.run_all()
    del bench.nodes["c"]
    bench.jobs.append(job("y"))
    assert bench.decide() == {"x": "abc"}, "else x would have less than its least"


def test_only_nodes_that_the_next_job_can_use_are_asked_for() -> None:
    bench = Bench("ab", job("x", 1, 2))
    bench.decide()
    bench.run_all()
    bench.nodes["b"] = replace(bench.nodes["b"], problem="it is hot")
    bench.jobs.append(job("y"))
    assert bench.decide() == {"x": "a-b"}, "b may take no job"

    bench = Bench("ab", job("x", 1, 2), job("y"))
    assert bench.decide() == {"x": "a", "y": "b"}
    bench.run_all()
    bench.end("b", AllocationOutcome.NOT_HERE)
    assert bench.decide() == {"x": "a-b"}, "b cannot run y"


def test_surplus_is_not_asked_for_when_it_is_not_enough() -> None:
    bench = Bench("abcd", job("x", 2, 4))
    bench.decide()
    bench.jobs.append(job("y", 3))
    assert bench.decide() == {"x": "abcd"}


def test_no_more_is_asked_for_than_is_missing_beside_what_is_on_its_way() -> None:
    bench = Bench("abcd", job("x", 1, 4))
    bench.decide()
    bench.run_all()
    bench.jobs.append(job("y", 2))
    assert bench.decide() == {"x": "abc-d-"}
    bench.end("c", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "abd-"}, "c waits for d: no other job gets it meanwhile"
    bench.jobs.append(job("z"))
    assert bench.decide() == {"x": "abd-"}, "z does not overtake y"
    bench.end("d", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "ab-", "y": "cd"}, "and now b is for z"


def test_a_run_that_lost_a_node_gets_another_before_a_younger_job_does() -> None:
    bench = Bench("abc", job("x", 2), job("y", 1, 2))
    bench.decide()
    bench.run_all()
    assert bench.allocations == {"x": "ab", "y": "c"}
    bench.nodes["d"] = node("d")
    assert bench.decide() == {"x": "ab", "y": "cd"}
    bench.lose("b")
    assert bench.decide() == {"x": "a", "y": "cd-"}
    bench.end("d", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "ad", "y": "c"}


# ---------------------------------------------------------------- nodes that end, leave, and are lost


def test_one_node_that_succeeds_is_the_end_of_its_job_once_all_have_ended() -> None:
    bench = Bench("ab", job("x", 2))
    bench.decide()
    bench.run_all()
    bench.end("b", AllocationOutcome.SUCCEEDED, reason="done")
    assert bench.decide() == {"x": "a"}
    assert bench.plan.runs[0].ending == Ending(Outcome.SUCCEEDED, "b: done", 0, NOW)
    assert not bench.results
    bench.end("a", AllocationOutcome.SUCCEEDED)
    assert bench.decide() == {}
    assert bench.results == [JobResult("x", Outcome.SUCCEEDED, "b: done", 0, 1, NOW, NOW, ("b", "a"))]


def test_the_exit_code_of_the_node_that_failed_is_the_jobs() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    bench.end("a", AllocationOutcome.FAILED, 3, "exit code 3")
    bench.decide()
    assert (bench.results[0].outcome, bench.results[0].code) == (Outcome.FAILED, 3)


def test_nodes_that_do_not_end_with_their_job_are_asked_to() -> None:
    bench = Bench("ab", job("x", 2))
    bench.decide()
    bench.run_all()
    bench.end("b", AllocationOutcome.FAILED, 1)
    assert bench.decide() == {"x": "a"}
    bench.wait(END_GRACE_S)
    assert bench.decide() == {"x": "a-"}


def test_a_node_that_is_lost_keeps_its_allocation_until_it_has_been_missing_for_long_enough() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    missing = bench.nodes.pop("a")
    assert bench.decide() == {"x": "a"}
    bench.lost.add(missing.incarnation)
    assert bench.decide() == {}
    (over,) = bench.plan.attempts
    assert (over.attempt, over.in_vain, over.refusals, over.left) == (1, 1, {}, ())
    bench.nodes["b"] = node("b")
    assert bench.decide() == {"x": "b"}
    assert bench.plan.runs[0].attempt == 2


def test_a_job_that_waits_again_gets_no_node_before_it_can_have_its_least() -> None:
    bench = Bench("ab", job("x", 2, 4))
    bench.decide()
    bench.run_all()
    bench.lose("a")
    bench.lose("b")
    bench.nodes["c"] = node("c")
    assert bench.decide() == {}
    bench.nodes["d"] = node("d")
    assert bench.decide() == {"x": "cd"}


def test_another_life_of_a_daemon_takes_a_new_allocation_at_once() -> None:
    bench = Bench("ab", job("x", 2))
    bench.decide()
    bench.run_all()
    bench.restart("b")
    assert bench.decide() == {"x": "ab"}
    assert [allocation.incarnation for allocation in bench.plan.runs[0].allocations] == ["a-1", "b-2"]
    assert bench.plan.runs[0].attempt == 1


def test_a_node_that_leaves_the_pool_leaves_its_job_and_another_takes_its_place() -> None:
    bench = Bench("ab", job("x"))
    bench.decide()
    bench.run_all()
    bench.nodes["a"] = replace(bench.nodes["a"], leaving=True)
    assert bench.decide() == {"x": "a-b"}
    bench.end("a", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "b"}
    assert bench.plan.runs[0].attempt == 1


def test_what_a_node_reports_that_was_taken_for_lost_still_counts() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    bench.run_all()
    silent = bench.nodes["a"]
    bench.lose("a")
    assert bench.decide() == {}
    end = AllocationEnd("x", silent.running, AllocationOutcome.SUCCEEDED, 0, "done")
    bench.nodes["a"] = replace(silent, running=0, ended=end)
    assert bench.decide() == {}
    assert bench.outcomes == {"x": Outcome.SUCCEEDED}


# ---------------------------------------------------------------- refusals and attempts


def test_a_node_that_cannot_run_a_job_is_asked_again_later() -> None:
    bench = Bench("abc", job("x", 2))
    bench.decide()
    for _ in range(3):
        bench.end("b", AllocationOutcome.NOT_HERE, reason="no such directory")
        bench.nodes.pop("c", None)
        assert bench.decide() == {"x": "a"}
        bench.wait(REFUSAL_S - 0.1)
        assert bench.decide() == {"x": "a"}
        bench.wait(0.1)
        assert bench.decide() == {"x": "ab"}


def test_a_clock_that_jumps_back_holds_nothing_up() -> None:
    bench = Bench("ab", job("x"))
    bench.decide()
    bench.end("a", AllocationOutcome.NOT_HERE)
    bench.decide()
    bench.end("b", AllocationOutcome.NOT_HERE)
    assert bench.decide() == {}
    bench.now -= 86400.0
    assert bench.decide() == {"x": "a"}, "a refusal of tomorrow is none"

    bench = Bench("ab", job("x", 2))
    bench.decide()
    bench.end("a", AllocationOutcome.SUCCEEDED)
    assert bench.decide() == {"x": "b"}
    bench.now -= 86400.0
    assert bench.decide() == {"x": "b-"}, "nor is it waited for until tomorrow"


def test_another_node_takes_the_place_of_one_that_refuses() -> None:
    bench = Bench("abc", job("x", 2), job("y", 2))
    bench.decide()
    bench.run_all()
    bench.end("b", AllocationOutcome.NOT_HERE, reason="no such directory")
    assert bench.decide() == {"x": "ac"}
    assert bench.plan.refusals_of("x") == {"b": Refusal("no such directory", NOW + REFUSAL_S)}
    assert why_waiting(bench.pool, bench.jobs[1], NOW) == "needs 2 nodes; 1 idle"


def test_a_job_that_one_node_refuses_leaves_that_node_to_others() -> None:
    bench = Bench("a", job("x"), job("y"))
    bench.decide()
    bench.end("a", AllocationOutcome.NOT_HERE)
    assert bench.decide() == {"y": "a"}, "the pool cannot run x now"


def test_a_job_that_no_node_can_run_ends_after_some_attempts_and_says_why() -> None:
    bench = Bench("a", job("x"))
    for _ in range(MOST_ATTEMPTS):
        assert bench.decide() == {"x": "a"}
        bench.end("a", AllocationOutcome.NOT_HERE, reason="no such directory")
        bench.decide()
        bench.wait(REFUSAL_S)
    (result,) = bench.results
    assert (result.outcome, result.attempts) == (Outcome.UNABLE, MOST_ATTEMPTS)
    assert result.reason == "3 attempts without an outcome (a: no such directory)"
    assert bench.plan.attempts == ()


def test_a_job_whose_nodes_were_lost_again_and_again_ends() -> None:
    bench = Bench("", job("x"))
    for life in range(MOST_ATTEMPTS):
        bench.nodes[f"n{life}"] = node(f"n{life}")
        bench.decide()
        bench.lose(f"n{life}")
        bench.decide()
    assert bench.results[0].reason == "3 attempts without an outcome (all its nodes were lost)"


def test_planned_leaves_of_all_its_nodes_do_not_end_a_job() -> None:
    """Such as a service manager that restarts the only daemon, again and again."""
    bench = Bench("a", job("x"))
    for attempt in range(1, 3 * MOST_ATTEMPTS):
        assert bench.decide() == {"x": "a"}
        assert bench.plan.runs[0].attempt == attempt
        bench.run_all()
        bench.nodes["a"] = replace(bench.nodes["a"], leaving=True)
        assert bench.decide() == {"x": "a-"}
        bench.end("a", AllocationOutcome.LEFT)
        assert bench.decide() == {}
        bench.restart("a")
    assert not bench.results


def test_attempts_that_have_lasted_long_do_not_add_up() -> None:
    """A job of weeks outlives more than three outages of all its nodes."""
    bench = Bench("a", job("x"))
    for _ in range(3 * MOST_ATTEMPTS):
        assert bench.decide() == {"x": "a"}
        bench.wait(STEADY_S)
        bench.restart("a")
        bench.decide()
    assert not bench.results


def test_an_attempt_that_lasted_long_starts_the_count_again() -> None:
    bench = Bench("a", job("x"))
    for lasts_s in (0.0, 0.0, STEADY_S, 0.0, 0.0):
        assert bench.decide() == {"x": "a"}
        bench.wait(lasts_s)
        bench.restart("a")
    assert bench.decide() == {"x": "a"}
    bench.restart("a")
    assert bench.decide() == {}
    assert bench.outcomes == {"x": Outcome.UNABLE}


def test_the_plan_stays_small_when_every_node_refuses_every_job() -> None:
    """As when the file system of all jobs is away: a plan that the store does not take would end the pool."""
    names = [f"n{number}" for number in range(100)]
    bench = Bench("", *(job(f"j{number}", 100) for number in range(500)))
    bench.nodes = {name: node(name) for name in names}
    reason = "the job's directory is not there on this node " * 30
    for _ in range(200):
        decision = decide(bench.pool, bench.now)
        assert decision is not None
        bench.plan = decision.plan
        for run in bench.plan.runs:
            for allocation in run.allocations:
                bench.end(allocation.node, AllocationOutcome.NOT_HERE, 73, reason[:MAX_REASON])
    assert sum(len(run.refusals) for run in bench.plan.attempts) <= MOST_REFUSALS
    assert len(Decision(bench.plan).writes) == 1
    assert len(bench.plan.to_json()) < MAX_RECORD_CHARS / 2


# ---------------------------------------------------------------- cancel


def test_a_waiting_job_that_is_cancelled_ends_at_once() -> None:
    bench = Bench("a", job("x"), job("y"))
    bench.decide()
    bench.cancelled = {"y": "me@here"}
    assert bench.decide() == {"x": "a"}
    (result,) = bench.results
    assert (result.job, result.outcome, result.reason) == ("y", Outcome.CANCELLED, "cancelled by me@here")
    assert (result.attempts, result.started_at, result.nodes) == (0, None, ())


def test_a_running_job_that_is_cancelled_leaves_all_its_nodes() -> None:
    bench = Bench("ab", job("x", 2), job("y"))
    bench.decide()
    bench.run_all()
    bench.cancelled = {"x": "me@here"}
    assert bench.decide() == {"x": "a-b-"}
    bench.end("a", AllocationOutcome.LEFT)
    assert bench.decide() == {"x": "b-", "y": "a"}, "what is free is used"
    bench.end("b", AllocationOutcome.LEFT)
    assert bench.decide() == {"y": "a"}
    assert bench.outcomes == {"x": Outcome.CANCELLED}


def test_a_job_that_has_succeeded_before_it_was_cancelled_has_succeeded() -> None:
    bench = Bench("ab", job("x", 2))
    bench.decide()
    bench.run_all()
    bench.end("a", AllocationOutcome.SUCCEEDED)
    bench.cancelled = {"x": "me@here"}
    bench.decide()
    bench.end("b", AllocationOutcome.LEFT)
    bench.decide()
    assert bench.outcomes == {"x": Outcome.SUCCEEDED}


def test_a_job_that_is_cancelled_while_a_node_leaves_ends_when_that_has_left() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    bench.run_all()
    bench.nodes["a"] = replace(bench.nodes["a"], leaving=True)
    assert bench.decide() == {"x": "a-"}
    bench.cancelled = {"x": "me@here"}
    assert bench.decide() == {"x": "a-"}
    bench.end("a", AllocationOutcome.LEFT)
    assert bench.decide() == {}
    assert bench.outcomes == {"x": Outcome.CANCELLED}


# ---------------------------------------------------------------- bounds


def test_so_many_results_are_written_in_one_step() -> None:
    bench = Bench("a", *(job(f"j{number}") for number in range(MOST_AT_ONCE + 4)))
    bench.cancelled = {one.job: "me" for one in bench.jobs}
    decision = decide(bench.pool, NOW)
    assert decision is not None
    assert len(decision.results) == MOST_AT_ONCE
    assert bench.decide() == {}
    assert len(bench.results) == MOST_AT_ONCE + 4


def test_a_run_whose_result_waits_for_the_next_decision_gets_no_other_nodes() -> None:
    bench = Bench("a", job("last"))
    bench.decide()
    bench.end("a", AllocationOutcome.NOT_HERE)
    (run,) = bench.plan.attempts
    run = replace(run, attempt=MOST_ATTEMPTS, in_vain=MOST_ATTEMPTS - 1)
    bench.plan = replace(bench.plan, attempts=(run,))
    bench.nodes["b"] = node("b")
    others = [job(f"j{number}") for number in range(MOST_AT_ONCE)]
    bench.jobs = [*others, *bench.jobs]
    bench.cancelled = {one.job: "me" for one in others}
    decision = decide(bench.pool, NOW)
    assert decision is not None
    assert [run.allocations for run in decision.plan.runs] == [()]
    bench.decide()
    assert bench.outcomes["last"] is Outcome.UNABLE


def test_a_job_whose_record_is_gone_leaves_its_nodes() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    bench.run_all()
    bench.jobs.clear()
    assert bench.decide() == {"x": "a-"}
    bench.end("a", AllocationOutcome.LEFT)
    assert bench.decide() == {}
    assert bench.results[0].reason == "its record was deleted"


def test_of_a_job_whose_record_is_gone_while_it_waits_again_no_attempt_is_kept() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    bench.lose("a")
    bench.decide()
    assert [run.job for run in bench.plan.attempts] == ["x"]
    bench.jobs.clear()
    bench.decide()
    assert bench.plan.attempts == ()


def test_the_oldest_results_are_forgotten() -> None:
    results = tuple(f"j{number}" for number in range(MOST_RESULTS + MOST_AT_ONCE + 2))
    decision = decide(Pool((), (), results=results), NOW)
    assert decision == Decision(Plan(), (), results[:MOST_AT_ONCE])
    assert decide(Pool((), (), results=results[:MOST_RESULTS]), NOW) is None


# ---------------------------------------------------------------- what a job waits for


@pytest.mark.parametrize(
    ("names", "jobs", "asked", "expected"),
    [
        ("", [job("x")], 0, "needs 1 node; the pool has 0 that can run it"),
        ("ab", [job("x", 3)], 0, "needs 3 nodes; the pool has 2 that can run it"),
        ("ab", [job("x", 2), job("y", 2)], 1, "needs 2 nodes; 0 idle"),
        ("ab", [job("x", 2), job("y", 2), job("z")], 2, "behind 1 other job of the queue"),
        ("abc", [job("x", 2), job("y", 2)], 1, "needs 2 nodes; 1 idle"),
    ],
)
def test_a_waiting_job_says_what_it_waits_for(names: str, jobs: list[Job], asked: int, expected: str) -> None:
    bench = Bench(names, *jobs)
    bench.decide()
    bench.run_all()
    assert why_waiting(bench.pool, jobs[asked], NOW) == expected


def test_a_waiting_job_says_which_node_cannot_run_it_and_why() -> None:
    bench = Bench("a", job("x"))
    bench.decide()
    bench.end("a", AllocationOutcome.NOT_HERE, reason="no such directory")
    bench.decide()
    assert why_waiting(bench.pool, bench.jobs[0], NOW) == (
        "needs 1 node; the pool has 0 that can run it (a: no such directory)"
    )


def test_a_node_that_refuses_a_job_which_others_run_ends_it_for_itself_alone() -> None:
    bench = Bench("abc", job("x", 2, 3))
    bench.decide()
    bench.run_all()
    bench.end("c", AllocationOutcome.REFUSED, 78, "no script")
    assert bench.decide() == {"x": "ab"}
    assert not bench.outcomes
    assert bench.plan.refusals_of("x")["c"].reason == "no script"


def test_a_job_that_all_its_nodes_refuse_has_failed() -> None:
    bench = Bench("ab", job("x", 2))
    bench.decide()
    bench.run_all()
    bench.end("a", AllocationOutcome.REFUSED, 78, "no script")
    bench.decide()
    assert not bench.outcomes, "the other one may run it"
    bench.end("b", AllocationOutcome.REFUSED, 78, "no script")
    bench.decide()
    (result,) = bench.results
    assert (result.outcome, result.code, result.reason) == (Outcome.FAILED, 78, "b: no script")


def test_a_refusal_of_an_earlier_attempt_decides_nothing() -> None:
    bench = Bench("ab", job("x", 1, 2))
    bench.decide()
    bench.run_all()
    bench.end("b", AllocationOutcome.REFUSED, 78, "no script")
    bench.decide()
    bench.end("a", AllocationOutcome.NOT_HERE)
    assert bench.decide() == {}
    assert not bench.outcomes
    bench.wait(REFUSAL_S + 1)
    assert bench.decide() == {"x": "ab"}
