"""One run of the recovery benchmark: its nodes, their agents, what the workers wrote, and the end of all of it.

Nodes are agents on the loopback of one machine, or where a node is to be cut off, each in a network of its own. Every
process is found by a variable in its environment, so that a node can be killed whole and nothing that a run started
outlives it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import scale_stores
from recovery_figures import Step, parse_steps

if TYPE_CHECKING:
    from tests.system.networks import Host, Network

MARK = "RECOVERY_BENCHMARK"
START_LIMIT_S = 150.0
"""From the first agent to steady training: above torchrun's last call of 30 s and its store timeout of 60 s."""
CLEANUP_LIMIT_S = 10.0
AIM_S = 0.05
"""Between two looks before the fault, which is to come near a given step."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is to run."""

    min_nodes: int
    max_nodes: int
    nodes: int
    """Nodes before the fault; with none, the start itself is the event."""
    workers: int
    """Workers of each node."""
    own_networks: bool = False
    """Each node is a network namespace on one switch; only root can make these."""
    etcd: bool = False
    """Whoever can meets in etcd, where that is installed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a node's agents are told."""

    setting: Setting
    node: int
    address: str
    """The node's own."""
    endpoint: str
    """Of the store, which is at node 0 unless it is etcd."""
    directory: Path


class Launcher(Protocol):
    """What of a system a job must know."""

    @property
    def commands(self) -> Callable[[Launch], list[list[str]]]: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def store(self) -> Callable[[int], list[str]] | None: ...
    @property
    def store_first(self) -> bool: ...
    @property
    def etcd(self) -> bool: ...


@dataclass(slots=True)
class Node:
    mark: str
    host: Host | None
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def processes(self) -> list[int]:
        return marked(self.mark)

    def cut_off(self) -> None:
        assert self.host is not None, "the scenario gives its nodes networks of their own"
        self.host.disturb("counter drop")

    @property
    def is_dead(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)


class Job:
    """The nodes of one run and what their workers wrote. Leaving the `with` block ends all its processes."""

    def __init__(self, setting: Setting, system: Launcher) -> None:
        self.setting, self._system = setting, system
        self.nodes: list[Node] = []
        self.steps: list[Step] = []
        self.directory = Path(tempfile.mkdtemp(prefix="recovery-"))
        self._mark = uuid.uuid4().hex
        self._leaver: Node | None = None
        self._partial = ""
        self._lines = (self.directory / "steps").open("x+")
        self._around = contextlib.ExitStack()
        self._network: Network | None = None
        self._endpoint = ""
        self._store: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as undone:
            undone.callback(self.__exit__)
            if self.setting.own_networks:
                self._network = self._around.enter_context(_network(self.setting.max_nodes))
            if self.setting.etcd and self._system.etcd and shutil.which("etcd"):
                port = self._around.enter_context(scale_stores.etcd())
                self._endpoint = f"etcd://{LOOPBACK}:{port}"
            else:
                self._endpoint = f"{self._address(0)}:{_free_port()}"
            undone.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + CLEANUP_LIMIT_S
        while alive := marked(self._mark):  # again and again: an agent may start a worker while we look
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"processes {alive} of this run cannot be ended: end them before you measure on"
                )
            kill(alive)
            time.sleep(AIM_S)
        for process in [*(agent for node in self.nodes for agent in node.agents), self._store]:
            if process is not None:
                process.wait()
        self._around.close()
        self._lines.close()
        shutil.rmtree(self.directory)

    def start(self) -> None:
        if self._system.store is not None:
            port = int(self._endpoint.rpartition(":")[2])
            self._store = self._popen(self._system.store(port), f"{self._mark}.store", "store")
            self._wait_for(self._store)
        for number in range(self.setting.nodes):
            self.start_node()
            if number == 0 and self._system.store_first and self.setting.max_nodes > 1:
                self._wait_for(self.nodes[0].agents[0])

    def start_node(self) -> None:
        number = len(self.nodes)
        launch = Launch(self.setting, number, self._address(number), self._endpoint, self.directory)
        host = self._network[f"n{number}"] if self._network is not None else None
        node = Node(f"{self._mark}.{number}", host)
        self.nodes.append(node)
        for agent, command in enumerate(self._system.commands(launch)):
            words = [*(host.enter if host is not None else ()), *command]
            node.agents.append(
                self._popen(words, node.mark, f"node{number}" + (f"-{agent}" if agent else ""))
            )

    def pick_leaver(self) -> Node:
        """The node that nobody shall expect to go on: the last one, as the first hosts the store."""
        self._leaver = self.nodes[-1]
        return self._leaver

    def is_dead(self) -> bool:
        """Whether nobody is left who could go on."""
        return all(node.is_dead for node in self.nodes if node is not self._leaver)

    def wait(self, condition: Callable[[], bool], limit_s: float, look_s: float) -> bool:
        """Read on until `condition`; False if the job died or the limit passed first."""
        deadline = time.monotonic() + limit_s
        while True:
            dead = self.is_dead()
            self._read()
            if condition():
                return True
            if dead or time.monotonic() > deadline:
                return False
            time.sleep(look_s)

    def logs(self) -> list[Path]:
        return sorted(self.directory.glob("*.log"))

    def _read(self) -> None:
        text = self._partial + self._lines.read()
        whole, newline, self._partial = text.rpartition("\n")
        self.steps += parse_steps(whole + newline)

    def _popen(self, command: Sequence[str], mark: str, name: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0" if self._network is not None else "lo",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.directory),
            MARK: mark,
            **self._system.environment,
        }
        with (self.directory / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _address(self, node: int) -> str:
        return self._network[f"n{node}"].address if self._network is not None else LOOPBACK

    def _wait_for(self, host: subprocess.Popen[bytes]) -> None:
        """Until the store answers that this process hosts."""
        name, _, port = self._endpoint.rpartition(":")
        deadline = time.monotonic() + START_LIMIT_S
        while not name.startswith("etcd") and host.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((name, int(port)), timeout=1.0):
                return
            time.sleep(AIM_S)


def kill(pids: Sequence[int]) -> float:
    """The instant before the first one was killed."""
    before_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return before_s


def marked(mark: str = "") -> list[int]:
    """Processes whose mark begins so. A zombie has no environment any more, and nothing is left of it to end."""
    wanted = f"\0{MARK}={mark}".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it may end while we look, or belong to somebody else
            if wanted in b"\0" + environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def why_no_networks() -> str:
    """Why nodes cannot have networks of their own here; empty if they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} missing: .ci/system-packages network"
    try:
        with _network(1):
            return ""
    except ImportError as error:
        return f"{error}: pip install -e '.[dev]'"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


def _network(nodes: int) -> contextlib.closing[Network]:
    """The tests know how to make one."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.system.networks import Network

    return contextlib.closing(Network([f"n{node}" for node in range(nodes)]))


def _free_port() -> int:
    """For a store whose port all agents must know beforehand. Taken meanwhile, the run will not get steady."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
