"""One agent put together and taken apart: what is refused, in which order it starts, and how it leaves."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_agent.agent.common.events import Event, IoThread
from elastic_agent.agent.common.exits import CannotStart, ExitCode
from elastic_agent.agent.common.ports import PortError
from elastic_agent.agent.configuration.config import Command, Config, RendezvousConfig
from elastic_agent.agent.machine.inventory import Machine, inspect_machine
from elastic_agent.agent.machine.network import Network
from elastic_agent.agent.main import assembly
from elastic_agent.agent.main import run as life
from elastic_agent.agent.main.assembly import Agent, Listeners, PreparedProcess
from elastic_agent.agent.main.loop import AgentEnd, Loop
from elastic_agent.agent.main.process import ServiceManager
from elastic_agent.agent.output.console import Console
from elastic_agent.agent.rendezvous_io.store_opening import policy_of
from elastic_agent.agent.workers.environment import Node
from elastic_agent.agent.workers.processes.guard import Subreaper
from elastic_agent.health.http import Probe
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.store.interface import Store

from .supervised import Ignored

CONFIG = Config(Command("script", "train.py"))


class Recorded:
    """Notes every call, by its name here and the method's."""

    lease = 7

    def __init__(self, name: str, calls: list[str], answer: Any = None) -> None:
        self._name = name
        self._calls = calls
        self._answer = answer

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(f"{self._name}.{method}")
            return self._answer

        return call


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def agent(calls: list[str], machine: Machine) -> Agent:
    manager = cast(ServiceManager, Recorded("manager", calls))
    console = cast(Console, Ignored())
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    subreaper = cast(Subreaper, Ignored())
    prepared = PreparedProcess("a-1", events, IoThread(), subreaper, adoption_error="")
    return Agent(CONFIG, "a", prepared, {}, manager, console, machine)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return inspect_machine(Config(Command("binary", "sleep")), {"PATH": "/usr/bin:/bin"})


def ended(code: ExitCode) -> AgentEnd:
    return AgentEnd(code, "it is over")


def test_the_lease_is_given_up_after_the_loop_has_ended_with_its_workers(
    agent: Agent, calls: list[str]
) -> None:
    loop = cast(Loop, Recorded("loop", calls, ended(ExitCode.SUCCESS)))
    for part in ("store", "observer", "participant", "link", "heartbeat"):
        setattr(agent, part, Recorded(part, calls))
    agent.listeners = cast(Listeners, SimpleNamespace(store=None))
    ending = life._live(agent, loop)
    assert ending.code is ExitCode.SUCCESS
    assert calls == [
        "heartbeat.start",
        "loop.run",
        "observer.ended_with",
        "heartbeat.close",
        "manager.stopping",
        "link.close",
        "store.revoke",
    ]


def test_a_store_that_is_lost_is_not_asked_for_a_farewell(calls: list[str]) -> None:
    store, participant = cast(Store, Recorded("store", calls)), cast(Participant, Recorded("it", calls))
    life._depart(store, participant, ended(ExitCode.NO_ANSWER), stays_for_others=False)
    assert calls == []


def test_a_port_that_cannot_be_had_is_refused_and_leaves_nothing(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise PortError("no descriptors")

    monkeypatch.setattr(assembly, "bind_listener", refuse)
    monkeypatch.setattr(life, "run_directory_parent", lambda environ: str(tmp_path))
    assert isinstance(agent.machine.network, Network)
    agent.network = agent.machine.network
    with pytest.raises(CannotStart) as refused, agent.ends:
        life._claim(agent)
    assert refused.value.code is ExitCode.NOT_HERE
    assert list(tmp_path.iterdir()) == []


def test_http_answers_while_the_store_is_looked_for(
    agent: Agent, calls: list[str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the loop exists there is no turn to wait for."""
    order: list[str] = []

    class Served:
        address = "127.0.0.1", 1

        def __init__(self, *_: object) -> None:
            order.append("http")

        def start(self) -> None: ...

        def close(self) -> None: ...

    def find(agent: Agent) -> None:
        order.append("store")
        assert agent.heartbeat.liveness() == Probe(True, "starting")
        assert agent.state.readiness() == Probe(False, "waiting: the rendezvous store")
        assert '"a-1"' in agent.state.introduction()
        raise CannotStart(ExitCode.NO_ANSWER, "no store")

    monkeypatch.setattr(life, "catch_signals", lambda *_: None)
    assert isinstance(machine.network, Network)
    agent.network = machine.network
    for name in ("_wait_for_network", "_claim", "_start_helpers", "store_options", "announce"):
        monkeypatch.setattr(life, name, lambda *_: None)
    agent.listeners = cast(Listeners, SimpleNamespace(http=socket.socket(), store=None))
    agent.node = cast(Node, SimpleNamespace(run_dir=None))
    monkeypatch.setattr(life, "Board", lambda *_: SimpleNamespace(events=None, overview=None))
    monkeypatch.setattr(life, "_check", lambda *_: order.append("checks"))
    monkeypatch.setattr(life, "HealthServer", Served)
    monkeypatch.setattr(life, "_find_store", find)
    with pytest.raises(CannotStart):
        life._run(agent)
    assert order == ["checks", "http", "store"]
    assert calls == ["manager.ready"]


@pytest.mark.parametrize(
    ("backend", "grace_s", "outlives", "granted_s"),
    [("etcd", 60.0, True, 60.0), ("c10d", 60.0, False, 0.0), ("memory", 60.0, False, 0.0)],
)
def test_only_etcd_outlives_a_job_and_grants_an_outage(
    backend: Any, grace_s: float, outlives: bool, granted_s: float
) -> None:
    config = Config(
        Command("script", "train.py"),
        rendezvous=RendezvousConfig(backend=backend, store_outage_grace_s=grace_s),
    )
    policy = policy_of(config)
    assert (policy.store_outlives_job, policy.store_outage_grace_s) == (outlives, granted_s)
