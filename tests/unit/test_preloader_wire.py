"""What a spare is to become: there and back, and what is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_agent.agent.workers.processes.spare_wire import (
    CODEC,
    BecomeWorker,
    Fork,
    Message,
    Preloaded,
    pair,
    receive,
    send,
)
from elastic_agent.codec import Invalid

START = BecomeWorker(
    "script", "train.py", ("--lr", "0.1"), {"RANK": "0", "ODD": "\udcff"}, "/work", "0,1", ("python",)
)


@pytest.fixture
def channels() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = pair()
    with one, other:
        yield one, other


@pytest.mark.parametrize(
    "message", [START, Fork(), Preloaded(7, {"torch": "no such module"}), replace(START, args=("y" * 10**6,))]
)
def test_a_message_survives_the_way_there(
    message: Message, channels: tuple[socket.socket, socket.socket]
) -> None:
    send(channels[0], message)
    assert receive(channels[1]) == (message, [])
    channels[0].close()
    assert receive(channels[1]) is None


def test_descriptors_come_with_their_message(channels: tuple[socket.socket, socket.socket]) -> None:
    read, write = os.pipe()
    send(channels[0], Fork(), [write])
    os.close(write)
    received = receive(channels[1])
    assert received is not None
    os.close(received[1][0])
    assert os.read(read, 1) == b""
    os.close(read)


def test_what_comes_without_a_text_is_refused(channels: tuple[socket.socket, socket.socket]) -> None:
    channels[0].send(b".")
    with pytest.raises(Invalid):
        receive(channels[1])


def test_descriptors_of_a_message_that_is_refused_are_closed(
    channels: tuple[socket.socket, socket.socket],
) -> None:
    before = os.listdir("/proc/self/fd")
    text = os.memfd_create("message")
    os.write(text, b"no message")
    socket.send_fds(channels[0], [b"."], [text, 0, 0])
    os.close(text)
    with pytest.raises(Invalid):
        receive(channels[1])
    assert os.listdir("/proc/self/fd") == before


def test_the_command_is_what_python_is_given() -> None:
    assert START.command == ("-u", "train.py", "--lr", "0.1")
    module = replace(START, target_kind="module", target="package.train", args=("1",))
    assert module.command == ("-u", "-m", "package.train", "1")


@pytest.mark.parametrize(
    "changed",
    [
        {"target_kind": "binary"},
        {"target": 1},
        {"args": "--lr"},
        {"args": [1]},
        {"environment": []},
        {"environment": {"A": 1}},
        {"cwd": None},
        {"more": "fields"},
    ],
    ids=str,
)
def test_what_is_no_such_message_is_refused(changed: dict[str, object]) -> None:
    body = json.loads(CODEC.encode(START))
    with pytest.raises(Invalid):
        CODEC.decode(json.dumps({**body, **changed}).encode())
