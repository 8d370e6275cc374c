"""The messages between workers, agent and disk writer: what travels, and that nothing else is taken for one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_agent.codec import Checked, Codec, Invalid, kind_of, plain
from elastic_agent.worker.wire import messages
from elastic_agent.worker.wire.channel import Lines
from elastic_agent.worker.wire.messages import (
    COMMIT_ANSWERS,
    FROM_WORKERS,
    MAX_BYTES,
    MAX_REASON_CHARS,
    REPORTS,
    STEP_ANSWERS,
    TO_GUARDS,
    UNSAVED_STEPS,
    VERSION,
    WRITE_CANCELS,
    WRITE_ORDERS,
    WRITE_OUTCOMES,
    Broken,
    CancelWrite,
    CommitGranted,
    CommitOrder,
    CommitQuestion,
    CommitRefused,
    CommitUndecided,
    FinishWrites,
    Go,
    Guarding,
    Held,
    Hold,
    Keep,
    Kept,
    LentLock,
    LoadReport,
    ReplicationReport,
    SaveReport,
    ShardOrder,
    StepAnswer,
    StepEnded,
    StepStatus,
    UnsavedStep,
    UnsavedSteps,
    Verdict,
    WriteOutcome,
    encode,
)

ORDER = ShardOrder("/dev/shm/x", "/runs/\udcff", "3b9e", "a", 120, 6, 7, "3b9e", "step-120", 0, None)
MESSAGES: list[tuple[Codec[Any], Checked]] = [
    (REPORTS, SaveReport(7, 0, 120, "ok", 0.25, 4096)),
    (REPORTS, SaveReport(7, 0, 120, "error", 3, 0)),
    (REPORTS, SaveReport(7, 0, 120, "ok", 3, 10, "memory", 0.1)),
    (REPORTS, SaveReport(7, 0, 120, "ok", 3, 10, "local", 0.1, "\U0001f4be" * 500)),
    (REPORTS, LoadReport(0, 3, 0, "none", 0.0)),
    (REPORTS, LoadReport(2**62, 3, 2**62, "corrupt", 1e9)),
    (REPORTS, LentLock(7, 0, "3f2a")),
    (REPORTS, ReplicationReport(7, 120, ("b",))),
    (FROM_WORKERS, CommitQuestion(7)),
    (COMMIT_ANSWERS, CommitGranted(2.5)),
    (COMMIT_ANSWERS, CommitGranted(1)),
    (COMMIT_ANSWERS, CommitRefused("it is over")),
    (COMMIT_ANSWERS, CommitUndecided(MAX_REASON_CHARS * "\U0001f600")),
    *((FROM_WORKERS, StepEnded(7, 3, 1, 120, status)) for status in StepStatus),
    *((STEP_ANSWERS, StepAnswer(verdict, leaves=True)) for verdict in Verdict),
    (FROM_WORKERS, Guarding(7, 1)),
    (FROM_WORKERS, Broken()),
    (FROM_WORKERS, Held(120)),
    (FROM_WORKERS, Held(None)),
    (FROM_WORKERS, Kept(0)),
    (FROM_WORKERS, Kept(None)),
    (TO_GUARDS, Hold(2.0)),
    (TO_GUARDS, Keep()),
    (TO_GUARDS, Go()),
    (WRITE_ORDERS, ORDER),
    (WRITE_ORDERS, ShardOrder("/dev/shm/x", "/runs/x", "3b9e.1", "b", 120, 6, 7, "3b9e", "step-120", 9, None)),
    (WRITE_ORDERS, ShardOrder("/dev/shm/x", "/runs/x", "3b9e.1", "b", 120, 6, 7, "3b9e", "step-120", 9, 1)),
    (WRITE_ORDERS, CommitOrder("/runs/x", 120, 7, "3b9e", "step-120", 16, 16, 2, (100, 110), 60.0)),
    (WRITE_ORDERS, FinishWrites()),
    (WRITE_CANCELS, CancelWrite()),
    (WRITE_OUTCOMES, WriteOutcome(120, 4096)),
    (WRITE_OUTCOMES, WriteOutcome(120, error="Fenced", reason="generation 8 has replaced it")),
    (UNSAVED_STEPS, UnsavedSteps((UnsavedStep(54, "/runs/x", "No space left"), UnsavedStep(1, "y", final=True)))),
    (UNSAVED_STEPS, UnsavedSteps((UnsavedStep(54, "/runs/x", "No space left", rank=3),))),
    (UNSAVED_STEPS, UnsavedSteps(())),
]  # fmt: skip
CODECS = list({id(codec): codec for codec, _ in MESSAGES}.values())


@pytest.mark.parametrize(("codec", "message"), MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_survives_the_wire(codec: Codec[Any], message: Checked) -> None:
    line = encode(message)
    assert codec.decode(line) == message
    assert len(line) <= codec.most_bytes
    assert line.count(b"\n") == 1


def test_no_message_is_forgotten_here() -> None:
    declared = {
        one for one in vars(messages).values() if isinstance(one, type) and issubclass(one, Checked)
    } - {Checked, UnsavedStep}
    assert {type(message) for _, message in MESSAGES} == declared


def test_the_form_is_one_object_with_version_and_kind() -> None:
    assert json.loads(encode(SaveReport(7, 0, 120, "ok", 0.25, 4096))) == {
        "v": 9, "kind": "save_report", "generation": 7, "local_rank": 0,
        "step": 120, "result": "ok", "duration_s": 0.25, "bytes": 4096, "tier": "local", "blocked_s": 0.0,
        "directory": "",
    }  # fmt: skip
    assert json.loads(encode(StepAnswer(Verdict.END_ALONE, leaves=True))) == {
        "v": 9,
        "kind": "step_answer",
        "verdict": "end alone",
        "leaves": True,
    }


WRONG: dict[Any, list[Any]] = {
    int: [-1, True, 1.0, 2**63, 10**4000, "1", [1], None],
    float: [-1, True, "1", [1], None, float("nan"), float("inf"), 10**400, 2**40],
    str: [1, None, ["x"], {}],
    bool: [0, 1, "true", None],
    tuple: [None, "x", 1, {}, [None], [[]], [{}]],
}
"""By the type of a field."""


def wrong_values(hint: Any) -> Iterator[Any]:
    optional = type(None) in get_args(hint)
    form = get_args(hint)[0] if optional else hint
    bare = get_args(form)[0] if get_origin(form) is Annotated else form
    kind = get_origin(bare) or bare
    for value in WRONG.get(kind, ["other", ["ok"], None, 1]):  # else it is one of some words
        if not (optional and value is None):
            yield value


def mutilations() -> Iterator[tuple[Codec[Any], bytes]]:
    for codec, message in MESSAGES:
        body = {"v": VERSION, "kind": kind_of(type(message)), **plain(message)}
        hints = get_type_hints(type(message), include_extras=True)
        changes: list[dict[str, Any]] = [
            {"v": 1}, {"v": True}, {"v": None}, {"v": [3]},
            {"kind": "other"}, {"kind": ["held"]}, {"kind": None}, {"extra": 1},
            *({name: value} for name, hint in hints.items() for value in wrong_values(hint)),
        ]  # fmt: skip
        for change in changes:
            yield codec, json.dumps({**body, **change}).encode()
        for name in body:
            yield codec, json.dumps({other: value for other, value in body.items() if other != name}).encode()


def test_whatever_is_wrong_in_a_message_is_found() -> None:
    tried = 0
    for codec, raw in mutilations():
        tried += 1
        with pytest.raises(Invalid):
            pytest.fail(f"taken for {codec.decode(raw)}: {raw[:200]!r}")
    assert tried > 800


@pytest.mark.parametrize("codec", CODECS, ids=range(len(CODECS)))
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\xff\xfe", b"1", b"[]", b"null", b'"x"', b"{", b"{}", b"[" * 4000,
        b'{"v":' * 1500, b" " * (MAX_BYTES + 1),
        b'{"v": 9, "kind": "held", "step": ' + b"9" * 5000 + b"}", encode(Guarding(7, 1)) * 2,
    ],
)  # fmt: skip
def test_bytes_that_are_no_message(codec: Codec[Any], raw: bytes) -> None:
    with pytest.raises(Invalid):
        codec.decode(raw)


def test_a_question_is_no_answer() -> None:
    with pytest.raises(Invalid, match=r"kind 'commit_question', expected one of .*commit_granted"):
        COMMIT_ANSWERS.decode(encode(CommitQuestion(7)))


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (SaveReport, (7, 0, "12", "ok", 0.0, 0), "step is '12', expected a whole number from 0 to 9223372036854775807"),
        (SaveReport, (7, 0, True, "ok", 0.0, 0), "step is True, expected"),
        (LoadReport, (7, 0, 1, "fine", 0.0), "result is 'fine', expected one of 'ok', 'corrupt', 'error', 'none'"),
        (LoadReport, (7, 0, 1, "ok", float("nan")), "duration_s is nan, expected a number from 0 to 2147483648"),
        (LentLock, (7, 0, "a/b"), "run is 'a/b', expected a text of at most 128 characters of the form [A-Z"),
        (CommitGranted, (0,), "valid_s is 0, expected a number above 0"),
        (CommitRefused, ("x" * (MAX_REASON_CHARS + 1),), "..., expected a text of at most 500 characters"),
        (WriteOutcome, (1, 0, "Key Error"), "error is 'Key Error', expected"),
        (UnsavedSteps, ((UnsavedStep(1, "x"), 1),), "unsaved[1] is 1, expected an object"),
    ],
)  # fmt: skip
def test_a_wrong_message_cannot_be_made(kind: Any, values: tuple[Any, ...], says: str) -> None:
    with pytest.raises(Invalid, match=rf"^{kind_of(kind)}\..*{re.escape(says)}"):
        kind(*values)


# A small alphabet: for all of Unicode, hypothesis first builds tables for a second.
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text("aok\0é\ud800")
JSON = st.recursive(SCALARS, st.lists, max_leaves=3)
NAMES = sorted({field.name for _, message in MESSAGES for field in fields(message)})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(MESSAGES), st.binary() | st.dictionaries(st.sampled_from(["v", "kind", *NAMES]), JSON))
def test_whatever_arrives_is_a_message_or_an_error(
    sent: tuple[Codec[Any], Checked], garbage: bytes | dict[str, Any]
) -> None:
    codec, message = sent
    raw = garbage
    if isinstance(raw, dict):
        raw = json.dumps({"v": VERSION, "kind": kind_of(type(message)), **plain(message), **raw}).encode()
    try:
        found = codec.decode(raw)
    except Invalid:
        return
    assert codec.decode(encode(found)) == found


def test_messages_come_whole_out_of_any_pieces() -> None:
    sent = [message for codec, message in MESSAGES if codec is FROM_WORKERS]
    stream = b"".join(map(encode, sent))
    for size in (1, 7, len(stream)):
        lines, heard = Lines(FROM_WORKERS), []
        for begin in range(0, len(stream), size):
            heard += lines.add(stream[begin : begin + size])
        assert heard == sent


@pytest.mark.parametrize("codec", CODECS)
def test_a_line_without_an_end_is_refused(codec: Codec[Any]) -> None:
    Lines(codec).add(b"x" * codec.most_bytes)
    with pytest.raises(Invalid, match=f"more than {codec.most_bytes} bytes"):
        Lines(codec).add(b"x" * (codec.most_bytes + 1))


def test_the_unsaved_steps_of_many_directories_are_one_message() -> None:
    """Paths as long as a file system takes, with reasons, and in pieces as a socket brings them."""
    reason = MAX_REASON_CHARS * "x"
    unsaved = UnsavedSteps(tuple(UnsavedStep(n, f"/{n}/{'x' * 4000}", reason) for n in range(200)))
    line = encode(unsaved)
    pieces = [line[begin : begin + 8192] for begin in range(0, len(line), 8192)]
    lines = Lines(UNSAVED_STEPS)
    assert [message for piece in pieces for message in lines.add(piece)] == [unsaved]
