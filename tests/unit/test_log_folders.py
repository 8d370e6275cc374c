"""Folders below --log-dir: the newest stay, what somebody else has made stays, and what is in use stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elastic_agent.agent.common import folders
from elastic_agent.agent.common.exits import CannotStart, ExitCode, NoTemporaryDirectory
from elastic_agent.agent.common.folders import make_own, pool_folder_here
from elastic_agent.agent.configuration.config import LogConfig
from elastic_agent.agent.configuration.parse import Streams
from elastic_agent.agent.main.assembly import choose_folders
from elastic_agent.agent.output.log_files import (
    KEPT_GENERATIONS,
    KEPT_RUNS,
    MARK,
    RunFolder,
    own_logs,
    run_folder,
)
from elastic_agent.agent.workers.environment import output_routes


def a_run(directory: Path, number: int) -> RunFolder:
    """One of long ago; the higher its number, the later."""
    run = RunFolder(run_folder(directory, "job", f"{number:03}"))
    run.hold()
    os.utime(run.path / MARK, (number, number))
    (run.path / "gen1" / "rank0").mkdir(parents=True)
    (run.path / "gen1" / "rank0" / "stderr.log").write_text("said")
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_runs_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT_RUNS + 5):
        a_run(tmp_path, number).release()
    newest = a_run(tmp_path, 900)
    newest.prune(1)
    assert names(tmp_path) == [*(f"job-{n:03}" for n in range(6, KEPT_RUNS + 5)), "job-900"]
    assert len(names(tmp_path)) == KEPT_RUNS


def test_a_run_that_goes_on_stays_however_old_it_is(tmp_path: Path) -> None:
    going_on = a_run(tmp_path, 0)
    for number in range(1, KEPT_RUNS + 5):
        a_run(tmp_path, number).release()
    newest = a_run(tmp_path, 900)
    newest.prune(1)
    assert going_on.path.exists()
    assert not (tmp_path / "job-001").exists()
    going_on.release()
    newest.prune(1)
    assert not going_on.path.exists()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "job-mine" / "gen1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / MARK).touch()
    os.utime(tmp_path / "elsewhere" / MARK, (0, 0))
    directory = tmp_path / "logs"
    directory.mkdir()
    (directory / "link").symlink_to(tmp_path / "elsewhere")
    noted = a_run(directory, 0)
    (noted.path / "notes.txt").write_text("of a person")
    noted.release()
    for number in range(1, KEPT_RUNS + 1):
        a_run(directory, number).release()
    a_run(directory, 900).prune(1)
    assert (tmp_path / "elsewhere" / MARK).exists()
    assert names(noted.path) == [MARK, "notes.txt"]
    assert (tmp_path / "job-mine" / "gen1").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_runs_of_other_users_stay_and_do_not_count(tmp_path: Path) -> None:
    for number in range(KEPT_RUNS + 5):
        a_run(tmp_path, number).release()
    for number in (0, KEPT_RUNS + 4):
        os.chown(tmp_path / f"job-{number:03}", 1234, 1234)
    a_run(tmp_path, 900).prune(1)
    kept = [0, *range(5, KEPT_RUNS + 5), 900]
    assert names(tmp_path) == [f"job-{number:03}" for number in kept]


@pytest.mark.parametrize("generation", [3, KEPT_GENERATIONS, KEPT_GENERATIONS + 3])
def test_the_newest_generations_are_kept(tmp_path: Path, generation: int) -> None:
    run = RunFolder(tmp_path / "job-run")
    run.hold()
    for number in range(1, generation + 1):
        (run.path / f"gen{number}" / "rank0").mkdir(parents=True)
    run.prune(generation)
    kept = {f"gen{n}" for n in range(max(1, generation - KEPT_GENERATIONS + 1), generation + 1)}
    assert set(names(run.path)) == {MARK, *kept}


def test_a_run_without_a_directory_has_one_of_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    logs = LogConfig(redirects=Streams(3))
    path = own_logs()
    assert path == tmp_path / f"elastic_agent_logs_{os.geteuid()}"
    assert not path.exists(), "nothing is made for --check-config"
    for _ in range(2):
        chosen, runs = choose_folders(logs)
        assert chosen.directory == runs == path
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o770)
    with pytest.raises(PermissionError, match="not a folder of this user's alone"):
        make_own(path, readable=True)
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=path.name):
        make_own(path, readable=True)
    assert choose_folders(logs) == (logs, None)


def test_no_temporary_directory_is_no_reason_to_write_into_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(folders, "_PLACES", (str(tmp_path / "none"),))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoTemporaryDirectory, match="in TMPDIR"):
        own_logs()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert own_logs().parent == tmp_path


def test_a_full_temporary_directory_is_not_taken_but_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    pool = full / f"elastic-agent-pool-{os.geteuid()}" / "default.db"
    pool.parent.mkdir()
    pool.touch()

    def try_out(place: Path) -> None:
        if place == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders, "try_out", try_out)
    monkeypatch.setattr(folders, "_PLACES", (str(full), str(free)))
    monkeypatch.delenv("TMPDIR", raising=False)
    assert own_logs().parent == free
    assert pool_folder_here({}, "default") == pool.parent
    unit = {"RUNTIME_DIRECTORY": str(free / "of-a-unit")}
    assert pool_folder_here(unit, "default") == pool.parent, "no store is in the folder of the unit"
    monkeypatch.setattr(folders, "_PLACES", (str(full),))
    with pytest.raises(NoTemporaryDirectory, match="No space left on device"):
        own_logs()
    assert pool_folder_here({}, "default") == pool.parent


def test_dev_null_as_the_log_directory_means_no_files() -> None:
    """As under torchrun, whose --redirects have no effect then."""
    logs = LogConfig(Path("/dev/null"), redirects=Streams(3), stdout_filters=("loss",))
    chosen, runs = choose_folders(logs)
    assert (chosen.directory, runs) == (None, None)
    for route in output_routes(chosen, 0, {}):
        assert (route.file, route.console, route.copied) == (False, True, ())


def test_a_directory_that_is_named_is_made_or_refused(tmp_path: Path) -> None:
    logs = LogConfig(tmp_path / "of" / "jobs")
    assert choose_folders(logs) == choose_folders(logs) == (logs, logs.directory)
    assert (tmp_path / "of" / "jobs").is_dir()
    with pytest.raises(
        CannotStart, match=r"--log-dir /proc/x cannot be made: No such .+; name another"
    ) as no:
        choose_folders(LogConfig(Path("/proc/x")))
    assert no.value.code is ExitCode.NOT_HERE


def test_where_no_file_can_be_everything_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(folders, "_PLACES", (str(tmp_path / "missing"),))
    logs = LogConfig(redirects=Streams(3))
    assert choose_folders(logs) == (logs, None)
    assert "goes to the console alone, and events" in caplog.text
    assert choose_folders(LogConfig()) == (LogConfig(), None)
