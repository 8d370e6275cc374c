"""Every number this agent publishes, defined once.

Words: a *family* is one metric name with its type, help text and labels; a *series* is one family with one
value for each label. The names are a published interface: dashboards and alerts depend on them, and
`docs/metrics.md` lists them in a table that a test compares with this file. An attribute is the metric's name
without the prefix: `metrics.restarts_total.inc(reason="oom")` is elastic_agent_restarts_total{reason="oom"}.

Invariants:
- Every label has a closed set of values, fixed when `Metrics` is built: no peer, exception text or port can
  make the number of series grow. A label or value outside the set is a bug of the caller: `ValueError`.
- Counters and histograms exist from the start, at zero, for every combination of label values: `increase()`
  does not see the event that creates a series. A gauge is absent until its value is known: 0 is a claim too.
- A scrape sees whole transitions: one lock covers each method that writes, and the snapshot for `render`.

The families are kept here rather than in prometheus_client's own metric classes: those write into the user's
directory when PROMETHEUS_MULTIPROC_DIR is set for the training script, and show `_created` series by a switch
that is global to the process. prometheus_client still writes the text format.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "elastic_agent_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = ("init", "joining", "starting", "running", "stopping", "draining", "backoff", "succeeded", "failed")
NODE_STATES = ("active", "standby", "waiting", "excluded", "lost")
WORKER_STATES = ("starting", "running", "failed", "stopped")
RENDEZVOUS_RESULTS = ("ok", "timeout", "closed", "error")
FAILURE_REASONS = (
    "exception",
    "signal",
    "oom",
    "hang",
    "nccl",
    "cuda",
    "ecc",
    "port",
    "preempted",
    "unknown",
)
EXIT_REASONS = ("ok", *FAILURE_REASONS)
MEMBERSHIP_CHANGES = ("join", "leave", "lost", "drain")
RESTART_REASONS = (*FAILURE_REASONS, *MEMBERSHIP_CHANGES)
BUDGET_KINDS = ("failure",)
PORT_PURPOSES = ("store", "metrics", "master")
CHECKPOINT_TIERS = ("memory", "local", "shared")
CHECKPOINT_RESULTS = ("ok", "error", "corrupt")

DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_Series = tuple[str, ...]  # one value per label, in the order of the family's labels
_F = TypeVar("_F", bound="Family")


class Family:
    """One metric name. Subclasses say how it is written and which samples it shows."""

    kind: str

    def __init__(
        self, lock: threading.RLock, name: str, help_text: str, labels: Mapping[str, Sequence[str]]
    ) -> None:
        self._lock = lock
        self.name = name
        self.help_text = help_text
        self.labels = {label: tuple(allowed) for label, allowed in labels.items()}
        self._begin()

    def _begin(self) -> None:
        """Create the series that exist before anything is written."""
        raise NotImplementedError

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(suffix of the name, labels, value) of every series."""
        raise NotImplementedError

    def _all_series(self) -> list[_Series]:
        return list(product(*self.labels.values()))

    def _series(self, labels: Mapping[str, object]) -> _Series:
        if labels.keys() != self.labels.keys():
            raise ValueError(
                f"{self.name} has the labels {sorted(self.labels)}, called with {sorted(labels)}"
            )
        series = tuple(str(labels[label]) for label in self.labels)
        for value, (label, allowed) in zip(series, self.labels.items(), strict=True):
            if value not in allowed:
                raise ValueError(f"{self.name}: {label}={value!r} is not one of {', '.join(allowed)}")
        return series

    def _named(self, series: _Series) -> dict[str, str]:
        return dict(zip(self.labels, series, strict=True))


class Gauge(Family):
    kind = "gauge"

    def _begin(self) -> None:
        self._values: dict[_Series, float] = {}

    def set(self, value: float, /, **labels: object) -> None:
        series = self._series(labels)
        with self._lock:
            self._values[series] = value

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for series, value in self._values.items():
            yield "", self._named(series), value


class Counter(Family):
    kind = "counter"

    def _begin(self) -> None:
        self._values = dict.fromkeys(self._all_series(), 0)

    def inc(self, **labels: object) -> None:
        series = self._series(labels)
        with self._lock:
            self._values[series] += 1

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for series, value in self._values.items():
            yield "", self._named(series), value


class Histogram(Family):
    kind = "histogram"

    def _begin(self) -> None:
        self._counts = {series: [0] * (len(DURATION_BUCKETS_S) + 1) for series in self._all_series()}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, value_s: float, /, **labels: object) -> None:
        series = self._series(labels)
        with self._lock:
            self._counts[series][bisect_left(DURATION_BUCKETS_S, value_s)] += 1
            self._sums[series] += value_s

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        bounds = [*(f"{bound:g}" for bound in DURATION_BUCKETS_S), "+Inf"]
        for series, counts in self._counts.items():
            named = self._named(series)
            for bound, up_to_bound in zip(bounds, accumulate(counts), strict=True):
                yield "_bucket", {**named, "le": bound}, up_to_bound
            yield "_count", named, sum(counts)
            yield "_sum", named, self._sums[series]


class Metrics:
    """The families of one agent, each series carrying `run_id` and `node`.

    slots: workers on this node; local_rank is 0..slots-1. started_at_s: when the agent started, in seconds
    since the epoch, like all instants here: the only clock that we share with a dashboard. Versions not known
    are empty strings, which Prometheus treats as absent labels.
    """

    def __init__(
        self,
        run_id: str,
        node: str,
        version: str,
        *,
        slots: int,
        min_nodes: int,
        max_nodes: int,
        started_at_s: float,
        python_version: str = "",
        torch_version: str = "",
        nccl_version: str = "",
    ) -> None:
        self._constant_labels = {"run_id": run_id, "node": node}
        self._lock = threading.RLock()
        self.families: list[Family] = []
        local_ranks = [str(local_rank) for local_rank in range(slots)]
        build = {
            "version": version,
            "torch_version": torch_version,
            "nccl_version": nccl_version,
            "python_version": python_version,
        }

        self.build_info = self._add(
            Gauge,
            "build_info",
            "Always 1; the labels are the versions of the agent and of what it runs on.",
            **{label: (value,) for label, value in build.items()},
        )
        self.state = self._add(
            Gauge,
            "state",
            "What the agent is doing: 1 for the current state, 0 for the others.",
            state=STATES,
        )
        self.up_since_timestamp_seconds = self._add(
            Gauge, "up_since_timestamp_seconds", "When this agent started, in seconds since the epoch."
        )

        self.rendezvous_generation = self._add(
            Gauge,
            "rendezvous_generation",
            "Number of the newest world this node belonged to; 0 before the first.",
        )
        self.rendezvous_total = self._add(
            Counter, "rendezvous_total", "Rendezvous that ended, by result.", result=RENDEZVOUS_RESULTS
        )
        self.rendezvous_duration_seconds = self._add(
            Histogram,
            "rendezvous_duration_seconds",
            "Seconds from joining to a world, for each rendezvous that ended in one.",
        )
        self.world_size = self._add(Gauge, "world_size", "Workers in the current world; 0 outside one.")
        self.group_world_size = self._add(
            Gauge, "group_world_size", "Nodes in the current world; 0 outside one."
        )
        self.nodes = self._add(Gauge, "nodes", "Nodes known to this agent, by state.", state=NODE_STATES)
        self.min_nodes = self._add(Gauge, "min_nodes", "Fewest nodes a world may have (configuration).")
        self.max_nodes = self._add(Gauge, "max_nodes", "Most nodes a world may have (configuration).")

        self.workers = self._add(Gauge, "workers", "Workers of this node, by state.", state=WORKER_STATES)
        self.worker_exits_total = self._add(
            Counter,
            "worker_exits_total",
            "Exits of this node's workers that the agent did not ask for, by reason.",
            local_rank=local_ranks,
            reason=EXIT_REASONS,
        )
        self.restarts_total = self._add(
            Counter,
            "restarts_total",
            "Restarts of the workers of the whole world, by the failure or membership change behind them.",
            reason=RESTART_REASONS,
        )
        self.restart_budget_remaining = self._add(
            Gauge,
            "restart_budget_remaining",
            "Restarts left before the job fails; +Inf without a cap.",
            kind=BUDGET_KINDS,
        )
        self.backoff_seconds = self._add(
            Gauge,
            "backoff_seconds",
            "Seconds the agent waits before the restart that is due; 0 when none is.",
        )
        self.port_bind_attempts_total = self._add(
            Counter,
            "port_bind_attempts_total",
            "Attempts to bind a port, by what it is for.",
            purpose=PORT_PURPOSES,
        )
        self.port_bind_failures_total = self._add(
            Counter,
            "port_bind_failures_total",
            "Attempts to bind a port that failed, by what it is for.",
            purpose=PORT_PURPOSES,
        )

        self.step = self._add(Gauge, "step", "Newest training step that a worker of this node reported.")
        self.last_step_timestamp_seconds = self._add(
            Gauge, "last_step_timestamp_seconds", "When that step was reported, in seconds since the epoch."
        )

        self.checkpoint_saves_total = self._add(
            Counter,
            "checkpoint_saves_total",
            "Checkpoint saves, by result.",
            tier=CHECKPOINT_TIERS,
            result=CHECKPOINT_RESULTS,
        )
        self.checkpoint_loads_total = self._add(
            Counter,
            "checkpoint_loads_total",
            "Checkpoint loads, by result.",
            tier=CHECKPOINT_TIERS,
            result=CHECKPOINT_RESULTS,
        )
        self.checkpoint_save_duration_seconds = self._add(
            Histogram,
            "checkpoint_save_duration_seconds",
            "Seconds a successful checkpoint save took.",
            tier=CHECKPOINT_TIERS,
        )
        self.checkpoint_size_bytes = self._add(
            Gauge, "checkpoint_size_bytes", "Size of the newest checkpoint in bytes.", tier=CHECKPOINT_TIERS
        )
        self.checkpoint_last_step = self._add(
            Gauge, "checkpoint_last_step", "Training step of the newest checkpoint.", tier=CHECKPOINT_TIERS
        )
        self.checkpoint_last_success_timestamp_seconds = self._add(
            Gauge,
            "checkpoint_last_success_timestamp_seconds",
            "When the newest checkpoint was saved, in seconds since the epoch.",
            tier=CHECKPOINT_TIERS,
        )
        self.checkpoint_verify_failures_total = self._add(
            Counter,
            "checkpoint_verify_failures_total",
            "Checkpoints that failed their checksums and were not loaded.",
        )

        self.build_info.set(1, **build)
        self.up_since_timestamp_seconds.set(started_at_s)
        self.min_nodes.set(min_nodes)
        self.max_nodes.set(max_nodes)
        self.rendezvous_generation.set(0)
        self.leave_world()
        self.enter_state("init")
        self.count_nodes()
        self.count_workers()
        self.backoff_seconds.set(0)

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

    def count_nodes(self, **by_state: int) -> None:
        """Nodes in each state of NODE_STATES; a state not named has none."""
        self._count(self.nodes, NODE_STATES, by_state)

    def count_workers(self, **by_state: int) -> None:
        """Workers in each state of WORKER_STATES; a state not named has none."""
        self._count(self.workers, WORKER_STATES, by_state)

    def progress(self, step: int, at_s: float) -> None:
        """A worker reported `step` at `at_s`, seconds since the epoch."""
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

    # What a scrape reads.

    def render(self) -> bytes:
        """The whole page in the text exposition format, as CONTENT_TYPE says. Any thread may call it."""
        # Here, because with all that it imports it would be a third of the agent's start. A scrape is in no hurry.
        from prometheus_client import generate_latest

        return generate_latest(self)

    def collect(self) -> list[Metric]:
        """A snapshot of every family, as prometheus_client asks for it."""
        from prometheus_client.core import Metric

        page: list[Metric] = []
        with self._lock:
            for family in self.families:
                # Metric wants a counter's name without "_total"; the text format puts it back.
                metric = Metric(PREFIX + family.name.removesuffix("_total"), family.help_text, family.kind)
                for suffix, labels, value in family.samples():
                    metric.add_sample(
                        PREFIX + family.name + suffix, {**self._constant_labels, **labels}, value
                    )
                page.append(metric)
        return page

    def _count(self, gauge: Gauge, states: Sequence[str], by_state: Mapping[str, int]) -> None:
        with self._lock:
            for state, number in (dict.fromkeys(states, 0) | dict(by_state)).items():
                gauge.set(number, state=state)

    def _add(self, kind: type[_F], name: str, help_text: str, /, **labels: Sequence[str]) -> _F:
        family = kind(self._lock, name, help_text, labels)
        self.families.append(family)
        return family
