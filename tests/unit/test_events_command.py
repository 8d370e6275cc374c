"""`elastic-agent events`: the journals of a run, and how it ends; and what ends commands whose reader is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.agent.commands import command
from elastic_agent.agent.commands.runs import events
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.output.journal import EVENT, EventKind
from elastic_agent.agent.output.log_files import MARK

from .test_run_report import Journal


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run of two nodes, the second of which began first."""
    for name in ("ELASTIC_AGENT_LOG_DIR", "PET_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "digits-5fa46501"
    run.mkdir()
    a, b = Journal("a", 1.0), Journal("b")
    a.note(EventKind.WORLD, 1, cause="start")
    a.note(EventKind.FAILURE, rank=3, about="b", cause="exception")
    a.note(EventKind.ACCOUNTING)
    b.note(EventKind.AGENT_STARTED, 1)
    for journal in (a, b):
        lines = [EVENT.encode(event) for event in journal]
        (run / f"events-{journal[0].node}.jsonl").write_text("\n".join([*lines, '{"schema":1,"num']))
    (run / MARK).touch()
    return run


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_events_of_all_nodes_are_in_the_order_of_their_clocks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert events([str(folder)]) == ExitCode.SUCCESS
    assert [line.split(maxsplit=2)[2].rstrip() for line in lines(capsys)] == [
        "b                1  agent started",
        "a                1  generation",
        "a                1  failure          rank 3 on b:",
    ]
    assert events([str(folder), "--json"]) == ExitCode.SUCCESS
    read = [EVENT.decode(line) for line in lines(capsys)]
    assert [(event.node, event.number) for event in read] == [("b", 1), ("a", 1), ("a", 2), ("a", 3)]


def test_a_job_stands_for_its_newest_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert events(["digits", f"--log-dir={tmp_path}", "--json"]) == ExitCode.SUCCESS
    assert len(lines(capsys)) == 4


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["./nothing/here"], ExitCode.NOT_FOUND, "is no folder"),
        (["nobody"], ExitCode.NOT_FOUND, "no run of a job of this name"),
        ([], ExitCode.NOT_FOUND, "no run is in"),
        (["a", "b"], ExitCode.BAD_CONFIG, "one run"),
        (["--follow"], ExitCode.BAD_CONFIG, "--follow"),
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
    assert events(words) == code
    out, err = capsys.readouterr()
    assert (out, says in err) == ("", True)
    assert err.startswith("elastic-agent events: ")


def test_who_has_no_standard_output_at_all_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`>&-`: else each pause would be over at once, and the command would use a whole processor."""
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    monkeypatch.setattr(command, "STDOUT", writer)
    with pytest.raises(BrokenPipeError):
        command.pause(20.0)


def test_a_pause_ends_as_soon_as_the_reader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(command, "STDOUT", writer)
    command.pause(0.01)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        command.pause(20.0)
    os.close(writer)
