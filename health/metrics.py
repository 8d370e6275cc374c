"""Every number this agent publishes, defined once, with the types of the families and the registry that holds them.

The names are a published interface: dashboards and alerts depend on them, and `docs/metrics.md` lists them in a table
that a test compares with this file. An attribute is the metric's name without the prefix:
`metrics.restarts_total.inc(reason="oom")` is elastic_agent_restarts_total{reason="oom"}. A *family* is one metric name
with its type, help text and labels; a *series* is one family with one value for each label.

Invariants:
- Every label has a closed set of values: no peer, exception text or port can make the number of series grow. A label
  or value outside the set is a bug of the caller: `ValueError`.
- A scrape sees whole transitions: one lock covers everything that is written together, and the snapshot for `render`.
- Counters and histograms exist from the start, at zero, for every combination of label values: `increase()` does not
  see the event that creates a series. Counters never fall. A gauge is absent until its value is known, and again when
  it no longer is: 0 is a claim too.

The types are not prometheus_client's own: those write into the user's directory when PROMETHEUS_MULTIPROC_DIR is set
for the training script, and show `_created` series by a switch that is global to the process. prometheus_client still
writes the text format.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, product
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .checks.runner import AT_JOIN

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "elastic_agent_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Series: TypeAlias = tuple[str, ...]
"""One value per label, in the order of the family's labels."""

Sample: TypeAlias = tuple[str, dict[str, str], float]
"""Suffix of the name, labels, value."""


_F = TypeVar("_F", bound="Family")


class MetricRow(Generic[_F]):
    """Declares one family of a `Registry`: an attribute of its class, whose name is the metric's.

    A label with an empty set of values takes those that the registry was made with; `...` in a set stands for these.
    """

    def __init__(
        self,
        kind: type[_F],
        help_text: str,
        buckets: Sequence[float] = (),
        /,
        **labels: Sequence[str | EllipsisType],
    ) -> None:
        self.kind = kind
        self.help_text = help_text
        self.buckets = tuple(buckets)
        self.labels = labels

    def __get__(self, registry: Registry, owner: type[Registry]) -> _F:
        raise AttributeError("a registry has its own families")


class Family:
    """One metric name. The lock is the registry's."""

    kind: str
    complete = False
    """Every series exists from the start."""

    def __init__(self, registry: Registry, name: str, row: MetricRow[Any]) -> None:
        self._lock = registry.lock
        self.name = name
        self.help_text = row.help_text
        self.labels = {
            label: tuple(
                value
                for one in allowed or (...,)
                for value in (registry.values[label] if one is ... else (str(one),))
            )
            for label, allowed in row.labels.items()
        }
        known = product(*self.labels.values()) if self.complete else ()
        self._values: dict[Series, float] = dict.fromkeys(known, 0.0)

    def samples(self) -> Iterator[Sample]:
        """Every series as it is now."""
        for series, value in self._values.items():
            yield "", self._named(series), value

    def _series(self, labels: Mapping[str, object]) -> Series:
        series = tuple(str(labels.get(label)) for label in self.labels)
        if len(labels) != len(series) or not all(map(operator.contains, self.labels.values(), series)):
            raise ValueError(f"{self.name} has the labels {self.labels}, called with {labels}")
        return series

    def _named(self, series: Series) -> dict[str, str]:
        return dict(zip(self.labels, series, strict=True))


class Gauge(Family):
    kind = "gauge"

    def set(self, value: float | None, /, **labels: object) -> None:
        """None: unknown now."""
        series = self._series(labels)
        with self._lock:
            if value is None:
                self._values.pop(series, None)
            else:
                self._values[series] = value


class Level(Gauge):
    """A gauge that is 0 until it is set."""

    complete = True

    def choose(self, value: str) -> None:
        """Of a family with one label: the series of this value is 1, all others are 0."""
        [label] = self.labels
        chosen = self._series({label: value})
        with self._lock:
            self._values = {series: float(series == chosen) for series in self._values}


class Counter(Family):
    kind = "counter"
    complete = True

    def inc(self, amount: float = 1, /, **labels: object) -> None:
        series = self._series(labels)
        if amount < 0:
            raise ValueError(f"{self.name} never falls, called with {amount}")
        with self._lock:
            self._values[series] += amount

    def reach(self, total: float, /, **labels: object) -> None:
        """For what is counted elsewhere: it has come to `total`."""
        with self._lock:
            self.inc(total - self._values[self._series(labels)], **labels)


class Histogram(Family):
    kind = "histogram"
    complete = True

    def __init__(self, registry: Registry, name: str, row: MetricRow[Any]) -> None:
        super().__init__(registry, name, row)
        self.buckets = row.buckets
        self._counts = {series: [0] * (len(self.buckets) + 1) for series in self._values}

    def observe(self, value: float, /, *, times: int = 1, **labels: object) -> None:
        series = self._series(labels)
        with self._lock:
            self._counts[series][bisect_left(self.buckets, value)] += times
            self._values[series] += value * times

    def samples(self) -> Iterator[Sample]:
        bounds = [*(f"{bound:g}" for bound in self.buckets), "+Inf"]
        for series, counts in self._counts.items():
            named = self._named(series)
            for bound, up_to_bound in zip(bounds, accumulate(counts), strict=True):
                yield "_bucket", {**named, "le": bound}, up_to_bound
            yield "_count", named, sum(counts)
            yield "_sum", named, self._values[series]


class Registry:
    """The families that its class declares. They share a lock and some labels."""

    def __init__(self, constant_labels: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> None:
        """`values` are those of labels that were declared without."""
        self.values = values
        self.lock = threading.RLock()
        self.families: list[Family] = []
        self._constant_labels = dict(constant_labels)
        for name, row in vars(type(self)).items():
            if isinstance(row, MetricRow):
                family = row.kind(self, name, row)
                vars(self)[name] = family
                self.families.append(family)

    def render(self) -> bytes:
        """The whole page in the text exposition format. Any thread may call it."""
        # Here, because with all that it imports it would be a third of the agent's start. A scrape is in no hurry.
        from prometheus_client import generate_latest

        return generate_latest(self)

    def collect(self) -> list[Metric]:
        """A snapshot of every family, as prometheus_client asks for it."""
        from prometheus_client.core import Metric

        snapshot: list[Metric] = []
        with self.lock:
            for family in self.families:
                # Metric wants a counter's name without "_total"; the text format puts it back.
                metric = Metric(PREFIX + family.name.removesuffix("_total"), family.help_text, family.kind)
                for suffix, labels, value in family.samples():
                    metric.add_sample(
                        PREFIX + family.name + suffix, {**self._constant_labels, **labels}, value
                    )
                snapshot.append(metric)
        return snapshot


# ---------------------------------------------------------------- of an agent

STATES = ("init", "joining", "starting", "running", "stopping", "draining", "backoff", "succeeded", "failed")
NODE_STATES = ("active", "standby", "waiting", "lost")
UNKNOWN = "unknown"
"""The label for causes that this registry was not made with."""
MEMBERSHIP_CHANGES = ("join", "leave", "lost")
RECOVERY_PHASES = ("detect", "stop", "rendezvous", "backoff", "start", "init", "load", "step")
HANG_STATES = ("off", "watching", "suspecting")
LOST_TIME_CAUSES = ("detect", "stop", "rendezvous", "backoff", "startup", "recompute", "waiting")
STORE_REQUESTS = ("grant", "keep_alive", "transact", "read")
STORE_OPERATIONS = (*STORE_REQUESTS, "watch")
SAVE_TIERS = ("memory", "local", "part")
"""A part is what one node writes of a sharded checkpoint; the whole counts as local."""
DROPPED = ("events", "log_bytes", "console_lines", "reports")

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


_VERSIONS: dict[str, tuple[str, ...]] = {field.name: () for field in fields(Build)}
"""Labels whose values the registry is made with."""


class Metrics(Registry):
    """The families of one agent, in the order of docs/metrics.md, and the events that several of them count. Levels are
    set when they are read, from the state of the node. Each series carries `run_id` and `node`."""

    build_info = MetricRow(
        Gauge,
        "Always 1; the labels are the versions of the agent and of what it runs on.",
        **_VERSIONS,
    )
    state = MetricRow(
        Level,
        "What the agent is doing: 1 for the current state, 0 for the others. Workers are starting until the "
        "script of each runs.",
        state=STATES,
    )
    up_since_timestamp_seconds = MetricRow(Gauge, "When this agent started, in seconds since the epoch.")
    coordinator = MetricRow(Level, "1 while this node decides which world comes next, else 0.")

    rendezvous_generation = MetricRow(
        Level, "Number of the newest world this node belonged to; 0 before the first."
    )
    world_size = MetricRow(Level, "Workers in the current world; 0 outside one.")
    group_world_size = MetricRow(Level, "Nodes in the current world; 0 outside one.")
    nodes = MetricRow(
        Gauge,
        "Nodes by state: active are members of the running world. Only the coordinator knows the others: standby are "
        "outside a running world, waiting for the next world to form, lost are members of the newest world that are "
        "gone.",
        state=NODE_STATES,
    )
    min_nodes = MetricRow(Gauge, "Fewest nodes a world may have (configuration).")
    node_excluded = MetricRow(
        Level,
        "1 while this node is excluded from all worlds, because workers failed on it alone, a rank on it was too slow, "
        "or an operator asked for it, else 0.",
    )

    worker_exits_total = MetricRow(
        Counter,
        "Exits of this node's workers that the agent did not ask for, by cause.",
        local_rank=(),
        reason=("ok", ...),
    )
    restarts_total = MetricRow(
        Counter,
        "Restarts of the workers of the whole world, by the failure or membership change behind them.",
        reason=(*MEMBERSHIP_CHANGES, ...),
    )
    restart_budget_remaining = MetricRow(
        Gauge, "Restarts left before the job fails; +Inf without a cap.", kind=("failure",)
    )
    backoff_seconds = MetricRow(
        Level,
        "Seconds the job waits before the restart that is due; 0 when none is, and where this node does not "
        "coordinate.",
    )

    recovery_duration_seconds = MetricRow(
        Histogram,
        "Seconds for which training stood still on this node: from the failed worker's exit, or else the order to "
        "stop, to the first step of a later generation (until the scripts have begun where none reports steps).",
        RECOVERY_BUCKETS_S,
        kind=("process", "node", "join", "leave"),
    )
    recovery_phase_duration_seconds = MetricRow(
        Histogram,
        "The parts of recovery_duration_seconds, each observed once per recovery that had it: detect until the order "
        "to stop, stop until no worker is left, rendezvous until the next start without backoff (which only the "
        "coordinator can tell apart), start until each worker's script has begun (the process was made, where it is "
        "no spare), init until each has called Checkpointer.load(), load until it has returned, step until the first "
        "step was done. Without a load init lasts until then; without steps there is none after start.",
        RECOVERY_BUCKETS_S,
        phase=RECOVERY_PHASES,
    )

    check_outcome = MetricRow(
        Gauge,
        "How the newest check of this node before a join (--check) ended: 0 ok, 1 warn, 2 fail; absent where that is "
        "unknown, and for what this job does not need.",
        check=AT_JOIN,
    )

    step = MetricRow(Gauge, "Newest training step that a worker of this node finished.")
    last_step_timestamp_seconds = MetricRow(Gauge, "When that step was finished, in seconds since the epoch.")
    steps_total = MetricRow(
        Counter, "New training steps that this node's workers finished: beyond the highest one before."
    )
    step_duration_seconds = MetricRow(
        Histogram,
        "Seconds per training step, each step but the first of a generation observed once, as the mean of those that "
        "were finished since the agent looked last, a second ago; what is between two steps, such as a checkpoint, is "
        "included.",
        STEP_BUCKETS_S,
    )
    step_time_skew_ratio = MetricRow(
        Gauge,
        "Ratio of this rank's own time for a step, without its waits for other ranks, to the median over all ranks of "
        "the job: 1.4 is 40 % more. The slowest rank sets the pace of a synchronous job. Absent without steps.",
        local_rank=(),
    )
    straggler = MetricRow(
        Level,
        "1 while the coordinator finds this rank slower than the others, else 0.",
        local_rank=(),
    )
    lost_steps_total = MetricRow(
        Counter,
        "Training steps that this node's workers had finished and that the next generation had to do again.",
    )
    productive_time_seconds_total = MetricRow(
        Counter,
        "Seconds that this node's workers spent on new steps and finished them: between the first and the newest step "
        "of a generation, without recompute. Checkpoints saved in between are included.",
    )
    lost_time_seconds_total = MetricRow(
        Counter,
        "All other seconds since the agent started, by cause: detect since the last finished step until the order to "
        "stop; stop, rendezvous and backoff as in recovery_phase_duration_seconds; startup: its start, init, load and "
        "step together; recompute until the highest step reached before is reached again; waiting before the first "
        "world, next to a world that runs without this node, and after the last. Workers that do not call step() stay "
        "in startup.",
        cause=LOST_TIME_CAUSES,
    )
    store_request_duration_seconds = MetricRow(
        Histogram,
        "Seconds until the rendezvous store answered a request, but for those under an expired lease.",
        PROMPT_BUCKETS_S,
        operation=STORE_REQUESTS,
    )
    store_errors_total = MetricRow(
        Counter,
        "Requests of the rendezvous that its store refused or did not answer in time.",
        operation=STORE_OPERATIONS,
    )
    lease_age_seconds = MetricRow(
        Gauge,
        "Seconds since this node sent the newest keep-alive that the rendezvous store confirmed; absent without a "
        "lease.",
    )
    hang_timeout_seconds = MetricRow(
        Gauge,
        "Workers that make no progress for so long have failed, once the rank is found that keeps the others waiting: "
        "--hang-timeout, or the limit of auto; absent without a limit.",
    )
    hang_detector_state = MetricRow(
        Level,
        "1 for the state of this node's hang detector: off, watching, or suspecting a hang.",
        state=HANG_STATES,
    )

    checkpoint_saves_total = MetricRow(
        Counter,
        "Saves to disk that rank 0 reported on this node, and copies to this node's memory, by result.",
        tier=SAVE_TIERS,
        result=("ok", "error"),
    )
    checkpoint_save_duration_seconds = MetricRow(
        Histogram, "Seconds a successful checkpoint save took.", DURATION_BUCKETS_S, tier=SAVE_TIERS
    )
    checkpoint_last_step = MetricRow(
        Gauge, "Training step of the newest checkpoint that this node saved or loaded.", tier=SAVE_TIERS
    )
    checkpoint_last_success_timestamp_seconds = MetricRow(
        Gauge,
        "When that checkpoint was saved, in seconds since the epoch; absent where another node saved it.",
        tier=SAVE_TIERS,
    )
    checkpoint_interval_seconds = MetricRow(
        Gauge, "Seconds between the two newest successful saves to disk that were reported on this node."
    )
    checkpoint_blocked_seconds_total = MetricRow(
        Counter,
        "Seconds for which training stood still for saves and copies to memory, successful or not, as rank 0 and the "
        "first worker of this node reported; not while the disk was written behind it.",
    )
    checkpoint_verify_failures_total = MetricRow(
        Counter, "Checkpoints that failed their checksums and were not loaded, each worker's finding counted."
    )

    replica_partners_unreachable = MetricRow(
        Gauge,
        "Partners of this node that do not take its shards now, because they do not answer or have no memory left for "
        "them; training goes on without those replicas.",
    )

    dropped_total = MetricRow(
        Counter,
        "What this node has lost for good: events that a full disk did not take, bytes of log files, lines of the "
        "console, and reports of workers that the agent could not read or had no time for.",
        what=DROPPED,
    )

    def __init__(
        self,
        run_id: str,
        node: str,
        build: Build,
        *,
        workers: int,
        min_nodes: int,
        started_at_s: float,
        causes: Sequence[str] = (UNKNOWN,),
    ) -> None:
        """`started_at_s`: when the agent started, in seconds since the epoch like all instants that are shown.
        `causes`: the names of all causes of failures, with `UNKNOWN` among them."""
        versions = asdict(build)
        values = {label: (value,) for label, value in versions.items()}
        super().__init__(
            {"run_id": run_id, "node": node},
            values | {"local_rank": tuple(map(str, range(workers))), "reason": tuple(causes)},
        )
        self.build_info.set(1, **versions)
        self.up_since_timestamp_seconds.set(started_at_s)
        self.min_nodes.set(min_nodes)

    def restarted(self, reason: str) -> None:
        self.restarts_total.inc(reason=reason if reason in self.restarts_total.labels["reason"] else UNKNOWN)

    def recovered(self, kind: str, phases_s: Mapping[str, float]) -> None:
        """Training goes on after having stood still for these seconds."""
        with self.lock:
            self.recovery_duration_seconds.observe(sum(phases_s.values()), kind=kind)
            for phase, seconds in phases_s.items():
                self.recovery_phase_duration_seconds.observe(seconds, phase=phase)

    def count_steps(self, *, new: int, lost: int, timed: int, mean_s: float) -> None:
        """`timed` steps took `mean_s` each."""
        with self.lock:
            self.steps_total.inc(new)
            self.lost_steps_total.inc(lost)
            self.step_duration_seconds.observe(mean_s, times=timed)
