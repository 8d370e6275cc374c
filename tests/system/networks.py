"""Hosts with a network of their own on this machine, whose cables can be pulled and whose packets can be lost.

A `Network` is a switch and the hosts on it, each a network namespace with one interface. This process is on the switch,
too, so that a test can ask agents and stores what it wants to know. What runs on a host is started with the words of
`Host.enter` before its command, which keep its pid.

What is done to a host lasts until `heal`. A host whose cable is pulled keeps its address and its routes, and gets
silence. Packets are judged on the host itself, those that it sends apart from those that it gets: a fault may be
one-way.

A `Cabling` is for tests of which interface is chosen: machines with any number of them, each cable to any switch, which
nobody else sees.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from tests.etcd_servers import Place
from tests.needs import skip_without
from tests.waiting import wait_for

ADDRESSES = ipaddress.ip_network("198.18.0.0/15")
"""Kept for tests of networks. Each network takes 256 of them that no other one on this machine has taken."""

INTERFACE = "eth0"

DROP = "counter drop"
RESET = "meta l4proto tcp counter reject with tcp reset"
"""Only for one of the two ways: what is sent back would be hit by it, too."""


def loss(percent: int) -> str:
    return f"numgen random mod 100 < {percent} counter drop"


@dataclass(frozen=True)
class Host:
    """See the module's docstring."""

    namespace: str
    address: str
    switch: str
    socket: str
    """Where on the switch its cable ends."""

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    @property
    def place(self) -> Place:
        return Place(self.address, self.enter)

    def unplug(self) -> None:
        run("ip", "-n", self.switch, "link", "set", "dev", self.socket, "down")

    def disturb(
        self, how: str, *, towards: Sequence[Host] = (), sent: bool = True, received: bool = True
    ) -> None:
        """From now on `how` happens to the packets between this host and others, or all; nothing else does."""
        others = ", ".join(other.address for other in towards) or "0.0.0.0/0"
        chains = []
        if sent:
            rule = f"oifname {INTERFACE} ip daddr {{ {others} }} {how}"
            chains.append(f"chain sent {{ type filter hook output priority 0; {rule}; }}")
        if received:
            rule = f"iifname {INTERFACE} ip saddr {{ {others} }} {how}"
            chains.append(f"chain received {{ type filter hook input priority 0; {rule}; }}")
        self._filter("\n".join(["table ip faults {", *chains, "}"]))

    @property
    def disturbed(self) -> int:
        """How many packets have been hit."""
        found = re.findall(r"counter packets (\d+)", run(*self.enter, "nft", "list", "ruleset"))
        return sum(map(int, found))

    def heal(self) -> None:
        run("ip", "-n", self.switch, "link", "set", "dev", self.socket, "up")
        self._filter("")

    def _filter(self, table: str) -> None:
        # A table that is not there cannot be deleted, but one that is there may be added again.
        run(*self.enter, "nft", f"add table ip faults\ndelete table ip faults\n{table}")


class Network:
    """Several may be on one machine: all that it makes has a name of its own. Closed when it could not be made, too."""

    def __init__(self, names: Sequence[str]) -> None:
        mark = f"{os.getpid()}-{random.SystemRandom().randrange(16**4):04x}"
        self._interface = f"net{mark}"  # 15 characters at most
        self._namespaces: list[str] = []
        try:
            self.hosts = self._make(mark, names)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def heal(self) -> None:
        for host in self.hosts.values():
            host.heal()

    def close(self) -> None:
        # The cable first: one that dies with its namespace does so only some time later.
        subprocess.run(["ip", "link", "del", self._interface], capture_output=True)
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def _make(self, mark: str, names: Sequence[str]) -> dict[str, Host]:
        switch = self._namespace(f"{mark}-switch")
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        run("ip", "link", "add", self._interface, "type", "veth", "peer", "name", "here", "netns", switch)
        run("ip", "-n", switch, "link", "set", "here", "master", "bridge", "up")
        subnet = _free_subnet()
        addresses = (f"{address}/{subnet.prefixlen}" for address in subnet.hosts())
        run("ip", "addr", "add", next(addresses), "dev", self._interface)
        run("ip", "link", "set", self._interface, "up")
        hosts = {}
        for name, address in zip(names, addresses, strict=False):
            inside, socket = self._namespace(f"{mark}-{name}"), f"to-{name}"
            other_end = ("name", INTERFACE, "netns", inside)
            run("ip", "-n", switch, "link", "add", "name", socket, "type", "veth", "peer", *other_end)
            run("ip", "-n", switch, "link", "set", "dev", socket, "master", "bridge", "up")
            run("ip", "-n", inside, "addr", "add", address, "dev", INTERFACE)
            run("ip", "-n", inside, "link", "set", INTERFACE, "up")
            run("ip", "-n", inside, "link", "set", "lo", "up")
            hosts[name] = Host(inside, address.partition("/")[0], switch, socket)
        return hosts

    def _namespace(self, name: str) -> str:
        run("ip", "netns", "add", name)
        self._namespaces.append(name)
        return name


@dataclass(frozen=True)
class Cable:
    """One interface of a machine, and the switch where it ends. A switch without any other cable leads nowhere."""

    interface: str
    switch: str
    address: str
    """With the length of its prefix."""
    down: bool = False
    gateway: str | None = None
    """The default route's."""


@dataclass(frozen=True)
class Machine:
    """A network namespace with the interfaces that a test has asked for."""

    namespace: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    @property
    def files(self) -> Path:
        """What stands here is seen in /etc by processes that `ip netns exec` starts."""
        return Path("/etc/netns") / self.namespace

    def ip(self, *words: str) -> None:
        run("ip", "-n", self.namespace, *words)

    def switch_on(self, interface: str) -> None:
        self.ip("link", "set", interface, "up")

    def add_docker(self) -> None:
        """Docker's bridge as it is on every host that has run a container, up because one is running."""
        self.ip("link", "add", "docker0", "type", "bridge")
        self.ip("link", "add", "veth1a2b3c4", "type", "veth", "peer", "name", "inside")
        for interface in ("veth1a2b3c4", "inside"):
            self.switch_on(interface)
        self.ip("link", "set", "veth1a2b3c4", "master", "docker0")
        self.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
        self.switch_on("docker0")
        link = ("ip", "-n", self.namespace, "link", "show", "docker0")
        wait_for(lambda: "state UP" in run(*link), "docker0 to come up", 10.0, seen=lambda: run(*link))


class Cabling:
    """Machines with cables between them, apart from all else on this machine: their addresses may be any."""

    def __init__(self) -> None:
        self._mark = f"{os.getpid()}-{random.SystemRandom().randrange(16**4):04x}"
        self._switches = Machine(f"{self._mark}-switches")
        self._known: set[str] = set()
        self._machines: list[Machine] = []
        self._cables = 0
        self._make(self._switches)

    def machine(self, name: str) -> Machine:
        """One without any interface but loopback, whose name server says at once that it is not there: torch asks
        for the names of its peers, and would wait for the machine's own one, which cannot be reached from here."""
        machine = Machine(f"{self._mark}-{name}")
        self._make(machine)
        machine.files.mkdir(parents=True)
        (machine.files / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        machine.switch_on("lo")
        return machine

    def connect(self, machine: Machine, cable: Cable) -> None:
        switches, socket = self._switches, f"socket{self._cables}"
        self._cables += 1
        if cable.switch not in self._known:
            self._known.add(cable.switch)
            switches.ip("link", "add", cable.switch, "type", "bridge")
            switches.switch_on(cable.switch)
        other_end = ("name", cable.interface, "netns", machine.namespace)
        switches.ip("link", "add", "name", socket, "type", "veth", "peer", *other_end)
        switches.ip("link", "set", "dev", socket, "master", cable.switch, "up")
        # An IPv6 address would be looked for on the network first, and could be bound only a second later.
        at_once = ["nodad"] if ":" in cable.address else []
        machine.ip("addr", "add", cable.address, "dev", cable.interface, *at_once)
        if not cable.down:
            machine.switch_on(cable.interface)
        if cable.gateway is not None:
            machine.ip("route", "add", "default", "via", cable.gateway)

    def close(self) -> None:
        for machine in self._machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True)
            shutil.rmtree(machine.files, ignore_errors=True)

    def _make(self, machine: Machine) -> None:
        run("ip", "netns", "add", machine.namespace)
        self._machines.append(machine)


def _free_subnet() -> ipaddress.IPv4Network:
    taken = run("ip", "-4", "route")
    free = [subnet for subnet in ADDRESSES.subnets(new_prefix=24) if str(subnet) not in taken]
    return random.SystemRandom().choice(free)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class _Closing(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closing)


@contextlib.contextmanager
def made(make: Callable[[], _C]) -> Iterator[_C]:
    """What `make` makes, and closed at the end. Skips the test where it cannot be made."""
    skip_without(("ip", "nft"), "network", "only root may make network namespaces")
    try:
        thing = make()
    except subprocess.CalledProcessError as error:
        if "not permitted" in error.stderr or "not supported" in error.stderr:
            pytest.skip(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
        raise AssertionError(f"{' '.join(error.cmd)}: {error.stderr}") from error
    with contextlib.closing(thing):
        yield thing


def network(*names: str) -> contextlib.AbstractContextManager[Network]:
    """A switch with these hosts."""
    return made(lambda: Network(names))
