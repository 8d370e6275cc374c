"""What travels between a client and the host of its store survives the trip; nothing else gets in."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_agent.codec import Invalid
from elastic_agent.rendezvous.c10d.link import (
    SCHEMA,
    Call,
    Caller,
    Changes,
    Done,
    Granted,
    KeepAlive,
    LongPoll,
    Refused,
    Reply,
    Request,
    Result,
    Revoke,
    Transact,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from elastic_agent.rendezvous.store.interface import (
    Change,
    Compare,
    Delete,
    Entry,
    Grant,
    Outcome,
    Put,
    Read,
    Snapshot,
)

CLIENT = "0123456789abcdef" * 2
ENTRY = Entry("k", "näme \ud800", 1, 2)


@pytest.mark.parametrize(
    "call",
    [
        Grant(0.5),
        KeepAlive(3),
        Revoke(0),
        Transact((), ()),
        Transact((Compare("a", 0), Compare("b", 2)), (Put("a", "1"), Put("b", "2", 7), Delete("c"))),
        Read(()),
        Read(("a", "")),
        Read(("a",), "nodes/"),
        LongPoll(("a", "b"), 9),
    ],
)
def test_a_call_arrives_as_it_was_sent(call: Call) -> None:
    request = Request(Caller(CLIENT, 2, 5), call)
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize(
    "result",
    [
        Granted(4),
        Done(),
        Outcome(True, 3, (None, ENTRY)),
        Snapshot(7, ()),
        Snapshot(7, (ENTRY, ENTRY)),
        Changes(8, (Change(7, "k", ENTRY), Change(8, "k", None))),
        Refused("Compacted", "gone"),
    ],
)
def test_a_result_arrives_as_it_was_sent(result: Result) -> None:
    assert decode_reply(encode_reply(Reply(6, result))) == Reply(6, result)


@pytest.mark.parametrize(
    "change",
    [
        {"id": None},
        {"id": True},
        {"v": SCHEMA + 1},
        {"kind": "read"},
        {"kind": None},
        {"revision": -1},
        {"entries": [{"key": "k"}]},
        {"entries": None},
        {"more": 1},
    ],
)
def test_a_result_that_is_not_one_is_refused(change: dict[str, object]) -> None:
    good = json.loads(encode_reply(Reply(6, Snapshot(7, (ENTRY,)))))
    with pytest.raises(Invalid):
        decode_reply(json.dumps(good | change).encode())


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["read", "grant", "transact"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["v", "kind", "id", "link", "scopes", "writes", "compares"]), inner)
    ),
    max_leaves=10,
)


@given(JSON)
def test_whatever_json_arrives_is_a_request_or_refused(message: object) -> None:
    whole = json.loads(encode_request(Request(Caller(CLIENT, 1, 1), Transact((), ()))))
    for raw in (message, whole | {"writes": message}, whole | (message if isinstance(message, dict) else {})):
        try:
            decode_request(json.dumps(raw).encode())
        except Invalid:
            pass


@example(b"[" * 100_000)
@example(b"1" * 100_000)
@example(b"\xff")
@given(st.binary(max_size=50))
def test_whatever_bytes_arrive_are_refused(raw: bytes) -> None:
    with pytest.raises(Invalid):
        decode_request(raw)
    with pytest.raises(Invalid):
        decode_reply(raw)
