"""What people and other programs do to a job in etcd: forget history, revoke leases, write what makes no sense."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from elastic_agent.rendezvous.etcd.store import EtcdStore
from elastic_agent.rendezvous.store.interface import Put
from tests.etcd_servers import EtcdCluster, etcd_access, etcd_cluster

from .etcd_jobs import NODES, NoteGap, agent_of, lease_of, member_of, start
from .harness import RECORDER, Job, without

GARBAGE = "\x00no record of ours"
TEN_MEGABYTES = "x" * 10_000_000
STORE_MISMATCH = 76
NOT_HERE = 73
TOKEN_GONE_S = 4.0
"""Etcd counts in whole seconds, and looks once a second."""


# --- History that is forgotten


@pytest.fixture
def apart(job: Job) -> Iterator[EtcdCluster]:
    """Nodes a and b talk to member 0, node c to one of the other two."""
    with etcd_cluster(3, heartbeat_ms=50, election_ms=500) as cluster:
        mine = {"a": cluster.endpoints[:1], "b": cluster.endpoints[:1], "c": cluster.endpoints[1:]}
        for name, endpoints in mine.items():
            where = "etcd://" + ",".join(f"{host}:{port}" for host, port in endpoints)
            options = (f"--rdzv-endpoint={where}", f"--rdzv-id={job.id}", "--nnodes=3")
            job.start(name, *options, script=(RECORDER, "--report"))
        job.wait_for_training(world=3)
        yield cluster


class Compaction(threading.Thread):
    """All changes are forgotten every 200 ms."""

    def __init__(self, cluster: EtcdCluster) -> None:
        super().__init__(name="compaction")
        self._cluster = cluster
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            self._cluster.compact()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


@pytest.mark.long
def test_a_watch_that_is_cut_while_history_is_forgotten_reads_again(
    job: Job, apart: EtcdCluster, note_gap: NoteGap
) -> None:
    """The world changes while node c's member stands still; on the next one, what c has missed is forgotten."""
    with Compaction(apart):
        for _ in range(2):
            old = job.wait_for_convergence(*NODES)
            frozen = member_of(agent_of(job, "c"), apart)
            apart.freeze(frozen)
            os.kill(old.pid(old.rank_on("a")), signal.SIGKILL)
            new = job.wait_for_training(world=3, after=old.number)
            assert new.number == old.number + 1, "c lost nothing but time"
            apart.heal()
    note_gap("compaction every 200 ms, worker killed while a member is frozen", job)


# --- Leases and tokens


def test_a_lease_that_is_revoked_from_outside_costs_its_node_one_new_incarnation(
    job: Job, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    old = start(job, etcd)
    node = old.nodes[0]
    etcd.ctl("lease", "revoke", lease_of(job, etcd, node))
    job.wait_for_text(agent_of(job, node), "lease lost")
    job.wait_for_training(world=3, after=old.number)
    new = job.wait_for_convergence(*NODES)
    assert new.nodes == [*without(old.nodes, node), node], "a survivor has the first place"
    assert agent_of(job, node).process.poll() is None
    note_gap("lease revoked from outside", job)


@pytest.fixture
def forgetful() -> Iterator[EtcdCluster]:
    """It wants a password, and forgets a token that nobody has used for a second."""
    with etcd_cluster(args=("--auth-token-ttl=1", "--bcrypt-cost=4")) as cluster:
        cluster.ctl("user", "add", "root:secret")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("auth", "enable")
        yield cluster


def logins(cluster: EtcdCluster) -> int:
    with urllib.request.urlopen(f"{cluster.url(0)}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counter = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Authenticate"'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(counter))


@pytest.mark.long
def test_tokens_that_expire_interrupt_nothing(job: Job, forgetful: EtcdCluster, note_gap: NoteGap) -> None:
    """While nothing changes nobody needs one: etcd lets keep-alives pass without."""
    job.use_etcd(forgetful)
    password = job.folder / "password"
    password.write_text("secret")
    password.chmod(0o600)
    for name in NODES:
        job.join(name, "--nnodes=1:3", "--etcd-user=root", f"--etcd-password-file={password}")
    old = job.wait_for_training(world=3)
    job.wait_for_steps(old, TOKEN_GONE_S)
    before = logins(forgetful)
    os.kill(old.pid(0), signal.SIGKILL)
    assert job.wait_for_training(world=3, after=old.number).number == old.number + 1
    assert logins(forgetful) >= before + len(NODES), "each agent had to log in again"
    assert job.wait_for_convergence(*NODES).number == old.number + 1
    note_gap("tokens have expired when a worker is killed", job)


# --- Values that make no sense


@pytest.fixture(scope="module")
def roomy() -> Iterator[EtcdCluster]:
    """It takes large values."""
    with etcd_cluster(args=("--max-request-bytes", str(16 * 2**20))) as cluster:
        yield cluster


def write(job: Job, cluster: EtcdCluster, *keys: str, value: str) -> None:
    access = etcd_access(cluster.endpoints, job.id)
    store = EtcdStore.connect(access)
    store.transact((), tuple(Put(key, value) for key in keys))
    store.close()


VALUES = pytest.mark.parametrize(
    "value",
    [
        pytest.param(GARBAGE, id="garbage"),
        pytest.param(TEN_MEGABYTES, id="ten megabytes", marks=pytest.mark.long),
    ],
)


@VALUES
def test_a_world_that_makes_no_sense_ends_the_job_and_names_the_key(
    job: Job, roomy: EtcdCluster, value: str
) -> None:
    start(job, roomy)
    write(job, roomy, "world", value=value)
    for agent in job.agents:
        assert agent.exit_code() == STORE_MISMATCH
        assert agent.says("'world'")
        assert len(agent.text) < 20_000, "nobody wants to read all of it"


@pytest.mark.long
@VALUES
def test_other_keys_that_make_no_sense_disturb_nobody(
    job: Job, roomy: EtcdCluster, note_gap: NoteGap, value: str
) -> None:
    old = start(job, roomy)
    write(job, roomy, "nodes/x", value=value)
    write(job, roomy, "nobody-knows-it", value=value)
    named = r"ignoring a node: .*nodes/x"
    job.wait_for(lambda: any(agent.says(named) for agent in job.agents), "the coordinator to name the key")
    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=3, after=old.number)
    assert job.wait_for_convergence(*NODES).number == old.number + 1
    assert all(len(agent.text) < 20_000 for agent in job.agents)


def test_a_record_that_makes_no_sense_and_was_there_first_is_named_before_anything_starts(
    job: Job, roomy: EtcdCluster
) -> None:
    write(job, roomy, "nodes/x", value=GARBAGE)
    job.use_etcd(roomy)
    agent = job.join("a", "--nnodes=1:3")
    assert agent.exit_code() == STORE_MISMATCH
    assert agent.says("'nodes/x'")
    assert job.generations() == []


# --- Names


@pytest.mark.long
def test_of_two_agents_with_one_name_the_second_is_refused(job: Job, etcd: EtcdCluster) -> None:
    job.use_etcd(etcd)
    options = ("--nnodes=1:2", "--lease-ttl=2")
    first = job.join("a", *options)
    old = job.wait_for_training(world=1)
    second = job.join("a", *options)
    assert second.exit_code() == NOT_HERE
    assert second.says("another live agent of job .* is already called 'a'")
    assert job.wait_for_convergence("a").number == old.number
    assert first.process.poll() is None
