"""One daemon's part in its pool, over a real kv and a clock moved by hand: what the pools' simulator does not play."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elastic_agent.pool.member import PoolMember
from elastic_agent.pool.records import (
    JOBS_PREFIX,
    NODES_PREFIX,
    PLAN_KEY,
    SCOPES,
    Allocation,
    AllocationEnd,
    Attempt,
    Job,
    JobResult,
    Outcome,
    Plan,
    PoolNode,
)
from elastic_agent.pool.schedule import Decision
from elastic_agent.rendezvous.errors import LeaseExpired, StoreError, StoreUnavailable
from elastic_agent.rendezvous.node.transactions import WriteRecord
from elastic_agent.rendezvous.store.interface import Answer, Grant, Put, Read, Request, Subscription
from elastic_agent.rendezvous.store.kv_state import KvState

TTL_S = 5.0
WALL = 1.0e9


class Daemon:
    """A member, and what its loop would do; it takes its allocations when a test says so."""

    def __init__(self, bench: Bench, name: str, life: int) -> None:
        self.bench = bench
        self.member = PoolMember(
            PoolNode(name, f"{name}-{life}"),
            lease_ttl_s=TTL_S,
            rng=random.Random(1),
            now=bench.now,
            wall=lambda: WALL + bench.now,
        )
        self.connected = True
        self.asked: list[Request] = []
        self._watched: Subscription | None = None
        self._seen_to = 0

    def turn(self) -> bool:
        """False when there was nothing to do."""
        member, now = self.member, self.bench.now
        request = member.request(now)
        if request is not None:
            self.asked.append(request)
            try:
                answer = self.bench.serve(request, self.connected)
            except StoreError as error:
                member.failed(request, error, now)
            else:
                member.answered(request, answer, now)
        return (request is not None and self.connected) | self._watch()

    def _watch(self) -> bool:
        if self.member.subscription is not self._watched:
            self._watched = self.member.subscription
            self._seen_to = self._watched.after_revision if self._watched else 0
        if self._watched is None or not self.connected:
            return False
        changes = self.bench.kv.changes(self._watched.scopes, self._seen_to)
        self._seen_to = self.bench.kv.revision
        if changes:
            self.member.changed(changes, self.bench.now)
        return bool(changes)

    def start(self) -> None:
        """Take the allocation that is due."""
        due = self.member.to_start
        assert due is not None
        self.member.started(due.allocation.id)

    def end(self, outcome: Outcome = Outcome.SUCCEEDED) -> None:
        allocation_id = self.member.record.running
        self.member.ended(AllocationEnd("x", allocation_id, outcome, 0, "why"))


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.kv = KvState()
        self.daemons: list[Daemon] = []

    def daemon(self, name: str, life: int = 1) -> Daemon:
        self.daemons.append(Daemon(self, name, life))
        return self.daemons[-1]

    def serve(self, request: Request, connected: bool) -> Answer:
        if not connected:
            raise StoreUnavailable("no answer")
        if isinstance(request, Grant):
            return self.kv.grant(request.ttl_s, self.now)
        if isinstance(request, Read):
            return self.kv.read(request.scopes, self.now)
        return self.kv.transact(request.compares, request.writes, self.now)

    def settle(self) -> None:
        for _ in range(100):
            turned = [daemon.turn() for daemon in self.daemons]
            if not any(turned):
                return
        raise AssertionError("the daemons do not come to rest")

    def wait(self, seconds: float) -> None:
        """All leases of daemons that are connected are kept."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for daemon in self.daemons:
                if daemon.connected and daemon.member.lease is not None:
                    try:
                        self.kv.keep_alive(daemon.member.lease, self.now)
                    except LeaseExpired:
                        daemon.member.lease_gone(daemon.member.lease)
                    else:
                        daemon.member.lease_confirmed(daemon.member.lease, self.now)
            self.kv.expire(self.now)
            self.settle()

    def put(self, key: str, value: str) -> None:
        self.kv.transact((), (Put(key, value),), self.now)
        self.settle()

    def submit(self, name: str, by: str = "") -> None:
        """`by`: who cancels it."""
        job = Job(name, name, (), ("train.py",), {}, "/", 1, 1, WALL, "user@host", cancelled_by=by)
        self.put(job.key, job.to_json())

    def value(self, key: str) -> str | None:
        entries = self.kv.read((key,), self.now).entries
        return entries[0].value if entries else None

    @property
    def plan(self) -> Plan:
        return Plan.read(PLAN_KEY, self.value(PLAN_KEY) or Plan().to_json())

    def result(self, job: str) -> JobResult | None:
        text = self.value(f"results/{job}")
        return JobResult.read("", text) if text is not None else None


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_daemons_join_and_the_oldest_coordinates(bench: Bench) -> None:
    a, b = bench.daemon("a"), bench.daemon("b")
    bench.settle()
    assert [a.member.coordinates, b.member.coordinates] == [True, False]
    assert [node.node for node in b.member.view.nodes] == ["a", "b"]
    assert a.member.tracks
    assert b.member.tracks
    kinds = [type(request) for request in b.asked]
    assert kinds == [Grant, Read, WriteRecord], "an idle daemon asks nothing"


def test_a_job_whose_result_is_not_heard_of_yet_does_not_begin_anew(bench: Bench) -> None:
    """A store may tell of the plan before it tells of a result that was written with it."""
    a = bench.daemon("a")
    bench.submit("x")
    a.start()
    bench.settle()
    a.end()
    revision = bench.kv.revision
    while bench.result("x") is None:
        request = a.member.request(bench.now)
        assert request is not None
        a.member.answered(request, bench.serve(request, True), bench.now)
        if bench.result("x") is None:
            a.member.changed(bench.kv.changes(SCOPES, revision), bench.now)
            revision = bench.kv.revision
    changes = bench.kv.changes(SCOPES, revision)
    a.member.changed(tuple(change for change in changes if change.key != "results/x"), bench.now)
    request = a.member.request(bench.now)
    assert isinstance(request, Decision), "it takes x for one that waits"
    a.member.answered(request, bench.serve(request, True), bench.now)
    assert bench.plan.runs == ()
    bench.settle()
    assert bench.plan.runs == ()


def test_an_allocation_that_is_to_be_left_before_it_was_taken_is_left_at_once(bench: Bench) -> None:
    a = bench.daemon("a")
    bench.submit("x")
    bench.submit("x", by="me")
    assert a.member.to_start is None
    result = bench.result("x")
    assert result is not None
    assert result.outcome is Outcome.CANCELLED
    assert a.member.record.ended is not None
    assert a.member.record.ended.reason == "before it began"


@pytest.mark.parametrize("odd", ["/srv/a\nb", "/srv/\x1b[31mred", "/srv/\u2028", "/srv/\udcff"])
def test_a_reason_with_what_no_reader_sees_is_written_once(bench: Bench, odd: str) -> None:
    a = bench.daemon("a")
    a.member.report_problem(f"no {odd}")
    bench.settle()
    a.member.report_problem("")
    bench.submit("x")
    a.start()
    a.member.ended(AllocationEnd("x", a.member.record.running, Outcome.UNABLE, 0, f"no {odd}"))
    bench.settle()
    assert bench.plan.runs == (), "the pool goes on"


# ---------------------------------------------------------------- leases and the store's outages


def test_a_daemon_that_its_store_does_not_answer_is_not_current(bench: Bench) -> None:
    a = bench.daemon("a")
    bench.settle()
    bench.wait(3 * TTL_S)
    assert a.member.is_current(bench.now)
    a.connected = False
    bench.wait(TTL_S - 1.0)
    assert a.member.is_current(bench.now)
    bench.wait(1.5)
    assert a.member.tracks, "it has asked for nothing meanwhile"
    assert not a.member.is_current(bench.now)
    a.connected = True
    bench.wait(2.0)
    assert a.member.is_current(bench.now)


def test_a_plan_that_another_has_written_meanwhile_is_read_first(bench: Bench) -> None:
    a = bench.daemon("a")
    bench.settle()
    job = Job("x", "x", (), ("train.py",), {}, "/", 1, 1, WALL, "user@host")
    bench.kv.transact((), (Put(job.key, job.to_json()),), bench.now)
    a._watch()
    decision = a.member.request(bench.now)
    assert isinstance(decision, Decision)
    bench.kv.transact((), (Put(PLAN_KEY, Plan(7).to_json()),), bench.now)
    a.member.answered(decision, bench.serve(decision, connected=True), bench.now)
    assert a.member.subscription is None
    bench.settle()
    assert bench.plan.runs[0].allocations[0].id == 8


# ---------------------------------------------------------------- names and odd records


def test_a_daemon_waits_for_another_one_of_its_name_to_be_forgotten_and_says_what_to_do(bench: Bench) -> None:
    first = bench.daemon("a")
    bench.settle()
    again = bench.daemon("a", life=2)
    bench.wait(3 * TTL_S)
    assert "give this one another --node-id" in again.member.waiting_for
    assert (first.member.tracks, again.member.tracks) == (True, False)
    first.connected = False
    bench.wait(TTL_S + 1.0)
    assert again.member.tracks
    assert again.member.coordinates


@pytest.mark.parametrize("plan", ["{}", "not JSON", '{"v":99,"allocation_ids":0,"attempts":[]}'])
@pytest.mark.parametrize("there_before", [True, False])
def test_a_plan_that_cannot_be_read_ends_the_daemon(bench: Bench, plan: str, there_before: bool) -> None:
    a = bench.daemon("a")
    if not there_before:
        bench.settle()
    bench.put(PLAN_KEY, plan)
    assert a.member.mismatch is not None
    assert "'plan'" in a.member.mismatch
    assert a.member.request(bench.now) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{JOBS_PREFIX}odd", "not JSON"),
        (f"{NODES_PREFIX}odd", '{"v": 2, "node": "odd"}'),
        (f"{NODES_PREFIX}odd", PoolNode("b", "b-1").to_json()),
        ("results/odd", "not JSON"),
    ],
)
def test_other_records_that_cannot_be_read_are_ignored(bench: Bench, key: str, value: str) -> None:
    """Also where it is the oldest record, as of a daemon of a later version, which cannot coordinate."""
    bench.put(key, value)
    a = bench.daemon("a")
    bench.submit("x")
    assert a.member.mismatch is None
    assert a.member.coordinates
    assert a.member.to_start is not None


def test_an_allocation_in_a_plan_for_an_unknown_job_is_not_taken(bench: Bench) -> None:
    a = bench.daemon("a")
    bench.settle()
    allocations = (Allocation("a", "a-1", 1),)
    bench.put(PLAN_KEY, Plan(1, (Attempt("gone", 1, WALL, allocations),)).to_json())
    assert a.member.to_start is None
    assert bench.plan.runs == ()


def test_news_of_an_older_request_counts_for_nothing(bench: Bench) -> None:
    a = bench.daemon("a")
    first = a.member.request(bench.now)
    assert first is not None
    a.member.answered(replace(first), 77, bench.now)  # type: ignore[type-var]
    assert a.member.lease is None
    a.member.failed(replace(first), StoreUnavailable("late"), bench.now)  # type: ignore[type-var]
    a.member.answered(first, 78, bench.now)
    assert a.member.lease == 78


def test_a_daemon_has_departed_when_its_last_allocation_is_out_of_the_plan(bench: Bench) -> None:
    a, b = bench.daemon("a"), bench.daemon("b")
    assert a.member.has_departed, "nothing was begun"
    bench.submit("x")
    a.start()
    bench.settle()
    a.member.leave()
    bench.settle()
    assert not a.member.has_departed
    a.end(Outcome.UNABLE)
    assert not a.member.has_departed
    bench.settle()
    assert a.member.has_departed
    assert b.member.to_start is not None
    assert not b.member.has_departed
    assert not any(run.in_vain for run in bench.plan.attempts)
