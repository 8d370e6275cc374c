"""Real etcd servers for tests: one or three members, with their data in memory.

As a rule they listen on free loopback ports. A test that comes between them gives each a place of its own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.rendezvous.etcd import PREFIX
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.rendezvous.store.store_kind import Access
from tests.stopping import stop
from tests.waiting import wait_for

HOST = "127.0.0.1"
START_S = 30.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Certificates:
    """Of one authority, for servers on the loopback address and `localhost`, and for a client."""

    folder: Path

    def file(self, name: str) -> Path:
        return self.folder / name

    def issue(self, name: str, common_name: str, alternatives: str = f"IP:{HOST},DNS:localhost") -> None:
        """`name`.pem and `name`.key."""
        key, extension = self.file(f"{name}.key"), self.file(f"{name}.ext")
        extension.write_text(f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        request = self.file(f"{name}.csr")
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={common_name}", "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.file("ca.pem"), "-CAkey", self.file("ca.key")),
            *("-CAcreateserial", "-days", "2", "-extfile", extension, "-out", self.file(f"{name}.pem")),
        )


def make_certificates(folder: Path) -> Certificates:
    made = Certificates(folder)
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", made.file("ca.key"))
    _openssl(
        *("req", "-x509", "-new", "-key", made.file("ca.key"), "-subj", "/CN=authority", "-days", "2"),
        *("-out", made.file("ca.pem")),
    )
    return made


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs: its address, and the words before a command that bring it there."""

    address: str = HOST
    enter: tuple[str, ...] = ()


@dataclass
class Member:
    name: str
    place: Place
    port: int
    peer_port: int
    process: subprocess.Popen[bytes] | None = None


class EtcdCluster:
    """Members are counted from 0. `args` go to every server; `tls` makes the client side speak TLS."""

    def __init__(
        self,
        members: int = 1,
        *,
        places: Sequence[Place] = (),
        tls: Certificates | None = None,
        client_certificates: bool = True,
        args: Sequence[str] = (),
        heartbeat_ms: int = 0,
        election_ms: int = 0,
    ) -> None:
        """Without times for heartbeats and elections a cluster elects fast, and one member alone, which needs none,
        is idle while no client asks it."""
        self._tls = tls
        self._client_certificates = client_certificates
        self._args = tuple(args)
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="etcd-test-", dir=root))
        self._places = tuple(places) or (Place(),) * members
        self._count = len(self._places)
        heartbeat_ms = heartbeat_ms or (50 if self._count == 1 else 10)
        election_ms = election_ms or 10 * heartbeat_ms
        self._timing = ("--heartbeat-interval", str(heartbeat_ms), "--election-timeout", str(election_ms))
        self.members: list[Member] = []

    def start(self) -> None:
        """Raises when they do not get ready; a port that another program took meanwhile is no reason."""
        while True:
            ports = _free_ports(2 * self._count)
            self.members = [
                Member(f"m{n}", place, ports[2 * n], ports[2 * n + 1]) for n, place in enumerate(self._places)
            ]
            for number in range(self._count):
                self.launch(number)
            if wait_for(self._started, "etcd to be ready", START_S, seen=self.said) == "ready":
                return
            said = self.said()
            self.close()
            assert "address already in use" in said, f"etcd did not start:\n{said}"
            self._folder.mkdir()

    def _started(self) -> str:
        if any(member.process is None or member.process.poll() is not None for member in self.members):
            return "ended"
        return "ready" if all(map(self.healthy, range(self._count))) else ""

    def close(self) -> None:
        for number, member in enumerate(self.members):
            if member.process is not None:
                self.kill(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def launch(self, number: int) -> None:
        """Start a member, or start it again with the data that it had."""
        member = self.members[number]
        mine, peer = self.url(number), _peer_url(member)
        data = str(self._folder / member.name)
        words = [*member.place.enter, "etcd", "--name", member.name, "--data-dir", data]
        words += ["--listen-client-urls", mine, "--advertise-client-urls", mine]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", self._initial_cluster, *self._timing, *self._args]
        if self._tls is not None:
            words += ["--cert-file", str(self._tls.file("server.pem"))]
            words += ["--key-file", str(self._tls.file("server.key"))]
            if self._client_certificates:
                words += ["--client-cert-auth", "--trusted-ca-file", str(self._tls.file("ca.pem"))]
        with (self._folder / f"{member.name}.log").open("ab") as output:
            member.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    @property
    def _initial_cluster(self) -> str:
        return ",".join(f"{member.name}={_peer_url(member)}" for member in self.members)

    def url(self, number: int) -> str:
        member = self.members[number]
        return f"{'https' if self._tls else 'http'}://{member.place.address}:{member.port}"

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        return tuple((member.place.address, member.port) for member in self.members)

    def said(self) -> str:
        """The end of what each member wrote."""
        return "\n".join(
            log.read_text(errors="replace")[-2000:] for log in sorted(self._folder.glob("*.log"))
        )

    def kill(self, number: int) -> None:
        process = self.members[number].process
        assert process is not None
        process.kill()
        process.wait()
        self.members[number].process = None

    def heal(self) -> None:
        """Every member runs, and knows a leader."""
        for number, member in enumerate(self.members):
            if member.process is None:
                self.launch(number)
            else:
                self.thaw(number)
        wait_for(
            lambda: all(map(self.healthy, range(self._count))), "etcd to recover", START_S, seen=self.said
        )

    def freeze(self, number: int) -> None:
        """Returns when none of its threads can answer any more."""
        process = self.members[number].process
        assert process is not None
        stop(process.pid)

    def thaw(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, what: signal.Signals) -> None:
        process = self.members[number].process
        assert process is not None
        process.send_signal(what)

    def ctl(self, *words: str, through: int = 0, user: str | None = None, stdin: str = "") -> str:
        """What etcdctl prints, as JSON where it can. Raises CalledProcessError."""
        command = [
            "etcdctl",
            "--endpoints",
            self.url(through),
            "--write-out",
            "json",
            "--command-timeout",
            "10s",
        ]
        if self._tls is not None:
            command += ["--cacert", str(self._tls.file("ca.pem"))]
            command += [
                "--cert",
                str(self._tls.file("client.pem")),
                "--key",
                str(self._tls.file("client.key")),
            ]
        if user is not None:
            command += ["--user", user]
        return subprocess.run(
            [*command, *words], check=True, capture_output=True, text=True, input=stdin
        ).stdout

    def healthy(self, number: int) -> bool:
        """Whether it answers and knows a leader."""
        try:
            with socket.create_connection(self.endpoints[number], 1.0):
                return self._status(number)["leader"] != 0
        except (OSError, subprocess.CalledProcessError):
            return False

    def _status(self, number: int) -> dict[str, int]:
        status = json.loads(self.ctl("endpoint", "status", through=number))[0]["Status"]
        return {"leader": status.get("leader", 0), "id": status["header"]["member_id"]}

    def leader(self) -> int:
        """Of the members that run; asks again while they are electing."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for number, member in enumerate(self.members):
                if member.process is None:
                    continue
                with contextlib.suppress(subprocess.CalledProcessError):
                    status = self._status(number)
                    if status["leader"] == status["id"]:
                        return number
        raise AssertionError(f"etcd elects no leader:\n{self.said()}")

    def snapshot(self) -> Path:
        """All that the cluster holds now, in a file."""
        file = self._folder / f"snapshot-{self.revision()}"
        self.ctl("snapshot", "save", str(file))
        return file

    def restore(self, snapshot: Path, token: str = "etcd-cluster") -> None:
        """As an operator does it: all members end, and begin again with what the snapshot holds. By default with
        the same name of the cluster, and so with the same cluster id."""
        for number in range(self._count):
            self.kill(number)
        for member in self.members:
            data = self._folder / member.name
            shutil.rmtree(data)
            words = ["snapshot", "restore", str(snapshot), "--data-dir", str(data), "--name", member.name]
            words += ["--initial-cluster", self._initial_cluster, "--initial-cluster-token", token]
            self.ctl(*words, "--initial-advertise-peer-urls", _peer_url(member))
        self.heal()

    def revision(self) -> int:
        return int(json.loads(self.ctl("get", "x"))["header"]["revision"])

    def compact(self, through: int = 0) -> None:
        """Forget all changes up to now."""
        revision = int(json.loads(self.ctl("get", "x", through=through))["header"]["revision"])
        with contextlib.suppress(subprocess.CalledProcessError):  # nothing has changed since the last time
            self.ctl("compact", str(revision), through=through)


def _peer_url(member: Member) -> str:
    return f"http://{member.place.address}:{member.peer_port}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def etcd_is_installed() -> bool:
    return shutil.which("etcd") is not None and shutil.which("etcdctl") is not None


@contextlib.contextmanager
def etcd_cluster(members: int = 1, **how: object) -> Iterator[EtcdCluster]:
    """Started, and gone at the end. Skips the test where etcd is not installed."""
    if not etcd_is_installed():
        pytest.skip("etcd is not installed: .ci/system-packages etcd")
    cluster = EtcdCluster(members, **how)  # type: ignore[arg-type]
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def etcd_access(
    endpoints: Sequence[tuple[str, int]],
    job: str = "job",
    ttl_s: float = 60.0,
    timeout_s: float = 20.0,
    **how: Any,
) -> Access:
    """How an agent reaches these members."""
    places = tuple(Endpoint(*endpoint) for endpoint in endpoints)
    return Access(places, job, timeout_s, ttl_s, **{"prefix": PREFIX, **how})
