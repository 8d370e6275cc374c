"""Which node runs which job next: stories of a pool, line by line, and the bounds of what is written.

A line of a story is something that happens, and what the coordinator has decided when it has come to rest. `x=ab-` says
that job x has the nodes a and b, of which b is to leave. Nodes take their allocations as soon as they have them.

    nodes ab                    a, b are there
    job x 2-4 of 2              x is submitted: it needs 2 nodes, takes 4, in multiples of 2
    a ends failed 3 oops        what runs on a has ended: outcome, exit code, reason
    a lost | missing | back     it has no record any more, for long or for a moment; or it has one again
    a leaves | restarts | ill   it takes no job any more; its daemon begins another life; it has a problem
    cancel x | delete x         by a person; by who has removed its record
    wait 30                     seconds
    is x=unable                 how jobs have ended
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.pool.records import (
    MAX_REASON,
    MAX_RECORD_CHARS,
    AllocationEnd,
    Job,
    JobResult,
    Outcome,
    Plan,
    Pool,
    PoolNode,
    Refusal,
)
from elastic_agent.pool.schedule import (
    MOST_AT_ONCE,
    MOST_ATTEMPTS,
    MOST_REFUSALS,
    MOST_RESULTS,
    REFUSAL_S,
    Decision,
    decide,
    why_waiting,
)
from elastic_agent.rendezvous.store.interface import MOST_OPERATIONS, Compare, Delete

NOW = 1.0e9
JOB = Job("x", "x.py", (), ("train.py",), {}, "/", 1, 1, NOW, "user@host")


class Story:
    """A pool whose coordinator decides, and whose nodes do what they are asked to when a line says so."""

    def __init__(self, lines: str = "") -> None:
        self.now = NOW
        self.nodes: dict[str, PoolNode] = {}
        self.away: dict[str, PoolNode] = {}
        """Nodes without a record."""
        self.jobs: list[Job] = []
        self.plan = Plan()
        self.given: dict[int, str] = {}
        """The job of each allocation."""
        self.results: list[JobResult] = []
        self.lost: set[str] = set()
        for line in filter(None, map(str.strip, lines.splitlines())):
            self.tell(line)

    def tell(self, line: str) -> None:
        happens, arrow, expected = line.partition("->")
        for one in happens.split(";"):
            self._happens(one.split())
        if arrow:
            assert self.decide() == expected.strip(), line

    def _happens(self, words: list[str]) -> None:
        match words:
            case ["nodes", names]:
                self.nodes |= {name: PoolNode(name, f"{name}-1") for name in names}
            case ["job", name, *sizes]:
                least, _, most = (sizes or ["1"])[0].partition("-")
                multiple = int(sizes[2]) if sizes[1:] else 1
                self.jobs.append(
                    replace(
                        JOB,
                        job=name,
                        min_nodes=int(least),
                        max_nodes=int(most or least),
                        nodes_multiple_of=multiple,
                    )
                )
            case ["wait", seconds]:
                self.now += float(seconds)
            case ["cancel", name]:
                self.jobs = [replace(one, cancelled_by="me") if one.job == name else one for one in self.jobs]
            case ["delete", name]:
                self.jobs = [one for one in self.jobs if one.job != name]
            case ["is", *outcomes]:
                assert [f"{one.job}={one.outcome.value}" for one in self.results] == outcomes
            case [name, "ends", outcome, *more]:
                nodes = self.nodes if name in self.nodes else self.away
                took, reason = nodes[name].running, " ".join(more[1:]) or "why"
                end = AllocationEnd(self.given[took], took, Outcome(outcome), int((more or ["0"])[0]), reason)
                nodes[name] = replace(nodes[name], running=0, ended=end)
            case [name, "lost" | "missing" as how]:
                self.away[name] = self.nodes.pop(name)
                self.lost |= {self.away[name].incarnation} if how == "lost" else set()
            case [name, "back"]:
                self.nodes[name] = self.away.pop(name)
            case [name, "restarts"]:
                life = int(self.nodes.pop(name).incarnation.partition("-")[2])
                self.nodes[name] = PoolNode(name, f"{name}-{life + 1}")
            case [name, "leaves"]:
                self.nodes[name] = replace(self.nodes[name], leaving=True)
            case [name, "ill"]:
                self.nodes[name] = replace(self.nodes[name], problem="it is ill")
            case _:
                assert not words, words

    @property
    def pool(self) -> Pool:
        ended = {result.job for result in self.results}
        return Pool(
            nodes=tuple(self.nodes.values()),
            jobs=tuple(one for one in self.jobs if one.job not in ended),
            plan=self.plan,
            results=tuple(result.job for result in self.results),
            lost=frozenset(self.lost),
        )

    def decide(self) -> str:
        """Until nothing is left to decide; then nodes take what they have."""
        for _ in range(100):
            if (decision := decide(self.pool, self.now)) is None:
                break
            self.plan = decision.plan
            self.results += decision.results
        else:
            raise AssertionError("the decision does not come to rest")
        for run in self.plan.runs:
            for one in run.allocations:
                node = self.nodes.get(one.node)
                if one.id not in self.given and node is not None:
                    self.nodes[one.node] = replace(node, running=one.id)
                self.given[one.id] = run.job
        shown = (
            (run.job, "".join(one.node + "-" * one.leaving for one in run.allocations))
            for run in self.plan.runs
        )
        return " ".join(f"{job}={nodes}" for job, nodes in shown)


STORIES = {
    "the first for which idle nodes are enough gets them": """
        nodes abc; job x 2; job y   -> x=ab y=c
    """,
    "a younger job does not overtake one that can be served later": """
        nodes abc; job x 2; job y 2; job z   -> x=ab
    """,
    "it passes one that the pool could not run, were it empty": """
        nodes abc; job x 4; job y 2   -> y=ab
    """,
    "first all have their least, then the oldest gets more": """
        nodes abcd; job x 1-3; job y 1-3   -> x=acd y=b
    """,
    "what is too little for the next job is lent until that can have its least": """
        nodes abc; job x 2-4; job y 2   -> x=abc
        nodes d                         -> x=abc-
        c ends unable                 -> x=ab y=cd
    """,
    "a node that leaves, is ill, or has processes of something else gets no job": """
        nodes abcd; b leaves; c ill; job x; job y; job z   -> x=a y=d
    """,
    "a run gives what it has beyond its least to the next job, and takes it back later": """
        nodes abc; job x 1-3   -> x=abc
        job y                  -> x=abc-
        c ends unable        -> x=ab y=c
        c ends succeeded       -> x=abc
        is y=succeeded
    """,
    "the youngest run gives first": """
        nodes abcd; job x 1-2; job y 1-2   -> x=ac y=bd
        job z                              -> x=ac y=bd-
    """,
    "a run takes no surplus that makes no larger multiple": """
        nodes abc; job x 2-6 of 2   -> x=ab
        nodes d                     -> x=abcd
        nodes ef; b lost            -> x=acde
    """,
    "who leaves counts until it has left, where another would be surplus": """
        nodes abc; job x 1-3   -> x=abc
        b leaves; nodes d      -> x=ab-c
        b ends unable        -> x=acd
    """,
    "a node that is missing is nothing to give back": """
        nodes abc; job x 2-3     -> x=abc
        c missing; job y         -> x=abc
        c back                   -> x=abc-
    """,
    "only nodes that the next job can use are asked for": """
        nodes ab; job x 1-2      -> x=ab
        b ill; job y             -> x=a-b
        a ends unable          -> x=b y=a
    """,
    "nor is one that has just refused that job": """
        nodes ab; job x 1-2; job y   -> x=a y=b
        b ends unable              -> x=a-b
    """,
    "surplus is not asked for when it is not enough": """
        nodes abcd; job x 2-4    -> x=abcd
        job y 3                  -> x=abcd
    """,
    "no more is asked for than is missing beside what is on its way, and what waits is for the one that asked": """
        nodes abcd; job x 1-4    -> x=abcd
        job y 2                  -> x=abc-d-
        c ends unable          -> x=abd-
        job z                    -> x=abd-
        d ends unable          -> x=ab- y=cd
    """,
    "a run that lost a node gets another before a younger job does": """
        nodes abc; job x 2; job y 1-2   -> x=ab y=c
        nodes d                         -> x=ab y=cd
        b lost                          -> x=a y=cd-
        d ends unable                 -> x=ad y=c
    """,
    "one node that succeeds is the end of its job once all have ended": """
        nodes ab; job x 2            -> x=ab
        b ends succeeded 0 done      -> x=a
        a ends succeeded             ->
        is x=succeeded
    """,
    "nodes that do not end with their job are asked to after a while": """
        nodes ab; job x 2        -> x=ab
        b ends failed 1          -> x=a
        wait 29                  -> x=a
        wait 1                   -> x=a-
    """,
    "and at once where the clock has jumped back": """
        nodes ab; job x 2                      -> x=ab
        a ends succeeded                       -> x=b
        wait -86400                            -> x=b-
    """,
    "a lost node keeps its allocation until it has been missing for long enough": """
        nodes a; job x           -> x=a
        a missing                -> x=a
        a back; a lost           ->
        nodes b                  -> x=b
    """,
    "a job that waits again gets no node before it can have its least": """
        nodes ab; job x 2-4          -> x=ab
        a lost; b lost; nodes c      ->
        nodes d                      -> x=cd
    """,
    "another life of a daemon takes a new allocation at once": """
        nodes ab; job x 2        -> x=ab
        b restarts               -> x=ab
    """,
    "a node that leaves the pool leaves its job, and another takes its place": """
        nodes ab; job x          -> x=a
        a leaves                 -> x=a-b
        a ends unable          -> x=b
    """,
    "what a node reports that was taken for lost still counts": """
        nodes a; job x           -> x=a
        a lost                   ->
        a ends succeeded; a back ->
        is x=succeeded
    """,
    "a node that cannot run a job is asked again later, and others at once": """
        nodes abc; job x 2       -> x=ab
        b ends unable          -> x=ac
        c lost                   -> x=a
        wait 29.5                -> x=a
        wait 0.5                 -> x=ab
    """,
    "a refusal of tomorrow is none": """
        nodes a; job x           -> x=a
        a ends unable          ->
        wait -86400              -> x=a
    """,
    "a job that one node refuses leaves that node to others": """
        nodes a; job x; job y    -> x=a
        a ends unable          -> y=a
    """,
    "a job that no node can run ends after some attempts": """
        nodes a; job x                       -> x=a
        a ends unable                      ->
        wait 30                              -> x=a
        a ends unable                      ->
        wait 30                              -> x=a
        a ends unable 73 no such place     ->
        is x=unable
    """,
    "a job that its nodes refuse as it is has failed when the last one has": """
        nodes ab; job x 2                    -> x=ab
        b ends unable 78 no script           -> x=a
        is
        a ends unable 78 no script           ->
        is x=failed
    """,
    "one node that refuses it ends no run of the others": """
        nodes abc; job x 2-3                 -> x=abc
        c ends unable 76 another version     -> x=ab
        a lost; b lost                       ->
        is
    """,
    "a job whose nodes are lost again and again ends": """
        nodes a; job x           -> x=a
        a lost                   ->
        nodes b                  -> x=b
        b lost                   ->
        nodes c                  -> x=c
        c lost                   ->
        is x=unable
    """,
    "attempts that end because their daemons are stopped do not count": """
        nodes a; job x                   -> x=a
        a leaves                         -> x=a-
        a ends unable                  ->
        a restarts                       -> x=a
        a leaves; a ends unable        ->
        a restarts                       -> x=a
        a leaves; a ends unable        ->
        a restarts                       -> x=a
        a leaves; a ends unable        ->
        a restarts                       -> x=a
        is
    """,
    "an attempt that lasted an hour starts the count again": """
        nodes a; job x           -> x=a
        a restarts               -> x=a
        a restarts               -> x=a
        wait 3600; a restarts    -> x=a
        a restarts               -> x=a
        a restarts               -> x=a
        a restarts               ->
        is x=unable
    """,
    "a waiting job that is cancelled ends at once": """
        nodes a; job x; job y    -> x=a
        cancel y                 -> x=a
        is y=cancelled
    """,
    "a running job that is cancelled leaves all its nodes, and what is free is used": """
        nodes ab; job x 2; job y     -> x=ab
        cancel x                     -> x=a-b-
        a ends unable              -> x=b- y=a
        b ends unable              -> y=a
        is x=cancelled
    """,
    "a job that has succeeded before it was cancelled has succeeded": """
        nodes ab; job x 2                -> x=ab
        a ends succeeded; cancel x       -> x=b
        b ends unable                  ->
        is x=succeeded
    """,
    "a job that is cancelled while a node leaves ends when that has left": """
        nodes a; job x           -> x=a
        a leaves                 -> x=a-
        cancel x                 -> x=a-
        a ends unable          ->
        is x=cancelled
    """,
    "a job whose record is gone leaves its nodes": """
        nodes a; job x           -> x=a
        delete x                 -> x=a-
        a ends unable          ->
        is x=cancelled
    """,
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_pool_does_as_the_story_says(story: str) -> None:
    Story(story)


def test_what_a_result_and_a_refusal_say() -> None:
    pool = Story("nodes abc; job x 2 -> x=ab")
    pool.tell("b ends succeeded 0 done -> x=a")
    assert pool.plan.runs[0].ending == JobResult("x", Outcome.SUCCEEDED, "b: done", 0, 0, None, NOW, ())
    pool.tell("a ends succeeded ->")
    assert pool.results == [JobResult("x", Outcome.SUCCEEDED, "b: done", 0, 1, NOW, NOW, ("b", "a"))]
    pool.tell("job y; job z; cancel z -> y=a")
    pool.tell("a ends failed 3 exit code 3 ->")
    results = {one.job: one for one in pool.results}
    assert (results["y"].code, results["z"].reason, results["z"].started_at) == (3, "cancelled by me", None)
    pool.tell("job v; job w 4 -> v=a")
    pool.tell("a ends unable 73 no such place -> v=b")
    assert pool.plan.refusals_of("v") == {"a": Refusal("no such place", NOW + REFUSAL_S)}
    why = "needs 4 nodes; the pool has 3 that can run it"
    assert why_waiting(pool.pool, pool.jobs[-1], NOW) == why


@pytest.mark.parametrize("code", [ExitCode.UNLIKE_THE_JOB, ExitCode.MISMATCH, ExitCode.BAD_CONFIG])
def test_a_job_that_its_nodes_refuse_as_it_is_fails_with_their_reason(code: ExitCode) -> None:
    pool = Story(f"nodes ab; job x 1 -> x=a\na ends unable {code:d} no script ->")
    assert pool.results == [JobResult("x", Outcome.FAILED, "a: no script", code, 1, NOW, NOW, ("a",))]


def test_a_job_that_is_unable_says_what_its_nodes_said() -> None:
    pool = Story(STORIES["a job that no node can run ends after some attempts"])
    assert pool.results[0].reason == "3 attempts without an outcome (a: no such place)"
    assert (pool.results[0].attempts, pool.plan.attempts) == (MOST_ATTEMPTS, ())
    lost = Story(STORIES["an attempt that lasted an hour starts the count again"])
    assert lost.results[0].reason == "3 attempts without an outcome (all its nodes were lost)"


def test_every_allocation_has_an_id_of_its_own_also_where_the_plan_went_back_with_its_store() -> None:
    pool = Story("nodes ab; job x 2; job y 2 -> x=ab")
    before = pool.plan
    pool.tell("a ends succeeded; b ends succeeded -> y=ab")
    assert [one.id for run in pool.plan.runs for one in run.allocations] == [3, 4]
    pool.tell("a ends failed; b ends failed ->")
    for plan in (Plan(), before):
        restored = Story("job z 2")
        restored.nodes, restored.plan = dict(pool.nodes), replace(plan, attempts=())
        assert restored.decide() == "z=ab"
        assert [one.id for run in restored.plan.runs for one in run.allocations] == [5, 6]


@pytest.mark.parametrize(
    ("lines", "asked", "expected"),
    [
        ("job x ->", "x", "needs 1 node; the pool has 0 that can run it"),
        ("nodes ab; job x 2; job y 2 -> x=ab", "y", "needs 2 nodes; 0 idle"),
        ("nodes abc; job x 2; job y 2 -> x=ab", "y", "needs 2 nodes; 1 idle"),
        ("nodes ab; job x 2; job y 2; job z -> x=ab", "z", "behind 1 other job of the queue"),
        ("nodes a; a ill; job x ->", "x", "needs 1 node; the pool has 0 that can run it (a: it is ill)"),
    ],
)
def test_a_waiting_job_says_what_it_waits_for(lines: str, asked: str, expected: str) -> None:
    pool = Story(lines)
    job = next(one for one in pool.jobs if one.job == asked)
    assert why_waiting(pool.pool, job, NOW) == expected


# ---------------------------------------------------------------- what is written at once, and how much


def test_nothing_is_left_of_a_forgotten_job_and_no_result_takes_the_place_of_another() -> None:
    result = JobResult("j", Outcome.FAILED, "", 1, 1, None, 0.0, ())
    writes = Decision(Plan(), forgotten=("j",)).writes
    deleted = {write.key for write in writes if isinstance(write, Delete)}
    assert deleted == {"jobs/j", "results/j", "runs/j/world", "runs/j/stop_at"}
    assert Compare("results/j", 0) in Decision(Plan(), (result,)).compares


def test_a_job_begins_only_while_it_has_no_result_also_where_the_store_has_not_told_of_that_yet() -> None:
    decision = decide(Pool((PoolNode("a", "a-1"),), (JOB,)), NOW)
    assert decision is not None
    assert Compare("results/x", 0) in decision.compares


def test_the_largest_decision_is_one_transaction_for_etcd() -> None:
    jobs = [f"j{number}" for number in range(MOST_AT_ONCE)]
    results = tuple(JobResult(job, Outcome.FAILED, "", 1, 1, None, 0.0, ()) for job in jobs)
    decision = Decision(Plan(), results, tuple(jobs), tuple(jobs))
    assert len(decision.writes) + len(decision.compares) <= MOST_OPERATIONS


def test_so_many_results_are_written_in_one_step() -> None:
    names = [f"j{number}" for number in range(MOST_AT_ONCE + 4)]
    pool = Story("; ".join(["nodes a", *(f"job {name}; cancel {name}" for name in names)]))
    decision = decide(pool.pool, NOW)
    assert decision is not None
    assert len(decision.results) == MOST_AT_ONCE
    assert pool.decide() == ""
    assert len(pool.results) == len(names)


def test_a_run_whose_result_waits_for_the_next_decision_gets_no_other_nodes() -> None:
    pool = Story("nodes a; job last -> last=a")
    pool.tell("a ends unable; nodes b")
    (run,) = pool.plan.attempts
    pool.plan = replace(pool.plan, attempts=(replace(run, attempt=3, in_vain=MOST_ATTEMPTS - 1),))
    pool.jobs[:0] = [replace(JOB, job=f"j{number}", cancelled_by="me") for number in range(MOST_AT_ONCE)]
    decision = decide(pool.pool, NOW)
    assert decision is not None
    assert [run.allocations for run in decision.plan.runs] == [()]
    pool.decide()
    assert pool.results[-1].outcome is Outcome.UNABLE


def test_the_oldest_results_are_forgotten() -> None:
    results = tuple(f"j{number}" for number in range(MOST_RESULTS + MOST_AT_ONCE + 2))
    assert decide(Pool((), (), results=results), NOW) == Decision(Plan(), (), results[:MOST_AT_ONCE])
    assert decide(Pool((), (), results=results[:MOST_RESULTS]), NOW) is None


def test_of_a_job_whose_record_is_gone_while_it_waits_again_no_attempt_is_kept() -> None:
    pool = Story("nodes a; job x -> x=a")
    pool.tell("a lost ->")
    assert [run.job for run in pool.plan.attempts] == ["x"]
    pool.tell("delete x ->")
    assert pool.plan.attempts == ()


def test_the_plan_stays_small_when_every_node_refuses_every_job() -> None:
    """As when the file system of all jobs is away: a plan that the store does not take would end the pool."""
    pool = Story("; ".join(f"job j{number} 100" for number in range(500)))
    pool.nodes = {f"n{number}": PoolNode(f"n{number}", f"n{number}-1") for number in range(100)}
    reason = ("the job's directory is not there on this node " * 30)[:MAX_REASON]
    for _ in range(200):
        decision = decide(pool.pool, NOW)
        assert decision is not None
        pool.plan = decision.plan
        for run in pool.plan.runs:
            for one in run.allocations:
                end = AllocationEnd(run.job, one.id, Outcome.UNABLE, 73, reason)
                pool.nodes[one.node] = replace(pool.nodes[one.node], ended=end)
    assert sum(len(run.refusals) for run in pool.plan.attempts) <= MOST_REFUSALS
    assert len(pool.plan.to_json()) < MAX_RECORD_CHARS / 2
