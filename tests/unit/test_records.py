"""Records: what one node writes the others read back, and anything else is refused by key and field."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_agent.agent.configuration.parse import MOST_NODES
from elastic_agent.codec import Invalid
from elastic_agent.health.hang_report import (
    HangFinding,
    HangProbe,
    HangSuspicion,
    InGroup,
    RankActivity,
    RankReport,
    Recorded,
    Urgency,
)
from elastic_agent.health.hang_report import HangReport as Said
from elastic_agent.health.stragglers import PaceComparison, Paces, Straggler
from elastic_agent.rendezvous.errors import RecordInvalid
from elastic_agent.rendezvous.messages import Exclusion, Limits, Program, Recheck
from elastic_agent.rendezvous.records import (
    MAX_EXCEPTION,
    MAX_LOG_LINE,
    MAX_RECORD_BYTES,
    MAX_SEEN,
    MAX_TRACEBACK,
    SCHEMA,
    WORLD_KEY,
    Action,
    BadState,
    Cause,
    CauseKind,
    Condition,
    DrainRequest,
    Endpoint,
    Failure,
    GenerationProgress,
    Member,
    NodeRecord,
    PeerStatus,
    Phase,
    Restarts,
    Result,
    Standby,
    StopAt,
    World,
    assign_ranks,
    node_key,
)
from elastic_agent.rendezvous.text import CAUSE, clean

FAILURE = Failure(
    *(3, "ValueError in step", "rank 1 raised ValueError: lr < 0", "exception"),
    node="b",
    rank=1,
    local_rank=0,
    returncode=1,
    exception="ValueError: lr < 0",
    traceback="Traceback ...",
    log_tail=("the last line",),
    log_file="/logs/rank1.log",
)
RECORDED = Recorded(
    12.5, False, (InGroup("default_pg", None, 7, 6, "all_reduce"), InGroup("1 #5dcb363a", 2, 3, None, "send"))
)
NODE = NodeRecord(
    node="a",
    incarnation="a-1",
    address="10.0.0.1",
    port=4711,
    slots=2,
    http=Endpoint("10.0.0.1", 9100),
    limits=Limits(2, 4, 1.5, 3),
    program=Program("train.py", "ab12", "cd34", 5.0, 60.0),
    node_rank=1,
    hosts_store=True,
    leaving=True,
    ready=True,
    generation=3,
    conditions=frozenset({Condition.STOPPED, Condition.STABLE}),
    failure=FAILURE,
    step=17,
    progress=GenerationProgress(3, 12, 17),
    seen=2,
    role="trainer",
    recheck=Recheck(2, False, "/dev/shm is full"),
    paces=Paces(3, 20, 300_000, (200_000, 280_000)),
    comparison=PaceComparison(3, 200_000, (Straggler("a", 1, 280_000), Straggler("b", 3, 290_000))),
    suspicion=HangSuspicion(3, "no step for 5 s", Urgency.EARLY),
    hang_report=Said(
        3,
        1,
        (RankReport(0, RankActivity.WAITS, 17, 5.0), RankReport(1, RankActivity.OTHER, recorded=RECORDED)),
    ),
)
WORLD = World(
    job="job",
    generation=3,
    phase=Phase.STOPPING,
    members=(Member("a", "a-1", 2, 0), Member("b", "b-1", 3, 2, Endpoint("10.0.0.2", 9100), "trainer")),
    master=Endpoint("10.0.0.1", 4711),
    cause=Cause(CauseKind.FAILURE, "a", "rank 1 raised", FAILURE),
    restarts=Restarts(2, 1, "ValueError in step", 1, 1, BadState(2, 12), "b", 2),
    step=17,
    limits=Limits(2, 4, 1.5, 3),
    limits_of="a",
    program=Program("train.py", "ab12", "cd34"),
    unproven=(0, 1),
    exclusions=(
        Exclusion("c", "c-1", "repeated", "its workers fail", "0123456789abcdef", 2),
        Exclusion("d", "d-1", "operator", "a fan is loud", by_operator=True, readmitted=True),
    ),
    standbys=(Standby("e", Endpoint("10.0.0.5", 4712)), Standby("f", Endpoint("10.0.0.6", 4712))),
    run="a",
    inquiry=HangProbe(2, Urgency.OVERDUE, HangFinding.LIKELY, "rank 0 sleeps", "a", 0),
)
INTRODUCTION = PeerStatus("a", "a-1", 3, confirmed_s=0.25, whole_s=1.5)
STOP = StopAt(3, 17, paused=True)
DRAIN_REQUEST = DrainRequest("a-1")
ENDED = replace(WORLD, phase=Phase.ENDED, result=Result.CRASH_LOOP)

Record = NodeRecord | World | StopAt | DrainRequest | PeerStatus
Tree = dict[str, Any]
Path = tuple[str | int, ...]


def tree(record: Record) -> Tree:
    loaded = json.loads(record.to_json())
    assert isinstance(loaded, dict)
    return loaded


def at(root: Tree, path: Path) -> Any:
    value: Any = root
    for part in path:
        value = value[part]
    return value


def read_node(text: str) -> NodeRecord:
    return NodeRecord.from_json("nodes/a", text)


def read_drain_request(text: str) -> DrainRequest:
    return DrainRequest.from_json("drain/a", text)


Read = Callable[[str], Record]
READERS: dict[str, tuple[Record, Read]] = {
    "node": (NODE, read_node),
    "world": (WORLD, World.from_json),
    "stop": (STOP, StopAt.from_json),
    "drain_request": (DRAIN_REQUEST, read_drain_request),
    "introduction": (INTRODUCTION, PeerStatus.from_json),
}


def refused(read: Read, text: str) -> RecordInvalid:
    with pytest.raises(RecordInvalid) as caught:
        read(text)
    return caught.value


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("record", [NODE, replace(NODE, failure=None), NodeRecord("a", "i", "", 0, 1)])
def test_a_node_record_comes_back_as_it_was(record: NodeRecord) -> None:
    assert NodeRecord.from_json("nodes/a", record.to_json()) == record


@pytest.mark.parametrize(
    "world", [WORLD, ENDED, replace(WORLD, phase=Phase.RUNNING, cause=Cause(CauseKind.START), step=0)]
)
def test_a_world_comes_back_as_it_was(world: World) -> None:
    assert World.from_json(world.to_json()) == world


@pytest.mark.parametrize("kind", CauseKind)
def test_every_cause_comes_back(kind: CauseKind) -> None:
    world = replace(WORLD, cause=Cause(kind, "a", "why", FAILURE))
    assert World.from_json(world.to_json()).cause.kind is kind


@pytest.mark.parametrize("result", Result)
def test_every_result_comes_back(result: Result) -> None:
    world = replace(ENDED, result=result)
    assert World.from_json(world.to_json()).result is result


names = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=128)
numbers = st.integers(0, 2**63 - 1)
counts = st.integers(1, 2**63 - 1)


def texts(max_size: int) -> st.SearchStrategy[str]:
    """As they are read: an agent that writes others finds them clean when they come back."""
    return st.text(max_size=max_size).map(clean)


endpoints = st.builds(Endpoint, texts(256), st.integers(0, 65535))
ages = st.none() | st.floats(0, 1e12)
introductions = st.builds(PeerStatus, names, names, numbers, ages, ages)
failures = st.builds(
    Failure,
    counts,
    texts(50),
    texts(50),
    st.from_regex(CAUSE, fullmatch=True),
    st.sampled_from(Action),
    st.booleans(),
    st.booleans(),
    st.just("") | names,
    st.none() | numbers,
    st.none() | numbers,
    st.integers(-128, 255),
    st.none() | texts(50),
    st.none() | texts(50),
    st.lists(texts(50), max_size=16).map(tuple),
    st.none() | texts(50),
)
limits = st.builds(Limits, counts, counts, st.floats(0, 1e12), st.none() | numbers)
programs = st.builds(
    Program,
    texts(50),
    texts(50),
    texts(50),
    st.floats(0, 1e12),
    st.floats(0, 1e12),
)
progress = st.builds(GenerationProgress, counts, st.none() | numbers, st.none() | numbers)
exclusions = st.builds(
    Exclusion,
    names,
    names,
    st.from_regex(CAUSE, fullmatch=True),
    texts(50),
    texts(32),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
nodes = st.builds(
    NodeRecord,
    node=names,
    incarnation=names,
    address=texts(256),
    port=st.integers(0, 65535),
    slots=st.integers(1, 4096),
    http=st.none() | endpoints,
    limits=st.none() | limits,
    program=st.none() | programs,
    node_rank=st.none() | numbers,
    hosts_store=st.booleans(),
    leaving=st.booleans(),
    ready=st.booleans(),
    generation=numbers,
    conditions=st.frozensets(st.sampled_from(Condition)),
    failure=st.none() | failures,
    step=numbers,
    progress=st.none() | progress,
    seen=st.integers(0, MAX_SEEN),
    role=st.sampled_from(["default", "my trainer", "a/b"]) | names,
    recheck=st.none() | st.builds(Recheck, st.integers(1, 9), st.booleans(), texts(50)),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    phase = draw(st.sampled_from(Phase))
    failure = draw(failures)
    return World(
        job=draw(names),
        generation=draw(st.integers(1, 2**63 - 1)),
        phase=phase,
        members=assign_ranks(
            tuple(
                draw(
                    st.lists(
                        nodes, min_size=1, max_size=4, unique_by=(lambda n: n.node, lambda n: n.incarnation)
                    )
                )
            )
        ),
        master=draw(endpoints),
        cause=Cause(draw(st.sampled_from(CauseKind)), draw(names), draw(texts(50)), failure),
        restarts=draw(
            st.builds(
                Restarts,
                numbers,
                numbers,
                texts(50),
                numbers,
                numbers,
                st.none() | st.builds(BadState, counts, numbers),
                st.just("") | names,
                numbers,
            )
        ),
        step=draw(numbers),
        result=draw(st.sampled_from(Result)) if phase is Phase.ENDED else None,
        final_saver=draw(st.just("") | names),
        finishing=draw(st.booleans()),
        limits=draw(st.none() | limits),
        limits_of=draw(st.just("") | names),
        program=draw(st.none() | programs),
        unproven=tuple(draw(st.lists(numbers, max_size=3))),
        exclusions=tuple(draw(st.lists(exclusions, max_size=3))),
        standbys=tuple(draw(st.lists(st.builds(Standby, names, endpoints), max_size=3))),
        run=draw(st.just("") | names),
    )


@settings(deadline=None)
@given(nodes)
def test_any_node_record_comes_back_as_it_was(record: NodeRecord) -> None:
    assert NodeRecord.from_json(node_key(record.node), record.to_json()) == record


@settings(deadline=None)
@given(worlds())
def test_any_world_comes_back_as_it_was(world: World) -> None:
    assert World.from_json(world.to_json()) == world


@settings(deadline=None)
@given(introductions)
def test_any_introduction_comes_back_as_it_was(introduction: PeerStatus) -> None:
    assert PeerStatus.from_json(introduction.to_json()) == introduction


def test_a_world_of_the_most_nodes_fits_with_long_names() -> None:
    crowd = tuple(
        replace(
            NODE, node=f"ip-10-0-{i >> 8}-{i & 255}.a-long-region-1.compute.internal", incarnation=f"{i:032x}"
        )
        for i in range(MOST_NODES)
    )
    world = replace(WORLD, members=assign_ranks(crowd))
    assert World.from_json(world.to_json()) == world


# ---------------------------------------------------------------- every field, missing and wrong

BIG = 2**63 - 1
NAME: list[Any] = [None, 1, True, [], {}, "", "a b", "a/b", "a\n", "\u00fc", "x" * 129]
FLAG: list[Any] = [None, 0, 1, "true", [], {}]
CHOICE: list[Any] = [None, 1, True, [], {}, "", "other"]
OBJECT: list[Any] = [1, True, "x", [], [{}]]


def text(at_most: int) -> list[Any]:
    return [None, 1, True, [], {}, "x" * (at_most + 1)]


def number(low: int = 0, high: int = BIG) -> list[Any]:
    return [None, True, "1", 1.0, [], {}, low - 1, high + 1]


NAME_OR_NONE: list[Any] = [*text(128), "a/b", "a b", ".\n"]
AGE: list[Any] = [True, "1", [], {}, -1, -0.1, 2**63, 10**400, float("inf"), float("nan")]
FAILURE_FIELDS: dict[Path, list[Any]] = {
    ("failure", "generation"): number(1),
    ("failure", "fingerprint"): text(1024),
    ("failure", "summary"): text(4096),
    ("failure", "cause"): [None, 1, True, [], {}, "", "Xid", "a-b", "a b", "a\n", "a" * 41],
    ("failure", "action"): CHOICE,
    ("failure", "collateral"): FLAG,
    ("failure", "outside"): FLAG,
    ("failure", "node"): NAME_OR_NONE,
    ("failure", "rank"): number()[1:],
    ("failure", "local_rank"): number()[1:],
    ("failure", "returncode"): number(-128, 255),
    ("failure", "exception"): text(MAX_EXCEPTION)[1:],
    ("failure", "traceback"): text(MAX_TRACEBACK)[1:],
    ("failure", "log_tail"): [None, 1, True, "x", {}, [1], [None], ["x" * (MAX_LOG_LINE + 1)], ["x"] * 21],
    ("failure", "log_file"): text(500)[1:],
}
SECONDS: list[Any] = [None, *AGE]
LIMITS_FIELDS: dict[Path, list[Any]] = {
    ("limits",): OBJECT,
    ("limits", "min_nodes"): number(1),
    ("limits", "max_nodes"): number(1),
    ("limits", "last_call_s"): SECONDS,
    ("limits", "max_restarts"): number()[1:],
    ("limits", "nodes_multiple_of"): number(1),
}
PROGRAM_FIELDS: dict[Path, list[Any]] = {
    ("program",): OBJECT,
    ("program", "name"): text(256),
    ("program", "digest"): text(64),
    ("program", "arguments"): text(64),
    ("program", "lease_ttl_s"): SECONDS,
    ("program", "outage_grace_s"): SECONDS,
}
WRONG: dict[str, dict[Path, list[Any]]] = {
    "node": {
        ("node",): NAME,
        ("incarnation",): NAME,
        ("address",): text(256),
        ("port",): number(0, 65535),
        ("slots",): number(1, 4096),
        ("http",): OBJECT,
        ("http", "address"): text(256),
        ("http", "port"): number(0, 65535),
        **LIMITS_FIELDS,
        **PROGRAM_FIELDS,
        ("node_rank",): number()[1:],
        ("hosts_store",): FLAG,
        ("leaving",): FLAG,
        ("ready",): FLAG,
        ("generation",): number(),
        ("conditions",): [None, 1, True, "stopped", {}, [1], ["other"], ["stopped"] * 9],
        ("failure",): OBJECT,
        **FAILURE_FIELDS,
        ("step",): number(),
        ("recheck",): OBJECT,
        ("recheck", "times"): number(1),
        ("recheck", "passed"): FLAG,
        ("recheck", "summary"): text(512),
        ("progress",): OBJECT,
        ("progress", "generation"): number(),
        ("progress", "loaded"): number()[1:],
        ("progress", "reached"): number()[1:],
        ("seen",): number(high=MAX_SEEN),
        ("role",): [None, 1, True, [], {}, "", "a\n", 'a"b', "a\\b", "\u00fc", "x" * 129],
        ("memory",): number(0, 65535),
        ("paces",): OBJECT,
        ("paces", "generation"): number(1),
        ("paces", "timed"): number(),
        ("paces", "step_us"): number(),
        ("paces", "own_us"): [None, 1, True, "x", {}, [True], [-1], ["x"], [1.5], [None], [[]], [1] * 4097],
        ("comparison",): OBJECT,
        ("comparison", "generation"): number(1),
        ("comparison", "usual_us"): number(),
        ("comparison", "stragglers"): [None, 1, True, "x", {}, [1], [None], [[]]],
        ("suspicion",): OBJECT,
        ("suspicion", "generation"): number(1),
        ("suspicion", "why"): text(512),
        ("suspicion", "urgency"): CHOICE,
        ("hang_report",): OBJECT,
        ("hang_report", "generation"): number(1),
        ("hang_report", "inquiry"): number(1),
        ("hang_report", "ranks"): [None, 1, True, "x", {}, [1], [None], [[]], [{}] * 129],
    },
    "world": {
        ("job",): NAME,
        ("generation",): number(1),
        ("phase",): CHOICE,
        ("members",): [None, 1, True, "x", {}, [1], [None], [[]]],
        ("members", 1, 0): NAME,
        ("members", 1, 1): NAME,
        ("members", 1, 2): number(1, 4096),
        ("members", 1, 3): [None, 1, True, [], {}, "a\n", 'a"b', "\u00fc", "x" * 129],
        ("members", 1, 4): text(256),
        ("members", 1, 5): number(0, 65535),
        ("master",): [None, *OBJECT],
        ("master", "address"): text(256),
        ("master", "port"): number(0, 65535),
        ("cause",): [None, *OBJECT],
        ("cause", "kind"): CHOICE,
        ("cause", "node"): text(128),
        ("cause", "detail"): text(4096),
        ("cause", "failure"): OBJECT,
        **{("cause", *path): wrong for path, wrong in FAILURE_FIELDS.items()},
        ("restarts",): [None, *OBJECT],
        ("restarts", "failures"): number(),
        ("restarts", "without_progress"): number(),
        ("restarts", "fingerprint"): text(1024),
        ("restarts", "same_fingerprint"): number(),
        ("restarts", "at_load"): number(),
        ("restarts", "bad_state"): OBJECT,
        ("restarts", "bad_state", "generation"): number(1),
        ("restarts", "bad_state", "step"): number(),
        ("restarts", "culprit"): text(128),
        ("restarts", "blamed"): number(),
        ("restarts", "exclusions"): number(),
        ("restarts", "free_retries"): number(),
        ("restarts", "from_outside"): number(),
        ("step",): number(),
        ("result",): [1, True, [], {}, "", "other"],
        ("final_saver",): text(128),
        ("finishing",): FLAG,
        **LIMITS_FIELDS,
        ("limits_of",): text(128),
        **PROGRAM_FIELDS,
        ("unproven",): [None, 1, True, "x", {}, [True], [-1], ["x"], [1.5], [None], [[]]],
        ("exclusions",): [None, 1, True, "x", {}, [1], [None], [[]], [{}] * 65],
        ("standbys",): [None, 1, True, "x", {}, [1], [None], [[]]],
        ("run",): NAME_OR_NONE,
        ("inquiry",): OBJECT,
        ("inquiry", "number"): number(1),
        ("inquiry", "urgency"): CHOICE,
        ("inquiry", "finding"): CHOICE[1:],
        ("inquiry", "why"): text(512),
        ("inquiry", "node"): NAME_OR_NONE,
        ("inquiry", "rank"): number()[1:],
    },
    "drain_request": {("incarnation",): NAME},
    "stop": {
        ("generation",): number(1),
        ("step",): number(),
        ("paused",): FLAG,
    },
    "introduction": {
        ("node",): NAME,
        ("incarnation",): NAME,
        ("generation",): number(),
        ("confirmed_s",): AGE,
        ("whole_s",): AGE,
    },
}
"""For every field of all records: what must not pass."""


def name_of(value: Any) -> str:
    text = ".".join(map(str, value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) < 30 else f"{text[:10]}..{len(text)}"


def spelled(path: Path) -> str:
    """How a refusal names the field: of a member by its place, whichever part is wrong."""
    return f"members[{path[1]}]" if path[0] == "members" and path[1:] else ".".join(map(str, path))


def paths(value: Any, path: Path = ()) -> set[Path]:
    """Every field of a record's JSON form, the first member's left out."""
    if isinstance(value, dict):
        inner = (paths(item, (*path, key)) for key, item in value.items() if key != "v")
        return set().union({path} - {()}, *inner)
    if isinstance(value, list) and len(value) > 1 and isinstance(value[1], list):
        return {path} | {(*path, 1, part) for part in range(len(value[1]))}
    return {path}


@pytest.mark.parametrize("kind", READERS)
def test_the_table_of_wrong_values_covers_every_field(kind: str) -> None:
    assert set(WRONG[kind]) == paths(tree(READERS[kind][0]))


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in WRONG for path in WRONG[kind]], ids=name_of
)
def test_a_missing_field_is_refused_by_name(kind: str, path: Path) -> None:
    record, read = READERS[kind]
    root = tree(record)
    del at(root, path[:-1])[path[-1]]
    error = refused(read, json.dumps(root))
    missing = " is missing" if isinstance(path[-1], str) else " is ["
    assert error.problem.startswith(spelled(path) + missing)


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [(kind, path, wrong) for kind in WRONG for path in WRONG[kind] for wrong in WRONG[kind][path]],
    ids=name_of,
)
def test_a_wrong_value_is_refused_by_the_fields_name(kind: str, path: Path, wrong: Any) -> None:
    record, read = READERS[kind]
    root = tree(record)
    at(root, path[:-1])[path[-1]] = wrong
    error = refused(read, json.dumps(root))
    assert re.match(rf"{re.escape(spelled(path))}(\[0\])? is ", error.problem)


def test_the_largest_values_pass() -> None:
    failure = Failure(
        *(BIG, "x" * 1024, "x" * 4096, "x" * 40, Action.STOP, True, True, "n" * 128, BIG, BIG, 255),
        *("x" * MAX_EXCEPTION, "x" * MAX_TRACEBACK, ("x" * MAX_LOG_LINE,) * 20, "x" * 500),
    )
    endpoint = Endpoint("x" * 256, 65535)
    node = NodeRecord(
        "n" * 128,
        "i" * 128,
        "x" * 256,
        65535,
        4096,
        endpoint,
        Limits(BIG, BIG, 1e9, BIG),
        Program("x" * 256, "x" * 64, "x" * 64, 1e9, 1e9),
        BIG,
        True,
        True,
        True,
        BIG,
        frozenset(Condition),
        failure,
        BIG,
        GenerationProgress(BIG, BIG, BIG),
    )
    assert NodeRecord.from_json(node_key(node.node), node.to_json()) == node
    world = World(
        "j" * 128,
        BIG,
        Phase.ENDED,
        (Member("n" * 128, "i" * 128, 4096, 0, endpoint, "r" * 128),),
        endpoint,
        Cause(CauseKind.FAILURE, "n" * 128, "x" * 4096, failure),
        Restarts(BIG, BIG, "x" * 1024, BIG, BIG, BadState(BIG, BIG), "n" * 128, BIG, BIG),
        BIG,
        Result.CRASH_LOOP,
        run="r" * 128,
    )
    assert World.from_json(world.to_json()) == world


# ---------------------------------------------------------------- what no single field shows


def test_a_record_under_another_nodes_key_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="it is the record of node 'a'"):
        NodeRecord.from_json("nodes/b", NODE.to_json())


def members(*places: Member) -> World:
    return replace(WORLD, members=places)


@pytest.mark.parametrize(
    ("record", "change", "problem"),
    [
        (WORLD, {"members": []}, "it has no members"),
        (WORLD, {"members": [["a", "a-1", 2, ""], ["a", "a-2", 1, ""]]}, "it lists a node twice"),
        (WORLD, {"members": [["a", "a-1", 2, ""], ["b", "a-1", 1, ""]]}, "it lists a node twice"),
        (WORLD, {"result": "succeeded"}, "phase 'stopping' with result"),
        (ENDED, {"result": None}, "phase 'ended' with result None"),
        (WORLD, {"cause": tree(WORLD)["cause"] | {"failure": None}}, "a failure that it does not name"),
    ],
)
def test_a_world_that_contradicts_itself_is_refused(record: World, change: Tree, problem: str) -> None:
    assert problem in refused(World.from_json, json.dumps(tree(record) | change)).problem


def test_a_world_that_contradicts_itself_cannot_be_made() -> None:
    with pytest.raises(Invalid, match="it lists a node twice"):
        members(Member("a", "a-1", 2, 0), Member("a", "a-2", 1, 2))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "version", [None, 0, SCHEMA - 1, SCHEMA + 1, str(SCHEMA), True, float(SCHEMA), [], "missing"]
)
def test_another_schema_version_is_refused(kind: str, version: Any) -> None:
    record, read = READERS[kind]
    root = {**tree(record), "v": version}
    if version == "missing":
        del root["v"]
    error = refused(read, json.dumps(root))
    assert re.match(rf"text of version .*, this process reads {SCHEMA}$", error.problem)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "garbage",
    ["", "{", "null", "1", "[]", '"x"', "NaN", "\0", "[" * 100_000, '{"v":' * 20_000, "1" * 10_000, "\ud800"],
    ids=name_of,
)
def test_garbage_is_refused(kind: str, garbage: str) -> None:
    problem = refused(READERS[kind][1], garbage).problem
    assert re.match(r"text is (not JSON|a JSON \w+, expected an object)", problem)


@pytest.mark.parametrize("kind", READERS)
def test_a_record_may_be_as_long_as_the_limit_and_no_longer(kind: str) -> None:
    record, read = READERS[kind]
    text = record.to_json()
    assert read(text.ljust(MAX_RECORD_BYTES)) == record
    assert f"at most {MAX_RECORD_BYTES} are read" in refused(read, text.ljust(MAX_RECORD_BYTES + 1)).problem


def test_a_refusal_names_the_key_and_the_way_out() -> None:
    error = refused(World.from_json, "{}")
    assert error.key == WORLD_KEY
    assert f"under {WORLD_KEY!r}" in str(error)
    assert "--rdzv-id" in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def never_half_used(read: Read, text: str) -> None:
    """A reader answers with a record that writes and reads back, or with RecordInvalid; with nothing else."""
    try:
        record = read(text)
    except RecordInvalid:
        return
    assert read(record.to_json()) == record


@pytest.mark.parametrize("kind", READERS)
@settings(deadline=None)
@given(text=st.text() | json_values.map(json.dumps))
def test_no_text_raises_anything_else(kind: str, text: str) -> None:
    never_half_used(READERS[kind][1], text)


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in WRONG for path in WRONG[kind]], ids=name_of
)
@settings(max_examples=20, deadline=None)
@given(value=json_values)
def test_no_value_of_any_field_raises_anything_else(kind: str, path: Path, value: Any) -> None:
    record, read = READERS[kind]
    root = tree(record)
    at(root, path[:-1])[path[-1]] = value
    never_half_used(read, json.dumps(root))


# ---------------------------------------------------------------- what peers say reaches logs

FORGED = "killed\n12:00:00.000 [a] all is well\x1b]0;you\x07\x1b[2J\x9b31m\r\u202egood"


def test_nothing_that_a_terminal_obeys_comes_out_of_a_record() -> None:
    failure = Failure(3, FORGED, FORGED, log_tail=(FORGED,), log_file=FORGED)
    node = read_node(replace(NODE, address=FORGED, failure=failure, http=Endpoint(FORGED, 1)).to_json())
    member = replace(WORLD.members[1], http=Endpoint(FORGED, 1))
    cause = Cause(CauseKind.FAILURE, FORGED, FORGED, failure)
    exclusions = (Exclusion("c", "c-1", "unknown", FORGED),)
    world = World.from_json(replace(WORLD, cause=cause, members=(member,), exclusions=exclusions).to_json())
    for record in (node, world):
        assert "all is well" in repr(record)
        assert all(text.isprintable() for text in texts_in(record)), record


def texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value if isinstance(value, tuple) else ()
    if hasattr(value, "__dataclass_fields__"):
        parts = tuple(getattr(value, name) for name in value.__dataclass_fields__)
    return [text for part in parts for text in texts_in(part)]


# ---------------------------------------------------------------- ranks


def test_ranks_are_dense_in_the_order_given() -> None:
    crowd = tuple(
        NodeRecord(name, f"{name}-1", "", 1, slots) for name, slots in [("b", 3), ("a", 1), ("c", 2)]
    )
    assert assign_ranks(crowd) == (
        Member("b", "b-1", 3, 0),
        Member("a", "a-1", 1, 3),
        Member("c", "c-1", 2, 4),
    )
    assert replace(WORLD, members=assign_ranks(crowd)).size == 6


def test_ranks_follow_from_the_order_whatever_was_in_memory() -> None:
    """Nothing in a world can contradict them (I3)."""
    crowd = (Member("b", "b-1", 3, 7), Member("a", "a-1", 1, 0))
    assert [member.first_rank for member in World.from_json(members(*crowd).to_json()).members] == [0, 3]


def test_a_member_is_found_by_its_incarnation_alone() -> None:
    assert WORLD.member("b-1") == WORLD.members[1]
    assert WORLD.member("b") is None
    assert WORLD.member("b-2") is None


@pytest.mark.parametrize(
    ("generation", "conditions", "stopped"),
    [
        (3, {Condition.STOPPED}, True),
        (3, {Condition.STABLE, Condition.SUCCEEDED}, False),
        (3, set(), False),
        (2, {Condition.STOPPED}, False),
        (4, set(), True),
    ],
)
def test_workers_have_stopped_when_it_says_so_or_a_later_generation_was_there(
    generation: int, conditions: set[Condition], stopped: bool
) -> None:
    node = replace(NODE, generation=generation, conditions=frozenset(conditions))
    assert node.has_stopped(3) is stopped
    assert node.has(Condition.STOPPED, 3) is (generation == 3 and stopped)


def test_conditions_add_up_within_a_generation_and_are_over_with_it() -> None:
    node = replace(NODE, generation=3, conditions=frozenset({Condition.NOTIFIED}))
    assert node.having(3, Condition.POLLING).conditions == {Condition.NOTIFIED, Condition.POLLING}
    later = node.having(4, Condition.STABLE)
    assert (later.generation, later.conditions) == (4, {Condition.STABLE})
    assert later.has_stopped(3)
