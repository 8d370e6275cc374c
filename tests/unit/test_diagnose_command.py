"""`elastic-agent diagnose`: what is in the archive, what is not, and how it ends."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

import pytest

from elastic_agent.agent.commands import runs
from elastic_agent.agent.commands.runs import diagnose as main
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.main.assembly import about_node
from elastic_agent.agent.output.journal import EventKind, Journal
from elastic_agent.agent.output.log_files import MARK, LogFiles

CANARY = "c4n4ry-Value9"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "digits-3f2a"
    files = {
        "configuration-a.toml": f'script = "train.py"\nargs = ["--api-key", "{CANARY}"]\n',
        "events-a.jsonl": f'{{"schema": 1, "text": "exit code 1: token={CANARY}"}}\n',
        "gen1/rank0/stdout.log": f"loss 0.1\nconnect to redis://me:{CANARY}@db\n",
        "gen1/rank0/stderr.log": f"os.environ: {{'HF_TOKEN': '{CANARY}'}}\n{CANARY} by itself\n",
        "gen1/evidence/a/1-hang/summary.txt": "rank 0: asleep, train.py:9 in step\n",
        "gen1/flight_records/rank_0": "binary",
        "gen1/core": CANARY,
        MARK: "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def bundled(run: Path, tmp_path: Path, *words: str) -> dict[str, str]:
    """Texts by name in the folder."""
    archive = tmp_path / "out.tar.gz"
    assert main([str(run), f"--output={archive}", *words]) == ExitCode.SUCCESS
    with tarfile.open(archive) as tar:
        found = {}
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            found[member.name.removeprefix(f"{run.name}/")] = content.read().decode()
    return found


def test_logs_evidence_journals_and_settings_are_in_it(run: Path, tmp_path: Path) -> None:
    found = bundled(run, tmp_path)
    assert set(found) == {
        "about.txt",
        "configuration-a.toml",
        "events-a.jsonl",
        "gen1/rank0/stdout.log",
        "gen1/rank0/stderr.log",
        "gen1/evidence/a/1-hang/summary.txt",
        "gen1/flight_records/rank_0",
    }
    assert found["gen1/rank0/stdout.log"].startswith("loss 0.1\n")
    assert "gen1/core: left out" in found["about.txt"]


def test_no_secret_is_in_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", CANARY)
    assert not [name for name, text in bundled(run, tmp_path).items() if CANARY in text]


def test_journal_and_settings_have_no_secret_of_the_agents(tmp_path: Path) -> None:
    """The command does not know their values, which stand for themselves in what the agent writes."""
    secrets, logs = {CANARY}, tmp_path / "logs"
    beside = about_node("a", [f'script = "{CANARY}"'], secrets)
    files = LogFiles()
    files.start()
    journal = Journal("a", time.time, files, secrets=secrets, beside=beside)
    journal.begin(logs / "digits-3f2a")
    journal.note(EventKind.FAILURE, f"exit code 1: ValueError: {CANARY}")
    files.close()
    found = bundled(logs / "digits-3f2a", tmp_path)
    assert {"events-a.jsonl", "configuration-a.toml"} < set(found)
    assert not [name for name, text in found.items() if CANARY in text]


def test_the_end_of_a_long_file_is_kept_and_links_and_pipes_are_not_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_OF_A_FILE", 100)
    (run / "gen1" / "long.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    (tmp_path / "elsewhere.log").write_text("elsewhere")
    (run / "gen1" / "link.log").symlink_to(tmp_path / "elsewhere.log")
    os.mkfifo(run / "gen1" / "pipe.log")
    found = bundled(run, tmp_path)
    assert found["gen1/long.log"].startswith("line 9")
    assert found["gen1/long.log"].endswith("line 999\n")
    assert {"gen1/link.log", "gen1/pipe.log"}.isdisjoint(found)
    for name in ("long", "link", "pipe"):
        assert f"gen1/{name}.log: " in found["about.txt"]


def test_an_archive_has_a_bound_and_the_newest_file_comes_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_IN_ALL", 1000)
    for number in (2, 10):
        (run / f"gen{number}").mkdir()
        file = run / f"gen{number}" / "full.log"
        file.write_text("x" * 600 + "\n")
        os.utime(file, (2e9 + number,) * 2)
    found = bundled(run, tmp_path)
    assert "gen10/full.log" in found
    assert "gen2/full.log: left out: the archive is full" in found["about.txt"]


def test_it_is_this_users_alone_and_replaces_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled(run, tmp_path)
    archive = tmp_path / "out.tar.gz"
    assert archive.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out == f"{archive}\n"
    before = archive.read_bytes()
    assert main([str(run), f"--output={archive}"]) == ExitCode.NOT_HERE
    assert archive.read_bytes() == before
    assert "name another with --output" in capsys.readouterr().err


def test_the_newest_run_of_a_job_is_found_by_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["digits", f"--log-dir={run.parent}"]) == ExitCode.SUCCESS
    assert (tmp_path / "digits-3f2a.tar.gz").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--log-dir=/proc/self/fdinfo"], ExitCode.NOT_FOUND),
        (["digits", "other"], ExitCode.BAD_CONFIG),
        (["digits", "--log-dir=/nowhere"], ExitCode.NOT_FOUND),
        (["no such job", "--log-dir=/tmp"], ExitCode.NOT_FOUND),
        (["--help"], ExitCode.SUCCESS),
    ],
)
def test_how_it_ends(words: list[str], code: ExitCode) -> None:
    assert main(words) == code
