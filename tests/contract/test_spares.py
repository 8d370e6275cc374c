"""A real fork server, with cheap modules in place of torch, and what becomes of its spares. The test stands where
the agent does, and adopts them as it does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.workers.preloader import spares as policy
from elastic_agent.agent.workers.preloader.spares import Interpreter, Spare
from elastic_agent.agent.workers.processes.spare_wire import BecomeWorker, ServeStore
from elastic_agent.agent.workers.processes.workers import tied
from tests.spare_keeper import SpareKeeper, adopting


@pytest.fixture(autouse=True)
def _adopting(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    with adopting():
        yield


@pytest.fixture
def agent() -> Iterator[SpareKeeper]:
    agent = SpareKeeper("json").start()
    yield agent
    agent.spares.close()


def run(spare: Spare, script: Path | str, *args: str, **more: Any) -> str:
    """What it prints as a worker, on both streams."""
    cold = tuple(tied([sys.executable, "-u", str(script), *args]))
    place = {"cpus": "", "cgroup": "", **more}
    start = BecomeWorker("script", str(script), args, dict(os.environ), os.getcwd(), cold=cold, **place)
    read, write = os.pipe()
    spare.become(start, [0, write, write])
    os.close(write)
    with open(read) as printed:
        return printed.read()


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def state(pid: int) -> str:
    """As the kernel writes it, X for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def gone(pid: int) -> bool:
    """Or dead, and not yet reaped."""
    return state(pid) in "ZX"


def test_spares_are_children_of_the_agent_and_their_exit_status_is_its_own(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_ready()
    exits = script(tmp_path, "import os, sys; print(os.getpid(), os.getppid(), os.getsid(0)); sys.exit(7)")
    spare = agent.take()
    assert run(spare, exits).split() == [str(spare.pid), str(os.getpid()), str(spare.pid)]
    assert spare.wait() == 7
    killed = agent.take()
    assert "no" in run(
        killed, script(tmp_path, "import os; print('no', flush=True); os.kill(os.getpid(), 11)")
    )
    assert killed.wait() == -signal.SIGSEGV


def test_a_spare_is_handed_out_once_and_others_take_its_place_when_all_is_calm(agent: SpareKeeper) -> None:
    agent.run_until_ready()
    first, second = agent.take(), agent.take()
    assert first.pid != second.pid
    assert agent.spares.take() is None
    assert agent.spares.why_cold == "no spare was ready"
    agent.spares.workers_started(agent.clock())
    agent.spares.turn(agent.clock())
    assert agent.spares.sessions != []
    started = agent.clock()
    agent.run_until_ready()
    assert agent.clock() - started > policy.CALM_S - 0.1, "the cores belong to who has just started"
    for spare in (first, second):
        os.kill(spare.pid, signal.SIGKILL)
        spare.wait()


def test_a_start_waits_for_the_imports_and_for_spares_that_are_forked_when_needed(agent: SpareKeeper) -> None:
    assert not agent.prepared(4), "the imports are going on"
    agent.run_until(lambda: agent.prepared(4))
    assert agent.spares.ready == 4, "twice as many as are kept"


def test_a_spare_that_was_killed_is_not_handed_out(agent: SpareKeeper) -> None:
    agent.run_until_ready()
    killed = [pid for pid in agent.spares.pids if pid != agent.preloaded]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    while not all(map(gone, killed)):
        time.sleep(0.01)
    assert agent.spares.hand_out(ServeStore(), []) is None


def test_who_kills_idle_spares_gets_others_to_kill_but_not_without_a_pause(agent: SpareKeeper) -> None:
    agent.run_until_ready()
    before = set(agent.spares.pids)
    for pid in before - {agent.preloaded}:
        os.kill(pid, signal.SIGKILL)
    agent.run_until(lambda: agent.spares.ready == 0)
    killed_at = agent.clock()
    agent.run_until_ready()
    assert agent.clock() - killed_at > policy.CALM_S - 0.1
    assert set(agent.spares.pids) & before == {agent.preloaded}


def test_spares_outlive_the_preloaded_process_and_another_one_takes_its_place(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_ready()
    first = agent.preloaded
    os.kill(first, signal.SIGKILL)
    agent.run_until(lambda: first not in agent.spares.sessions and agent.spares.sessions != [])
    assert agent.spares.ready == 2
    spare = agent.take()
    assert run(spare, script(tmp_path, "print('lives')")) == "lives\n"
    assert spare.wait() == 0
    agent.run_until_ready()


@pytest.mark.parametrize("when", ["importing", "ready"])
def test_no_start_waits_for_ever_for_a_preloaded_process_that_stands_still(
    when: str, agent: SpareKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    if when == "ready":
        agent.run_until_ready()
    os.kill(first := agent.preloaded, signal.SIGSTOP)
    assert not agent.prepared(4)
    limit_s = policy.FORKING_S if when == "ready" else policy.LOADING_S
    agent.late_s += limit_s - 1.0
    assert not agent.prepared(4)
    agent.late_s += 1.0
    assert agent.prepared(4), "cold, as far as there are no spares"
    assert "the fork server is gone: it has not" in caplog.text
    agent.run_until_ready()
    agent.run_until(lambda: gone(first) and agent.spares.sessions != [] and agent.preloaded != first)


def test_a_preloaded_process_whose_messages_were_not_read_for_long_has_not_hung(agent: SpareKeeper) -> None:
    """The agent was looking for its store meanwhile, or stood still itself."""
    while agent.events.empty():
        time.sleep(0.01)
    first = agent.preloaded
    agent.late_s += policy.LOADING_S
    assert not agent.prepared(2), "they are forked now"
    agent.run_until(lambda: agent.prepared(2))
    assert agent.preloaded == first
    assert agent.spares.ready == 2


def test_a_process_that_ends_at_once_is_tried_again_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fatal.py").write_text("import os; os._exit(9)")
    agent = SpareKeeper("fatal", PYTHONPATH=str(tmp_path)).start()
    agent.run_until(lambda: caplog.text.count("is gone: exit code 9") == 1)
    assert agent.prepared(2), "no start waits for the second attempt"
    assert "exit code 9" in agent.spares.why_cold
    agent.late_s += policy.RETRY_S
    agent.run_until(lambda: caplog.text.count("is gone: exit code 9") == 2)
    agent.spares.close()


def test_a_module_that_cannot_be_imported_is_named_and_the_others_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('half installed')")
    agent = SpareKeeper("broken", "no.such.module", "json", PYTHONPATH=str(tmp_path)).start()
    agent.run_until_ready()
    assert "not preloaded: broken (RuntimeError: half installed)" in caplog.text
    assert "not preloaded: no.such.module (ModuleNotFoundError: No module named 'no')" in caplog.text
    agent.spares.close()


def test_a_second_thread_makes_all_starts_cold_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    agent = SpareKeeper("threaded", PYTHONPATH=str(tmp_path)).start()
    agent.run_until(lambda: agent.prepared(2))
    assert "it has 2 threads" in agent.spares.why_cold
    assert "workers start cold from now on" in caplog.text
    agent.run_until(lambda: agent.spares.sessions == [])
    agent.late_s += 1000.0
    agent.spares.turn(agent.clock())
    assert agent.spares.sessions == [], "it would be the same again"
    agent.spares.close()


def test_the_environment_of_a_worker_may_be_longer_than_any_socket_takes(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_ready()
    program = script(
        tmp_path, "import os, sys; print(sum(map(len, os.environ.values())), sum(map(len, sys.argv)))"
    )
    long = {f"LONG_{number}": "x" * 100_000 for number in range(15)}
    os.environ.update(long)
    try:
        printed = run(spare := agent.take(), program, *(["y" * 100_000] * 5))
    finally:
        for name in long:
            del os.environ[name]
    assert int(printed.split()[0]) > 1_500_000
    assert int(printed.split()[1]) > 500_000
    assert spare.wait() == 0


def test_a_worker_keeps_to_its_cpus_and_a_cgroup_that_is_not_there_is_reported(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_ready()
    program = script(tmp_path, "import os; print(os.sched_getaffinity(0))")
    last = max(os.sched_getaffinity(0))
    assert run(first := agent.take(), program, cpus=str(last)) == f"{{{last}}}\n"
    assert first.wait() == 0
    assert "cannot enter the cgroup" in run(second := agent.take(), program, cgroup=str(tmp_path / "none"))
    assert second.wait() == 1


def test_closing_ends_all_of_them(agent: SpareKeeper) -> None:
    agent.run_until_ready()
    pids = list(agent.spares.pids)
    agent.spares.close()
    agent.run_until(lambda: all(map(gone, pids)))


def test_all_of_them_die_with_the_agent_without_any_help(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from elastic_agent.agent.workers.processes.spare_wire import BecomeWorker
from tests.spare_keeper import SpareKeeper, adopting
with adopting():
    keeper = SpareKeeper("json").start()
    keeper.run_until_ready()
    pids = keeper.spares.pids
    worker = keeper.take()
    read, write = os.pipe()
    start = BecomeWorker("script", {str(script(tmp_path, "import time; print(flush=True); time.sleep(600)"))!r},
        (), dict(os.environ), os.getcwd(), "", "", ())
    worker.become(start, [0, write, write])
    os.read(read, 1)
    print(*pids, flush=True)
    time.sleep(600)
"""
    root = Path(__file__).parents[2]
    agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root)
    assert agent.stdout is not None
    pids = [int(word) for word in agent.stdout.readline().split()]
    assert len(pids) == 3
    agent.kill()
    deadline = time.monotonic() + 5.0
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "fork server, spare and worker"
        time.sleep(0.01)
    agent.communicate()


def test_service_managers_signals_to_all_do_not_end_the_preloaded_process(agent: SpareKeeper) -> None:
    agent.run_until_ready()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(agent.preloaded, number)
    agent.run_until(lambda: agent.prepared(4))
    assert agent.spares.ready == 4


def test_an_interpreter_that_is_not_there_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    agent = SpareKeeper("json", python="/nonexistent/python")
    agent.start()
    agent.run_until(lambda: "is gone: exit code 127" in caplog.text)
    agent.spares.close()


def test_what_was_preloaded_before_the_job_is_for_jobs_like_it_alone(tmp_path: Path) -> None:
    """A variable that a preloaded module has read is another one for each value; any other one may differ."""
    (tmp_path / "asks.py").write_text("import os\nFOUND = os.environ.get('ASKED_FOR')\n")
    keeper = SpareKeeper("asks", wanted=0, PYTHONPATH=str(tmp_path)).start()
    of_daemon = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def adopt(*names: str, python: str = sys.executable, **variables: str) -> str:
        interpreter = Interpreter(python, {**of_daemon, **variables})
        return keeper.spares.adopt(interpreter, names or ("asks",), 2)

    try:
        assert adopt(OTHER="1") == "the job has variables of its own, and its imports are not done yet"
        keeper.run_until(lambda: keeper.spares.loaded)
        assert adopt(ASKED_FOR="1") == "ASKED_FOR is '1', and not set where its modules were loaded"
        assert adopt(PYTHONPATH="/nowhere").startswith("PYTHONPATH is '/nowhere'")
        assert adopt("asks", "csv") == "--preload is asks,csv, and was asks"
        assert adopt(python="/usr/bin/other") == f"workers run /usr/bin/other, and not {sys.executable}"
        assert keeper.spares.ready == 0
        assert adopt(OTHER="1", OMP_NUM_THREADS="3") == ""
        keeper.run_until_ready(2)
    finally:
        keeper.spares.close()
    assert adopt() == keeper.spares.why_cold, "it is not there any more"
