"""Every number this agent publishes, defined once.

The names are a published interface: dashboards and alerts depend on them, and `docs/metrics.md` lists them in a table
that a test compares with this file. An attribute is the metric's name without the prefix:
`metrics.restarts_total.inc(reason="oom")` is elastic_agent_restarts_total{reason="oom"}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from .families import Page

STATES = ("init", "joining", "starting", "running", "stopping", "draining", "backoff", "succeeded", "failed")
NODE_STATES = ("active", "standby", "waiting", "lost")
WORKER_STATES = ("running", "stopped", "failed")
RENDEZVOUS_RESULTS = ("ok", "timeout", "closed", "error")
FAILURE_REASONS = (
    "exception",
    "signal",
    "oom",
    "hang",
    "nccl",
    "unknown",
)
EXIT_REASONS = ("ok", *FAILURE_REASONS)
MEMBERSHIP_CHANGES = ("join", "leave", "lost")
RESTART_REASONS = (*FAILURE_REASONS, *MEMBERSHIP_CHANGES)
INCIDENT_REASONS = (*FAILURE_REASONS, "lost")
BUDGET_KINDS = ("failure",)
DETECTION_KINDS = ("process",)
RECOVERY_KINDS = ("process", "node", "join", "leave")
RECOVERY_PHASES = ("detect", "stop", "rendezvous", "backoff", "start", "init", "load", "step")
LOST_TIME_CAUSES = ("detect", "stop", "rendezvous", "backoff", "startup", "recompute", "waiting")
STOP_SIGNALS = ("term", "kill")
STORE_REQUESTS = ("grant", "keep_alive", "revoke", "transact", "read")
STORE_OPERATIONS = (*STORE_REQUESTS, "watch")
PORT_PURPOSES = ("store", "metrics", "master")
CHECKPOINT_TIERS = ("memory", "local")
SAVE_RESULTS = ("ok", "error")
LOAD_RESULTS = ("ok", "error", "corrupt")
LOG_STREAMS = ("stdout", "stderr")

DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RECOVERY_BUCKETS_S = (0.01, 0.025, *DURATION_BUCKETS_S)
STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PROMPT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""For what should take milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The labels of build_info. A version that is not known is empty, which Prometheus treats as an absent label."""

    version: str
    torch_version: str = ""
    nccl_version: str = ""
    python_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The labels of node_info. local_rank is 0 to workers - 1."""

    interface: str = ""
    address: str = ""
    workers: int
    gpus: int = 0


class Metrics(Page):
    """The families of one agent, each series carrying `run_id` and `node`.

    started_at_s: when the agent started, in seconds since the epoch, like all instants that are shown: the only clock
    that we share with a dashboard. `clock` is monotonic, and gives the age of what is shown as an age.
    """

    def __init__(
        self,
        run_id: str,
        node: str,
        build: Build,
        place: Place,
        *,
        min_nodes: int,
        max_nodes: int,
        started_at_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__({"run_id": run_id, "node": node}, clock)
        local_ranks = [str(local_rank) for local_rank in range(place.workers)]
        versions, described = asdict(build), {name: str(value) for name, value in asdict(place).items()}

        self._declare_node(versions, described)
        self._declare_rendezvous()
        self._declare_workers(local_ranks)
        self._declare_recovery()
        self._declare_training()
        self._declare_store()
        self._declare_checkpoints()
        self._declare_output()

        self.build_info.set(1, **versions)
        self.node_info.set(1, **described)
        self.up_since_timestamp_seconds.set(started_at_s)
        self.coordinator.set(0)
        self.min_nodes.set(min_nodes)
        self.max_nodes.set(max_nodes)
        self.rendezvous_generation.set(0)
        self.leave_world()
        self.enter_state("init")
        self.count_nodes(active=0)
        self.count_workers()
        for local_rank in local_ranks:
            self.worker_up.set(0, local_rank=local_rank)
        self.backoff_seconds.set(0)

    # The families, as docs/metrics.md lists them.

    def _declare_node(self, build: Mapping[str, str], place: Mapping[str, str]) -> None:
        self.build_info = self._gauge(
            "build_info",
            "Always 1; the labels are the versions of the agent and of what it runs on.",
            **{label: (value,) for label, value in build.items()},
        )
        self.node_info = self._gauge(
            "node_info",
            "Always 1; the labels are this node's network interface and address, its workers and its GPUs.",
            **{label: (value,) for label, value in place.items()},
        )
        self.state = self._gauge(
            "state",
            "What the agent is doing: 1 for the current state, 0 for the others. Workers are starting until one "
            "reports a step.",
            state=STATES,
        )
        self.up_since_timestamp_seconds = self._gauge(
            "up_since_timestamp_seconds", "When this agent started, in seconds since the epoch."
        )
        self.coordinator = self._gauge(
            "coordinator", "1 while this node decides which world comes next, else 0."
        )

    def _declare_rendezvous(self) -> None:
        self.rendezvous_generation = self._gauge(
            "rendezvous_generation",
            "Number of the newest world this node belonged to; 0 before the first.",
        )
        self.rendezvous_total = self._counter(
            "rendezvous_total", "Rendezvous that ended, by result.", result=RENDEZVOUS_RESULTS
        )
        self.rendezvous_duration_seconds = self._histogram(
            "rendezvous_duration_seconds",
            "Seconds from joining to a world, for each rendezvous that ended in one.",
            DURATION_BUCKETS_S,
        )
        self.world_size = self._gauge("world_size", "Workers in the current world; 0 outside one.")
        self.group_world_size = self._gauge("group_world_size", "Nodes in the current world; 0 outside one.")
        self.nodes = self._gauge(
            "nodes",
            "Nodes by state: active are members of the running world. Only the coordinator knows the others: standby "
            "are outside a running world, waiting for the next world to form, lost are members of the newest world "
            "that are gone.",
            state=NODE_STATES,
        )
        self.min_nodes = self._gauge("min_nodes", "Fewest nodes a world may have (configuration).")
        self.max_nodes = self._gauge("max_nodes", "Most nodes a world may have (configuration).")
        self.membership_changes_total = self._counter(
            "membership_changes_total",
            "Nodes that came to or went from the world between two generations, as seen from this node: leave was "
            "asked to stop, lost is every other that went.",
            kind=MEMBERSHIP_CHANGES,
        )
        self.nodes_put_aside_total = self._counter(
            "nodes_put_aside_total",
            "Nodes that all further worlds leave out because the workers failed on them alone, as seen from this node.",
        )

    def _declare_workers(self, local_ranks: Sequence[str]) -> None:
        self.workers = self._gauge(
            "workers",
            "Workers of this node: running undisturbed; stopped were told to stop and are still there; failed ended by "
            "themselves, and the others of their generation are not gone yet.",
            state=WORKER_STATES,
        )
        self.worker_up = self._gauge(
            "worker_up", "1 while this worker's process runs, else 0.", local_rank=local_ranks
        )
        self.worker_starts_total = self._counter(
            "worker_starts_total", "Worker processes started on this node."
        )
        self.spares = self._gauge(
            "spares",
            "Idle forks of the preloaded process that wait to become workers; absent with --preload none.",
        )
        self.worker_exits_total = self._counter(
            "worker_exits_total",
            "Exits of this node's workers that the agent did not ask for, by reason.",
            local_rank=local_ranks,
            reason=EXIT_REASONS,
        )
        self.worker_last_exit_code = self._gauge(
            "worker_last_exit_code",
            "How this worker's newest process that ended did so: its exit code, negative for a signal.",
            local_rank=local_ranks,
        )
        self.worker_stop_duration_seconds = self._histogram(
            "worker_stop_duration_seconds",
            "Seconds from the order to stop to each worker's exit; kill: it had to be sent SIGKILL.",
            PROMPT_BUCKETS_S,
            signal=STOP_SIGNALS,
        )
        self.failures_total = self._counter(
            "failures_total",
            "Generations of the job that a failure ended, by its root: one worker's failure, or lost nodes.",
            reason=INCIDENT_REASONS,
        )
        self.restarts_total = self._counter(
            "restarts_total",
            "Restarts of the workers of the whole world, by the failure or membership change behind them.",
            reason=RESTART_REASONS,
        )
        self.restart_budget_remaining = self._gauge(
            "restart_budget_remaining",
            "Restarts left before the job fails; +Inf without a cap.",
            kind=BUDGET_KINDS,
        )
        self.backoff_seconds = self._gauge(
            "backoff_seconds",
            "Seconds the job waits before the restart that is due; 0 when none is, and where this node does not "
            "coordinate.",
        )

    def _declare_recovery(self) -> None:
        self.detection_duration_seconds = self._histogram(
            "detection_duration_seconds",
            "Seconds from the exit of a worker of this node that failed to the order to stop its generation.",
            PROMPT_BUCKETS_S,
            kind=DETECTION_KINDS,
        )
        self.recovery_duration_seconds = self._histogram(
            "recovery_duration_seconds",
            "Seconds for which training stood still on this node: from the failed worker's exit, or else the order to "
            "stop, to the first step of a later generation (to the start of its workers where none reports steps).",
            RECOVERY_BUCKETS_S,
            kind=RECOVERY_KINDS,
        )
        self.recovery_phase_duration_seconds = self._histogram(
            "recovery_phase_duration_seconds",
            "The parts of recovery_duration_seconds, each observed once per recovery that had it: detect until the "
            "order to stop, stop until no worker is left, rendezvous until the next start without backoff (which only "
            "the coordinator can tell apart), start until each worker's script has begun (the process was made, where "
            "it is no spare), init until each has called Checkpointer.load(), load until it has returned, step until "
            "the first step was done. Without a load init lasts until then; without steps there is none of these.",
            RECOVERY_BUCKETS_S,
            phase=RECOVERY_PHASES,
        )

    def _declare_training(self) -> None:
        self.step = self._gauge("step", "Newest training step that a worker of this node finished.")
        self.last_step_timestamp_seconds = self._gauge(
            "last_step_timestamp_seconds", "When that step was finished, in seconds since the epoch."
        )
        self.steps_total = self._counter(
            "steps_total",
            "New training steps that this node's workers finished: beyond the highest one before.",
        )
        self.step_duration_seconds = self._histogram(
            "step_duration_seconds",
            "Seconds per training step, each step but the first of a generation observed once, as the mean of those "
            "that were finished since the agent looked last, a second ago; what is between two steps, such as a "
            "checkpoint, is included.",
            STEP_BUCKETS_S,
        )
        self.lost_steps_total = self._counter(
            "lost_steps_total",
            "Training steps that this node's workers had finished and that the next generation had to do again.",
        )
        self.productive_time_seconds_total = self._counter(
            "productive_time_seconds_total",
            "Seconds that this node's workers spent on new steps and finished them: between the first and the newest "
            "step of a generation, without recompute. Checkpoints saved in between are included.",
        )
        self.lost_time_seconds_total = self._counter(
            "lost_time_seconds_total",
            "All other seconds since the agent started, by cause: detect since the last finished step until the order "
            "to stop; stop, rendezvous and backoff as in recovery_phase_duration_seconds; startup: its start, init, "
            "load and step together; recompute until the highest step reached before is reached again; waiting before "
            "the first world, next to a world that runs without this node, and after the last. Workers that do not "
            "call step() stay in startup.",
            cause=LOST_TIME_CAUSES,
        )
        self.goodput_ratio = self._gauge(
            "goodput_ratio",
            "productive_time_seconds_total / (productive_time_seconds_total + lost_time_seconds_total of all causes) "
            "from the agent's start to the last finished step while workers step, else to now; absent until a worker "
            "has finished a step.",
        )

    def _declare_store(self) -> None:
        self.store_request_duration_seconds = self._histogram(
            "store_request_duration_seconds",
            "Seconds until the rendezvous store answered, for each request that it answered.",
            PROMPT_BUCKETS_S,
            operation=STORE_REQUESTS,
        )
        self.store_errors_total = self._counter(
            "store_errors_total",
            "Requests that the rendezvous store refused or did not answer in time.",
            operation=STORE_OPERATIONS,
        )
        self.lease_renewal_failures_total = self._counter(
            "lease_renewal_failures_total",
            "Keep-alives of this node's lease that the rendezvous store did not confirm.",
        )
        self.lease_age_seconds = self._age(
            "lease_age_seconds",
            "Seconds since this node sent the newest keep-alive that the rendezvous store confirmed; absent without a "
            "lease.",
        )
        self.hang_timeout_seconds = self._gauge(
            "hang_timeout_seconds",
            "Workers that report nothing for so long after a step have failed (configuration); absent without a limit.",
        )
        self.port_bind_attempts_total = self._counter(
            "port_bind_attempts_total", "Attempts to bind a port, by what it is for.", purpose=PORT_PURPOSES
        )
        self.port_bind_failures_total = self._counter(
            "port_bind_failures_total",
            "Attempts to bind a port that failed, by what it is for.",
            purpose=PORT_PURPOSES,
        )

    def _declare_checkpoints(self) -> None:
        self.checkpoint_saves_total = self._counter(
            "checkpoint_saves_total",
            "Saves to disk that rank 0 reported on this node, and copies to this node's memory, by result.",
            tier=CHECKPOINT_TIERS,
            result=SAVE_RESULTS,
        )
        self.checkpoint_loads_total = self._counter(
            "checkpoint_loads_total",
            "Checkpoint loads, each worker's counted, by result.",
            tier=CHECKPOINT_TIERS,
            result=LOAD_RESULTS,
        )
        self.checkpoint_save_duration_seconds = self._histogram(
            "checkpoint_save_duration_seconds",
            "Seconds a successful checkpoint save took.",
            DURATION_BUCKETS_S,
            tier=CHECKPOINT_TIERS,
        )
        self.checkpoint_size_bytes = self._gauge(
            "checkpoint_size_bytes", "Size of the newest checkpoint in bytes.", tier=CHECKPOINT_TIERS
        )
        self.checkpoint_last_step = self._gauge(
            "checkpoint_last_step", "Training step of the newest checkpoint.", tier=CHECKPOINT_TIERS
        )
        self.checkpoint_last_success_timestamp_seconds = self._gauge(
            "checkpoint_last_success_timestamp_seconds",
            "When the newest checkpoint was saved, in seconds since the epoch.",
            tier=CHECKPOINT_TIERS,
        )
        self.checkpoint_interval_seconds = self._gauge(
            "checkpoint_interval_seconds",
            "Seconds between the two newest successful saves to disk that were reported on this node.",
        )
        self.checkpoint_blocked_seconds_total = self._counter(
            "checkpoint_blocked_seconds_total",
            "Seconds for which training stood still for saves and copies to memory, successful or not, as rank 0 and "
            "the first worker of this node reported; not while the disk was written behind it.",
        )
        self.checkpoint_verify_failures_total = self._counter(
            "checkpoint_verify_failures_total",
            "Checkpoints that failed their checksums and were not loaded, each worker's finding counted.",
        )
        self.checkpoint_fallbacks_total = self._counter(
            "checkpoint_fallbacks_total",
            "Generations that went on from an older checkpoint because this node's newer one was damaged.",
        )
        self.checkpoint_set_backs_total = self._counter(
            "checkpoint_set_backs_total",
            "States that the workers passed over for an older one, because those that had loaded it failed "
            "alike before another step.",
        )

    def _declare_output(self) -> None:
        self.log_lines_total = self._counter(
            "log_lines_total", "Lines that this node's workers printed.", stream=LOG_STREAMS
        )
        self.log_bytes_total = self._counter(
            "log_bytes_total", "Bytes that this node's workers printed.", stream=LOG_STREAMS
        )
        self.log_file_bytes_dropped_total = self._counter(
            "log_file_bytes_dropped_total",
            "Bytes that this node's workers printed and that are not in their log files because the disk stood still.",
        )
        self.console_lines_dropped_total = self._counter(
            "console_lines_dropped_total",
            "Lines of the agent and its workers that were not shown because its console stood still or refused them.",
        )
        self.reports_dropped_total = self._counter(
            "reports_dropped_total",
            "Reports of this node's workers that the agent could not read or had no time for.",
        )

    # Transitions that several series tell together.

    def enter_state(self, state: str) -> None:
        """`state` becomes 1, every other state 0."""
        with self._lock:
            self.state.set(1, state=state)
            for other in STATES:
                if other != state:
                    self.state.set(0, state=other)

    def enter_world(
        self, *, generation: int, world_size: int, group_world_size: int, duration_s: float
    ) -> None:
        """A rendezvous ended well, `duration_s` after this node joined it."""
        with self._lock:
            self.rendezvous_generation.set(generation)
            self.world_size.set(world_size)
            self.group_world_size.set(group_world_size)
            self.rendezvous_total.inc(result="ok")
            self.rendezvous_duration_seconds.observe(duration_s)

    def leave_world(self) -> None:
        """This node is in no world now; the generation stays, as it names the newest."""
        with self._lock:
            self.world_size.set(0)
            self.group_world_size.set(0)

    def count_nodes(
        self,
        *,
        active: int,
        standby: int | None = None,
        waiting: int | None = None,
        lost: int | None = None,
    ) -> None:
        """Nodes in each state; None where they are unknown here."""
        with self._lock:
            self.nodes.set(active, state="active")
            self.nodes.set(standby, state="standby")
            self.nodes.set(waiting, state="waiting")
            self.nodes.set(lost, state="lost")

    def count_workers(self, **by_state: int) -> None:
        """Workers in each state of WORKER_STATES; a state not named has none."""
        with self._lock:
            for state, number in {**dict.fromkeys(WORKER_STATES, 0), **by_state}.items():
                self.workers.set(number, state=state)

    def count_membership_change(
        self, *, joined: int, left: int, lost: int, put_aside: int, incident: str | None
    ) -> None:
        """The world has changed: nodes by what became of them, and the root of the failure if one was behind it."""
        with self._lock:
            self.nodes_put_aside_total.inc(put_aside)
            for kind, number in (("join", joined), ("leave", left), ("lost", lost)):
                self.membership_changes_total.inc(number, kind=kind)
            if incident is not None:
                self.failures_total.inc(reason=incident)

    def worker_exited(self, local_rank: int, returncode: int) -> None:
        with self._lock:
            self.worker_up.set(0, local_rank=local_rank)
            self.worker_last_exit_code.set(returncode, local_rank=local_rank)

    def recovered(self, kind: str, phases_s: Mapping[str, float]) -> None:
        """Training goes on after having stood still for these seconds."""
        with self._lock:
            self.recovery_duration_seconds.observe(sum(phases_s.values()), kind=kind)
            for phase, seconds in phases_s.items():
                self.recovery_phase_duration_seconds.observe(seconds, phase=phase)

    def account(self, productive_s: float, lost_s: Mapping[str, float], *, reports_steps: bool) -> None:
        """What the agent's life until now went into. Without steps it is unknown how much of it was productive."""
        with self._lock:
            self.productive_time_seconds_total.reach(productive_s)
            for cause, seconds in lost_s.items():
                self.lost_time_seconds_total.reach(seconds, cause=cause)
            if reports_steps:
                self.goodput_ratio.set(productive_s / (productive_s + sum(lost_s.values())))

    def count_steps(self, *, new: int, lost: int, timed: int, mean_s: float) -> None:
        """`timed` steps took `mean_s` each."""
        with self._lock:
            self.steps_total.inc(new)
            self.lost_steps_total.inc(lost)
            self.step_duration_seconds.observe(mean_s, times=timed)

    def printed(self, stream: str, lines: int, size: int) -> None:
        """Workers have printed so many lines and bytes."""
        with self._lock:
            self.log_lines_total.inc(lines, stream=stream)
            self.log_bytes_total.inc(size, stream=stream)

    def progress(self, step: int, at_s: float) -> None:
        """A worker finished `step` at `at_s`, seconds since the epoch."""
        with self._lock:
            self.step.set(step)
            self.last_step_timestamp_seconds.set(at_s)

    def checkpoint_saved(
        self, *, tier: str, step: int, size_bytes: int, duration_s: float, at_s: float
    ) -> None:
        """A save succeeded at `at_s`, seconds since the epoch: it is the newest checkpoint of its tier."""
        with self._lock:
            self.checkpoint_saves_total.inc(tier=tier, result="ok")
            self.checkpoint_save_duration_seconds.observe(duration_s, tier=tier)
            self.checkpoint_size_bytes.set(size_bytes, tier=tier)
            self.checkpoint_last_step.set(step, tier=tier)
            self.checkpoint_last_success_timestamp_seconds.set(at_s, tier=tier)
