"""`elastic-agent files`: what it writes, what it leaves alone, and how it ends."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from elastic_agent.agent.commands.files import DEPLOY, KINDS, main
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import OPTIONS
from elastic_agent.agent.configuration.parse import OptionSource
from elastic_agent.cli import bash_completion


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_deployments_files_are_written_out(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "new" / kind
    assert main([kind, str(target)]) == ExitCode.SUCCESS
    source = DEPLOY / kind
    written = {
        str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()
    }
    assert written == {str(f.relative_to(source)): f.read_bytes() for f in source.rglob("*") if f.is_file()}
    assert written


def test_the_completion_knows_every_option_and_command(tmp_path: Path) -> None:
    (tmp_path / "elastic-agent.bash").write_text(bash_completion())
    for option in OPTIONS:
        if OptionSource.CLI in option.sources:
            assert f"--{option.name}" in bash_completion()
    asked = (
        "source $0; how=$(complete -p elastic-agent); how=${{how#complete}};"
        ' eval "compgen ${{how% elastic-agent}} -- {}"'
    )
    for word, answer in (("--min", "--min-nodes"), ("dra", "drain"), ("--rdzv-e", "--rdzv-endpoint")):
        command = ["bash", "-c", asked.format(word), str(tmp_path / "elastic-agent.bash")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert (done.stdout.strip(), done.stderr) == (answer, "")


def test_a_file_that_somebody_changed_is_kept_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["systemd", str(tmp_path)]) == ExitCode.SUCCESS
    changed = tmp_path / "job.toml"
    changed.write_text("mine")
    (tmp_path / "job.env").unlink()
    capsys.readouterr()
    assert main(["systemd", str(tmp_path)]) == ExitCode.FAILED
    assert changed.read_text() == "mine"
    assert (tmp_path / "job.env").exists()
    assert str(changed) in capsys.readouterr().err
    assert main(["systemd", str(tmp_path), "--force"]) == ExitCode.SUCCESS
    assert changed.read_text() != "mine"


@pytest.mark.parametrize("words", [[], ["helm"], ["podman", "x"], ["helm", "x", "y"], ["helm", "--replace"]])
def test_what_is_not_understood_writes_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == ExitCode.BAD_CONFIG
    assert "one of systemd, helm" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["helm", str(tmp_path / "file")]) == ExitCode.NOT_HERE
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_file_that_the_disk_has_no_room_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_bytes(path: Path, content: bytes) -> int:
        if path.name == "job.toml":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert main(["systemd", str(tmp_path)]) == ExitCode.NOT_HERE
    shown = capsys.readouterr()
    assert "No space left on device" in shown.err
    assert str(tmp_path / "job.env") in shown.out.split(), "what was written before is named"
