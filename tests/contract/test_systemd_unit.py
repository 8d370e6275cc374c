"""The shipped units, as systemd reads them: no unknown word, few rights, and numbers that agree with the agent's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.parse import duration
from elastic_agent.agent.configuration.stopping import STOP_GRACE, whole_stop_s
from elastic_agent.agent.main.heartbeat import STUCK_AFTER_S
from elastic_agent.agent.main.loop import HEARTBEAT_S
from elastic_agent.agent.main.run import HOST_LINGERS_S
from elastic_agent.agent.workers.processes.guard import SWEEP_S
from tests.names import ONLY_OF_COMMANDS, REQUEUE

SHIPPED = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT, DAEMON = "elastic-agent@.service", "elastic-agent-pool.service"


def settings(unit: str) -> list[tuple[str, str]]:
    lines = (SHIPPED / unit).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return [(name, value) for name, _, value in pairs]


both = pytest.mark.parametrize("unit", [UNIT, DAEMON])

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze missing: .ci/system-packages systemd"
)


def setting(key: str, unit: str = UNIT) -> str:
    [value] = [value for name, value in settings(unit) if name == key]
    return value


def seconds(text: str) -> float:
    return float(duration(0.0).parse(text))


def installed(folder: Path, name: str, *, change: tuple[str, str] = ("", "")) -> Path:
    """The unit with a program that exists here, for the job `job`, and the drop-in for credentials."""
    unit = folder / name.replace("@", "@job")
    text = (SHIPPED / name).read_text().replace(setting("ExecStart").split()[0], shutil.which("true") or "")
    unit.write_text(text.replace(*change))
    drop_ins = folder / f"{unit.name}.d"
    drop_ins.mkdir()
    shutil.copy(SHIPPED / "etcd-credentials.conf", drop_ins)
    return unit


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False
    )


@needs_analyze
@both
def test_systemd_understands_every_word(unit: str, tmp_path: Path) -> None:
    done = analyze("verify", installed(tmp_path, unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_analyze
@pytest.mark.parametrize("word", ["Type", "@system-service"])
def test_a_word_misspelt_would_be_seen(tmp_path: Path, word: str) -> None:
    assert analyze("verify", installed(tmp_path, UNIT, change=(word, f"{word}x"))).stderr


@needs_analyze
@both
def test_it_is_exposed_to_little(unit: str, tmp_path: Path) -> None:
    done = analyze("security", "--offline=true", "--threshold=25", installed(tmp_path, unit))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("unit", "sample_file"), [(UNIT, "job.toml"), (DAEMON, "pool.toml")])
def test_a_stop_ends_before_systemd_kills_it(unit: str, sample_file: str) -> None:
    limit_s = seconds(setting("TimeoutStopSec", unit))
    grace_s = STOP_GRACE.default_value
    assert grace_s is not None
    assert whole_stop_s(grace_s) + HOST_LINGERS_S + SWEEP_S < limit_s
    sample = (SHIPPED / sample_file).read_text()
    stated = re.search(r"More than (\d+) s needs more in the unit", sample)
    assert stated is not None
    assert whole_stop_s(float(stated[1])) <= limit_s < whole_stop_s(float(stated[1]) + 1)


def test_the_watchdog_and_the_liveness_probe_have_one_idea_of_stuck() -> None:
    assert seconds(setting("WatchdogSec")) == STUCK_AFTER_S > 3 * HEARTBEAT_S


def test_every_exit_code_is_a_success_worth_another_start_or_a_persons() -> None:
    assert setting("Restart") == "on-failure"
    fine = {ExitCode.SUCCESS, *map(int, setting("SuccessExitStatus").split())}
    hopeless = {*map(int, setting("RestartPreventExitStatus").split())}
    again = {*REQUEUE, ExitCode.UNLIKE_THE_JOB} - {ExitCode.UNKILLABLE}  # Slurm may take another node
    assert fine == {ExitCode.SUCCESS, ExitCode.STOPPED_BY_SIGINT, ExitCode.STOPPED_BY_SIGTERM}
    assert sorted([*fine, *hopeless, *again]) == sorted(set(ExitCode) - ONLY_OF_COMMANDS)


def test_the_sample_job_is_a_valid_configuration(tmp_path: Path) -> None:
    """But for the script, which is the user's."""
    script = tmp_path / "train.py"
    script.touch()
    sample = (SHIPPED / "job.toml").read_text()
    assert 'script = "/srv/job/train.py"' in sample
    (tmp_path / "job.toml").write_text(
        sample.replace("/srv/job/train.py", str(script)) + 'log-level = "warning"\n'
    )
    given = [line for line in (SHIPPED / "job.env").read_text().splitlines() if not line.startswith("#")]
    environment = {**os.environ, **dict(line.split("=", 1) for line in given)}
    command = [sys.executable, "-m", "elastic_agent", "--config", tmp_path / "job.toml", "--check-config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stop-grace" in done.stdout
    assert re.search(r"^log-level = (30|\"warning\")", done.stdout, re.M), (
        "the shipped job.env overrules no job.toml"
    )


def test_the_sample_pool_is_a_valid_configuration(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text((SHIPPED / "pool.toml").read_text())
    assert not [line for line in (SHIPPED / "pool.env").read_text().splitlines() if not line.startswith("#")]
    variables = {"ELASTIC_AGENT_CONFIG": str(tmp_path / "pool.toml"), "RUNTIME_DIRECTORY": str(tmp_path)}
    command = [sys.executable, "-m", "elastic_agent", *setting("ExecStart", DAEMON).split()[1:]]
    done = subprocess.run(
        [*command, "--check-config"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f'rdzv-endpoint = "local://{tmp_path}"' in done.stdout
    assert re.search(r"^max-nodes = \"4\" ", done.stdout, re.M)
