"""What each source of `elastic-agent status` makes of agents' pages, of real stores, and of whoever else answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest

from elastic_agent.agent.commands import command, control
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.agent.configuration.rendezvous import EtcdConfig, RendezvousConfig
from elastic_agent.agent.observability import sources as status_sources
from elastic_agent.agent.observability.sources import (
    AT_ONCE,
    AgentsSource,
    StoreSource,
    Unreachable,
    ask_nodes,
)
from elastic_agent.agent.observability.status import (
    JOB_PAGE,
    JOB_PATH,
    STATUS_PAGE,
    STATUS_PATH,
    JobStatus,
    NodeStatus,
    job_page,
)
from elastic_agent.health.http import Answers, HealthServer, Probe, json_page
from elastic_agent.rendezvous.records import (
    SCHEMA,
    WORLD_KEY,
    Endpoint,
    NodeRecord,
    assign_ranks,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Put, Store
from elastic_agent.rendezvous.store.memory import MemoryStore
from tests.etcd_servers import HOST, EtcdCluster
from tests.observed import answering
from tests.unit.test_status_pages import JOB, STATUS, WORLD

from .conftest import HostProcess

PATIENCE_S = 20.0
SHORT_S = 0.3
"""For those who never answer."""
HOME = Endpoint("127.0.0.1", 1)


class Node:
    """An agent's pages on a port of its own."""

    def __init__(self, status: NodeStatus, job: JobStatus) -> None:
        self.status, self.job = status, job
        ok = Probe(True, "")
        pages = {
            STATUS_PATH: json_page(lambda: STATUS_PAGE.encode(self.status)),
            JOB_PATH: json_page(lambda: job_page(self.told)),
        }
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = HealthServer(listener, Answers(lambda: b"", lambda: ok, lambda: ok, pages))
        self.http = Endpoint(*self.server.address)
        self.server.start()

    @property
    def told(self) -> JobStatus:
        return replace(self.job, agent=self.status)


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    with contextlib.ExitStack() as stack:

        def start(name: str, job: JobStatus = JOB, **more: object) -> Node:
            status = replace(STATUS, node=name, incarnation=f"{name}-1", **more)  # type: ignore[arg-type]
            one = Node(status, job)
            stack.callback(one.server.close)
            return one

        yield start


def unused_port() -> Endpoint:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Endpoint(*listener.getsockname()[:2])


@pytest.fixture
def frozen() -> Iterator[Endpoint]:
    """Its machine takes connections, and its agent stands still."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint(*listener.getsockname()[:2])


@pytest.fixture
def stranger() -> Iterator[Endpoint]:
    """Another program that speaks HTTP."""
    with answering({}) as http:
        yield http


def record(name: str, http: Endpoint | None) -> NodeRecord:
    return NodeRecord(name, f"{name}-1", "127.0.0.1", 1, 2, http)


def job_of(*nodes: NodeRecord, coordinator: str = "a", complete: bool = True) -> JobStatus:
    world = replace(WORLD, members=assign_ranks(nodes)) if nodes else None
    return JobStatus("digits", world, nodes, coordinator, complete)


def source_at(*agents: Endpoint, here: bool = False, timeout_s: float = PATIENCE_S) -> AgentsSource:
    return AgentsSource(lambda: agents, timeout_s, here=here)


def refused(source: AgentsSource | StoreSource) -> CannotDo:
    with pytest.raises(CannotDo) as nothing:
        source.jobs()
    return nothing.value


# ---------------------------------------------------------------- agents


def test_each_node_answers_for_itself_and_each_kind_of_silence_is_recognized(
    node: Callable[..., Node], frozen: Endpoint, stranger: Endpoint
) -> None:
    a, b = node("a", step=21), node("b")
    b.status = replace(b.status, incarnation="b-2")
    job = job_of(
        record("a", a.http),
        record("b", b.http),
        record("c", unused_port()),
        record("d", frozen),
        record("e", stranger),
        record("f", None),
    )
    assert ask_nodes(job, SHORT_S) == {
        "a-1": a.status,
        "b-1": Unreachable.REFUSED,
        "c-1": Unreachable.REFUSED,
        "d-1": Unreachable.SILENT,
        "e-1": Unreachable.STRANGE,
        "f-1": Unreachable.HIDDEN,
    }


def test_a_thousand_nodes_are_asked_at_most_so_many_at_once(node: Callable[..., Node]) -> None:
    a = node("a")
    names = [f"n{number}" for number in range(1000)]
    job = job_of(*(record(name, a.http) for name in names))
    threads: set[int] = set()
    counted = threading.Event()

    def count() -> None:
        while not counted.wait(0.002):
            threads.add(sum(thread.name.startswith("ask") for thread in threading.enumerate()))

    counting = threading.Thread(target=count)
    counting.start()
    answers = ask_nodes(job, 8 * PATIENCE_S)
    counted.set()
    counting.join()
    assert list(answers.values()) == [Unreachable.REFUSED] * 1000
    assert 1 < max(threads) <= AT_ONCE


@pytest.mark.parametrize(("count", "each_s"), [(1, 8.0), (AT_ONCE, 8.0), (AT_ONCE + 1, 4.0), (1000, 1.0)])
def test_those_who_have_to_wait_share_the_time(
    count: int, each_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def silent(*question: object) -> str:
        given.append(cast(float, question[3]))
        raise TimeoutError

    monkeypatch.setattr(status_sources, "get", silent)
    answers = ask_nodes(job_of(*(record(f"n{number}", HOME) for number in range(count))), 8.0)
    assert list(answers.values()) == [Unreachable.SILENT] * count
    assert given == [each_s] * count


def test_an_agent_that_does_not_coordinate_sends_on_to_the_one_that_does(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.job = job_of(record("a", a.http), record("b", b.http), record("c", HOME))
    b.job = job_of(record("a", a.http), record("b", b.http), complete=False)
    (found,) = source_at(b.http).jobs()
    assert found.job == replace(JOB_PAGE.decode(job_page(a.job)), agent=b.status)
    a.server.close()
    (alone,) = source_at(b.http).jobs()
    assert [record.node for record in alone.job.nodes] == ["a", "b"]
    assert not alone.job.complete


def test_the_coordinator_of_another_job_is_not_believed(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.job = replace(job_of(record("a", a.http)), job="letters")
    b.job = job_of(record("a", a.http), record("b", b.http), complete=False)
    (found,) = source_at(b.http).jobs()
    assert found.job.job == "digits"


def test_every_job_is_listed_once(node: Callable[..., Node]) -> None:
    a, b, c = node("a"), node("b"), node("c", job="letters")
    a.job = job_of(record("a", a.http), record("b", b.http))
    b.job = replace(a.job, complete=False)
    c.job = replace(job_of(record("c", c.http), coordinator="c"), job="letters")
    jobs = source_at(b.http, c.http, a.http, here=True).jobs()
    assert [(found.job.job, len(found.job.nodes)) for found in jobs] == [("digits", 2), ("letters", 1)]


def test_a_silent_agent_on_this_machine_is_mentioned_beside_the_others(
    node: Callable[..., Node], frozen: Endpoint
) -> None:
    a = node("a", job_of(record("a", HOME)))
    source = source_at(a.http, frozen, unused_port(), here=True, timeout_s=1.0)
    (found,) = source.jobs()
    assert found.notes == (), "it may be of another job"
    (note,) = source.silent
    assert f"{frozen} gives no answer within 1 s" in note


def test_a_job_is_found_among_all_here(node: Callable[..., Node], frozen: Endpoint) -> None:
    a = node("a", job_of(record("a", HOME)))
    c = node("c", replace(job_of(record("c", HOME)), job="words"))
    found = AgentsSource(lambda: (a.http, c.http, frozen), 1.0, here=True, job="words").jobs()
    assert [one.job.job for one in found] == ["words"]
    other = refused(AgentsSource(lambda: (a.http, frozen), 1.0, here=True, job="words"))
    assert other.code is ExitCode.NOT_FOUND
    assert f"no agent of job words answers on this machine; the agent at {frozen}" in str(other)


def test_why_there_is_nothing_to_show(frozen: Endpoint, stranger: Endpoint) -> None:
    for source, code, words in (
        (source_at(here=True), ExitCode.NOT_FOUND, "--agent HOST:PORT"),
        (source_at(unused_port(), here=True), ExitCode.NOT_FOUND, "--rdzv-endpoint HOST:PORT"),
        (source_at(unused_port()), ExitCode.NO_ANSWER, "no process listens"),
        (source_at(frozen, timeout_s=SHORT_S), ExitCode.NO_ANSWER, "no answer within 0.3 s"),
        (source_at(stranger), ExitCode.MISMATCH, "another program, or another version"),
    ):
        problem = refused(source)
        assert problem.code is code, str(problem)
        assert words in str(problem)


def test_a_command_about_a_node_asks_which_of_the_jobs_here_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = [
        {"rdzv-backend": "c10d", "rdzv-endpoint": "127.0.0.1:1", "rdzv-id": job}
        for job in ("digits", "words")
    ]
    asked = []

    def open_job(place: RendezvousConfig, timeout_s: float) -> MemoryStore:
        asked.append(place.job_id)
        return MemoryStore()

    monkeypatch.setattr(control, "stores_here", lambda *_: stores)
    monkeypatch.setattr(command, "open_to_look", open_job)
    assert control.readmit(["b", "--rdzv-id=digits"]) == ExitCode.NO_JOB
    assert asked == ["digits"]
    assert control.readmit(["b"]) == ExitCode.BAD_CONFIG
    assert "one of the jobs here: digits, words" in capsys.readouterr().err


# ---------------------------------------------------------------- the store


def put(store: Store, **values: str) -> None:
    store.transact((), tuple(Put(key.replace("__", "/"), value) for key, value in values.items()))


def etcd_place(cluster: EtcdCluster, job: str, **more: object) -> RendezvousConfig:
    endpoints = tuple(Endpoint(host, port) for host, port in cluster.endpoints)
    return RendezvousConfig("etcd", endpoints, EtcdConfig(**more), job_id=job)  # type: ignore[arg-type]


def test_etcd_lists_all_nodes_the_oldest_first_and_what_cannot_be_read(shared_etcd: EtcdCluster) -> None:
    root = "/elastic-agent/status-1/"
    for name in ("b", "a"):
        shared_etcd.ctl("put", root + node_key(name), record(name, HOME).to_json())
    shared_etcd.ctl("put", root + node_key("x"), "garbage")
    shared_etcd.ctl("put", root + WORLD_KEY, replace(WORLD, job="status-1").to_json())
    shared_etcd.ctl("put", "/elastic-agent/status-10/" + node_key("other"), record("other", HOME).to_json())
    revision = shared_etcd.revision()
    source = StoreSource(etcd_place(shared_etcd, "status-1"), PATIENCE_S)
    for _ in range(2):
        (found,) = source.jobs()
        assert found.job == JobStatus(
            "status-1",
            replace(WORLD, job="status-1"),
            (record("b", HOME), record("a", HOME)),
            coordinator="b",
            complete=True,
        )
        assert ["nodes/x" in note for note in found.notes] == [True]
    assert shared_etcd.revision() == revision, "it has written"


def test_etcd_without_this_job_or_with_a_world_of_another_version(shared_etcd: EtcdCluster) -> None:
    missing = refused(StoreSource(etcd_place(shared_etcd, "status-none"), PATIENCE_S))
    assert missing.code is ExitCode.NO_JOB
    assert "check --rdzv-id" in str(missing)
    newer = WORLD.to_json().replace(f'"v":{SCHEMA}', '"v":99')
    shared_etcd.ctl("put", "/elastic-agent/status-new/world", newer)
    strange = refused(StoreSource(etcd_place(shared_etcd, "status-new"), PATIENCE_S))
    assert strange.code is ExitCode.MISMATCH


def test_no_store_is_an_answer_in_time() -> None:
    http = unused_port()
    place = Endpoint(http.address, http.port)
    for rendezvous in (
        RendezvousConfig("etcd", (place,), EtcdConfig(), "digits"),
        RendezvousConfig("c10d", (place,), None, "digits"),
    ):
        assert refused(StoreSource(rendezvous, SHORT_S)).code is ExitCode.NO_ANSWER


def test_a_c10d_store_shows_only_its_own_job(host_process: Callable[..., HostProcess]) -> None:
    from elastic_agent.rendezvous.c10d.store import C10dStore

    host = host_process("digits")
    place = (Endpoint(HOST, host.port),)
    source = StoreSource(RendezvousConfig("c10d", place, None, "digits"), PATIENCE_S)
    assert refused(source).code is ExitCode.NO_JOB
    writer = C10dStore.connect(HOST, host.port, "digits", PATIENCE_S)
    put(writer, world=WORLD.to_json(), nodes__a=record("a", HOME).to_json())
    (found,) = source.jobs()
    assert (found.job.world, found.job.coordinator) == (WORLD, "a")
    other = refused(StoreSource(RendezvousConfig("c10d", place, None, "letters"), PATIENCE_S))
    assert other.code is ExitCode.MISMATCH
    assert "digits" in str(other)
    host.process.kill()
    host.process.wait()
    assert refused(source).code is ExitCode.NO_ANSWER
    writer.close()
