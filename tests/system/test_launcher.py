"""Jobs that Python starts: results, failures and signals of a function on real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.launcher import LaunchConfig, LaunchError, elastic_launch
from tests.waiting import wait_for

from .harness import NO_MORE_TORCH_THAN_NEEDED

COLD = {"preload": "none"}
WARM = {"preload": "torch.distributed.elastic.multiprocessing.errors"}
"""Two workers, or two generations, import torch once: all that runs a function needs of it."""
TWO = LaunchConfig(nproc_per_node=2, options=WARM)

ENDLESS = """
import sys
from elastic_agent.launcher import LaunchConfig, LaunchError, elastic_launch

def work(folder):
    import pathlib, time
    pathlib.Path(folder, "begun").touch()
    time.sleep(600)

try:
    elastic_launch(LaunchConfig(options={"preload": "none"}), work)(sys.argv[1])
except LaunchError as error:
    sys.exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def no_more_torch_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that serve the workers' stores."""
    monkeypatch.setenv("PYTHONPATH", NO_MORE_TORCH_THAN_NEEDED, prepend=os.pathsep)


def test_each_ranks_result_comes_back() -> None:
    def square(number: int) -> dict[str, int]:
        return {"rank": int(os.environ["RANK"]), "square": number**2}

    assert elastic_launch(TWO, square)(5) == {rank: {"rank": rank, "square": 25} for rank in (0, 1)}


@pytest.mark.long
def test_a_worker_that_is_killed_is_started_again() -> None:
    def killed_once() -> str:
        generation = os.environ["ELASTIC_AGENT_GENERATION"]
        if generation == "1" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return generation

    assert elastic_launch(TWO, killed_once)() == {0: "2", 1: "2"}


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    def divide() -> float:
        return 1 / (int(os.environ["RANK"]) - 1)

    with pytest.raises(LaunchError, match="ZeroDivisionError") as caught:
        elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0, options=WARM), divide)()
    assert caught.value.exit_code == 1
    assert "in divide" in str(caught.value)


@pytest.mark.long
def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(LaunchError, match="the result of rank 0, a generator, cannot be sent back"):
        elastic_launch(LaunchConfig(max_restarts=0, options=COLD), lambda: (n for n in ()))()


@pytest.mark.long
def test_a_program_gives_no_results() -> None:
    assert elastic_launch(LaunchConfig(options=COLD), "true")() == {}


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.long),
    ],
)
def test_a_signal_for_the_launching_process_stops_the_job(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENDLESS)
    with subprocess.Popen([sys.executable, str(program), str(tmp_path)]) as process:
        begun = tmp_path / "begun"
        wait_for(lambda: process.poll() is not None or begun.exists(), "the worker to begin", 60)
        process.send_signal(number)
        assert process.wait(60) == code
