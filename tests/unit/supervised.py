"""One node's workers without processes: the supervisor with a real participant and observer, and fakes for the rest."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from elastic_agent.agent.common.events import Event, IoThread
from elastic_agent.agent.configuration.config import Command, Config
from elastic_agent.agent.configuration.stopping import TimeoutConfig
from elastic_agent.agent.machine.devices import Device
from elastic_agent.agent.machine.inventory import inspect_machine
from elastic_agent.agent.machine.nvml import GpuHealth, NvmlReader
from elastic_agent.agent.observability.observer import Observer
from elastic_agent.agent.observability.status import NodeState
from elastic_agent.agent.output.journal import Journal
from elastic_agent.agent.output.worker_logs import WorkerLogs
from elastic_agent.agent.rendezvous_io.worker_answers import WorkerAnswers
from elastic_agent.agent.rendezvous_io.worker_links import WorkerLinks
from elastic_agent.agent.workers import causes
from elastic_agent.agent.workers.environment import Node
from elastic_agent.agent.workers.evidence import Evidence, EvidenceKeeper
from elastic_agent.agent.workers.generation import Processes
from elastic_agent.agent.workers.hang_detector import ActivityReader
from elastic_agent.agent.workers.processes import workers
from elastic_agent.agent.workers.processes.guard import Guard, Subreaper
from elastic_agent.agent.workers.processes.spares import Spares, WorkerStore
from elastic_agent.agent.workers.rank_activity import Target
from elastic_agent.agent.workers.supervisor import Supervisor
from elastic_agent.health.checks.gpus import GpuFacts, NvmlFacts
from elastic_agent.health.metrics import Build, Metrics
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    Failure,
    Member,
    NodeRecord,
    Phase,
    StopAt,
    World,
)
from elastic_agent.worker.wire.environment import WorkerEnv
from elastic_agent.worker.wire.messages import Report, ToGuard

from .bench import ALONE, TTL_S


class Ignored:
    """A part of the agent of which the test expects nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class FakeLogs(Ignored):
    """The log disk answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Callable[[], None]]] = []
        self.lines: tuple[str, ...] = ()
        self.has_files = True

    def drain(self, generation: int, rank: int, then: Callable[[], None]) -> None:
        self.asked.append((rank, then))

    def tail(self, generation: int, rank: int) -> tuple[str, ...]:
        return self.lines

    def answer(self) -> None:
        asked, self.asked = self.asked, []
        for _, then in asked:
            then()


class FakeEvidence(Ignored):
    """A look is over when the test says so."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.at_once = True
        self.kept_in = ""
        self.looks: list[tuple[str, Evidence]] = []
        self._then: list[Callable[[Evidence], None]] = []

    def where(self) -> str:
        return self.kept_in if self.looks else ""

    def look(
        self,
        why: str,
        targets: Sequence[Target],
        then: Callable[[Evidence], None],
    ) -> Evidence:
        look = Evidence(None, self.clock())
        self.looks.append((why, look))
        self._then.append(then)
        if self.at_once:
            self.end()
        return look

    def end(self) -> None:
        self.looks[-1][1].end()
        self._then[-1](self.looks[-1][1])


class FakeNvml:
    """In the place of the process that asks NVML: it answers when the test says so."""

    pid = 7

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, question: bytes) -> bool:
        self.asked += 1
        return True

    def kill(self) -> None:
        pass


class FakeSpares(Ignored):
    loaded = False

    def turn(self, now: float) -> None:
        return None

    def prepared(self, count: int) -> bool:
        return True


class FakeLinks:
    def __init__(self) -> None:
        self.sent: list[tuple[int, ToGuard]] = []
        self.came: list[tuple[Report, float]] = []

    def reports(self) -> Iterator[tuple[Report, float]]:
        while self.came:
            yield self.came.pop(0)

    def send(self, generation: int, local_rank: int, message: ToGuard) -> None:
        self.sent.append((local_rank, message))


class FakeLastSteps:
    def __init__(self) -> None:
        self.looks = 0
        self.asking: set[int] = set()

    def read_stop(self, generation: int, then: object) -> None:
        self.looks += 1

    def asks(self, generation: int, local_rank: int) -> bool:
        return local_rank in self.asking


class FakeWorkers(workers.WorkerGroup):
    """Workers without processes: they end when the test says so, and ignore signals."""

    lacks: list[OSError]
    """What the next starts are refused for."""
    before_lack: int
    """So many workers begin before that."""

    def start(self, command: Command, specs: Sequence[workers.WorkerSpec], spares: workers.Spares) -> None:
        self.signals: list[tuple[int, signal.Signals]] = []
        self.codes: dict[int, int] = {}
        for spec in specs:
            if self.lacks and spec.local_rank == self.before_lack:
                self.stopping = True
                raise self.lacks.pop(0)
            self._processes[spec.local_rank] = cast(Any, FakeProcess(1000 + spec.local_rank))
            self.ranks[spec.local_rank] = spec.rank

    def reap(self, local_rank: int) -> int:
        self.returncodes[local_rank] = self.codes[local_rank]
        return self.codes[local_rank]

    def gone(self) -> bool:
        return not self.running

    def _signal(self, process: Any, number: signal.Signals, *, group: bool) -> None:
        self.signals.append((process.pid - 1000, number))


class RecordingParticipant(Participant):
    """Keeps what it was given after it has begun anew."""

    failures: list[Failure]

    def workers_failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        super().workers_failed(failure)


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid


class Supervised:
    """A node of `count` workers, alone in its world."""

    def __init__(
        self, run_dir: Path, count: int, timeouts: TimeoutConfig | None = None, guard_s: float = 2.0
    ) -> None:
        self.now = 100.0
        self.events: list[Event] = []
        self.lacks: list[OSError] = []
        self.before_lack = 0
        command = Command("binary", "sleep", ("300",))
        config = Config(command, nproc_per_node=count, timeouts=timeouts or TimeoutConfig())
        self.config = replace(config, stop=replace(config.stop, just_in_time_grace_s=guard_s))
        identity = NodeRecord("a", "a-1", "host-a", 1000, count)
        self.participant = RecordingParticipant(
            identity, ALONE, lease_ttl_s=TTL_S, rng=random.Random(1), now=self.now
        )
        self.participant.failures = []
        about = "job", "a", Build(version="1")
        self.metrics = Metrics(
            *about,
            workers=count,
            min_nodes=1,
            started_at_s=0.0,
            causes=causes.NAMES,
        )
        state = NodeState(
            "job", "a", "a-1", self.metrics, lease_ttl_s=5.0, clock=self.clock, wall_clock=lambda: 0.0
        )
        self.evidence = FakeEvidence(self.clock)
        self.gpus = GpuHealth(NvmlReader((), {}, IoThread(), self.events.append))
        self.logs, self.links, self.last_steps = FakeLogs(), FakeLinks(), FakeLastSteps()
        journal = Journal("a", lambda: 0.0)
        machine = inspect_machine(self.config, {"PATH": os.environ["PATH"]})
        self.socket = run_dir / "socket"
        self.socket.touch()
        node = Node("a", "a-1", machine, run_dir, WorkerEnv(socket=str(self.socket)), {})
        self.supervisor = Supervisor(
            self.config,
            node,
            self.participant,
            Observer(
                self.metrics,
                state,
                journal,
                None,
                self.now,
            ),
            Processes(
                new_group=self.new_group,
                guard=cast(Guard, Ignored()),
                subreaper=cast(Subreaper, Ignored()),
                spares=cast(Spares, FakeSpares()),
                worker_store=cast(WorkerStore, Ignored()),
                logs=cast(WorkerLogs, self.logs),
                links=cast(WorkerLinks, self.links),
                answers=cast(WorkerAnswers, self.last_steps),
                evidence=cast(EvidenceKeeper, self.evidence),
                activity=cast(ActivityReader, Ignored()),
                gpus=self.gpus,
            ),
            self.events.append,
            self.clock,
        )

    def new_group(self, generation: int, exited: Callable[[int, int, float], object]) -> FakeWorkers:
        guard, logs = cast(Guard, Ignored()), cast(WorkerLogs, self.logs)
        group = FakeWorkers(generation, guard, logs, IoThread(), exited, self.events.append, self.clock)
        group.lacks, group.before_lack = self.lacks, self.before_lack
        return group

    def clock(self) -> float:
        return self.now

    @property
    def reported(self) -> list[str]:
        """The failures that the participant was given."""
        return [failure.summary for failure in self.participant.failures]

    @property
    def failures(self) -> list[Failure]:
        """The workers of the newest generation that have failed, as they were examined."""
        generation = self.supervisor._generation
        assert generation is not None
        return generation.failed

    def with_gpus(self) -> FakeNvml:
        """From now on NVML is asked of one GPU, which is well, and which the workers use."""
        failures = self.supervisor._failures
        machine = failures._node.machine
        inventory = replace(machine.inventory, cuda=(Device("0", "0000:3b:00.0"),))
        failures._node = replace(failures._node, machine=replace(machine, inventory=inventory))
        nvml = FakeNvml()
        self.gpus._reader = cast(NvmlReader, nvml)
        self.nvml_says(0)
        return nvml

    def nvml_says(self, uncorrected: int) -> None:
        reading = NvmlFacts(gpus=(GpuFacts(name="0000:3b:00.0", uncorrected=uncorrected),))
        self.gpus.handle(reading)

    @property
    def group(self) -> FakeWorkers:
        group = self.supervisor.group
        assert isinstance(group, FakeWorkers)
        return group

    def start(self, generation: int = 1, first: str | None = None, master: Endpoint | None = None) -> str:
        """`first`: another node, of one worker, which has rank 0."""
        others = (Member(first, f"{first}-1", 1, 0),) if first is not None else ()
        member = Member("a", "a-1", self.participant.identity.slots, len(others))
        master = master or Endpoint("host-a", 1000)
        world = World("job", generation, Phase.RUNNING, (*others, member), master, Cause(CauseKind.START))
        return self.supervisor.start(world, member, cast(socket.socket, Ignored()), self.now)

    def turn(self, after_s: float = 0.0) -> bool:
        """The loop's: the events that have come, then what is due."""
        self.now += after_s
        while self.events:
            event = self.events.pop(0)
            assert callable(event)
            event()
        return self.supervisor.turn(self.now)

    def exit(self, local_rank: int, returncode: int) -> None:
        self.group.codes[local_rank] = returncode
        generation, at = self.group.generation, self.now
        self.events.append(lambda: self.supervisor.worker_exited(generation, local_rank, at))

    def stop_was(self, stop: StopAt | None) -> None:
        generation = self.group.generation
        self.events.append(lambda: self.supervisor.stop_read(generation, stop))
