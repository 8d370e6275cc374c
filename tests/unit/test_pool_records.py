"""Records of a pool: what one daemon writes the others read back, and anything else is refused by key and field."""

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
    AllocationOutcome,
    Attempt,
    Cancel,
    Ending,
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
END = AllocationEnd("ab12", 3, AllocationOutcome.NOT_HERE, -9, "killed")
NODE = PoolNode("a", "a-1", 4, running=4, ended=END, leaving=True, problem="disk full")
NODE = replace(NODE, http=Endpoint("10.0.0.1", 80), token="t")
ALLOCATION = Allocation("a", "a-1", 3, leaving=True)
RUN = Attempt(
    "ab12", 2, 1.7e9, (ALLOCATION, Allocation("b", "b-1", 4)), Ending(Outcome.FAILED, "a: why", 1, 1.7e9)
)
RUN = replace(RUN, refusals={"a": Refusal("why", 1.7e9)})
PLAN = Plan(4, (RUN, Attempt("cd34", 2, 1.7e9, (), None, ("a",), 1)))
RESULT = JobResult("ab12", Outcome.UNABLE, "why", 0, 3, None, 1.7e9, ("a", "b"))
CANCEL = Cancel("ab12", "me@here")

ALL: tuple[Record, ...] = (JOB, NODE, PLAN, RESULT, CANCEL)
BIG = 2**63 - 1
NAME: list[Any] = [None, 1, True, [], {}, "", "a b", "a/b", "a\n", "\u00fc", "x" * 129]
FLAG: list[Any] = [None, 0, 1, "true", [], {}]
CHOICE: list[Any] = [None, 1, True, [], {}, "", "other"]
OBJECT: list[Any] = [1, True, "x", [], [{}]]
INSTANT: list[Any] = [None, True, "1", [], {}, -1, -0.1, 2**41, 10**400, float("inf"), float("nan")]


def text(at_most: int) -> list[Any]:
    return [None, 1, True, [], {}, "x" * (at_most + 1)]


def number(low: int, high: int) -> list[Any]:
    return [None, True, "1", 1.0, [], {}, low - 1, high + 1]


def words(at_most: int) -> list[Any]:
    return [None, 1, "x", {}, [1], [None], [["x"]], ["x"] * (at_most + 1)]


WRONG: dict[type[Record], dict[tuple[str | int, ...], list[Any]]] = {
    Job: {
        ("job",): NAME,
        ("name",): text(128),
        ("options",): words(MOST_WORDS),
        ("command",): words(MOST_WORDS),
        ("environment",): [None, 1, "x", [], {"A": 1}, {"A": None}],
        ("directory",): text(4096),
        ("min_nodes",): number(1, MOST_NODES),
        ("max_nodes",): number(1, MOST_NODES),
        ("submitted_at",): INSTANT,
        ("submitted_by",): text(256),
        ("nodes_multiple_of",): number(1, MOST_NODES),
    },
    Cancel: {("job",): NAME, ("cancelled_by",): text(256)},
    PoolNode: {
        ("node",): NAME,
        ("incarnation",): NAME,
        ("most_nodes",): number(1, MOST_NODES),
        ("running",): number(0, BIG),
        ("ended",): OBJECT,
        ("ended", "job"): NAME,
        ("ended", "allocation_id"): number(1, BIG),
        ("ended", "outcome"): CHOICE,
        ("ended", "code"): number(-255, 255),
        ("ended", "reason"): text(MAX_REASON),
        ("leaving",): FLAG,
        ("problem",): text(MAX_REASON),
        ("http",): OBJECT,
        ("http", "address"): text(256),
        ("http", "port"): number(0, 65535),
        ("token",): text(128),
    },
    Plan: {
        ("allocation_ids",): number(0, BIG),
        ("attempts",): [None, 1, "x", {}, [1], [None], [[]]],
        ("attempts", 0, "job"): NAME,
        ("attempts", 0, "attempt"): number(1, BIG),
        ("attempts", 0, "started_at"): INSTANT,
        ("attempts", 0, "allocations"): [None, 1, "x", {}, [1], [None], [[]]],
        ("attempts", 0, "allocations", 0, "node"): NAME,
        ("attempts", 0, "allocations", 0, "incarnation"): NAME,
        ("attempts", 0, "allocations", 0, "id"): number(1, BIG),
        ("attempts", 0, "allocations", 0, "leaving"): FLAG,
        ("attempts", 0, "left"): words(MOST_NODES),
        ("attempts", 0, "ending"): OBJECT,
        ("attempts", 0, "ending", "outcome"): CHOICE,
        ("attempts", 0, "ending", "reason"): text(MAX_REASON),
        ("attempts", 0, "ending", "code"): number(-255, 255),
        ("attempts", 0, "ending", "since"): INSTANT,
        ("attempts", 0, "in_vain"): number(0, BIG),
        ("attempts", 0, "refusals"): [None, 1, "x", [], {"a b": {}}, {"a": None}, {"a": 1}],
        ("attempts", 0, "refusals", "a", "reason"): text(MAX_REASON),
        ("attempts", 0, "refusals", "a", "until"): INSTANT,
    },
    JobResult: {
        ("job",): NAME,
        ("outcome",): CHOICE,
        ("reason",): text(MAX_REASON),
        ("code",): number(-255, 255),
        ("attempts",): number(0, BIG),
        ("started_at",): INSTANT[1:],
        ("ended_at",): INSTANT,
        ("nodes",): [None, 1, "x", {}, [1], [None], ["a b"], ["a"] * (MOST_NODES + 1)],
    },
}


def tree(record: Record) -> dict[str, Any]:
    loaded = json.loads(record.to_json())
    assert isinstance(loaded, dict)
    return loaded


def at(root: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        root = root[part]
    return root


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Of every field; of a list the first element stands for all."""
    found: list[tuple[str | int, ...]] = []
    if isinstance(value, list):
        return paths(value[0], (*path, 0)) if value and isinstance(value[0], dict) else []
    if isinstance(value, dict) and path[-1:] != ("environment",):
        for name, inner in value.items():
            named = path[-1:] == ("refusals",)
            found += [] if named or name == "v" else [(*path, name)]
            found += paths(inner, (*path, name))
    return found


def refused(kind: type[Record], body: Any) -> RecordInvalid:
    with pytest.raises(RecordInvalid) as caught:
        kind.read("a/key", body if isinstance(body, str) else json.dumps(body))
    assert caught.value.key == "a/key"
    return caught.value


@pytest.mark.parametrize(
    "record",
    [
        *ALL,
        PoolNode("a", "a-1"),
        Plan(),
        replace(JOB, options=(), environment={}),
        replace(RESULT, started_at=1.5),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert type(record).read(record.key, record.to_json()) == record


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_every_wrong_value_of_every_field_is_refused(record: Record) -> None:
    wrong = WRONG[type(record)]
    assert set(wrong) == set(paths(tree(record))), "a field has no row"
    for path, values in wrong.items():
        for value in values:
            body = tree(record)
            at(body, path[:-1])[path[-1]] = value
            assert str(path[-1]) in refused(type(record), body).problem, (path, value)
        body = tree(record)
        del at(body, path[:-1])[path[-1]]
        assert "missing" in refused(type(record), body).problem, path


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_what_is_no_record_of_this_version_is_refused(record: Record) -> None:
    kind = type(record)
    for odd in ("", "{", "[]", "1", "null", '"x"', "[" * 10_000):
        refused(kind, odd)
    for version in (None, 0, SCHEMA + 1, "1", True):
        assert "version" in refused(kind, {**tree(record), "v": version}).problem
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
        lambda: replace(JOB, directory="/" + "x" * 4096),
        lambda: replace(JOB, command=("x",) * (MOST_WORDS + 1)),
        lambda: replace(JOB, environment={f"A{number}": "x" * 1024 for number in range(100)}),
        lambda: replace(JOB, min_nodes=MOST_NODES + 1),
        lambda: replace(JOB, submitted_by="x" * 257),
        lambda: replace(NODE, problem="x" * (MAX_REASON + 1)),
        lambda: replace(RESULT, nodes=("a",) * (MOST_NODES + 1)),
    ],
)
def test_what_its_readers_would_refuse_is_not_written(spoiled: Callable[[], Record]) -> None:
    """Else a job would be in the store that no daemon sees."""
    with pytest.raises(RecordInvalid):
        spoiled().to_json()


def test_a_job_is_at_most_so_large() -> None:
    large = replace(JOB, environment={f"A{number}": "x" * 1000 for number in range(90)})
    assert Job.read(large.key, large.to_json()) == large
    body = tree(JOB)
    body["environment"] = {f"A{number}": "x" * 1000 for number in range(100)}
    assert f"at most {MAX_JOB_CHARS}" in refused(Job, body).problem


def test_a_plan_of_a_large_pool_fits() -> None:
    allocations = tuple(Allocation(f"ip-10-0-{i}.a-region.internal", f"{i:012x}", i + 1) for i in range(4000))
    runs = tuple(
        replace(RUN, job=f"{i:08x}", allocations=allocations[i * 40 : i * 40 + 40], ending=None)
        for i in range(100)
    )
    assert len(Plan(4000, runs).to_json()) < MAX_RECORD_CHARS


@pytest.mark.parametrize("chars", [0, MAX_REASON - 1, MAX_REASON, MAX_REASON + 1, 10 * MAX_REASON])
def test_a_short_reason_fits(chars: int) -> None:
    reason = short("x" * chars)
    assert len(reason) == min(chars, MAX_REASON)
    assert replace(NODE, problem=reason).to_json()


def test_a_text_of_another_node_is_read_as_one_line() -> None:
    body = tree(CANCEL)
    body["cancelled_by"] = "me\n12:00:00 all is well\x1b[31m"
    assert Cancel.read("k", json.dumps(body)).cancelled_by == "me 12:00:00 all is well"


def test_a_node_has_one_allocation_by_its_incarnation() -> None:
    assert PLAN.allocation_of("a", "a-1") == (RUN, ALLOCATION)
    assert PLAN.allocation_of("a", "a-2") is None
    assert RUN.staying == (Allocation("b", "b-1", 4),)
    assert PLAN.run_of("ab12") is RUN
    assert PLAN.run_of("cd34") is None
    assert PLAN.runs == (RUN,)
    assert list(PLAN.refusals_of("ab12")) == ["a"]
    assert PLAN.refusals_of("cd34") == {}
