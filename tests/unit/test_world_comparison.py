"""Differences between the networks of nodes: the usual value, the nodes that have another, and advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.observability.membership import WorldComparison, differences
from elastic_agent.health.checks.finding import MOST_NAMED
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    NetworkFacts,
    NodeRecord,
    Phase,
    World,
    line_up,
)
from elastic_agent.rendezvous.statements.terms import Program


def a_node(
    name: str,
    *,
    mtu: int = 9000,
    speed: int = 100_000,
    rdma: int = 0,
    address: str = "10.0.0.1",
    interface: str = "eth0",
) -> NodeRecord:
    ports = tuple(f"mlx5_{number}:1" for number in range(rdma))
    facts = NetworkFacts(interface, speed, mtu, ports)
    return NodeRecord(name, f"{name}-1", address, 1, 1, network=facts)


ALIKE = [a_node(f"n{number}") for number in range(997)]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            [a_node("a"), a_node("b", mtu=1500, interface="ens5")],
            "the MTU differs: 9000 on a (eth0), but 1500 on b (ens5). Large packets",
        ),
        (
            [a_node("a", mtu=1500), *ALIKE, a_node("z", mtu=1500)],
            "the MTU differs: 9000 on 997 nodes, but 1500 on a (eth0), z (eth0). ",
        ),
        (
            [a_node("a", speed=25_000), *ALIKE],
            "the link speed differs: 100000 Mbit/s on 997 nodes, but 25000 Mbit/s on a (eth0). The slowest",
        ),
        (
            [a_node("a", rdma=7), a_node("b", rdma=8), a_node("c", rdma=8)],
            "the number of active RDMA ports differs: 8 on 2 nodes, but 7 on a (eth0). ",
        ),
        (
            [a_node("a", address="fd00::1%eth0"), a_node("b"), a_node("c")],
            "the address family differs: IPv4 on 2 nodes, but IPv6 on a (eth0). ",
        ),
        (
            [*ALIKE, a_node("x", mtu=1400), a_node("y", mtu=1500), a_node("z", mtu=1500)],
            "9000 on 997 nodes, but 1500 on y (eth0), z (eth0); 1400 on x (eth0). ",
        ),
    ],
)
def test_a_difference_names_the_usual_value_and_who_has_another(
    nodes: list[NodeRecord], expected: str
) -> None:
    (sentence,) = differences(nodes)
    assert expected in sentence
    assert len(sentence) < 400


def test_many_odd_ones_are_counted() -> None:
    odd = [a_node(f"odd{number}", mtu=1500) for number in range(40)]
    (sentence,) = differences([*odd, *ALIKE])
    assert sentence.count("odd") == MOST_NAMED
    assert f"and {40 - MOST_NAMED} more" in sentence
    assert len(sentence) < 500


def test_every_trait_has_a_sentence_of_its_own() -> None:
    other = a_node("b", mtu=1500, speed=10_000, rdma=1, address="fd00::2")
    assert len(differences([a_node("a"), other])) == 4


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        ALIKE[:1],
        ALIKE,
        [a_node("a"), a_node("b", interface="ens5", address="10.0.0.2")],  # names may differ
        [a_node("a"), a_node("b", speed=0)],  # not known, as on most virtual machines
        [a_node("a"), NodeRecord("b", "b-1", "10.0.0.2", 1, 1)],  # torchrun's plug-in says nothing
        [a_node("a", address="host-a"), a_node("b", address="fd00::2")],
    ],
)
def test_what_is_alike_or_not_known_is_not_mentioned(nodes: list[NodeRecord]) -> None:
    assert differences(nodes) == ()


def a_world(generation: int, *nodes: NodeRecord, phase: Phase = Phase.RUNNING) -> World:
    return World("job", generation, phase, line_up(nodes), Endpoint("10.0.0.1", 1), Cause(CauseKind.START))


def test_each_world_is_compared_once_and_only_news_are_returned() -> None:
    a, b, c, spare = a_node("a"), a_node("b"), a_node("c", mtu=1500), a_node("spare", mtu=1400)
    nodes, comparison = (a, b, c, spare), WorldComparison()
    assert comparison.news(a_world(1, a, b), nodes, "a") == ()
    (first,) = comparison.news(a_world(2, a, b, c), nodes, "a")
    assert "1500 on c (eth0)" in first
    assert comparison.news(a_world(2, a, b, c), nodes, "a") == ()
    assert comparison.news(a_world(2, a, b, c, phase=Phase.STOPPING), nodes, "a") == ()
    assert comparison.news(a_world(3, a, b, c), nodes, "a") == (), "it is known"
    assert comparison.news(a_world(4, a, b), nodes, "a") == ()
    assert comparison.news(a_world(5, a, b, c), nodes, "a") == (first,), "it is back"


OURS = Program("train.py", "1" * 64, "aa", ("--lr", "0.1"))


def test_a_coordinator_names_nodes_with_other_limits_and_both_values() -> None:
    a, b = replace(a_node("a"), program=OURS), replace(a_node("b"), program=OURS)
    own = replace(a_node("c"), program=replace(OURS, arguments="bb", words=("--lr", "0.2")))
    world = replace(a_world(1, a, b, own), program=OURS, limits_of="a")
    (sentence,) = WorldComparison().news(world, (a, b, own), "a")
    assert sentence == (
        "node c was started with other arguments for the script: '0.2' as argument 2, where the job has '0.1';"
        " what the job has is node a's"
    )
    assert WorldComparison().news(world, (a, b, own), "c") == (), "node c logs that itself"


def test_of_many_nodes_with_other_limits_a_few_are_named() -> None:
    """Arguments may be a node's own, like the folder of its data."""
    own = replace(OURS, arguments="bb", words=("--lr", "0.1", "--data"))
    nodes = [replace(a_node("a"), program=OURS)]
    nodes += [replace(a_node(f"odd{number}"), program=own) for number in range(40)]
    world = replace(a_world(1, *nodes), program=OURS, limits_of="a")
    *named, rest = WorldComparison().news(world, nodes, "a")
    assert len(named) == MOST_NAMED
    assert rest.startswith(f"{40 - MOST_NAMED} more nodes were started with other limits")
