"""Ports: real sockets on loopback, real processes for the contention."""

from __future__ import annotations

import errno
import os
import random
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from elastic_agent.agent.common.exits import CannotStart, ExitCode
from elastic_agent.agent.common.ports import (
    PortError,
    PortLacking,
    PortRange,
    bind_listener,
    find_owner,
)
from elastic_agent.agent.configuration.config import Command, Config
from elastic_agent.agent.main import assembly
from tests.waiting import wait_for

LOOPBACK = "127.0.0.1"

IPV6 = Path("/proc/net/if_inet6").exists()
needs_ipv6 = pytest.mark.skipif(not IPV6, reason="this machine has no IPv6")


def port_of(listener: socket.socket) -> int:
    port = listener.getsockname()[1]
    assert isinstance(port, int)
    return port


def free_range(length: int) -> PortRange:
    """A range whose ports were all free a moment ago, below those that the kernel hands out."""
    for _ in range(100):
        ports = PortRange(first := random.randrange(10000, 32000), first + length - 1)
        with ExitStack() as held:
            try:
                for port in range(ports.first, ports.last + 1):
                    held.enter_context(bind_listener(LOOPBACK, port, "test", tries_for_s=0.0))
            except PortError:
                continue
            return ports
    raise AssertionError(f"no {length} free ports in a row")


@contextmanager
def foreign_listener(address: str) -> Iterator[tuple[int, int]]:
    """Another process that listens: its pid and its port."""
    code = (
        "import socket, sys; family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET;"
        " s = socket.create_server((sys.argv[1], 0), family=family); print(s.getsockname()[1], flush=True);"
        " sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield child.pid, int(child.stdout.readline())


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [("29500", 29500, 29500), ("29500-29600", 29500, 29600), ("1-65535", 1, 65535), ("80-80", 80, 80)],
)
def test_a_range_is_parsed_and_printed(text: str, first: int, last: int) -> None:
    ports = PortRange.parse(text)
    assert ports == PortRange(first, last)
    assert PortRange.parse(str(ports)) == ports
    assert len(ports) == last - first + 1


def test_a_round_has_every_port_once_and_starts_anywhere() -> None:
    ports = PortRange(100, 104)
    rounds = [ports.one_round(random.Random(seed)) for seed in range(50)]
    assert all(sorted(ports_once) == [100, 101, 102, 103, 104] for ports_once in rounds)
    assert {ports_once[0] for ports_once in rounds} == {100, 101, 102, 103, 104}


@pytest.mark.parametrize("address", [LOOPBACK, pytest.param("::1", marks=needs_ipv6)])
def test_the_socket_listens_at_once_and_is_not_inherited(address: str) -> None:
    with bind_listener(address, 0, "store") as listener:
        assert listener.getsockname()[0] == address
        assert not listener.get_inheritable()
        with socket.create_connection((address, port_of(listener)), timeout=10):
            accepted, _ = listener.accept()
            accepted.close()


@pytest.mark.parametrize(
    ("listen_on", "bind_on"),
    [
        (LOOPBACK, LOOPBACK),
        ("0.0.0.0", LOOPBACK),
        (LOOPBACK, "0.0.0.0"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param(LOOPBACK, "::", marks=needs_ipv6),
    ],
)
def test_a_taken_port_names_its_owner(listen_on: str, bind_on: str) -> None:
    with foreign_listener(listen_on) as (pid, port):
        with pytest.raises(PortError) as caught:
            bind_listener(bind_on, port, "metrics", tries_for_s=0.0)
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
    assert all(
        text in str(caught.value)
        for text in (bind_on, "metrics", str(port), f"pid {pid}, {comm}", "another port")
    )


OTHERS_PID = os.getppid()


@pytest.mark.parametrize(
    ("sockets", "told"),
    [
        ([], "owner unknown"),
        ([(81, "LISTEN", 1)], "owner unknown"),
        ([(80, "LISTEN", None)], "owner unknown"),
        ([(80, "LISTEN", OTHERS_PID)], f"pid {OTHERS_PID}, "),
        ([(80, "TIME_WAIT", None), (80, "ESTABLISHED", OTHERS_PID)], f"pid {OTHERS_PID}, "),
        ([(80, "ESTABLISHED", 1), (80, "LISTEN", OTHERS_PID)], f"pid {OTHERS_PID}, "),
    ],
)
def test_the_owner_is_the_listener_or_another_live_socket(
    sockets: list[tuple[int, str, int | None]],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        SimpleNamespace(laddr=SimpleNamespace(ip=LOOPBACK, port=p), status=s, pid=i) for p, s, i in sockets
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: rows)
    assert find_owner(80).startswith(told)


def test_a_reader_that_may_see_nothing_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert "owner unknown" in find_owner(80)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("192.0.2.1", "no interface of this machine"),
        ("localhost", "'localhost' is not an IP address"),
        ("", "not an IP address"),
        ("127.0.0.1:80", "not an IP address"),
        pytest.param("fe80::1", "choose another address", marks=needs_ipv6),  # which interface?
    ],
)
def test_what_cannot_work_fails_at_once(address: str, told: str) -> None:
    with pytest.raises(PortError, match=told) as caught:
        bind_listener(address, 0, "store")
    assert "for store" in str(caught.value)


def test_a_port_freed_during_the_wait_is_obtained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with bind_listener(LOOPBACK, 0, "test") as taken, ThreadPoolExecutor() as pool:
        binding = pool.submit(bind_listener, LOOPBACK, port := port_of(taken), "metrics")
        wait_for(lambda: bool(caplog.messages), "a word about the port", 20.0)
        assert not binding.done()
        taken.close()
        with binding.result(timeout=20) as listener:
            assert port_of(listener) == port
    [line] = caplog.messages
    assert re.fullmatch(rf"trying for 10 s to have {port} of 127.0.0.1: pid \d+, .*", line)


def test_the_last_free_port_of_a_range_is_found_in_the_first_round() -> None:
    ports = free_range(5)
    with ExitStack() as held:
        for _ in range(len(ports)):
            held.enter_context(bind_listener(LOOPBACK, ports, "test", tries_for_s=0.0))
        with pytest.raises(PortError, match=f"{ports} is taken") as caught:
            bind_listener(LOOPBACK, ports, "store", tries_for_s=0.0)
    assert f"pid {os.getpid()}, " in str(caught.value)
    assert "wider range" in str(caught.value)


def test_a_rival_that_listens_between_our_bind_and_listen_has_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind((LOOPBACK, 0))

        class Overtaken(socket.socket):
            def listen(self, backlog: int = 0, /) -> None:
                rival.listen()
                super().listen(backlog)

        monkeypatch.setattr(socket, "socket", Overtaken)
        with pytest.raises(PortError) as caught:
            bind_listener(LOOPBACK, port_of(rival), "store", tries_for_s=0.0)
    assert f"pid {os.getpid()}, " in str(caught.value)


def test_no_other_process_can_listen_beside_us() -> None:
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind((LOOPBACK, 0))  # with SO_REUSEADDR on both sides, Linux lets us bind beside a silent rival
        with (
            bind_listener(LOOPBACK, port_of(rival), "store", tries_for_s=0.0),
            pytest.raises(OSError, match="in use"),
        ):
            rival.listen()


def test_connections_of_a_predecessor_in_time_wait_do_not_block() -> None:
    with bind_listener(LOOPBACK, 0, "test") as predecessor:
        port = port_of(predecessor)
        with socket.create_connection((LOOPBACK, port), timeout=10) as client:
            accepted, _ = predecessor.accept()
            accepted.close()  # who closes first is left in TIME_WAIT
            assert client.recv(1) == b""
    with bind_listener(LOOPBACK, port, "store", tries_for_s=0.0) as listener:
        assert port_of(listener) == port


# 64 forked processes wait for one pipe to be closed (the starting gun), then bind, and keep what they got until all
# have answered.
STAMPEDE = """
import os, sys
from elastic_agent.agent.common.ports import PortRange, bind_listener
assert "torch" not in sys.modules, "the agent must stay small"
ports = PortRange.parse(sys.argv[1])
(gun, hold_fire), (heard, answer) = os.pipe(), os.pipe()
for _ in range(64):
    if os.fork() == 0:
        os.close(hold_fire)
        os.read(gun, 1)
        try:
            listener = bind_listener("127.0.0.1", ports, "store")
            os.write(answer, f"{listener.getsockname()[1]}\\n".encode())
        except BaseException as error:
            os.write(answer, f"{error!r}\\n".encode())
        sys.stdin.read()
        os._exit(0)
os.close(hold_fire)
os.close(answer)
with open(heard) as answers:
    for _ in range(64):
        print(answers.readline(), end="", flush=True)
sys.stdin.read()
for _ in range(64):
    os.wait()
"""


def test_64_processes_at_one_instant_get_64_ports_of_80() -> None:
    ports = free_range(80)
    command = [sys.executable, "-c", STAMPEDE, str(ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as herd:
        assert herd.stdout is not None
        answers = [herd.stdout.readline().strip() for _ in range(64)]
    got = {int(answer) for answer in answers}
    assert len(got) == 64
    assert ports.first <= min(got) <= max(got) <= ports.last
    assert herd.returncode == 0


def test_a_port_handed_over_serves_a_client_that_was_there_first() -> None:
    from torch.distributed import TCPStore

    listener = bind_listener(LOOPBACK, 0, "store")
    port = port_of(listener)
    answers: list[bytes] = []

    def early_client() -> None:
        answers.append(TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False).get("key"))

    client = threading.Thread(target=early_client, daemon=True)
    client.start()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # POLLIN alone: a connection waits in the backlog. A socket that does not listen reports POLLHUP.
    assert poll.poll(20_000) == [(listener.fileno(), select.POLLIN)]
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    store.set("key", "value")
    client.join(20)
    assert answers == [b"value"]


# --- The agent


def test_a_machine_without_descriptors_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", no_descriptor)
    with pytest.raises(PortLacking, match=r"Too many open files: .*raise `ulimit -n`"):
        bind_listener(LOOPBACK, 0, "master")


@pytest.mark.parametrize("refusal", [PortError("every port is taken"), PortLacking("no descriptors")])
def test_a_port_that_cannot_be_had_is_this_machines_fault(
    refusal: PortError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise refusal

    monkeypatch.setattr(assembly, "bind_listener", refuse)
    with pytest.raises(CannotStart) as caught:
        assembly.bind_all(Config(Command("script", "train.py")), None, LOOPBACK, copies=True)
    assert caught.value.code is ExitCode.NOT_HERE
