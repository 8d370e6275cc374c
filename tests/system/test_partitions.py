"""The network comes between nodes and their store: whoever is cut off stops before its place can be given away.

Each node is a network namespace, and so is each member of etcd. The lease is shorter than users have it where that
only saves time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from tests.etcd_servers import EtcdCluster, etcd_cluster

from .etcd_jobs import LEASE_S, NODES, NoteGap, agent_of, last_steps
from .harness import Agent, Generation, Job, without
from .networks import DROP, RESET, Host, Network, loss, network

MEMBERS = ("m0", "m1", "m2")
SHORT_LEASE = "--lease-ttl=3s"
AIRY_LEASE = "--lease-ttl=15s"
"""It does not end while this machine is busy with other things."""
NO_GRACE = "--store-outage-grace=0"

STOPPED_S = 10.0
"""Nobody needs so long to stop: a node that still trains then would train for ever."""

Cut: TypeAlias = Callable[[Host, Host], None]
"""Called with a node and the store."""


@pytest.fixture
def net() -> Iterator[Network]:
    with network("store", *NODES) as net:
        yield net


@pytest.fixture
def etcd(net: Network) -> Iterator[EtcdCluster]:
    with etcd_cluster(places=[net["store"].place]) as cluster:
        yield cluster


def join(job: Job, net: Network, name: str, endpoint: tuple[str, int], *options: str) -> Agent:
    store = (f"--rdzv-endpoint=etcd://{endpoint[0]}:{endpoint[1]}", f"--rdzv-id={job.id}", "--etcd-insecure")
    return job.start(name, *store, "--nnodes=1:3", *options, enter=net[name].enter)


def start(job: Job, net: Network, etcd: EtcdCluster, *options: str) -> Generation:
    for name in NODES:
        join(job, net, name, etcd.endpoints[0], *options)
    return wait_for_all(job)


def wait_for_all(job: Job) -> Generation:
    job.wait_for_training(world=3)
    return job.wait_for_convergence(*NODES)


def unconfirmed(job: Job) -> int:
    return sum(agent.text.count("lease not confirmed") for agent in job.agents)


def kill_worker(old: Generation, node: str) -> None:
    os.kill(old.pid(old.rank_on(node)), signal.SIGKILL)


def wait_for_replacement(job: Job, old: Generation, cut: str) -> Generation:
    """The others form a world without it, and not before its workers have ended by themselves."""
    two = job.wait_for_training(world=2, after=old.number)
    assert two.nodes == without(old.nodes, cut)
    job.wait_for(lambda: not job.workers(cut), f"node {cut} to stop its workers", STOPPED_S)
    last, first = last_sign(job, old, cut), min(start["at"] for start in two.starts.values())
    assert last < first, f"node {cut} trained on for {last - first:.3f} s after it was replaced"
    return two


def last_sign(job: Job, generation: Generation, *nodes: str) -> float:
    """When its workers on one of these nodes did something for the last time."""
    return min(job.history(node=node, generation=generation.number)[-1]["at"] for node in nodes)


def wait_for_return(job: Job, cut: str) -> None:
    job.wait_for_convergence(*NODES)
    assert agent_of(job, cut).says("joining again as a new incarnation")


def from_everything(node: Host, _store: Host) -> None:
    node.unplug()


def from_the_store(node: Host, store: Host) -> None:
    node.disturb(DROP, towards=[store])


def by_resets(node: Host, store: Host) -> None:
    node.disturb(RESET, towards=[store], received=False)


def for_what_it_sends(node: Host, _store: Host) -> None:
    node.disturb(DROP, received=False)


def for_what_it_gets(node: Host, _store: Host) -> None:
    node.disturb(DROP, sent=False)


@pytest.mark.parametrize(
    ("cut", "place", "options"),
    [
        (from_everything, 0, ()),
        (from_the_store, 0, (SHORT_LEASE,)),
        pytest.param(by_resets, 2, (SHORT_LEASE, NO_GRACE), marks=pytest.mark.long),
        pytest.param(for_what_it_sends, 2, (SHORT_LEASE,), marks=pytest.mark.long),
        pytest.param(for_what_it_gets, 0, (SHORT_LEASE,), marks=pytest.mark.long),
    ],
)
def test_a_node_that_is_cut_off_stops_before_its_place_is_given_away(
    job: Job,
    net: Network,
    etcd: EtcdCluster,
    note_gap: NoteGap,
    cut: Cut,
    place: int,
    options: tuple[str, ...],
) -> None:
    """Also when it may go on without the store while everybody does: its peers have it, or do not answer."""
    three = start(job, net, etcd, *options)
    lost = three.nodes[place]
    cut(net[lost], net["store"])
    two = wait_for_replacement(job, three, lost)
    assert last_sign(job, three, lost) < last_sign(job, three, *two.nodes), "it only followed the others"
    net.heal()
    wait_for_return(job, lost)
    how = cut.__name__.replace("_", " ")
    note_gap(f"node of rank {place} cut off {how} {' '.join(options)}", job)


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 2])
def test_a_silent_node_is_not_replaced_before_its_lease_ends_also_after_a_failure(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap, place: int
) -> None:
    """A pulled cable: the coordinator asks it, or it is the coordinator and asked, and nothing comes back."""
    three = start(job, net, etcd)
    lost = three.nodes[place]
    net[lost].unplug()
    kill_worker(three, three.nodes[1])
    wait_for_replacement(job, three, lost)
    assert any(agent.says(f"node {lost} is gone: its lease ended") for agent in job.agents)
    net.heal()
    wait_for_return(job, lost)
    note_gap(f"cable of rank {place} pulled, then a worker elsewhere killed", job)


@pytest.mark.long
def test_a_node_whose_port_refuses_is_evicted_although_it_lives(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    """Something between it and all others resets connections: it cannot know, and stops by its lease."""
    three = start(job, net, etcd)
    lost = three.nodes[2]
    net[lost].disturb(RESET, sent=False)
    kill_worker(three, three.nodes[1])
    two = job.wait_for_training(world=2, after=three.number)
    assert two.nodes == three.nodes[:2]
    assert any(agent.says(f"node {lost} is gone: its agent has ended") for agent in job.agents)
    job.wait_for(lambda: not job.workers(lost), "the evicted node to stop its workers")
    net.heal()
    wait_for_return(job, lost)
    note_gap("connections to rank 2 reset, then a worker elsewhere killed", job)


@pytest.mark.long
def test_a_write_that_was_done_and_never_confirmed_counts_once(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    """The store hears of a failure; the node does not hear that it did, and asks what became of it."""
    three = start(job, net, etcd, AIRY_LEASE)
    failed = three.nodes[2]
    net[failed].disturb(DROP, sent=False)
    kill_worker(three, failed)
    job.wait_for_text(agent_of(job, failed), "lease not confirmed")
    net.heal()
    assert job.wait_for_convergence(*NODES).number == three.number + 1
    note_gap("failure on rank 2, replies of the store lost for 1 s", job)


@pytest.mark.long
def test_all_nodes_without_the_store_stop_and_come_back_where_that_is_asked_for(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    start(job, net, etcd, SHORT_LEASE, NO_GRACE)
    net["store"].unplug()
    job.wait_for(lambda: not job.workers(), "all workers to be stopped")
    net.heal()
    job.wait_for_convergence(*NODES)
    note_gap(f"store's cable pulled until all have stopped {SHORT_LEASE}", job)


def test_all_nodes_without_the_store_go_on_while_they_reach_each_other(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    three = start(job, net, etcd)
    net["store"].unplug()
    job.wait_for_steps(three, LEASE_S + 1.0)
    note_gap("store's cable pulled for 6 s", job)
    net.heal()
    # The store ran on, and dropped all leases.
    for one in job.agents:
        job.wait_for_text(one, "joining again as a new incarnation")
    job.wait_for_convergence(*NODES)
    note_gap("the same, with the new world after healing", job)


@pytest.mark.long
def test_nobody_follows_a_world_that_may_go_on_although_its_machines_refuse_connections(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    """A firewall between two machines and all others: nobody but the third, which stands by, has the store."""
    for name in NODES:
        join(job, net, name, etcd.endpoints[0], SHORT_LEASE, "--nnodes=1:2", "--store-outage-grace=6s")
    two = job.wait_for_training(world=2)
    (outside,) = set(NODES) - set(two.nodes)
    third = agent_of(job, outside)
    job.wait_for(
        lambda: third.says("at http://") and "standing by" in third.get("/readyz")[1], "the third to stand by"
    )
    net[outside].disturb(RESET, towards=[net[node] for node in two.nodes], received=False)
    for node in two.nodes:
        net[node].disturb(DROP, towards=[net["store"]])
    job.wait_for_steps(two, 5.0)
    note_gap(f"all members cut from the store, and refusing who stands by {SHORT_LEASE}", job)
    one = job.wait_for_training(world=1, after=two.number)
    assert one.nodes == [outside]
    last, first = last_steps(job, two, two.nodes), one.starts[0]["at"]
    assert last < first, f"the two trained on for {last - first:.3f} s after they were replaced"


@pytest.mark.long
def test_a_burst_of_resets_interrupts_nothing_and_no_change_is_missed_after_it(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    three = start(job, net, etcd)
    net["store"].disturb(RESET, sent=False)
    for one in job.agents:
        job.wait_for_text(one, "watch interrupted")
    net.heal()
    job.wait_for_steps(three, LEASE_S)
    note_gap("connections to the store reset for a moment", job)
    kill_worker(three, "b")
    assert job.wait_for_convergence(*NODES).number == three.number + 1


@pytest.mark.long
def test_lost_packets_slow_the_store_down_and_break_no_promise(
    job: Job, net: Network, etcd: EtcdCluster, note_gap: NoteGap
) -> None:
    three = start(job, net, etcd)
    net["store"].disturb(loss(8))
    job.wait_for_steps(three, LEASE_S)
    job.wait_for(lambda: net["store"].disturbed, "a packet to be lost")
    note_gap("8 % of all packets lost both ways for 5 s", job)
    before = unconfirmed(job)
    net["store"].disturb(loss(30))
    job.wait_for(lambda: unconfirmed(job) > before, "a call to fail")
    kill_worker(three, "b")
    job.wait_for(lambda: job.generations()[-1].number > three.number, "another generation")
    net.heal()
    job.wait_for_convergence(*NODES)
    note_gap("the same, then 30 % and a worker killed", job)


@pytest.mark.long
@pytest.mark.parametrize("leads", [True, False])
def test_a_node_behind_a_member_without_quorum_is_cut_off_like_any_other(
    job: Job, note_gap: NoteGap, leads: bool
) -> None:
    """It reaches its member of etcd, and that one answers; but it can promise nothing."""
    with (
        network(*MEMBERS, *NODES) as net,
        etcd_cluster(places=[net[m].place for m in MEMBERS], heartbeat_ms=100, election_ms=1000) as cluster,
    ):
        for name, endpoint in zip(NODES, cluster.endpoints, strict=True):
            join(job, net, name, endpoint)
        three = wait_for_all(job)
        leader = cluster.leader()
        number = leader if leads else (leader + 1) % 3
        others = [net[name] for name in MEMBERS if name != MEMBERS[number]]
        net[MEMBERS[number]].disturb(DROP, towards=others)
        wait_for_replacement(job, three, NODES[number])
        # Where the others' members are slow to elect, these nodes stop by their leases, too, and before this one.
        unproven = f"stopping generation {three.number}: the rendezvous store does not confirm"
        job.wait_for_text(agent_of(job, NODES[number]), unproven)
        net.heal()
        wait_for_return(job, NODES[number])
        note_gap(
            f"{'leader' if leads else 'follower'} of etcd cut from the others, a node behind it",
            job,
        )
