"""What the agent adopts, with real processes: a program that stands where the agent does prints what it sees."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PATIENCE_S = 20.0

AGENT = """
import json, os, subprocess, sys, time
from elastic_agent.agent.workers.processes.guard import Subreaper, adopt_orphans
from elastic_agent.agent.workers.processes.proc import stat_of

def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)

def zombie(pid):
    return (stat := stat_of(f"/proc/{pid}")) is not None and stat.state == "Z"

def worker(command):
    "Ends at once; what it has started is an orphan then. Its children's numbers are what it prints."
    started = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    subreaper.add_known(lambda: (started.pid,))
    return started, [int(word) for word in started.stdout.readline().split()]

subreaper = Subreaper()
assert adopt_orphans() == ""
"""

DAEMON = "env -i setsid /bin/sleep 600 > /dev/null & echo $!"


def agent(does: str, *, before: str = "") -> Any:
    """What the program prints as JSON; `before` runs in the same process before it is an agent."""
    ran = subprocess.run(
        [sys.executable, "-c", before + AGENT + does], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_daemon_that_has_forgotten_where_it_comes_from_is_unknown_until_it_ends() -> None:
    assert agent(f"""
first, [daemon] = worker({DAEMON!r})
first.wait()
eventually(lambda: subreaper.unknown_children() == (daemon,))
os.kill(daemon, 9)
eventually(lambda: zombie(daemon))
living = subreaper.unknown_children()
subreaper.reap(100.0)
print(json.dumps([living, os.path.exists(f"/proc/{{daemon}}")]))
""") == [[], False]


def test_the_status_of_a_known_child_is_left_to_its_owner() -> None:
    assert agent("""
known, _ = worker("echo; exit 7")
eventually(lambda: zombie(known.pid))
subreaper.reap(100.0)
print(json.dumps([known.wait(), subreaper.unknown_children()]))
""") == [7, []]


def test_zombies_are_looked_for_not_more_often_than_is_worth_it() -> None:
    assert agent("""
subreaper.reap(100.0)
first, [orphan] = worker("sleep 0.01 & echo $!")
first.wait()
eventually(lambda: zombie(orphan))
subreaper.reap(100.9)
before = zombie(orphan)
subreaper.reap(101.1)
print(json.dumps([before, zombie(orphan)]))
""") == [True, False]


def test_a_child_of_another_thread_is_no_orphan() -> None:
    assert agent("""
import threading
started = []
def start():
    started.append(subprocess.Popen(["sleep", "600"]))
    time.sleep(600)
threading.Thread(target=start, daemon=True).start()
eventually(lambda: started)
print(json.dumps([subreaper.unknown_children(), started[0].poll()]))
started[0].kill()
""") == [[], None]


def test_a_child_of_an_expected_session_is_no_orphan() -> None:
    assert (
        agent("""
first, [orphan] = worker("sleep 600 > /dev/null & echo $!")
first.wait()
eventually(lambda: subreaper.unknown_children() == (orphan,))
subreaper.expect_sessions(lambda: (first.pid,))
print(json.dumps(subreaper.unknown_children()))
os.kill(orphan, 9)
""")
        == []
    )


def test_where_there_were_children_before_no_orphan_is_listed_but_it_is_reaped() -> None:
    sidecar = "import subprocess; sidecar = subprocess.Popen(['sleep', '600'])\n"
    assert agent(
        f"""
first, [daemon] = worker({DAEMON!r})
first.wait()
os.kill(sidecar.pid, 9)
eventually(lambda: zombie(sidecar.pid))
unknown = subreaper.unknown_children()
os.kill(daemon, 9)
eventually(lambda: zombie(daemon))
subreaper.reap(100.0)
print(json.dumps([unknown, os.path.exists(f"/proc/{{daemon}}"), sidecar.wait()]))
""",
        before=sidecar,
    ) == [[], False, -9]


@pytest.mark.parametrize("missing", [True, False])
def test_without_the_kernels_list_no_orphan_is_adopted(missing: bool) -> None:
    refused = agent(f"""
from elastic_agent.agent.workers.processes import guard as module
if {missing}:
    module._list_of_children = lambda: "/proc/self/task/none/children"
refusal, seen = module.adopt_orphans(), module.Subreaper().unknown_children()
print(json.dumps(["CONFIG_PROC_CHILDREN" in refusal, list(seen)]))
""")
    assert refused == [missing, []]
