"""The main loop over a real participant and a real kv, with everything else replaced: no process, thread or port.

Time is virtual: where the loop would wait for an event, the clock goes on to the instant at which it would wake.
"""

from __future__ import annotations

import errno
import queue
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.agent.common.events import Event, Signalled, ThreadFailed
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.common.ports import OfferedPort, PortError, PortLacking
from elastic_agent.agent.configuration.config import CheckMode
from elastic_agent.agent.configuration.stopping import LAST_SAVE_S, LEAST_SAVE_S, StopConfig, whole_stop_s
from elastic_agent.agent.main.loop import TRIES_AGAIN_S, AgentEnd, Loop
from elastic_agent.agent.rendezvous_io.node_checks import NodeChecks
from elastic_agent.health.checks.runner import CheckRun
from elastic_agent.health.http import Probe
from elastic_agent.rendezvous.coordinator.view import Policy
from elastic_agent.rendezvous.errors import LeaseExpired, StoreError
from elastic_agent.rendezvous.liveness import Peer
from elastic_agent.rendezvous.node.node_actions import Drain, Leave
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.node.session import NodeSnapshot
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Condition,
    Failure,
    Member,
    NodeRecord,
    PeerStatus,
    Result,
    World,
)
from elastic_agent.rendezvous.store.interface import Answer, Grant, LeaseId, Read, Request, Subscription
from elastic_agent.rendezvous.store.kv_state import KvState
from tests.observed import a_node
from tests.policies import PLAIN_POLICY

POLICY = replace(PLAIN_POLICY, last_call_s=0.0)
STOP = StopConfig(grace_s=30.0, failure_grace_s=5.0)
TTL_S = 5.0
MOST_TURNS = 2000


class Events(queue.SimpleQueue[Event]):
    """Never waits: the clock does."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.turns = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        try:
            return super().get_nowait()
        except queue.Empty:
            self.turns += 1
            assert self.turns < MOST_TURNS, "the loop comes to no end"
            assert timeout is not None
            self.scene.now += timeout
            self.scene.between_turns()
            raise


class Training:
    """Workers that start at once, and are gone a turn after they were asked to end."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.group: Any = None
        self.kill_at: float | None = None
        self.started: list[int] = []
        self.stops: list[tuple[float, bool, str | None]] = []
        self.prepared_at = 0.0
        self.lacks_until = 0.0
        """The machine lacks what workers need."""
        self.lacks_to_look_until = 0.0
        """The machine lacks what it takes to see whether stopped workers have left something behind."""
        self.undying = ""
        self.refused: dict[int, str] = {}
        """Saves that the disk has refused, by generation."""
        self.shown: list[Failure] = []

    @property
    def undisturbed(self) -> int:
        return self.group.generation if self.group is not None and not self.group.stopping else 0

    def turn(self, now: float) -> bool:
        self.scene.read()
        if self.group is None or not self.group.stopping or self.undying:
            return False
        if self.scene.now < self.lacks_to_look_until:
            raise OSError(errno.EMFILE, "Too many open files", "/proc")
        generation, self.group = self.group.generation, None
        self.scene.participant.workers_gone(generation)
        self.scene.read()
        return True

    def start(self, world: World, member: Member, listener: object, now: float) -> str:
        assert listener is self.scene.port.listener
        if now < self.lacks_until:
            return "too many open files"
        self.scene.participant.workers_started(world)
        self.started.append(world.generation)
        self.group = SimpleNamespace(generation=world.generation, stopping=False, running=1)
        self.scene.read()
        return ""

    def stop(self, grace_s: float, *, gently: bool, reason: str | None) -> None:
        if self.group is not None:
            self.scene.stopped.append((self.scene.now, grace_s))
            self.stops.append((grace_s, gently, reason))
            self.kill_at = self.scene.now + grace_s
            self.group.stopping = True
        self.scene.read()

    def drain(self, order: Drain) -> bool:
        return self.scene.participant.workers_are(Condition.NOTIFIED, order.generation)

    def show_failure(self, failure: Failure) -> None:
        self.shown.append(failure)

    def prepared(self, world: World, member: Member) -> bool:
        return self.scene.now >= self.prepared_at

    def planned_grace_s(self) -> float:
        return 30.0

    def lost_save(self, generation: int) -> str:
        return self.refused.get(generation, "")

    def stops_at(self, now: float) -> float | None:
        if self.undisturbed:
            return self.scene.participant.good_until(now)
        return self.kill_at

    def unkillable(self) -> str:
        return self.undying

    def wake_at(self) -> tuple[float | None, ...]:
        return ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Store:
    """Answers each request at once, from the kv."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.lease: LeaseId | None = None
        self.away = False

    def ask(self, request: Request) -> None:
        self.scene.read()
        if self.away:
            return
        part = self.scene.participant
        try:
            answer = self._serve(request)
            self.scene.events.put(lambda: part.answered(request, answer, self.scene.now))
        except StoreError as refusal:
            error = refusal
            self.scene.events.put(lambda: part.failed(request, error, self.scene.now))

    def _serve(self, request: Request) -> Answer:
        kv, now = self.scene.kv, self.scene.now
        if isinstance(request, Grant):
            return kv.grant(request.ttl_s, now)
        if isinstance(request, Read):
            return kv.read(request.scopes, now, request.oldest_under)
        return kv.transact(request.compares, request.writes, now)

    def keep(self, lease: LeaseId | None) -> None:
        self.lease = lease
        self.scene.read()

    def follow(self, subscription: Subscription | None) -> None:
        self.scene.read()


class Handing:
    """The memory server and its handover, which takes as long as it is said to."""

    def __init__(self, scene: Scene, takes_s: float) -> None:
        self.scene = scene
        self.takes_s = takes_s
        self.begun: list[tuple[int, float, bool]] = []
        """Generation, for how long, and whether the last step was kept."""
        self.late: list[float] = []
        self.told: list[object] = []

    def new_handover(self) -> Handing:
        return self

    def begin(self, world: World, deadline: float, done: Callable[[], object], *, kept: bool) -> None:
        self.begun.append((world.generation, deadline - self.scene.now, kept))
        self.scene.plan[self.scene.now + self.takes_s] = done

    def run(self, world: World, deadline: float, *, kept: bool) -> None:
        self.late.append(deadline - self.scene.now)

    def hurry(self, deadline: float) -> None:
        self.told.append(deadline)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.told.append(name)


@dataclass
class Scene:
    """One agent's loop."""

    now: float = 100.0
    policy: Policy = POLICY
    kv: KvState = field(default_factory=KvState)
    stop: StopConfig = STOP
    check: CheckMode = "off"
    plan: dict[float, Callable[[], object]] = field(default_factory=dict)
    """What happens at which instant."""

    hands_over_in_s: float | None = None
    """None: it has nothing in memory."""

    def __post_init__(self) -> None:
        self.handing = Handing(self, self.hands_over_in_s) if self.hands_over_in_s is not None else None
        memory = 7000 if self.handing is not None else 0
        me = NodeRecord("a", "a-1", "host-a", 1, 1, limits=self.policy.limits, memory=memory)
        self.events = Events(self)
        self.checks = NodeChecks(self.check, self.new_run, self.events.put)
        self.participant = Participant(
            me,
            self.policy,
            lease_ttl_s=TTL_S,
            rng=random.Random(1),
            now=self.now,
            held_back=self.checks.held_back,
        )
        if self.handing is not None:  # nothing is delivered here of what becomes of the world
            self.participant.leaves_memory = lambda generation: True  # type: ignore[method-assign]
        self.training = Training(self)
        self.store = Store(self)
        self.ports = iter(range(2, 100))
        self.gpus = SimpleNamespace(waiting=False, turn=lambda now: None, workers_gone=lambda now: None)
        self.said: list[str] = []
        self.due: list[float | None] = []
        """What the heartbeat was told: when the loop is to do the next thing to end its workers."""
        self.saves_end_at = 0.0
        self.stopped: list[tuple[float, float]] = []
        """When the workers were to stop, and with which grace."""
        self.finished: list[float] = []
        self.lost = ""
        """Why the disk writer has not brought the last save to disk."""
        self.port: Any = OfferedPort(self.listener(), self.listener)
        self.state = a_node(lease_ttl_s=TTL_S, clock=lambda: self.now)
        agent: Any = SimpleNamespace(
            config=SimpleNamespace(stop=self.stop),
            participant=self.participant,
            events=self.events,
            clock=lambda: self.now,
            link=self.store,
            peers=SimpleNamespace(ask=self.probe),
            gpu_memory=self.gpus,
            disk_writer=SimpleNamespace(finish=self.finish, departing=False),
            checks=self.checks,
            observer=self.observer(),
            state=self.state,
            manager=SimpleNamespace(turn=self.said.append, stopping=self.said.append),
            heartbeat=SimpleNamespace(turned=self.due.append),
            memory_server=self.handing,
        )
        self.loop = Loop(agent, self.training, self.port, lambda: self.now)  # type: ignore[arg-type]

    def finish(self, within_s: float) -> str:
        self.finished.append(within_s)
        return self.lost

    def observer(self) -> object:
        self.waits: list[str] = []

        def update(snapshot: NodeSnapshot, group: object, now: float) -> None:
            self.waits.append(snapshot.waiting_for)
            self.state.update(snapshot, None, "")

        return SimpleNamespace(
            compare=lambda participant: None,
            update=update,
            status=lambda snapshot, group: "",
            leaving=lambda asked_by: None,
            noticed=lambda *_: None,
            notice_withdrawn=lambda: None,
        )

    def new_run(self, of_excluded: bool) -> CheckRun:
        pytest.fail("nothing is to be checked")

    def listener(self) -> Any:
        number = next(self.ports)
        return SimpleNamespace(close=lambda: None, getsockname=lambda: ("host-a", number))

    def probe(self, peer: Peer) -> None:
        pytest.fail("nobody is there to be asked")

    def between_turns(self) -> None:
        self.read()
        if self.store.lease is not None:
            try:
                self.kv.keep_alive(self.store.lease, self.now)
            except LeaseExpired:
                self.participant.lease_gone(self.store.lease)
            else:
                self.participant.lease_confirmed(self.store.lease, self.now)
        for at in [at for at in self.plan if at <= self.now]:
            self.plan.pop(at)()

    def read(self) -> PeerStatus:
        """As the HTTP server's threads do, at any moment of a turn."""
        self.state.readiness()
        return PeerStatus.from_json(self.state.introduction())

    def at(self, after_s: float, event: Event) -> None:
        self.plan[self.now + after_s] = lambda: self.events.put(event)

    def world(self) -> World:
        (entry,) = self.kv.read((WORLD_KEY,), self.now).entries
        return World.from_json(entry.value)


def test_an_agent_trains_leaves_when_asked_and_finishes_its_saves() -> None:
    scene = Scene()
    scene.at(10.0, Signalled(signal.SIGTERM))
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")
    assert scene.training.started == [1]
    [(grace_s, gently, _reason)] = scene.training.stops
    assert (grace_s, gently) == (30.0, True)
    assert len(scene.finished) == 1
    assert "leaving the job, as SIGTERM asks" in scene.said


@pytest.mark.parametrize(("takes_s", "left_s"), [(0.5, LAST_SAVE_S), (25.0, 5.0), (29.9, LEAST_SAVE_S)])
def test_what_is_in_memory_is_handed_over_before_the_last_saves_and_in_their_time(
    takes_s: float, left_s: float
) -> None:
    scene = Scene(hands_over_in_s=takes_s)
    scene.at(10.0, Signalled(signal.SIGTERM))
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")
    assert scene.handing is not None
    [(generation, within_s, kept)] = scene.handing.begun
    assert (generation, within_s, kept) == (1, STOP.grace_s, False)
    [finished_s] = scene.finished
    assert finished_s == pytest.approx(left_s, abs=0.2)
    assert scene.handing.late == [], "once is enough"
    assert scene.handing.told[-1] == "report_lost"


def test_a_second_signal_cuts_a_handover_short() -> None:
    scene = Scene(hands_over_in_s=20.0)
    scene.at(10.0, Signalled(signal.SIGINT))
    scene.at(15.0, Signalled(signal.SIGINT))
    assert scene.loop.run().code is ExitCode.STOPPED_BY_SIGINT
    assert scene.handing is not None
    assert "cut" in scene.handing.told


def test_a_notice_leaves_a_handover_no_more_time_than_there_is() -> None:
    scene = Scene(hands_over_in_s=3.0)
    scene.at(10.0, Signalled(signal.SIGTERM))
    ends_at = scene.now + 30.0
    scene.at(15.0, lambda: scene.loop.noticed("the cloud ends it", ends_at))
    scene.loop.run()
    assert scene.handing is not None
    assert scene.participant.leave_times.saved_by in scene.handing.told


def test_a_second_signal_cuts_the_grace_short() -> None:
    scene = Scene()
    scene.training.undying = "worker 0 waits for a disk"
    scene.training.unkillable = lambda: ""  # type: ignore[method-assign]
    scene.at(10.0, Signalled(signal.SIGINT))
    scene.at(20.0, Signalled(signal.SIGINT))
    scene.plan[scene.now + 30.0] = lambda: setattr(scene.training, "undying", "")
    assert scene.loop.run().code is ExitCode.STOPPED_BY_SIGINT
    assert (0.0, False, "a second signal") in scene.training.stops


def test_under_slurm_sigterm_may_be_repeated() -> None:
    """A preemption sends it at the beginning and at the end of its grace."""
    scene = Scene(stop=StopConfig(requeues=True))
    scene.training.undying = "worker 0 writes its last state"
    scene.training.unkillable = lambda: ""  # type: ignore[method-assign]
    for after_s in (10.0, 20.0, 21.0):
        scene.at(after_s, Signalled(signal.SIGTERM))
    scene.plan[scene.now + 30.0] = lambda: setattr(scene.training, "undying", "")
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")
    assert "a second signal" not in [reason for _, _, reason in scene.training.stops]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_warning_may_be_repeated(number: signal.Signals) -> None:
    scene = Scene()
    for after_s in (10.0, 10.5, 11.0):
        scene.at(after_s, Signalled(number))
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, f"stopped by {number.name}")
    assert all(grace_s for grace_s, _, _ in scene.training.stops)


@pytest.mark.parametrize(
    ("number", "code", "asked_by"),
    [
        (signal.SIGUSR1, ExitCode.LEFT_IN_TIME, "SIGUSR1"),
        (signal.SIGTERM, ExitCode.STOPPED_BY_SIGTERM, "SIGTERM"),
        (signal.SIGINT, ExitCode.STOPPED_BY_SIGINT, "SIGINT"),
    ],
)
def test_under_slurm_a_warnings_exit_code_asks_for_another_start(
    number: signal.Signals, code: ExitCode, asked_by: str
) -> None:
    scene = Scene(stop=StopConfig(requeues=True))
    scene.at(10.0, Signalled(number))
    assert scene.loop.run() == AgentEnd(code, f"stopped by {asked_by}")


def noticed(scene: Scene, left_s: float, after_s: float = 10.0) -> None:
    ends_at = scene.now + after_s + left_s
    scene.at(after_s, lambda: scene.loop.noticed("the cloud", ends_at))


def test_a_notice_is_a_leave_with_the_exit_code_of_a_warning() -> None:
    for requeues, code in ((False, ExitCode.STOPPED_BY_SIGTERM), (True, ExitCode.LEFT_IN_TIME)):
        scene = Scene(stop=StopConfig(requeues=requeues))
        noticed(scene, 30.0)
        assert scene.loop.run() == AgentEnd(code, "stopped by a notice: the cloud")
        assert scene.training.stops
        assert len(scene.finished) == 1


@pytest.mark.parametrize("left_s", [2.0, 10.0, 30.0, 100.0])
def test_a_notice_bounds_each_part_of_the_leave(left_s: float) -> None:
    """Workers that come to no common last step, and a disk that takes all the time it is given."""
    scene = Scene()
    began = scene.now + 10.0
    noticed(scene, left_s)
    scene.loop.run()
    stopped_at, grace_s = scene.stopped[0]
    assert stopped_at <= began + min(left_s * 2 / 3, 3.0) + 0.01
    assert stopped_at + grace_s <= began + left_s * 5 / 6 + 0.01
    [within_s] = scene.finished
    assert scene.now + within_s <= began + left_s - min(1.0, left_s / 10) + 0.06


def test_a_notice_long_before_is_obeyed_two_minutes_before() -> None:
    scene = Scene()
    begun = scene.now + 10.0
    noticed(scene, 150.0)
    assert scene.loop.run().code is ExitCode.STOPPED_BY_SIGTERM
    assert begun + 30.0 <= scene.now < begun + 40.0


def test_a_notice_that_is_withdrawn_in_time_is_none() -> None:
    scene = Scene()
    noticed(scene, 150.0)
    scene.at(30.0, lambda: scene.loop.noticed("", None))
    scene.at(60.0, Signalled(signal.SIGTERM))
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")
    assert scene.now >= 160.0


def test_a_notice_hurries_a_leave_that_is_under_way() -> None:
    scene = Scene()
    scene.training.undying = "a long save"
    scene.training.unkillable = lambda: ""  # type: ignore[method-assign]
    scene.at(10.0, Signalled(signal.SIGTERM))
    noticed(scene, 6.0, after_s=15.0)
    scene.plan[scene.now + 25.0] = lambda: setattr(scene.training, "undying", "")
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")
    assert min(at + grace_s for at, grace_s in scene.stopped) <= 115.0 + 5.0
    assert scene.finished == [0.0]


def killed_at(scene: Scene) -> float:
    """When workers are killed that ignore SIGTERM and would have ten minutes, of the agent's leave."""
    scene.training.undying = "worker 0 is at work"
    scene.training.unkillable = lambda: ""  # type: ignore[method-assign]
    scene.training.planned_grace_s = lambda: 600.0  # type: ignore[method-assign]
    scene.plan[scene.now + 200.0] = lambda: setattr(scene.training, "undying", "")
    scene.loop.run()
    return min(at + grace_s for at, grace_s in scene.stopped)


@pytest.mark.parametrize("by", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("noticed_first", [True, False])
def test_each_way_to_leave_minds_a_notice_and_the_end_of_the_job(by: str, noticed_first: bool) -> None:
    """Both are known before they would make the node leave."""
    scene = Scene(stop=replace(STOP, job_ends_at=100 + (160 if noticed_first else 140)))
    noticed(scene, 140.0 if noticed_first else 160.0, after_s=0.0)
    scene.at(10.0, Signalled(signal.Signals[by]))
    assert killed_at(scene) == pytest.approx(110.0 + 130.0 * 5 / 6, abs=1.0)


def test_a_notice_does_not_prolong_the_time_until_the_end_of_the_job() -> None:
    scene = Scene(stop=replace(STOP, job_ends_at=130))
    noticed(scene, 120.0, after_s=16.0)
    assert killed_at(scene) == pytest.approx(115.0 + 15.0 * 5 / 6)


def test_a_notice_that_is_moved_moves_a_leave_that_is_under_way() -> None:
    scene = Scene()
    noticed(scene, 30.0)
    noticed(scene, 60.0, after_s=11.0)
    assert killed_at(scene) == pytest.approx(111.0 + 60.0 * 5 / 6)


def test_a_node_leaves_before_the_end_of_its_job() -> None:
    for requeues, code in ((False, ExitCode.STOPPED_BY_SIGTERM), (True, ExitCode.LEFT_IN_TIME)):
        scene = Scene(stop=replace(STOP, requeues=requeues, job_ends_at=300))
        assert scene.loop.run() == AgentEnd(code, "stopped by SLURM_JOB_END_TIME")
        assert scene.stopped[0][0] == pytest.approx(300.0 - whole_stop_s(STOP.grace_s), abs=3.1)


def test_an_end_of_the_job_that_is_over_is_not_its_end() -> None:
    """Its time limit was changed after it had started."""
    scene = Scene(stop=replace(STOP, job_ends_at=95))
    scene.at(60.0, Signalled(signal.SIGTERM))
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")
    assert scene.stopped[0] == (pytest.approx(160.0, abs=3.1), STOP.grace_s)


def test_a_success_whose_last_save_is_not_on_disk_is_none() -> None:
    scene = Scene()
    scene.lost = "step 10 is NOT on disk in /runs/x: No space left on device"
    done = Leave(Result.SUCCEEDED, "every worker ended with success")
    scene.plan[110.0] = lambda: scene.loop.carry_out(done, scene.now)
    assert scene.loop.run() == AgentEnd(
        ExitCode.NOT_ON_DISK, f"every worker ended with success, but {scene.lost}"
    )


@pytest.mark.parametrize("generation", [1, 2])
def test_a_success_whose_last_save_was_refused_is_none(generation: int) -> None:
    """Unless it was another generation's: the present one has saved, or had nothing to save."""
    scene = Scene()
    scene.training.refused[generation] = "step 10 is NOT on disk in /runs/x: its save was refused"
    done = Leave(Result.SUCCEEDED, "every worker ended with success")
    scene.plan[110.0] = lambda: scene.loop.carry_out(done, scene.now)
    reason = f"{done.reason}, but step 10 is NOT on disk in /runs/x: its save was refused"
    lost = AgentEnd(ExitCode.NOT_ON_DISK, reason)
    assert scene.loop.run() == (lost if generation == 1 else AgentEnd(ExitCode.SUCCESS, done.reason))


def test_a_leave_whose_last_save_is_not_on_disk_keeps_its_exit_code() -> None:
    scene = Scene()
    scene.lost = "step 10 is NOT on disk in /runs/x: No space left on device"
    scene.at(10.0, Signalled(signal.SIGTERM))
    assert scene.loop.run() == AgentEnd(ExitCode.STOPPED_BY_SIGTERM, "stopped by SIGTERM")


def test_an_agent_that_can_offer_no_port_ends() -> None:
    """Its workers have ended, and the next generation would need a fresh port."""
    scene = Scene()

    def refuse() -> None:
        raise PortError("no port is left")

    def fail() -> None:
        scene.participant.workers_failed(Failure(1, "crash", "crashed"))
        scene.training.stop(0.0, gently=False, reason="a worker failed")

    scene.port._bind = refuse
    scene.plan[scene.now + 10.0] = fail
    assert scene.loop.run() == AgentEnd(ExitCode.NOT_HERE, "no port is left")


@pytest.mark.parametrize("lasts_s", [3.0, 30.0])
def test_what_the_machine_lacks_for_workers_ends_the_agent_only_if_it_lasts(lasts_s: float) -> None:
    scene = Scene()
    begun_at = scene.now
    scene.training.lacks_until = begun_at + lasts_s
    scene.at(60.0, Signalled(signal.SIGTERM))
    ending = scene.loop.run()
    assert scene.world().restarts.failures == 0
    if lasts_s < TRIES_AGAIN_S:
        assert scene.training.started == [1]
        assert ending.code is ExitCode.STOPPED_BY_SIGTERM
        assert "too many open files" in scene.waits
    else:
        assert scene.training.started == []
        assert ending == AgentEnd(ExitCode.NOT_HERE, "too many open files")
        assert scene.now - begun_at < 2 * TRIES_AGAIN_S


@pytest.mark.parametrize("lasts_s", [3.0, 30.0])
def test_what_the_machine_lacks_for_a_port_ends_the_agent_only_if_it_lasts(lasts_s: float) -> None:
    scene = Scene()
    ends_at = scene.now + 10.0 + lasts_s

    def lack() -> Any:
        if scene.now < ends_at:
            raise PortLacking("too many open files")
        return scene.listener()

    def fail() -> None:
        scene.participant.workers_failed(Failure(1, "crash", "crashed"))
        scene.training.stop(0.0, gently=False, reason="a worker failed")

    scene.port._bind = lack
    scene.plan[scene.now + 10.0] = fail
    scene.at(60.0, Signalled(signal.SIGTERM))
    assert (scene.loop.run().code is ExitCode.NOT_HERE) == (lasts_s > TRIES_AGAIN_S)


@pytest.mark.parametrize("lasts_s", [3.0, 30.0])
def test_what_the_machine_lacks_to_see_workers_gone_ends_the_agent_only_if_it_lasts(lasts_s: float) -> None:
    scene = Scene()
    fails_at = scene.now + 10.0
    scene.training.lacks_to_look_until = fails_at + lasts_s

    def fail() -> None:
        scene.participant.workers_failed(Failure(1, "crash", "crashed"))
        scene.training.stop(0.0, gently=False, reason="a worker failed")

    scene.plan[fails_at] = fail
    scene.at(60.0, Signalled(signal.SIGTERM))
    if lasts_s < TRIES_AGAIN_S:
        assert scene.loop.run().code is ExitCode.STOPPED_BY_SIGTERM
        assert scene.training.group is None
    else:
        with pytest.raises(OSError, match="Too many open files"):  # which ends the agent as a lack does
            scene.loop.run()
        assert TRIES_AGAIN_S <= scene.now - fails_at < 2 * TRIES_AGAIN_S


def test_workers_that_no_signal_ends_end_the_agent() -> None:
    scene = Scene()
    scene.plan[scene.now + 10.0] = lambda: setattr(scene.training, "undying", "worker 0 waits for a disk")
    assert scene.loop.run() == AgentEnd(ExitCode.UNKILLABLE, "worker 0 waits for a disk")


def test_a_thread_that_fails_ends_the_workers_and_the_agent() -> None:
    scene = Scene()
    scene.at(10.0, ThreadFailed("worker-exits", "RuntimeError()"))
    ending = scene.loop.run()
    assert ending.code is ExitCode.AGENT_FAILED
    assert scene.training.stops == [(5.0, False, ending.reason)]


def test_a_thread_that_fails_while_saves_are_finished_is_not_forgotten() -> None:
    scene = Scene()

    def finish(within_s: float) -> str:
        scene.events.put(ThreadFailed("store-lease", "RuntimeError()"))
        return ""

    scene.loop._agent.disk_writer.finish = finish  # type: ignore[method-assign]
    scene.at(10.0, Signalled(signal.SIGTERM))
    assert scene.loop.run().code is ExitCode.AGENT_FAILED


def test_the_workers_of_a_node_whose_lease_ends_are_stopped_and_it_joins_anew() -> None:
    scene = Scene()

    scene.plan[scene.now + 10.0] = lambda: scene.participant.lease_gone(scene.store.lease)
    scene.at(20.0, Signalled(signal.SIGTERM))
    scene.loop.run()
    assert scene.training.stops[0][:2] == (5.0, False)
    assert scene.participant.incarnation == "a-1.1"


def test_a_turn_that_stops_the_workers_counts_before_the_loop_waits() -> None:
    """The workers take a while to end, and the loop waits for that: it does not stand still."""
    scene = Scene()
    told: list[tuple[float | None, float | None]] = []

    def lose() -> None:
        scene.training.undying = "worker 0 writes its traceback"
        scene.training.unkillable = lambda: ""  # type: ignore[method-assign]
        scene.participant.lease_gone(scene.store.lease)
        scene.plan[scene.now + 0.5] = look

    def look() -> None:
        told.append((scene.due[-1], scene.training.kill_at))
        scene.training.undying = ""

    scene.plan[scene.now + 10.0] = lose
    scene.at(20.0, Signalled(signal.SIGTERM))
    scene.loop.run()
    [(due_at, kill_at)] = told
    assert kill_at is not None
    assert due_at == kill_at


def test_other_threads_read_whole_turns_and_nothing_in_between() -> None:
    """The lease goes between two turns. A reader that asked the participant itself would see half of that."""
    scene = Scene()
    seen: list[tuple[PeerStatus, PeerStatus]] = []

    def lose() -> None:
        before = scene.read()
        scene.participant.lease_gone(scene.store.lease)
        seen.append((before, scene.read()))

    scene.plan[scene.now + 10.0] = lose
    scene.at(20.0, Signalled(signal.SIGTERM))
    scene.loop.run()
    [(before, after)] = seen
    assert before == after
    assert before.generation == 1
    assert before.confirmed_s is not None
    assert scene.participant.snapshot.incarnation == "a-1.1"


def test_readiness_names_what_is_waited_for() -> None:
    scene = Scene()
    told = []

    def look() -> None:
        told.append(scene.state.readiness())

    def free() -> None:
        look()
        scene.gpus.waiting = False

    scene.gpus.waiting = True
    scene.plan = {scene.now + 10.0: free, scene.now + 20.0: look}
    scene.at(30.0, Signalled(signal.SIGTERM))
    assert not scene.state.readiness().ok
    scene.loop.run()
    assert [(probe.ok, probe.detail) for probe in told] == [
        (False, "waiting: the killed workers' GPU memory to be free"),
        (True, "running generation 1"),
    ]


def test_a_start_that_waits_for_imports_says_so() -> None:
    scene = Scene()
    scene.training.prepared_at = scene.now + 5.0
    ready = []
    for after_s in (3.0, 8.0):
        scene.plan[scene.now + after_s] = lambda: ready.append(scene.state.readiness())
    scene.at(10.0, Signalled(signal.SIGTERM))
    scene.loop.run()
    imports = "what all workers import to be loaded once for them (--preload)"
    assert [(probe.ok, probe.detail) for probe in ready] == [
        (False, f"waiting: {imports}"),
        (True, "running generation 1"),
    ]
    assert scene.waits.count(imports) >= 4
    assert scene.training.started == [1]
    assert imports not in scene.waits[-3:]


@pytest.mark.parametrize(
    ("incarnation", "lease_left_s", "answer"),
    [
        ("b-1", 1.0, Probe(True, "standing by: generation 1 is running")),
        ("b-1", 0.0, Probe(False, "waiting: the others")),
        ("a-1", 1.0, Probe(False, "waiting: the others")),
    ],
)
def test_only_a_node_outside_the_running_world_stands_by(
    incarnation: str, lease_left_s: float, answer: Probe
) -> None:
    """A member without workers does not."""
    scene = Scene()
    seen = []
    scene.plan[scene.now + 5.0] = lambda: seen.append(scene.participant.snapshot)
    scene.at(10.0, Signalled(signal.SIGTERM))
    scene.loop.run()
    good_until = scene.now + lease_left_s
    scene.state.snapshot = replace(
        seen[0], incarnation=incarnation, good_until=good_until, undisturbed=0, waiting_for="the others"
    )
    assert scene.state.readiness() == answer
