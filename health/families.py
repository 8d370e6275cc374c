"""Metric types, and the page on which many metrics are read at once. `metrics` has the metrics of an agent.

Words: a *family* is one metric name with its type, help text and labels; a *series* is one family with one value for
each label.

Invariants:
- Every label has a closed set of values: no peer, exception text or port can make the number of series grow. A label
  or value outside the set is a bug of the caller: `ValueError`.
- A scrape sees whole transitions: one lock covers everything that is written together, and the snapshot for `render`.
- Counters and histograms exist from the start, at zero, for every combination of label values: `increase()` does not
  see the event that creates a series. Counters never fall. A gauge is absent until its value is known, and again when
  it no longer is: 0 is a claim too.

These are not prometheus_client's own metric classes: those write into the user's directory when
PROMETHEUS_MULTIPROC_DIR is set for the training script, and show `_created` series by a switch that is global to the
process. prometheus_client still writes the text format.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "elastic_agent_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Series: TypeAlias = tuple[str, ...]
"""One value per label, in the order of the family's labels."""

Sample: TypeAlias = tuple[str, dict[str, str], float]
"""Suffix of the name, labels, value."""


_F = TypeVar("_F", bound="Family")


class Row(Generic[_F]):
    """Declares one family of a `Page`: an attribute of its class, whose name is the metric's.

    A label with an empty set of values takes the values that the page was made with; `...` in a set stands for these.
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

    def __get__(self, page: Page, owner: type[Page]) -> _F:
        raise AttributeError("a page has its own families")


class Family:
    """One metric name. The lock is the page's."""

    kind: str
    complete = False
    """Every series exists from the start."""

    def __init__(self, page: Page, name: str, row: Row[Any]) -> None:
        self._lock = page.lock
        self.name = name
        self.help_text = row.help_text
        self.labels = {
            label: tuple(
                value
                for one in allowed or (...,)
                for value in (page.values[label] if one is ... else (str(one),))
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

    def __init__(self, page: Page, name: str, row: Row[Any]) -> None:
        super().__init__(page, name, row)
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


class Page:
    """The families that its class declares. They share a lock and some labels."""

    def __init__(self, constant_labels: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> None:
        """`values` are those of labels that were declared without."""
        self.values = values
        self.lock = threading.RLock()
        self.families: list[Family] = []
        self._constant_labels = dict(constant_labels)
        for name, row in vars(type(self)).items():
            if isinstance(row, Row):
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

        page: list[Metric] = []
        with self.lock:
            for family in self.families:
                # Metric wants a counter's name without "_total"; the text format puts it back.
                metric = Metric(PREFIX + family.name.removesuffix("_total"), family.help_text, family.kind)
                for suffix, labels, value in family.samples():
                    metric.add_sample(
                        PREFIX + family.name + suffix, {**self._constant_labels, **labels}, value
                    )
                page.append(metric)
        return page
