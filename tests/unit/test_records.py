"""Records: what one node writes the others read back, and anything else is refused by key and field."""

from __future__ import annotations

import json
import re
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
ENDED = replace(WORLD, phase=Phase.ENDED, result=Result.CRASH_LOOP)

Record = NodeRecord | World | StopAt | PeerStatus
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


Read = Callable[[str], Record]
READERS: dict[str, tuple[Record, Read]] = {
    "node": (NODE, read_node),
    "world": (WORLD, World.from_json),
    "stop": (STOP, StopAt.from_json),
    "introduction": (INTRODUCTION, PeerStatus.from_json),
}


def refused(read: Read, text: str) -> RecordInvalid:
    with pytest.raises(RecordInvalid) as caught:
        read(text)
    return caught.value


# ---------------------------------------------------------------- round trips

BIG = 2**63 - 1
LONGEST = Failure(
    *(BIG, "x" * 1024, "x" * 4096, "x" * 40, Action.STOP, True, True, "n" * 128, BIG, BIG, 255),
    *("x" * MAX_EXCEPTION, "x" * MAX_TRACEBACK, ("x" * MAX_LOG_LINE,) * 20, "x" * 500),
)
FAR = Endpoint("x" * 256, 65535)
LARGEST_NODE = replace(
    NodeRecord("n" * 128, "i" * 128, "x" * 256, 65535, 4096, FAR, Limits(BIG, BIG, 1e9, BIG)),
    program=Program("x" * 256, "x" * 64, "x" * 64, 1e9, 1e9),
    node_rank=BIG,
    generation=BIG,
    conditions=frozenset(Condition),
    failure=LONGEST,
    step=BIG,
    progress=GenerationProgress(BIG, BIG, BIG),
    seen=MAX_SEEN,
)
LARGEST_WORLD = World(
    "j" * 128,
    BIG,
    Phase.ENDED,
    (Member("n" * 128, "i" * 128, 4096, 0, FAR, "r" * 128),),
    FAR,
    Cause(CauseKind.FAILURE, "n" * 128, "x" * 4096, LONGEST),
    Restarts(BIG, BIG, "x" * 1024, BIG, BIG, BadState(BIG, BIG), "n" * 128, BIG, BIG),
    BIG,
    Result.CRASH_LOOP,
    run="r" * 128,
)


@pytest.mark.parametrize(
    "record",
    [NODE, replace(NODE, failure=None), NodeRecord("a", "i", "", 0, 1), LARGEST_NODE]
    + [replace(NODE, conditions=frozenset({one}), role="my trainer") for one in Condition],
)
def test_a_node_record_comes_back_as_it_was(record: NodeRecord) -> None:
    assert NodeRecord.from_json(node_key(record.node), record.to_json()) == record


@pytest.mark.parametrize(
    "world",
    [WORLD, LARGEST_WORLD, replace(WORLD, phase=Phase.RUNNING, cause=Cause(CauseKind.START), step=0)]
    + [replace(WORLD, cause=Cause(kind, "a", "why", FAILURE)) for kind in CauseKind]
    + [replace(ENDED, result=result) for result in Result]
    + [replace(WORLD, phase=phase) for phase in Phase if phase is not Phase.ENDED],
)
def test_a_world_comes_back_as_it_was(world: World) -> None:
    assert World.from_json(world.to_json()) == world


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


def text(at_most: int) -> list[Any]:
    return [None, 1, True, [], {}, "x" * (at_most + 1)]


def number(low: int = 0, high: int = BIG) -> list[Any]:
    return [None, True, "1", 1.0, [], {}, low - 1, high + 1]


def rows(*wrong: Any) -> list[Any]:
    """What a list must not be, and what must not be in it."""
    return [None, 1, True, "x", {}, [None], [[]], *wrong]


NAME: list[Any] = [None, 1, True, [], {}, "", "a b", "a/b", "a\n", "\u00fc", "x" * 129]
NAME_OR_NONE: list[Any] = [*text(128), "a/b", "a b", ".\n"]
FLAG: list[Any] = [None, 0, 1, "true", [], {}]
CHOICE: list[Any] = [None, 1, True, [], {}, "", "other"]
OBJECT: list[Any] = [1, True, "x", [], [{}]]
CAUSE_NAME: list[Any] = [None, 1, True, [], {}, "", "Xid", "a-b", "a b", "a\n", "a" * 41]
ROLE_NAME: list[Any] = [None, 1, True, [], {}, "a\n", 'a"b', "a\\b", "\u00fc", "x" * 129]
AGE: list[Any] = [True, "1", [], {}, -1, -0.1, 2**63, 10**400, float("inf"), float("nan")]
NONE_OR_NUMBER = number()[1:]
FAILURE_FIELDS: list[tuple[list[Any], str]] = [
    (OBJECT, "failure"),
    (number(1), "failure.generation"),
    (text(1024), "failure.fingerprint"),
    (text(4096), "failure.summary"),
    (CAUSE_NAME, "failure.cause"),
    (CHOICE, "failure.action"),
    (FLAG, "failure.collateral failure.outside"),
    (NAME_OR_NONE, "failure.node"),
    (NONE_OR_NUMBER, "failure.rank failure.local_rank"),
    (number(-128, 255), "failure.returncode"),
    (text(MAX_EXCEPTION)[1:], "failure.exception"),
    (text(MAX_TRACEBACK)[1:], "failure.traceback"),
    (rows([1], ["x" * (MAX_LOG_LINE + 1)], ["x"] * 21), "failure.log_tail"),
    (text(500)[1:], "failure.log_file"),
]
OPTIONS: list[tuple[list[Any], str]] = [
    (OBJECT, "limits program"),
    (number(1), "limits.min_nodes limits.max_nodes limits.nodes_multiple_of"),
    ([None, *AGE], "limits.last_call_s program.lease_ttl_s program.outage_grace_s"),
    (NONE_OR_NUMBER, "limits.max_restarts"),
    (text(256), "program.name"),
    (text(64), "program.digest program.arguments"),
]
FIELDS: dict[str, list[tuple[list[Any], str]]] = {
    "node": [
        *FAILURE_FIELDS,
        *OPTIONS,
        (NAME, "node incarnation"),
        (text(256), "address http.address"),
        (number(0, 65535), "port memory http.port"),
        (number(1, 4096), "slots"),
        (OBJECT, "http recheck progress paces comparison suspicion hang_report"),
        (NONE_OR_NUMBER, "node_rank progress.loaded progress.reached"),
        (FLAG, "hosts_store leaving ready recheck.passed"),
        (number(), "generation step progress.generation paces.timed paces.step_us comparison.usual_us"),
        (number(1), "recheck.times paces.generation comparison.generation suspicion.generation"),
        (number(1), "hang_report.generation hang_report.inquiry"),
        (rows([1], ["other"], ["stopped"] * 9), "conditions"),
        (text(512), "recheck.summary suspicion.why"),
        (number(high=MAX_SEEN), "seen"),
        ([*ROLE_NAME, ""], "role"),
        (rows([True], [-1], ["x"], [1.5], [1] * 4097), "paces.own_us"),
        (rows([1]), "comparison.stragglers"),
        (CHOICE, "suspicion.urgency"),
        (rows([1], [{}] * 129), "hang_report.ranks"),
    ],
    "world": [
        *(
            (wrong, " ".join(f"cause.{field}" for field in fields.split()))
            for wrong, fields in FAILURE_FIELDS
        ),
        *OPTIONS,
        (NAME, "job members.1.0 members.1.1"),
        (number(1), "generation restarts.bad_state.generation inquiry.number"),
        (CHOICE, "phase cause.kind inquiry.urgency"),
        (rows([1]), "members standbys"),
        (number(1, 4096), "members.1.2"),
        (ROLE_NAME, "members.1.3"),
        (text(256), "members.1.4 master.address"),
        (number(0, 65535), "members.1.5 master.port"),
        ([None, *OBJECT], "master cause restarts"),
        (text(128), "cause.node restarts.culprit final_saver limits_of"),
        (text(4096), "cause.detail"),
        (
            number(),
            "step restarts.failures restarts.without_progress restarts.same_fingerprint restarts.at_load",
        ),
        (number(), "restarts.blamed restarts.exclusions restarts.free_retries restarts.from_outside"),
        (number(), "restarts.bad_state.step"),
        (text(1024), "restarts.fingerprint"),
        (OBJECT, "restarts.bad_state inquiry"),
        ([1, True, [], {}, "", "other"], "result"),
        (rows([True], [-1], ["x"], [1.5]), "unproven"),
        (rows([1], [{}] * 65), "exclusions"),
        (NAME_OR_NONE, "run inquiry.node"),
        (CHOICE[1:], "inquiry.finding"),
        (text(512), "inquiry.why"),
        (NONE_OR_NUMBER, "inquiry.rank"),
    ],
    "stop": [(number(1), "generation"), (number(), "step"), (FLAG, "paused")],
    "introduction": [(NAME, "node incarnation"), (number(), "generation"), (AGE, "confirmed_s whole_s")],
}
WRONG: dict[str, dict[Path, list[Any]]] = {
    kind: {
        tuple(int(part) if part.isdigit() else part for part in field.split(".")): wrong
        for wrong, fields in groups
        for field in fields.split()
    }
    for kind, groups in FIELDS.items()
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


# ---------------------------------------------------------------- what no single field shows


def test_a_record_under_another_nodes_key_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="it is the record of node 'a'"):
        NodeRecord.from_json("nodes/b", NODE.to_json())


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
        replace(WORLD, members=(Member("a", "a-1", 2, 0), Member("a", "a-2", 1, 2)))


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


@pytest.mark.parametrize(
    ("kind", "path"),
    [(kind, path) for kind in WRONG for path in WRONG[kind]] + [(kind, ()) for kind in WRONG],
    ids=name_of,
)
@settings(max_examples=20, deadline=None)
@given(value=json_values)
def test_no_value_of_any_field_nor_any_text_raises_anything_else(kind: str, path: Path, value: Any) -> None:
    """A reader answers with a record that writes and reads back, or with RecordInvalid; with nothing else."""
    record, read = READERS[kind]
    root = tree(record) if path else value
    if path:
        at(root, path[:-1])[path[-1]] = value
    try:
        found = read(json.dumps(root))
    except RecordInvalid:
        return
    assert read(found.to_json()) == found


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
    world = replace(WORLD, members=(Member("b", "b-1", 3, 7), Member("a", "a-1", 1, 0)))
    assert [member.first_rank for member in World.from_json(world.to_json()).members] == [0, 3]


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
