"""What a peer's port says about its agent: who it is, that it has ended, or nothing."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from elastic_agent.agent.common.events import Event
from elastic_agent.agent.rendezvous_io.store_link import MAX_ANSWER_BYTES, PeerLink, find
from elastic_agent.health.http import NODE_PATH, json_page
from elastic_agent.rendezvous.liveness import Peer, ProbeFailure
from elastic_agent.rendezvous.records import Endpoint, PeerStatus
from tests.observed import answering

PATIENCE_S = 20.0
ME = PeerStatus("a", "a-1", 3, confirmed_s=0.5, whole_s=None)


@pytest.fixture
def agent() -> Iterator[Endpoint]:
    with answering({NODE_PATH: json_page(ME.to_json)}) as http:
        yield http


def endpoint_of(listener: socket.socket) -> Endpoint:
    return Endpoint(*listener.getsockname()[:2])


def test_an_agent_introduces_itself(agent: Endpoint) -> None:
    assert find(agent, time.monotonic, PATIENCE_S) == ME


def test_a_port_without_a_listener_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = endpoint_of(listener)
    assert find(endpoint, time.monotonic, PATIENCE_S) is ProbeFailure.REFUSED


def test_an_agent_that_listens_and_never_answers_is_silent() -> None:
    """As one that was stopped: its machine still completes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert find(endpoint_of(listener), time.monotonic, 0.05) is ProbeFailure.SILENT


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\xff" * 100,
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nnot json",
        b"HTTP/1.1 200 OK\r\n\r\n\xff",
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + ME.to_json().encode(),
        b"HTTP/1.1 200 OK\r\n\r\n" + ME.to_json().encode().ljust(MAX_ANSWER_BYTES * 3) + b"}",
        ME.to_json().encode(),
    ],
    ids=["nothing", "garbage", "empty", "no JSON", "no text", "busy", "endless", "no HTTP"],
)
def test_an_answer_that_is_no_introduction_is_silence(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                try:
                    connection.sendall(answer)
                except OSError:
                    pass  # the other side has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        assert find(endpoint_of(listener), time.monotonic, PATIENCE_S) is ProbeFailure.SILENT
        thread.join(PATIENCE_S)


def test_whoever_answers_in_single_bytes_is_silent_when_the_time_is_over() -> None:
    """However often something comes: only the whole answer counts."""
    now = itertools.count(0.0, 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    while True:
                        connection.sendall(b" ")
                except OSError:
                    pass  # the other side has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        assert find(endpoint_of(listener), lambda: next(now), 0.5) is ProbeFailure.SILENT
        thread.join(PATIENCE_S)
    assert next(now) < 1.0, "it went on reading after its time"


def test_a_question_becomes_an_event_with_the_instant_at_which_it_was_asked(agent: Endpoint) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    peer = Peer("a-1", agent)
    found: list[tuple[object, ...]] = []
    PeerLink(lambda *one: found.append(one), events.put, lambda: 7.0).ask(peer)
    event = events.get(timeout=PATIENCE_S)
    assert callable(event)
    event()
    assert found == [(peer, ME, 7.0, 7.0)]
