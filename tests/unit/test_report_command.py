"""`elastic-agent report`: which run is meant, what is printed and drawn, and how it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic_agent.agent.commands.report import main
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.output.journal import EVENT
from elastic_agent.agent.output.log_files import MARK

from .test_run_report import Journal, failing_once

ROOT = Path(__file__).parents[2]


def write(folder: Path, *journals: Journal, torn: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for journal in journals:
        text = "".join(f"{EVENT.encode(event)}\n" for event in journal)
        (folder / f"events-{journal[0].node}.jsonl").write_text(text + ('{"schema":1,"num' if torn else ""))
    (folder / MARK).touch()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "job-1", failing_once())


def test_the_folder_of_a_run_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == ExitCode.SUCCESS
    assert capsys.readouterr().out.startswith("run job-1: succeeded, 2 min 28 s")
    assert main([str(run), "--json"]) == ExitCode.SUCCESS
    document = json.loads(capsys.readouterr().out)
    assert document["ettr"] == pytest.approx(120 / 148)
    assert sum(document["seconds"].values()) == document["wall_seconds"] == 148.0
    assert document["troubles"] == [{"cause": "killed", "node": "a", "times": 1}]


def test_a_torn_line_an_unknown_kind_and_a_schema_of_tomorrow_are_skipped(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), "--json"])
    whole = capsys.readouterr().out
    file = run / "events-a.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    unknown = first.replace('"agent_started"', '"of_tomorrow"')
    tomorrow = first.replace('"schema":1', '"schema":2')
    assert unknown != first != tomorrow
    noise = "not JSON\n\x00\xff\n" + "x" * 100_000 + "\n"
    file.write_text("".join([first, unknown, tomorrow, noise, *rest]) + rest[-1][:40])
    assert main([str(run), "--json"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out == whole


def test_a_journal_that_was_full_has_an_older_part(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), "--json"])
    whole = capsys.readouterr().out
    file = run / "events-a.jsonl"
    events = file.read_text().splitlines(keepends=True)
    (run / "events-a.jsonl.1").write_text("".join(events[:7]))
    file.write_text("".join(events[7:]))
    main([str(run), "--json"])
    assert capsys.readouterr().out == whole


def test_a_job_stands_for_its_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, name in enumerate(("job-old", "job-new", "job-of-another-1", "jobs-1")):
        folder = write(tmp_path / name, failing_once())
        os.utime(folder / MARK, (at, at))
    (tmp_path / "job-unmarked").mkdir()
    assert main(["job", f"--log-dir={tmp_path}"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out.startswith("run job-new:")
    monkeypatch.setenv("ELASTIC_AGENT_LOG_DIR", str(tmp_path))
    assert main(["job-of-another"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out.startswith("run job-of-another-1:")
    assert main([]) == ExitCode.SUCCESS
    shown, said = capsys.readouterr()
    assert shown.startswith("run jobs-1:")
    assert said == f"elastic-agent: {tmp_path}/jobs-1, the newest run there\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--log-dir={tmp}/empty"], ExitCode.NOT_FOUND, "no run is in {tmp}/empty"),
        (["{run}", "{run}"], ExitCode.BAD_CONFIG, "one run"),
        (["{run}", "--jsn"], ExitCode.BAD_CONFIG, "--json"),
        (["none", "--log-dir={tmp}"], ExitCode.NOT_FOUND, "no run of a job of this name is in"),
        (["none", "--log-dir={tmp}/none"], ExitCode.NOT_FOUND, "No such file or directory"),
        (["{tmp}/empty"], ExitCode.NOT_FOUND, "is no folder of a run"),
        (["{tmp}/early"], ExitCode.NO_JOB, "nothing of how time was spent"),
        (["{tmp}/folder"], ExitCode.NOT_FOUND, "name the folder of a run"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    words: list[str], code: ExitCode, says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "events-a.jsonl").mkdir(parents=True)
    early = Journal("a")
    early.begin(0.0)
    write(tmp_path / "early", early)
    assert main([word.format(run=run, tmp=tmp_path) for word in words]) == code
    error = capsys.readouterr().err
    assert error.startswith("elastic-agent report: ")
    assert says.format(tmp=tmp_path) in error
    assert "Traceback" not in error
