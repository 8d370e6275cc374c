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

import psutil
import pytest

from elastic_agent.agent.workers.processes import spares as policy
from elastic_agent.agent.workers.processes.spare_wire import BecomeWorker, ServeStore
from elastic_agent.agent.workers.processes.spares import Spare
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


def run(agent: SpareKeeper, script: Path | str, *args: str, **more: Any) -> tuple[Spare, str]:
    """A spare as a worker, and what it prints on both streams."""
    cold = tuple(tied([sys.executable, "-u", str(script), *args]))
    start = BecomeWorker(
        "script", str(script), args, dict(os.environ), os.getcwd(), cold=cold, **{"cpus": "", **more}
    )
    read, write = os.pipe()
    spare = agent.hand_out(start, [0, write, write])
    os.close(write)
    with open(read) as printed:
        return spare, printed.read()


def idle(agent: SpareKeeper) -> list[int]:
    """Those that wait, as soon as they are this process' children."""
    session = agent.preloaded
    return [each.pid for each in psutil.Process().children() if os.getsid(each.pid) == session != each.pid]


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
    agent.run_until_prepared()
    exits = script(tmp_path, "import os, sys; print(os.getpid(), os.getppid(), os.getsid(0)); sys.exit(7)")
    spare, printed = run(agent, exits)
    assert printed.split() == [str(spare.pid), str(os.getpid()), str(spare.pid)]
    assert spare.wait() == 7
    killed, printed = run(
        agent, script(tmp_path, "import os; print('no', flush=True); os.kill(os.getpid(), 11)")
    )
    assert "no" in printed
    assert killed.wait() == -signal.SIGSEGV


def test_a_start_waits_for_the_imports_and_each_spare_is_handed_out_once(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    assert not agent.spares.prepared(2), "the imports are going on"
    agent.run_until_prepared(2)
    agent.run_until(lambda: len(idle(agent)) == 2)
    agent.spares.fork(2)
    nothing = script(tmp_path, "")
    first, second, third = (run(agent, nothing)[0] for _ in range(3))
    assert len({first.pid, second.pid, third.pid}) == 3, "the third was forked when it was needed"
    assert [spare.wait() for spare in (first, second, third)] == [0, 0, 0]
    assert not idle(agent)


def test_a_spare_that_was_killed_is_not_handed_out(agent: SpareKeeper) -> None:
    agent.run_until_prepared(2)
    agent.run_until(lambda: len(idle(agent)) == 2)
    killed = idle(agent)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    agent.run_until(lambda: all(map(gone, killed)))
    assert agent.spares.hand_out(ServeStore(), []) is None
    assert agent.spares.why_cold == "no process could be forked"


def test_workers_outlive_the_fork_server_and_another_one_takes_its_place(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_prepared(2)
    agent.run_until(lambda: len(idle(agent)) == 2)
    waiting, first = idle(agent), agent.preloaded
    read, write = os.pipe()
    lives = str(script(tmp_path, "print(input())"))
    start = BecomeWorker("script", lives, (), dict(os.environ), os.getcwd(), "", ())
    words, said = os.pipe()
    spare = agent.hand_out(start, [read, said, 2])
    os.close(read)
    os.close(said)
    os.kill(first, signal.SIGKILL)
    agent.run_until(lambda: first not in agent.spares.sessions)
    assert agent.spares.hand_out(ServeStore(), []) is None
    assert agent.spares.why_cold.startswith("there is no fork server: killed by SIGKILL")
    agent.run_until(lambda: all(map(gone, set(waiting) - {spare.pid})))
    with open(write, "w") as told, open(words) as heard:
        print("lives", file=told, flush=True)
        assert heard.read() == "lives\n"
    assert spare.wait() == 0
    agent.late_s += policy.RETRY_S
    agent.run_until(lambda: agent.spares.sessions not in ((), (first,)))
    agent.run_until_prepared()
    assert run(agent, script(tmp_path, "print('so does the next')"))[1] == "so does the next\n"


def test_no_start_waits_for_ever_for_imports_that_stand_still(agent: SpareKeeper, tmp_path: Path) -> None:
    os.kill(first := agent.preloaded, signal.SIGSTOP)
    agent.late_s += policy.LOADING_S - 1.0
    assert not agent.spares.prepared(4)
    agent.late_s += 1.0
    assert agent.spares.prepared(4)
    assert agent.spares.hand_out(ServeStore(), []) is None, "cold"
    assert agent.spares.why_cold == "the fork server has not yet done its imports"
    os.kill(first, signal.SIGCONT)
    agent.run_until(lambda: "could be forked" in agent.spares.why_cold)
    assert run(agent, script(tmp_path, "print('late')"))[1] == "late\n"


def test_no_start_waits_for_ever_for_a_fork_server_that_stands_still(
    agent: SpareKeeper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FORKING_S", 0.5)
    agent.run_until_prepared(0)
    os.kill(agent.preloaded, signal.SIGSTOP)
    assert agent.spares.prepared(4)
    began = agent.clock()
    assert [agent.spares.hand_out(ServeStore(), []) for _ in range(4)] == [None] * 4
    assert 0.4 < agent.clock() - began < 0.9, "once for all"
    assert "the fork server is gone: it has not forked" in caplog.text
    assert "has not forked" in agent.spares.why_cold


def test_a_process_that_ends_at_once_is_tried_again_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fatal.py").write_text("import os; os.write(2, b'no room\\n\\n'); os._exit(9)")
    agent = SpareKeeper("fatal", PYTHONPATH=str(tmp_path)).start()
    agent.run_until(lambda: caplog.text.count("is gone: exit code 9: no room;") == 1)
    assert agent.spares.prepared(2), "no start waits for the second attempt"
    assert "exit code 9" in agent.spares.why_cold
    agent.late_s += policy.RETRY_S
    agent.run_until(lambda: caplog.text.count("is gone: exit code 9: no room;") == 2)
    agent.spares.close()


def test_a_fork_server_whose_modules_close_its_socket_and_live_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "closing.py").write_text("import os, time; os.closerange(3, 64); time.sleep(600)")
    agent = SpareKeeper("closing", PYTHONPATH=str(tmp_path)).start()
    first = agent.preloaded
    agent.run_until(lambda: "is gone: it has closed its socket" in caplog.text)
    assert agent.spares.prepared(2), "no start waits for it"
    assert gone(first)
    agent.late_s += policy.RETRY_S
    agent.run_until(lambda: agent.spares.sessions not in ((), (first,)))
    agent.spares.close()


def test_a_module_that_cannot_be_imported_is_named_and_the_others_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('half installed')")
    agent = SpareKeeper("broken", "no.such.module", "json", PYTHONPATH=str(tmp_path)).start()
    agent.run_until_prepared()
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
    agent.run_until_prepared(2)
    assert "it has 2 threads" in agent.spares.why_cold
    assert "workers start cold from now on" in caplog.text
    agent.run_until(lambda: agent.spares.sessions == ())
    agent.late_s += 1000.0
    agent.spares.turn(agent.clock())
    assert agent.spares.sessions == (), "it would be the same again"
    agent.spares.close()


def test_the_environment_of_a_worker_may_be_longer_than_any_socket_takes(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_prepared()
    program = script(
        tmp_path, "import os, sys; print(sum(map(len, os.environ.values())), sum(map(len, sys.argv)))"
    )
    long = {f"LONG_{number}": "x" * 100_000 for number in range(15)}
    os.environ.update(long)
    try:
        spare, printed = run(agent, program, *(["y" * 100_000] * 5))
    finally:
        for name in long:
            del os.environ[name]
    assert int(printed.split()[0]) > 1_500_000
    assert int(printed.split()[1]) > 500_000
    assert spare.wait() == 0


def test_a_worker_keeps_to_its_cpus_and_those_that_are_not_there_are_reported(
    agent: SpareKeeper, tmp_path: Path
) -> None:
    agent.run_until_prepared()
    program = script(tmp_path, "import os; print(os.sched_getaffinity(0))")
    last = max(os.sched_getaffinity(0))
    first, printed = run(agent, program, cpus=str(last))
    assert printed == f"{{{last}}}\n"
    assert first.wait() == 0
    second, printed = run(agent, program, cpus="1023")
    assert "cannot run on the CPUs 1023" in printed
    assert second.wait() == 1


def test_closing_ends_all_of_them(agent: SpareKeeper) -> None:
    agent.run_until_prepared()
    agent.run_until(lambda: len(idle(agent)) == 2)
    pids = [*agent.spares.sessions, *idle(agent)]
    agent.spares.close()
    agent.run_until(lambda: all(map(gone, pids)))


def test_all_of_them_die_with_the_agent_without_any_help(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from elastic_agent.agent.workers.processes.spare_wire import BecomeWorker
import psutil
from tests.spare_keeper import SpareKeeper, adopting
with adopting():
    keeper = SpareKeeper("json").start()
    keeper.run_until_prepared()
    keeper.run_until(lambda: len(psutil.Process().children()) == 3)
    pids = [child.pid for child in psutil.Process().children()]
    read, write = os.pipe()
    start = BecomeWorker("script", {str(script(tmp_path, "import time; print(flush=True); time.sleep(600)"))!r},
        (), dict(os.environ), os.getcwd(), "", ())
    keeper.hand_out(start, [0, write, write])
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
    agent.run_until_prepared()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(agent.preloaded, number)
    agent.run_until_prepared(4)
    agent.run_until(lambda: len(idle(agent)) == 4)


def test_what_was_preloaded_before_the_job_is_for_jobs_like_it_alone(tmp_path: Path) -> None:
    """A variable that a preloaded module has read is another one for each value; any other one may differ."""
    (tmp_path / "asks.py").write_text("import os\nFOUND = os.environ.get('ASKED_FOR')\n")
    keeper = SpareKeeper("asks", PYTHONPATH=str(tmp_path)).start()
    of_daemon = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def adopt(*names: str, **variables: str) -> str:
        return keeper.spares.adopt({**of_daemon, **variables}, names or ("asks",))

    try:
        assert adopt(OTHER="1") == "the job has variables of its own, and its imports are not done yet"
        keeper.run_until(lambda: keeper.spares.loaded)
        assert adopt(ASKED_FOR="1") == "ASKED_FOR is '1', and not set where its modules were loaded"
        assert adopt(PYTHONPATH="/nowhere").startswith("PYTHONPATH is '/nowhere'")
        assert adopt("asks", "csv") == "--preload is asks,csv, and was asks"
        assert adopt(PYTHON_EXEC="/usr/bin/other").startswith("PYTHON_EXEC is '/usr/bin/other'")
        assert adopt(OTHER="1", OMP_NUM_THREADS="3") == ""
        assert not idle(keeper)
    finally:
        keeper.spares.close()
    assert adopt() == keeper.spares.why_cold, "it is not there any more"
