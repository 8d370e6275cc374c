"""`elastic-agent events`: of agents that answer, that end, that are none; and of the files of a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.agent.commands import store_command
from elastic_agent.agent.commands.runs import events as command
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.observability.page import MOST_EVENTS, Board
from elastic_agent.agent.output.journal import EVENT, EVENTS_PATH, EventFile, Journal, Kind
from elastic_agent.health.http import Answers, HealthServer, Probe
from elastic_agent.rendezvous.records import Endpoint

PATIENCE_S = 20.0


@contextmanager
def serving(journal: Journal, life: str, port: int = 0, job: str = "digits") -> Iterator[Endpoint]:
    about = {"job": job, "node": journal.node, "incarnation": life, "version": "1"}
    board = Board(journal, about, list, lambda job, problem: {})
    probe = Probe(True, "")
    server = HealthServer(
        socket.create_server(("127.0.0.1", port)),
        Answers(lambda: b"", lambda: probe, lambda: probe, queried={EVENTS_PATH: board.events}),
    )
    server.start()
    try:
        yield Endpoint(*server.address)
    finally:
        server.close()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    """The agents on this machine."""
    found: list[Endpoint] = []
    monkeypatch.setattr(command, "agents_here", lambda where, uid: tuple(found))
    monkeypatch.setattr(command, "FOLLOWS_S", 0.01)
    for name in ("ELASTIC_AGENT_LOG_DIR", "PET_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return found


def a_journal(node: str = "a", at: float = 1000.0, clock: Callable[[], float] | None = None) -> Journal:
    return Journal(node, clock or (lambda: at))


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_events_of_all_agents_here_are_in_the_order_of_their_clocks(
    here: list[Endpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = a_journal("a", 1000.0), a_journal("b", 999.5)
    a.note(Kind.WORLD, "the job starts", generation=1)
    a.note(Kind.FAILURE, "ValueError: lr < 0", rank=3, about="b", cause="exception")
    a.note(Kind.ACCOUNTING, "not shown")
    b.note(Kind.AGENT_STARTED, "agent 1 starts", generation=1)
    with serving(a, "a-1") as first, serving(b, "b-1") as second:
        here += [first, second]
        assert command.main([]) == ExitCode.SUCCESS
        shown = [line.split(maxsplit=2)[2] for line in lines(capsys)]
        assert shown == [
            "b                1  agent started    agent 1 starts",
            "a                1  generation       the job starts",
            "a                1  failure          rank 3 on b: ValueError: lr < 0",
        ]
        assert command.main(["--json"]) == ExitCode.SUCCESS
    read = [EVENT.decode(line) for line in lines(capsys)]
    assert [(event.node, event.number) for event in read] == [("b", 1), ("a", 1), ("a", 2), ("a", 3)]


def test_only_the_agents_of_the_job_count(here: list[Endpoint], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = a_journal("a"), a_journal("b")
    a.note(Kind.LOAD, "of digits")
    b.note(Kind.LOAD, "of letters")
    with (
        serving(a, "a-1") as first,
        serving(b, "b-1", job="letters") as second,
        socket.create_server(("127.0.0.1", 0)) as frozen,
    ):
        here += [first, Endpoint(*frozen.getsockname()[:2]), second]
        assert command.main(["letters"]) == ExitCode.SUCCESS
        out, err = capsys.readouterr()
        assert [line.rpartition("  ")[2] for line in out.splitlines()] == ["of letters"]
        assert f"the agent at {here[1]} gives no answer within 3 s" in err
        assert "if it is of job letters, its events are missing" in err
        assert command.main(["words"]) == ExitCode.NOT_FOUND
    assert "no agent of job words answers here, and words is no folder" in capsys.readouterr().err


def test_more_events_than_an_answer_holds_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    journal = a_journal()
    for number in range(2 * MOST_EVENTS + 7):
        journal.note(Kind.DRAIN, f"save {number}")
    with serving(journal, "a-1") as http:
        assert command.main(["--agent", str(http)]) == ExitCode.SUCCESS
    assert [line.rpartition(" ")[2] for line in lines(capsys)] == [str(n) for n in range(2 * MOST_EVENTS + 7)]


def test_who_follows_ends_when_its_reader_does_though_nothing_happens() -> None:
    journal = a_journal()
    journal.note(Kind.LOAD, "one")
    with serving(journal, "a-1") as http:
        words = [sys.executable, "-m", "elastic_agent", "events", "--agent", str(http), "--follow"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            assert following.stderr is not None
            assert following.stdout.readline().endswith("one\n")
            following.stdout.close()
            try:
                assert following.wait(PATIENCE_S) == ExitCode.OUTPUT_CLOSED
            finally:
                following.kill()
            assert following.stderr.read() == ""


def test_who_has_no_standard_output_at_all_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`>&-`: else each pause would be over at once, and the command would use a whole processor."""
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    monkeypatch.setattr(store_command, "STDOUT", writer)
    with pytest.raises(BrokenPipeError):
        store_command.pause(20.0)


def test_it_follows_an_agent_into_its_next_life_and_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sleep is the next thing that happens."""
    first, second = a_journal(), a_journal()
    first.note(Kind.LOAD, "one")
    second.note(Kind.LOAD, "of the next life")
    life = serving(first, "a-1")
    http = life.__enter__()

    def steps() -> Iterator[None]:
        first.note(Kind.LOAD, "two")
        yield
        life.__exit__(None, None, None)
        with serving(second, "a-2", http.port):
            yield
        yield

    happens = steps()
    monkeypatch.setattr(command, "pause", lambda seconds: next(happens))
    assert command.main(["--agent", str(http), "--follow"]) == ExitCode.SUCCESS
    assert [line.rpartition("load             ")[2] for line in lines(capsys)] == [
        "one",
        "two",
        "of the next life",
    ]


def test_the_files_of_a_run_are_read_where_no_agent_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "digits-5fa46501"
    for node, at in (("a", 1000.0), ("b", 999.5)):
        journal = Journal(node, lambda at=at: at, EventFile(lambda: None))  # type: ignore[misc]
        journal.start()
        journal.begin(folder)
        journal.note(Kind.AGENT_STARTED, f"{node} starts")
        journal.note(Kind.AGENT_ENDED, f"{node} ends")
        journal.close()
    for words in (
        [str(folder)],
        ["digits", f"--log-dir={tmp_path}"],
        ["digits", f"--log-dir={tmp_path}", "--follow"],
    ):
        assert command.main(words) == ExitCode.SUCCESS
        shown = [line.split("  ")[-1] for line in lines(capsys)]
        assert shown == ["b starts", "b ends", "a starts", "a ends"], words
    (folder / "events-a.jsonl").unlink()
    (folder / "events-b.jsonl").unlink()
    assert command.main([str(folder)]) == ExitCode.NOT_FOUND
    assert "has no events-NODE.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["./nothing/here"], ExitCode.NOT_FOUND, "is no folder"),
        (["nobody"], ExitCode.NOT_FOUND, "has no run of a job of this name"),
        ([], ExitCode.NOT_FOUND, "no agent answers here"),
        (["a", "--agent", "h:1"], ExitCode.BAD_CONFIG, "leave out"),
        (["a", "b"], ExitCode.BAD_CONFIG, "one job, or one run"),
        (["--agent", "h"], ExitCode.BAD_CONFIG, "HOST:PORT"),
    ],
)
def test_what_cannot_be_shown_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: ExitCode,
    says: str,
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_LOG_DIR", str(tmp_path))
    assert command.main(words) == code
    out, err = capsys.readouterr()
    assert (out, says in err, err.count("\n")) == ("", True, err.count("\n"))
    assert err.startswith("elastic-agent events: ")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"events": 1}',
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
def test_another_program_is_no_agent(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        assert command.main(["--agent", f"127.0.0.1:{port}"]) == ExitCode.MISMATCH
        thread.join(PATIENCE_S)
    assert "another program" in capsys.readouterr().err


def test_an_agent_that_stands_still_gives_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = ["--agent", f"127.0.0.1:{listener.getsockname()[1]}", "--timeout", "200ms"]
        assert command.main(words) == ExitCode.NO_ANSWER
    assert "gives no answer within 0.2 s" in capsys.readouterr().err


def test_events_of_a_kind_of_tomorrow_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    journal = a_journal()
    journal.note(Kind.LOAD, "one")
    [event] = journal.since(0, 1)
    known = json.loads(EVENT.encode(event))
    read = command._readable([{**known, "kind": "of_tomorrow"}, 5, known])
    assert list(read) == [event]
