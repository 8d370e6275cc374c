"""The command: what it prints, what it returns, and that it starts nothing when the configuration is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_agent import __version__
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import OPTIONS, Command, Config
from elastic_agent.agent.configuration.parse import OptionSource
from elastic_agent.agent.machine import inventory as machine
from elastic_agent.agent.machine.devices import Inventory
from elastic_agent.agent.machine.inventory import Machine
from elastic_agent.agent.machine.network import Network
from elastic_agent.agent.main.assembly import PreparedProcess
from elastic_agent.cli import COMMANDS, bash_completion, help_text, main

NETWORK = Network("lo", "127.0.0.1", "no other node can join")
MACHINE = Machine(Inventory((), 2), (), NETWORK, ("devices: one", 'odd: "\\" ä\nmin-nodes = 7'))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations `run` was called with; it is replaced, like the machine, and the environment is clean."""
    for name in os.environ:
        if name.startswith(("ELASTIC_AGENT_", "PET_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("LOGLEVEL", raising=False)
    calls: list[Config] = []

    def run(config: Config, machine: Machine, prepared: PreparedProcess | None, in_force: object) -> int:
        assert machine is MACHINE
        assert prepared is None
        calls.append(config)
        return ExitCode.FAILED

    module = types.ModuleType("elastic_agent.agent.main.run")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elastic_agent.agent.main.run", module)
    monkeypatch.setattr(machine, "inspect_machine", lambda config, environ: MACHINE)
    return calls


def agent(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from elastic_agent.cli import main; sys.exit(main())"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_AGENT_", "PET_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_exit_code_and_every_option_with_its_default(started: list[Config]) -> None:
    text = help_text()
    assert all(f"{int(code):>5}  {code.meaning}" in text for code in ExitCode)
    for option in OPTIONS:
        if OptionSource.CLI in option.sources:
            assert f"--{option.name}" in text
            assert (
                option.flag or not option.default or f"(default: {option.default})" in " ".join(text.split())
            )
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--min-nodes", "wrong", "--help"]])
def test_help_wins_over_problems_and_its_short_form_fits_a_screen(
    words: list[str], started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == ExitCode.SUCCESS
    assert capsys.readouterr().out == help_text(short=words == ["-h"]) + "\n"
    assert len(help_text(short=True).splitlines()) <= 72
    assert not started


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What a sub-command `look` was called with."""
    calls: list[list[str]] = []

    def look(words: Sequence[str]) -> int:
        calls.append(list(words))
        return 7

    module = types.ModuleType("look")
    module.__dict__["main"] = look
    monkeypatch.setitem(sys.modules, "elastic_agent.agent.commands.look", module)
    monkeypatch.setitem(COMMANDS, "look", ("agent.commands.look:main", "look at it"))
    return calls


def test_a_subcommand_gets_the_arguments_after_it_and_its_exit_code_is_returned(
    started: list[Config], asked: list[list[str]]
) -> None:
    assert main(["look", "--min-nodes", "x", "--help"]) == 7
    assert asked == [["--min-nodes", "x", "--help"]]
    assert not started


@pytest.mark.parametrize("before", [["./look"], ["--max-restarts", "3", "look"], ["--", "look"]])
def test_a_script_may_have_the_name_of_a_subcommand(
    before: list[str],
    started: list[Config],
    asked: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "look").write_text("pass\n")
    main([*before, "--lr", "0.1"])
    assert [config.command for config in started] == [Command("script", before[-1], ("--lr", "0.1"))]
    assert not asked


def test_help_names_every_subcommand(asked: list[list[str]]) -> None:
    assert "  look         look at it\n" in help_text()
    assert "./NAME" in help_text()


def test_version(started: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out == f"elastic-agent {__version__}\n"


def test_run_gets_the_configuration_and_its_exit_code_is_returned(script: str, started: list[Config]) -> None:
    assert main(["--nproc-per-node", "2", script, "--help"]) == ExitCode.FAILED
    (config,) = started
    assert config.nproc_per_node == 2
    assert config.command == Command("script", script, ("--help",))


def test_check_config_prints_and_starts_nothing(
    script: str, started: list[Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_MAX_NODES", "4")
    assert main(["--check-config", "--start-method", "fork", script]) == ExitCode.SUCCESS
    out, err = capsys.readouterr()
    assert any(
        line.split() == ["max-nodes", "=", '"4"', "#", "ELASTIC_AGENT_MAX_NODES"] for line in out.splitlines()
    )
    assert (
        err
        == "elastic-agent: warning: --start-method is ignored: it only concerns functions as entry points\n"
    )
    assert not started


def test_check_config_of_a_daemon_shows_its_pool_and_starts_nothing(
    started: list[Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = f"local://{tmp_path}"
    words = ["--max-nodes", "4", "--rdzv-endpoint", place, "--start-method", "fork", "--check-config"]
    assert main(words) == ExitCode.SUCCESS
    out, err = capsys.readouterr()
    assert f'rdzv-endpoint = "{place}"' in out
    assert 'rdzv-id = "pool"' in out
    assert "--start-method is ignored" in err
    assert not started


def test_check_config_shows_what_follows_on_this_machine_in_a_file_that_means_the_same(
    script: str, started: list[Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--check-config", "--node-id", "a", "--rdzv-id", "j", script]) == ExitCode.SUCCESS
    out = capsys.readouterr().out
    assert "\n# devices: one\n" in out
    file = tmp_path / "agent.toml"
    file.write_text(out)
    main(["--config", str(file)])
    main(["--node-id", "a", "--rdzv-id", "j", script])
    assert started[0] == started[1]


def test_what_does_not_fit_this_machine_is_refused_like_any_other_problem() -> None:
    for mode in ([], ["--check-config"]):
        done = agent("--nproc-per-node", "gpu", *mode, __file__, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == ExitCode.NOT_HERE, "another machine may have one"
        assert done.stdout == ""
        first, problem = done.stderr.splitlines()
        assert first == "elastic-agent: 1 problem; nothing was done"
        assert problem.startswith("  1. --nproc-per-node 'gpu': expected a CUDA device")


@pytest.mark.parametrize(
    ("variables", "words", "level"),
    [
        ({}, [], 20),
        ({"LOGLEVEL": ""}, [], 20),
        ({"LOGLEVEL": " Debug "}, [], 10),
        ({"LOGLEVEL": "7"}, [], 7),
        ({"LOGLEVEL": "error", "ELASTIC_AGENT_LOG_LEVEL": "info"}, [], 20),
        ({"LOGLEVEL": "DEBUG"}, ["--log-level=warn"], 30),
        ({"ELASTIC_AGENT_LOG_LEVEL": "error"}, ["--log-level=debug"], 10),
        ({}, ["--log-level=debug", "--log-level=warning"], 30),
    ],
)
def test_the_log_level_is_that_of_the_strongest_source_and_of_two_the_last(
    variables: dict[str, str],
    words: list[str],
    level: int,
    script: str,
    started: list[Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    main([*words, script])
    assert [config.logs.level for config in started] == [level]


def test_a_log_level_that_logging_does_not_know_is_refused_by_name(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGLEVEL", "verbose")
    assert main(["--min-nodes=0", script]) == ExitCode.BAD_CONFIG
    said = capsys.readouterr().err
    assert "2 problems" in said
    assert "LOGLEVEL 'verbose': expected debug, info, warning" in said


def test_what_is_refused_is_in_the_error_file_unless_it_was_only_a_check(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    for words, code in (
        (["--min-nodes", "0"], ExitCode.BAD_CONFIG),
        (["--nproc-per-node", "gpu"], ExitCode.NOT_HERE),
    ):
        for mode in (["--check-config"], []):
            assert not path.exists()
            done = agent(*words, *mode, __file__, CUDA_VISIBLE_DEVICES="", TORCHELASTIC_ERROR_FILE=str(path))
            assert done.returncode == code
        told = json.loads(path.read_text())["message"]
        assert told["errorCode"] == code
        assert told["message"].startswith("1 problem; nothing was done")
        assert words[0] in told["message"]
        path.unlink()


def test_a_machine_is_judged_once_the_settings_are_right(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--log-dir={script}/x", "--local-addr=192.0.2.1", script]
    assert main(["--min-nodes=5", "--max-nodes=2", *words]) == ExitCode.BAD_CONFIG
    assert "1 problem;" in capsys.readouterr().err
    assert main(words) == ExitCode.NOT_HERE
    said = capsys.readouterr().err
    for problem in ("2 problems", f"--log-dir '{script}/x'", "--local-addr '192.0.2.1'"):
        assert problem in said


def test_a_wrong_configuration_starts_nothing(started: list[Config]) -> None:
    assert main(["--min-nodes", "0", "no-such-script.py"]) == ExitCode.BAD_CONFIG
    assert not started


def test_a_real_process_lists_every_problem_and_exits_78() -> None:
    done = agent(
        "--min-nodes", "0", "--nproc", "x", "gone.py", ELASTIC_AGENT_LEASE_TTL="0", ELASTIC_AGENT_X="1"
    )
    assert done.returncode == 78
    assert done.stdout == ""
    first, *problems = done.stderr.splitlines()
    assert first == "elastic-agent: 4 problems; nothing was done"
    assert [problem.split(".")[0].strip() for problem in problems] == ["1", "2", "3", "4"]
    assert "Traceback" not in done.stderr


def test_a_real_process_prints_arguments_that_a_terminal_cannot_show(script: str) -> None:
    odd = os.fsdecode(b"\xff\x1b[31m")
    wrong = agent("--node-id", odd, script, PYTHONIOENCODING="ascii")
    assert wrong.returncode == 78
    assert "\x1b" not in wrong.stderr
    right = agent("--check-config", script, odd, PYTHONIOENCODING="ascii")
    assert right.returncode == 0
    assert "\x1b" not in right.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_job_runs_with_standard_streams_that_the_shell_has_closed(closed: str) -> None:
    command = [sys.executable, "-m", "elastic_agent", "--preload=none", "--no-python", "true"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_folder_that_was_deleted_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["submit", "x.py"], ["jobs"], ["x.py"], []):
        assert main(words) == ExitCode.BAD_CONFIG
    assert capsys.readouterr().err.count("the current folder was deleted") == 4


def test_a_real_process_prints_letters_that_its_terminal_lacks() -> None:
    program = (
        "import elastic_agent.cli\nfrom elastic_agent.__main__ import start\n"
        "elastic_agent.cli.main = lambda: print('\\u2603') or 0\nstart()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "\\u2603\n"), done.stderr


def test_the_command_line_needs_no_torch() -> None:
    code = "import sys, elastic_agent.cli as cli; cli.main(['--version']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_job_that_starts_its_own_store_has_a_new_id_every_time(script: str, started: list[Config]) -> None:
    main([script])
    main([script])
    assert started[0].rendezvous.job_id != started[1].rendezvous.job_id


def test_each_subcommand_has_a_module_that_answers_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"elastic-agent {name}" in capsys.readouterr().out


def test_torchruns_print_completion_prints_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out == bash_completion()
    assert main(["--print-completion", "tcsh"]) == ExitCode.BAD_CONFIG


def test_exit_codes_are_plain_numbers_with_a_meaning() -> None:
    assert sorted(map(int, ExitCode)) == [
        *(0, 1, 3, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 78, 79, 80, 130, 141, 143)
    ]
    assert all(code.meaning for code in ExitCode)
