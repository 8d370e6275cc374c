"""Failures that are really produced here, one process each, and the cause that the table gives them.

What cannot happen on a machine without GPUs is judged by recorded texts, in `tests/unit/test_causes.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_agent.agent.workers.causes import cause_named, describe_failure
from elastic_agent.agent.workers.post_mortem import OomKills, PostMortem
from elastic_agent.rendezvous.records import Action, Failure
from tests.small_memory import inside, small_memory

TAIL = 40
LIMIT = 64 * 2**20
PATIENCE_S = 120
PYTHON = sys.executable


@dataclass(frozen=True)
class Case:
    """`code` is a Python program, or `argv` any other."""

    cause: str
    code: str = ""
    argv: tuple[str, ...] = ()
    says: str = ""


def of_shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


BUS_ERROR = """
import mmap, os, tempfile
with tempfile.TemporaryFile() as file:
    file.truncate(8192)
    page = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    page[0]
"""
LOADER = """
import os, signal
from torch.utils.data import DataLoader, Dataset
class Dying(Dataset):
    def __len__(self): return 8
    def __getitem__(self, item): os.kill(os.getpid(), signal.SIGKILL)
list(DataLoader(Dying(), num_workers=1))
"""
UNREACHABLE = """
import socket, torch.distributed as dist
from datetime import timedelta
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
"""
NEVER_WRITTEN = """
import torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
store.get("what no rank writes")
"""
SERVER_GONE = """
import os, signal, subprocess, sys
import torch.distributed as dist
served = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
server = subprocess.Popen([sys.executable, "-c", served + "print(s.port, flush=True); sys.stdin.read()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
server.kill()
server.wait()
store.set("key", "value")
store.get("key")
"""
MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
files = [open("/dev/null") for _ in range(64)]
"""
REFUSED = "from elastic_agent.worker.errors import OtherRun\nraise OtherRun('/ckpt is in use')"
ARGUMENTS = "import argparse; argparse.ArgumentParser().parse_args(['--what'])"

CASES = [
    Case("exception", "raise ValueError('no')", says="exit code 1: ValueError: no"),
    Case("import_error", "import no_such_module", says="No module named 'no_such_module'"),
    Case("script_error", "def"),
    Case("script_error", "assert 1 == 2, 'two lines\\nof text'"),
    Case("script_error", "undefined"),
    Case("host_out_of_memory", "bytearray(2**62)"),
    Case("host_out_of_memory", "import torch; torch.empty(10**15)"),
    Case("killed", "import os; os.kill(os.getpid(), 9)", says="killed by SIGKILL (signal 9; a user"),
    Case("killed", argv=of_shell("sh -c 'kill -9 $$'; exit $?"), says="exit code 137"),
    Case("killed", "import os; os.kill(os.getpid(), 15)"),
    Case("killed", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"),
    Case("signal", "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)"),
    Case("signal", BUS_ERROR),
    Case("signal", "import os; os.kill(os.getpid(), 8)", says="SIGFPE"),
    Case("disk_full", "open('/dev/full', 'w', buffering=1).write('x\\n')"),
    Case("disk_full", argv=of_shell("cat /proc/version > /dev/full")),
    Case("exception", "open('/proc/self/mem', 'rb').read(1)", says="Input/output error"),
    Case("exception", MANY_FILES),
    Case("exception", LOADER),
    Case("connection_lost", "import socket; socket.create_connection(('127.0.0.1', 1))"),
    Case("exception", UNREACHABLE),
    Case("connection_lost", NEVER_WRITTEN),
    Case("connection_lost", SERVER_GONE),
    Case("refused", REFUSED),
    Case("unknown", ARGUMENTS, says="exit code 2"),
    Case("command", argv=of_shell("no-such-program"), says="exit code 127"),
    Case("command", argv=of_shell("/dev/null"), says="exit code 126"),
    Case("unknown", "import sys; sys.exit('the model is too large')"),
    Case("unknown", "import os; os._exit(7)", says="exit code 7"),
]


def start(argv: Sequence[str], enter: Sequence[str] = ()) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [*enter, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def judged(process: subprocess.Popen[str], *, oom_killed: bool = False) -> Failure:
    output, _ = process.communicate(timeout=PATIENCE_S)
    worker = PostMortem(
        *("a", 1, 0, 0, process.returncode),
        log_tail=tuple(output.splitlines()[-TAIL:]),
        oom_killed=oom_killed,
    )
    return describe_failure(worker)


def shown(case: Case) -> str:
    return f"{case.cause}: {(case.code or ' '.join(case.argv)).strip()[:40]}"


@pytest.mark.parametrize("case", CASES, ids=shown)
def test_the_cause_of_what_really_happened(case: Case) -> None:
    failure = judged(start(case.argv or (PYTHON, "-c", case.code)))
    assert failure.cause == case.cause, failure
    assert case.says in failure.summary


def test_a_taken_port_is_named_with_its_owner() -> None:
    hold = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
    owner = subprocess.Popen(
        [PYTHON, "-c", hold + "sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        port = int(owner.stdout.readline())
        failure = judged(start((PYTHON, "-c", f"import socket; socket.create_server(('127.0.0.1', {port}))")))
        owner.stdin.close()
    assert failure.cause == "port"
    assert f"pid {owner.pid}" in failure.summary or "while attempting to bind" not in failure.summary


RANK = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[1], rank=int(sys.argv[2]), world_size=2,
                        timeout=timedelta(seconds=3))
ones = torch.ones(4)
dist.all_reduce(ones)
if sys.argv[2] == "1":
    exec(sys.argv[3])
dist.all_reduce(ones)
"""


@pytest.mark.parametrize(
    ("does", "root"),
    [
        ("os.kill(os.getpid(), 11)", "signal"),
        ("raise ValueError('no')", "exception"),
        ("os._exit(7)", "unknown"),
        ("import no_such_module", "import_error"),
        ("time.sleep(60)", ""),
    ],
)
def test_a_rank_whose_collective_broke_is_collateral_of_the_one_that_ended(does: str, root: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    other, guilty = (start((PYTHON, "-c", RANK, port, rank, does)) for rank in "01")
    try:
        broken = judged(other)
        assert (broken.cause, broken.collateral) == ("connection_lost", True)
        if root:
            failure = judged(guilty)
            assert (failure.cause, failure.collateral) == (root, False)
    finally:
        guilty.kill()
        guilty.wait()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a cgroup or a mount")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with small_memory(LIMIT) as cgroup:
        yield cgroup


GREEDY = "hoard = [bytearray(2**20) for _ in range(1024)]"


@as_root
def test_the_kernels_killer_is_known_by_its_counter(cgroup: Path) -> None:
    counter = next(name for name in ("memory.events", "memory.oom_control") if (cgroup / name).exists())
    kills = OomKills(cgroup / counter)
    process = start((PYTHON, "-c", GREEDY), enter=inside(cgroup))
    process.wait()
    failure = judged(process, oom_killed=kills.lately(time.monotonic()))
    assert (failure.cause, failure.returncode) == ("host_out_of_memory", -signal.SIGKILL)
    assert "the kernel's out-of-memory killer" in failure.summary


@as_root
def test_a_full_file_system(tmp_path: Path) -> None:
    fill = "import os, sys\nwith open(sys.argv[1] + '/checkpoint', 'wb') as file: file.write(bytes(2**21))"
    mounted = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {PYTHON} -c "$0" {tmp_path}'
    failure = judged(start(("unshare", "--mount", "sh", "-c", mounted, fill)))
    assert failure.cause == "disk_full", failure


def test_what_follows_from_a_produced_failure_is_in_its_row() -> None:
    produced = {case.cause for case in CASES} | {"port", "connection_lost"}
    assert {cause_named(name).action for name in produced} == set(Action) - {Action.EXCLUDE_NODE}
