"""Records of a pool: what one daemon writes the others read back, anything else is refused, and all fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic_agent.pool.records import (
    MAX_JOB_CHARS,
    MAX_REASON,
    MAX_RECORD_CHARS,
    MOST_NODES,
    MOST_WORDS,
    RECORDS,
    SCHEMA,
    Allocation,
    AllocationEnd,
    Attempt,
    Job,
    JobResult,
    Outcome,
    Plan,
    PoolNode,
    Record,
    Refusal,
    short,
)
from elastic_agent.rendezvous.errors import RecordInvalid
from elastic_agent.rendezvous.records import Endpoint

JOB = Job(
    job="ab12",
    name="train.py",
    options=("--nproc-per-node=2", ""),
    command=("--", "train.py", "--lr", "0.1"),
    environment={"A": "1", "B": ""},
    directory="/data/my runs",
    min_nodes=1,
    max_nodes=4,
    submitted_at=1.7e9,
    submitted_by="me@here",
)
END = AllocationEnd("ab12", 3, Outcome.UNABLE, -9, "killed")
NODE = PoolNode("a", "a-1", 4, running=4, ended=END, leaving=True, problem="disk full")
NODE = replace(NODE, http=Endpoint("10.0.0.1", 80), token="t")
ALLOCATION = Allocation("a", "a-1", 3, leaving=True)
RESULT = JobResult("ab12", Outcome.UNABLE, "why", 0, 3, None, 1.7e9, ("a", "b"))
RUN = Attempt("ab12", 2, 1.7e9, (ALLOCATION, Allocation("b", "b-1", 4)), RESULT)
RUN = replace(RUN, refusals={"a": Refusal("why", 1.7e9)})
PLAN = Plan(4, (RUN, Attempt("cd34", 2, 1.7e9, (), None, ("a",), 1)))

ALL: tuple[Record, ...] = (JOB, NODE, PLAN, RESULT)


def tree(record: Record) -> dict[str, Any]:
    loaded = json.loads(record.to_json())
    assert isinstance(loaded, dict)
    return loaded


def refused(kind: type[Record], body: Any) -> str:
    with pytest.raises(RecordInvalid) as caught:
        kind.read("a/key", body if isinstance(body, str) else json.dumps(body))
    assert caught.value.key == "a/key"
    return caught.value.problem


@pytest.mark.parametrize("record", [*ALL, PoolNode("a", "a-1"), Plan(), replace(RESULT, started_at=1.5)])
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert type(record).read(record.key, record.to_json()) == record


@pytest.mark.parametrize(
    ("record", "path", "values"),
    [
        (JOB, ("job",), [None, 1, "", "a b", "a/b", "a\n", "x" * 129]),
        (JOB, ("environment",), [None, [], {"A": 1}]),
        (JOB, ("min_nodes",), [None, True, "1", 0, MOST_NODES + 1]),
        (JOB, ("submitted_at",), [None, -1, 10**400, float("nan")]),
        (NODE, ("ended", "outcome"), [None, "", "other"]),
        (NODE, ("http", "port"), [-1, 65536]),
        (PLAN, ("attempts", 0, "allocations", 0, "id"), [0, 2**63, "1"]),
        (PLAN, ("attempts", 0, "refusals"), [[], {"a b": {}}, {"a": 1}]),
        (RESULT, ("nodes",), [None, {}, ["a b"], ["a"] * (MOST_NODES + 1)]),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    record: Record, path: tuple[str | int, ...], values: list[Any]
) -> None:
    for value in values:
        body: Any = tree(record)
        place = body
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        assert str(path[-1]) in refused(type(record), body), value


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_what_is_no_record_of_this_version_is_refused(record: Record) -> None:
    kind = type(record)
    for odd in ("", "{", "[]", "null", "[" * 10_000):
        refused(kind, odd)
    for version in (None, 0, SCHEMA + 1, "1", True):
        assert "version" in refused(kind, {**tree(record), "v": version})
    assert kind.read("k", json.dumps({**tree(record), "added later": 1})) == record


def test_every_prefix_has_the_record_that_is_kept_below_it() -> None:
    for record in ALL:
        prefix = next((prefix for prefix in RECORDS if record.key.startswith(prefix)), None)
        assert prefix is None or RECORDS[prefix] is type(record)
    assert PLAN.key not in RECORDS


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda: replace(JOB, name="x" * 129),
        lambda: replace(JOB, command=("x",) * (MOST_WORDS + 1)),
        lambda: replace(JOB, environment={f"A{number}": "x" * 1024 for number in range(100)}),
        lambda: replace(JOB, min_nodes=MOST_NODES + 1),
        lambda: replace(NODE, problem="x" * (MAX_REASON + 1)),
    ],
)
def test_what_its_readers_would_refuse_is_not_written(spoiled: Callable[[], Record]) -> None:
    """Else a job would be in the store that no daemon sees."""
    with pytest.raises(RecordInvalid):
        spoiled().to_json()


def test_a_job_is_at_most_so_large_and_a_plan_of_a_large_pool_fits() -> None:
    large = replace(JOB, environment={f"A{number}": "x" * 1000 for number in range(90)})
    assert Job.read(large.key, large.to_json()) == large
    body = {**tree(JOB), "environment": {f"A{number}": "x" * 1000 for number in range(100)}}
    assert f"at most {MAX_JOB_CHARS}" in refused(Job, body)
    nodes = tuple(Allocation(f"ip-10-0-{i}.a-region.internal", f"{i:012x}", i + 1) for i in range(4000))
    runs = (
        replace(RUN, job=f"{i:08x}", allocations=nodes[i * 40 : i * 40 + 40], ending=None) for i in range(100)
    )
    assert len(Plan(4000, tuple(runs)).to_json()) < MAX_RECORD_CHARS


@pytest.mark.parametrize("chars", [0, MAX_REASON, MAX_REASON + 1, 10 * MAX_REASON])
def test_a_short_reason_fits(chars: int) -> None:
    reason = short("x" * chars)
    assert len(reason) == min(chars, MAX_REASON)
    assert replace(NODE, problem=reason).to_json()


def test_a_text_of_another_node_is_read_as_one_line() -> None:
    body = {**tree(JOB), "cancelled_by": "me\n12:00:00 all is well\x1b[31m"}
    assert Job.read("k", json.dumps(body)).cancelled_by == "me 12:00:00 all is well"


def test_a_node_has_one_allocation_by_its_incarnation() -> None:
    assert PLAN.allocation_of("a", "a-1") == (RUN, ALLOCATION)
    assert PLAN.allocation_of("a", "a-2") is None
    assert RUN.staying == (Allocation("b", "b-1", 4),)
    assert (PLAN.run_of("ab12"), PLAN.run_of("cd34"), PLAN.runs) == (RUN, None, (RUN,))
    assert (list(PLAN.refusals_of("ab12")), PLAN.refusals_of("cd34")) == (["a"], {})
