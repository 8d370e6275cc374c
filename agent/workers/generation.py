"""What is known of the workers of one generation on this node. Made when they start, dropped when the next ones do.

There are no effects but those on its own workers: what the other nodes or people are to know is up to the `Supervisor`.
Instants are seconds on the monotonic clock.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...health.diagnosis import STILL_S
from ...health.hang_report import HangProbe, HangReport, RankActivity, RankReport, Urgency
from ...rendezvous.coordinator.restarts import STABLE_AFTER_S
from ...rendezvous.records import Failure, World
from ...rendezvous.text import counted, shortened
from ...worker.wire.shared_progress import Reading
from ..configuration.config import Config
from ..machine.nvml import GpuHealth
from ..output.worker_logs import WorkerLogs
from ..rendezvous_io.worker_answers import WorkerAnswers
from ..rendezvous_io.worker_links import PaceWatch, WorkerLinks, WorkerPages
from .evidence import Evidence, EvidenceKeeper
from .hang_detector import ActivityReader, Durations, HangDetector, Stall, ends_alone
from .processes.guard import Guard, Subreaper
from .processes.proc import process_status
from .processes.spares import Spares, WorkerStore
from .processes.workers import WorkerGroup
from .rank_activity import StackFile, Target
from .stopping import DrainState, JustInTimeState

log = logging.getLogger(__name__)

LISTEN_PAUSE_S = 0.02
"""Between two looks whether all workers have finished a step, while a planned change waits for that."""


@dataclass(frozen=True, slots=True)
class Processes:
    """What starts the processes of this node, reads what they print, answers them, and misses none of them."""

    new_group: Callable[[int, Callable[[int, int, float], object]], WorkerGroup]
    """The workers of this generation, which `start` starts, and what is called when one of them has ended."""
    guard: Guard
    subreaper: Subreaper
    spares: Spares
    worker_store: WorkerStore
    logs: WorkerLogs
    links: WorkerLinks
    answers: WorkerAnswers
    evidence: EvidenceKeeper
    activity: ActivityReader
    gpus: GpuHealth


@dataclass(slots=True)
class Crash:
    """A worker that has failed. It is examined when its last lines have been read and NVML has answered, or when that
    takes too long."""

    local_rank: int
    returncode: int
    at: float
    due_at: float
    asked: bool = False
    """It was asked to end, so it has not failed; but it may have begun to before."""
    read: bool = False
    """Its last lines are here."""


@dataclass(frozen=True, slots=True)
class HowToStop:
    """How the workers are asked to end; see `WorkerGroup.stop`."""

    kill_at: float
    """Those that are left then are killed."""
    gently: bool
    asking: signal.Signals = signal.SIGTERM
    asked_at: float = 0.0


@dataclass(slots=True)
class Generation:
    """One `WorkerGroup`, with all that its end, its progress and its failures depend on."""

    config: Config
    world: World
    group: WorkerGroup
    started_at: float
    learned: Durations
    """Of steps, over all generations of the job here."""
    pages: WorkerPages = field(init=False)
    stacks: dict[int, StackFile] = field(init=False, default_factory=dict)
    """Where the workers write their stacks, by local rank."""
    read: Mapping[int, Reading] = field(init=False, default_factory=dict)
    """What the pages held at the last look, by local rank."""
    paces: PaceWatch = field(init=False)
    hang: HangDetector = field(init=False)
    stall: Stall | None = field(init=False, default=None)
    """The stall that the others were last told of."""
    last_limit_at: float = field(init=False, default=0.0)
    """When the present stall passed its last limit."""
    inquired: int = field(init=False, default=0)
    """The newest inquiry that this node has begun to answer."""
    heard: int = field(init=False, default=0)
    """The newest inquiry whose finding the log has."""
    hung: bool = field(init=False, default=False)
    """The workers are ended because they did not move."""
    just_in_time: JustInTimeState = field(init=False)
    drain: DrainState = field(init=False)
    postponed: HowToStop | None = field(init=False, default=None)
    """How the workers are stopped once their last step has been kept."""
    crashes: deque[Crash] = field(init=False, default_factory=deque)
    """That are not examined yet, the first first."""
    failed: list[Failure] = field(init=False, default_factory=list)
    """The workers that have failed, as they were examined."""
    told: Failure | None = field(init=False, default=None)
    """The first failure that this node has told the others."""
    last_look: Evidence | None = field(init=False, default=None)
    """At what the workers did before they were asked to end."""
    over: bool = field(init=False, default=False)
    """Nothing of it is left on this node."""

    def __post_init__(self) -> None:
        config, number = self.config, self.number
        self.pages = WorkerPages(number, all_signalled=config.stop.requeues)
        self.paces = PaceWatch(self.pages, number, len(self.world.members))
        self.hang = HangDetector(config.timeouts.hang, self.learned, self.started_at)
        self.just_in_time = JustInTimeState(number, config.stop.just_in_time_grace_s, self.pages.newest_step)
        self.drain = DrainState(number)

    @property
    def number(self) -> int:
        return self.world.generation

    @property
    def stopping(self) -> bool:
        return self.group.stopping

    @property
    def running(self) -> list[int]:
        """Local ranks."""
        return [local_rank for local_rank in self.group.ranks if local_rank not in self.group.returncodes]

    def log_start(self, took_s: float) -> None:
        cold = self.group.cold
        warm = len(self.group.ranks) - len(cold)
        if warm:
            log.info("generation %d: %s from spares in %.3f s", self.number, counted(warm, "worker"), took_s)
        if cold and self.config.preload and self.config.command.kind != "binary":
            start = "starts" if len(cold) == 1 else "start"
            reasons = "; ".join(dict.fromkeys(cold.values()))
            log.info(
                "generation %d: %s %s cold: %s", self.number, counted(len(cold), "worker"), start, reasons
            )

    def log_end(self) -> None:
        if self.succeeded:
            ended = counted(len(self.group.ranks), "worker")
            log.info("generation %d: %s here ended with success", self.number, ended)
        elif self.drained:
            state = "the state after their last step is kept in memory"
            if not self.kept:
                state = "no Checkpointer keeps the state after their last step here"
            log.info("generation %d: workers stopped; %s", self.number, state)

    # ---------------------------------------------------------------- what the workers do

    def look(self, now: float) -> list[int] | None:
        """At the workers' pages. Before anything else that a worker does is judged: what they show came before it.

        Returns the steps that were finished since, in their order; None: nothing is new.
        """
        before, self.read = self.read, self.pages.read()
        if self.read == before:
            return None
        stepped = sorted(
            (reading.stepped_at, reading.step, local_rank)
            for local_rank, reading in self.read.items()
            if reading.stepped_at is not None
            and reading.step is not None
            and (local_rank not in before or before[local_rank].stepped_at != reading.stepped_at)
        )
        for at, step, local_rank in stepped:
            self.hang.stepped(local_rank, step, at)
        polled = [reading.polled_at for reading in self.read.values() if reading.polled_at is not None]
        saving = [local_rank for local_rank, reading in self.read.items() if reading.saving]
        self.hang.marked(saving, max(polled, default=None))
        return [step for _, step, _ in stepped]

    @property
    def loads(self) -> int | None:
        """The step of the state that the workers load; None: none, as far as is known."""
        chosen = [reading.chosen_step for reading in self.read.values() if reading.chosen_step is not None]
        return max(chosen, default=None)

    def stalls(self, now: float) -> Stall | None:
        """The stall of the workers that run here; None without one."""
        stall = self.hang.stall(self.running, now)
        was_last = self.stall is not None and self.stall.urgency is Urgency.LAST
        if stall is not None and stall.urgency is Urgency.LAST and not was_last:
            self.last_limit_at = now
        return stall

    def ends_alone(self, stall: Stall, inquiry: HangProbe | None, now: float) -> bool:
        still = [self.hang.still_s(local_rank, now) for local_rank in self.running]
        all_still = all(one is not None and one >= STILL_S for one in still)
        return ends_alone(
            stall, self.config.timeouts.hang, inquiry, self.last_limit_at, now, all_still=all_still
        )

    def targets(self, now: float) -> list[Target]:
        """The workers that run, for a look."""
        ranks = self.group.ranks
        return [
            Target(
                ranks[local_rank],
                local_rank,
                self.group.pid(local_rank),
                self.stacks.get(local_rank),
                self.read[local_rank].step if local_rank in self.read else None,
                self._still_s(local_rank, now),
            )
            for local_rank in self.running
        ]

    def _still_s(self, local_rank: int, now: float) -> float | None:
        """As it is told to others. Below a limit of the user's own, that a worker was active lately shows nothing."""
        still_s = self.hang.still_s(local_rank, now)
        own = isinstance(self.config.timeouts.hang, float)
        return None if own and still_s is not None and still_s < STILL_S else still_s

    def looked_at(self, report: HangReport) -> HangReport:
        """The report, corrected for workers that have finished a step since they were looked at."""
        newest = {self.group.ranks[local_rank]: reading.step for local_rank, reading in self.read.items()}
        ranks = []
        for state in report.ranks:
            step = newest.get(state.rank)
            if step is not None and (state.step is None or step > state.step):
                state = RankReport(state.rank, RankActivity.WORKS, step, 0.0)
            ranks.append(state)
        return replace(report, ranks=tuple(ranks))

    # ---------------------------------------------------------------- how it ends

    def stop(self, how: HowToStop, now: float) -> None:
        if self.just_in_time.under_way:
            self.group.expect_end()
            if self.postponed is None or how.kill_at < self.postponed.kill_at:
                self.postponed = how
        else:
            at_once = self.pages.leave_sigterm() if how.asking is signal.SIGTERM else ()
            grace_s = max(0.0, how.kill_at - now)
            self.group.stop(grace_s, gently=how.gently, asking=how.asking, at_once=at_once)

    def finish(self) -> None:
        """Nothing of it is left here."""
        self.pages.close()
        self.stacks.clear()
        self.over = True

    def stop_if_kept(self, now: float) -> None:
        """What was postponed is due when the last step is in memory, or will not be."""
        if self.postponed is not None and not self.just_in_time.under_way:
            how, self.postponed = self.postponed, None
            if not how.gently:  # a failure's grace begins now; a planned one has gone on
                how = replace(how, kill_at=now + how.kill_at - how.asked_at)
            self.stop(how, now)

    @property
    def drained(self) -> bool:
        """All workers here have ended as a planned change asks, or wait for those that have."""
        return self.drain.complete(self.group.returncodes)

    @property
    def kept(self) -> bool:
        """This node keeps the state after the last step of its workers, which are `drained`."""
        return self.drain.keeps_all(self.group.returncodes)

    @property
    def succeeded(self) -> bool:
        """A worker that was asked to end may end as if all were done."""
        return self.group.succeeded and not self.stopping and not self.drain.finished

    def gone(self) -> bool:
        """Drive the end on. Whether nothing is left, and every failure is examined."""
        group = self.group
        ended = self.stopping or group.succeeded or (not group.running and self.drained)
        return ended and group.gone() and not self.crashes

    def unkillable(self) -> str:
        """Why this node can never be done with it: what does not die, and where it stands; empty if it can."""
        group, bound_s = self.group, self.config.stop.kill_timeout_s
        if group.kill_elapsed_s() < bound_s:
            return ""
        unkillable = group.unkillable()
        if group.running and not unkillable:
            return ""  # they have ended, and the event is still to come: this process stood still itself
        stats = filter(None, (process_status(f"/proc/{pid}") for pid in sorted(unkillable)))
        where = shortened(stats, "; ") or "nothing is known of what is left"
        return (
            f"generation {self.number} does not end on this node, {bound_s:g} s after SIGKILL: "
            f"{where}. The others go on without this node; whatever device or disk these wait for must be repaired, "
            "or the machine started anew"
        )

    @property
    def all_listen(self) -> bool:
        """Every worker here has looked at its flag at the end of a step."""
        stepped = [reading for reading in self.read.values() if reading.step is not None]
        return len(stepped) == len(self.group.ranks)

    def wake_at(self, now: float, *, listens: bool) -> tuple[float | None, ...]:
        """When there may be something to do without any event. `listens`: all workers do, and the others know it."""
        always = self.crashes[0].due_at if self.crashes else None, self.just_in_time.wake_at()
        if self.stopping:
            return (*always, self.group.wake_at())
        in_drain: tuple[float | None, ...] = ()
        if self.drain.under_way:
            in_drain = self.drain.look_at(), None if listens else now + LISTEN_PAUSE_S
        due_at = self.hang.due_at(self.running, now)
        return (*always, self.started_at + STABLE_AFTER_S, due_at, *in_drain)


def log_bad_state(world: World) -> None:
    """Of the terms under which the workers of `world` start."""
    bad = world.restarts.bad_state
    if bad is not None:
        log.warning(
            "generation %d does not load the state of step %d, or what came of it: %d times in a row workers that "
            "had loaded it failed in the same way before they came to another step (%s). It goes on from an older "
            "one, if there is any",
            *(world.generation, bad.step, world.restarts.at_load, world.cause.detail),
        )


WARN_AFTER_S = 2.0
"""The kernel has sent two SYNs by then; and workers here know by then of those elsewhere that have ended."""


def master_away(world: World, node: str) -> str:
    """Why workers on node `node` do not reach the port where those of `world` may meet; empty where they do.

    torch asks for minutes, in silence, and then names an address and nothing else. The port listens before the world
    names it: one that refuses belongs to workers that have ended, or a packet filter answers for it. The store there
    sees a client that sends nothing.
    """
    to = world.master
    try:
        socket.create_connection((to.address, to.port), WARN_AFTER_S).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            time.sleep(WARN_AFTER_S)
        found = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        return (
            f"generation {world.generation}: node {node} does not reach {to} of node {world.members[0].node}, where "
            f"the workers meet: {found}. Harmless for scripts that do not use MASTER_PORT. If a packet filter stands "
            "between the nodes, open that port (--port-range bounds which it is), and those that gloo and NCCL choose; "
            "otherwise look at routes and --local-addr"
        )
    return ""
