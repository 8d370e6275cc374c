"""What a worker asks before it commits: a client that believes nothing but a grant in time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.worker.errors import Fenced, Unconfirmed
from elastic_agent.worker.storage.disk import commit_permission
from elastic_agent.worker.storage.disk.commit_permission import MAX_QUESTIONS, CommitPermission
from elastic_agent.worker.wire.messages import (
    FROM_WORKERS,
    MAX_BYTES,
    CommitAnswer,
    CommitGranted,
    CommitQuestion,
    CommitRefused,
    CommitUndecided,
    encode,
)

# --- Asking


class ScriptedAgent(threading.Thread):
    """Hears one question after the other, and does with each connection what the test says."""

    def __init__(self, path: Path, replies: list[Callable[[socket.socket], None]]) -> None:
        super().__init__(daemon=True)
        self.address = str(path)
        self.heard: list[CommitQuestion] = []
        self._replies = replies
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen()

    def run(self) -> None:
        for reply in self._replies:
            connection, _ = self._socket.accept()
            with connection:
                self.heard.append(FROM_WORKERS.decode(connection.recv(MAX_BYTES)))
                reply(connection)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., ScriptedAgent]]:
    agents: list[ScriptedAgent] = []

    def start(*replies: Callable[[socket.socket], None]) -> ScriptedAgent:
        agents.append(ScriptedAgent(tmp_path / "commits", list(replies)))
        agents[-1].start()
        return agents[-1]

    yield start
    for one in agents:
        one.close()


def says(line: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(line)


def answers(answer: CommitAnswer) -> Callable[[socket.socket], None]:
    return says(encode(answer))


def is_silent(connection: socket.socket) -> None:
    """Until the other end gives up."""
    assert connection.recv(1) == b""


class Clock:
    """Moves on at each reading, by what the test says, and then stands."""

    def __init__(self, *moves_s: float) -> None:
        self._now = 100.0
        self._moves = list(moves_s)

    def __call__(self) -> float:
        self._now += self._moves.pop(0) if self._moves else 0.0
        return self._now


def test_a_grant_lets_every_change_be_made_until_it_runs_out(agent: Callable[..., ScriptedAgent]) -> None:
    asked = agent(answers(CommitGranted(2.0)), answers(CommitGranted(2.0)))
    clock = Clock()
    permission = CommitPermission(asked.address, 7, clock=clock)
    for _ in range(10):
        permission.check()
    assert asked.heard == [CommitQuestion(7)]
    clock._moves = [2.0]
    permission.check()
    assert asked.heard == [CommitQuestion(7)] * 2


def test_a_grant_counts_from_the_question_and_not_from_the_answer(
    agent: Callable[..., ScriptedAgent],
) -> None:
    """First check, question sent; then 3 s pass before the answer is here: a grant of 2 s has run out on its way."""
    asked = agent(answers(CommitGranted(2.0)), answers(CommitRefused("generation 8 has replaced it")))
    with pytest.raises(Fenced):
        CommitPermission(asked.address, 7, clock=Clock(0, 0, 3.0)).check()
    assert len(asked.heard) == 2


def test_grants_that_run_out_are_asked_for_again_a_few_times_only(
    agent: Callable[..., ScriptedAgent],
) -> None:
    asked = agent(*[answers(CommitGranted(1.0))] * MAX_QUESTIONS)
    with pytest.raises(Unconfirmed, match="ran out before they could be used"):
        CommitPermission(asked.address, 7, clock=Clock(*[2.0] * 100)).check()
    assert len(asked.heard) == MAX_QUESTIONS


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_a_question_on_a_connection_that_the_agent_has_ended_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Stopped between connecting and asking, for longer than the agent waits for a question."""
    asked: list[CommitQuestion] = []

    def ask(_address: str, question: CommitQuestion, *_: object) -> CommitAnswer:
        asked.append(question)
        if len(asked) < MAX_QUESTIONS:
            raise error
        return CommitGranted(60.0)

    monkeypatch.setattr(commit_permission, "ask", ask)
    CommitPermission("commits", 7).check()
    assert asked == [CommitQuestion(7)] * MAX_QUESTIONS


def test_connections_that_the_agent_ends_each_time_leave_it_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*_: object) -> CommitAnswer:
        raise BrokenPipeError

    monkeypatch.setattr(commit_permission, "ask", ask)
    with pytest.raises(Unconfirmed, match="ended their connections"):
        CommitPermission("commits", 7).check()


def test_a_refusal_says_that_the_generation_is_over(agent: Callable[..., ScriptedAgent]) -> None:
    asked = agent(answers(CommitRefused("generation 9 has replaced it")))
    with pytest.raises(
        Fenced, match=r"generation 7 is over: .* must not commit .*generation 9 has replaced it"
    ):
        CommitPermission(asked.address, 7).check()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answers(CommitUndecided("the store is away")), "the store is away"),
        (says(b"yes\n"), "not JSON"),
        (says(b'{"v": 2, "kind": "commit_granted", "valid_s": 5}\n'), "version 2"),
        (says(b'{"v": 4, "kind": "commit_granted", "valid_s": 5}'), "ended the connection after 48 bytes"),
        (says(encode(CommitGranted(5.0)) * 2), "not JSON"),
        (says(b""), "ended the connection after 0 bytes"),
        (says(b" " * (MAX_BYTES + 1) + b"\n"), f"more than {MAX_BYTES} bytes"),
        (is_silent, "no whole message within 0.5 s"),
    ],
)
def test_anything_but_a_whole_answer_leaves_it_undecided(
    agent: Callable[..., ScriptedAgent], reply: Callable[[socket.socket], None], reason: str
) -> None:
    asked = agent(reply)
    with pytest.raises(
        Unconfirmed, match=f"the agent does not confirm that generation 7 may still commit: .*{reason}"
    ):
        CommitPermission(asked.address, 7, answer_s=0.5).check()


def test_an_answer_that_drips_is_given_up_in_time(agent: Callable[..., ScriptedAgent]) -> None:
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        try:
            while not ended.wait(0.05):
                connection.sendall(b" ")
        except OSError:
            pass

    asked = agent(drip)
    try:
        with pytest.raises(Unconfirmed, match=r"no whole message within 0\.3 s"):
            CommitPermission(asked.address, 7, answer_s=0.3).check()
    finally:
        ended.set()


def test_an_agent_that_stands_still_or_is_gone_leaves_it_undecided(tmp_path: Path) -> None:
    with pytest.raises(Unconfirmed, match="No such file"):
        CommitPermission(str(tmp_path / "commits"), 7).check()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as frozen:
        frozen.bind(str(tmp_path / "commits"))
        frozen.listen()
        with pytest.raises(Unconfirmed, match=r"no whole message within 0\.2 s"):
            CommitPermission(str(tmp_path / "commits"), 7, answer_s=0.2).check()
    with pytest.raises(Unconfirmed, match="refused"):
        CommitPermission(str(tmp_path / "commits"), 7).check()


def test_without_an_agent_everything_is_permitted() -> None:
    CommitPermission("", 0).check()


def test_an_agent_that_gives_no_address_leaves_it_undecided() -> None:
    """As one of another version does, which names its variables otherwise."""
    with pytest.raises(Unconfirmed, match=r"generation 7 may still commit: .*different versions"):
        CommitPermission("", 7, has_agent=True).check()
