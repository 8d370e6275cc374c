"""A rack is lost: the coordinator on a real etcd, which takes 128 operations in a transaction, evicts 110 nodes."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace

from elastic_agent.rendezvous.etcd.store import EtcdStore
from elastic_agent.rendezvous.node.participant import Participant
from elastic_agent.rendezvous.node.transactions import Evict
from elastic_agent.rendezvous.records import (
    NODES_PREFIX,
    WORLD_KEY,
    Cause,
    CauseKind,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Grant, Put, Read, Request
from tests.etcd_servers import EtcdCluster, etcd_access
from tests.policies import PLAIN_POLICY

LOST = 110


def carry_out(store: EtcdStore, agent: Participant, now: float) -> Request | None:
    """What the agent's threads do with its next request; an error of the store ends the test."""
    request = agent.request(now)
    if isinstance(request, Grant):
        agent.answered(request, store.grant(request.ttl_s), now)
    elif isinstance(request, Read):
        agent.answered(request, store.read(request.scopes, request.oldest_under), now)
    elif request is not None:
        agent.answered(request, store.transact(request.compares, request.writes), now)
    return request


def test_a_hundred_nodes_lost_at_once_are_evicted_in_batches(shared_etcd: EtcdCluster) -> None:
    job = uuid.uuid4().hex
    store = EtcdStore.connect(etcd_access(shared_etcd.endpoints, job))
    try:
        me = NodeRecord("a", "a-1", "host-a", 4001, slots=1, http=Endpoint("host-a", 80))
        policy = replace(PLAIN_POLICY, job=job, max_nodes=LOST + 1, last_call_s=0.0)
        agent = Participant(me, policy, lease_ttl_s=60.0, rng=random.Random(1), now=0.0)
        carry_out(store, agent, 0.0)
        carry_out(store, agent, 0.0)
        rack = [replace(me, node=f"n{i}", incarnation=f"n{i}-1") for i in range(LOST)]
        for node in rack:
            store.transact((), (Put(node_key(node.node), node.to_json()),))
        world = World(
            job,
            3,
            Phase.STOPPING,
            assign_ranks((me, *rack)),
            Endpoint("host-a", 4001),
            Cause(CauseKind.LOST, "n0", "node n0 is gone"),
        )
        store.transact((), (Put(WORLD_KEY, world.to_json()),))
        asked: list[Request] = []
        for turn in range(100):
            if agent.wants_port:
                agent.offer_port(4002 + turn)
            request = carry_out(store, agent, turn / 100)
            if request is not None:
                asked.append(request)
                continue
            # What the watch would tell; and then all of them refuse the connection.
            agent.lost_track()
            agent.take_snapshot(0, "", turn / 100)
            nodes, world = agent.snapshot.known_nodes, agent.snapshot.world
            if len(nodes) > 1 and world is not None and world.generation == 3:
                agent._session.membership.detector.gone.update(node.incarnation for node in rack)
        assert agent.world is not None
        assert (agent.world.generation, agent.world.phase) == (4, Phase.RUNNING)
        assert [member.node for member in agent.world.members] == ["a"]
        assert [entry.key for entry in store.read((NODES_PREFIX,)).entries] == ["nodes/a"]
        assert sum(isinstance(request, Evict) for request in asked) == 3
    finally:
        store.close()
