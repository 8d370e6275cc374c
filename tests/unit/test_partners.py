"""Which nodes keep the replicas of which."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from elastic_agent.worker.storage.replication.partners import Keeper, NodePlace, partners


def place(node: str, digests: str = "", address: str = "10.0.0.1:7000") -> NodePlace:
    return NodePlace(node, address, frozenset(digests.split() or [f"shard of {node}"]))


def names(found: dict[str, tuple[Keeper, ...]]) -> dict[str, list[str]]:
    return {node: [one.node for one in keepers] for node, keepers in found.items()}


def load(found: dict[str, tuple[Keeper, ...]]) -> Counter[str]:
    return Counter(one.node for keepers in found.values() for one in keepers)


def random_world(rng: random.Random) -> list[NodePlace]:
    nodes = [place(f"n{number}") for number in range(rng.randint(1, 40))]
    rng.shuffle(nodes)
    return nodes


@pytest.mark.parametrize(
    ("nodes", "replicas", "expected"),
    [
        ([], 1, {}),
        ([place("a")], 1, {"a": []}),
        ([place("a"), place("b")], 0, {"a": [], "b": []}),
        ([place("a"), place("b")], 1, {"a": ["b"], "b": ["a"]}),
        ([place("a"), place("b")], 3, {"a": ["b"], "b": ["a"]}),
        # no memory server: neither gives nor keeps
        ([place("a"), place("b", address="")], 1, {"a": [], "b": []}),
        # replica groups: each shard is on two nodes by itself
        ([place("a", digests="0 1"), place("b", digests="0 1")], 1, {"a": [], "b": []}),
        # the other group's node has no memory server, from which its shards could be read
        (
            [place("a", digests="0"), place("b"), place("c", digests="0", address="")],
            1,
            {"a": ["b"], "b": ["a"], "c": []},
        ),
    ],
)
def test_small_worlds(nodes: list[NodePlace], replicas: int, expected: dict[str, list[str]]) -> None:
    assert names(partners(nodes, replicas)) == expected


def test_only_what_no_other_node_holds_is_copied() -> None:
    found = partners([place("a", digests="0 1"), place("b", digests="1 2"), place("c", digests="3")], 1)
    assert {node: sorted(one.digests for one in keepers) for node, keepers in found.items()} == {
        "a": [frozenset("0")],
        "b": [frozenset("2")],
        "c": [frozenset("3")],
    }


def test_what_another_node_holds_counts_as_one_replica() -> None:
    nodes = [place("a", digests="0"), place("b", digests="0"), place("c", digests="1")]
    assert names(partners(nodes, 2)) == {"a": ["c"], "b": ["c"], "c": names(partners(nodes, 2))["c"]}
    assert sorted(names(partners(nodes, 2))["c"]) == ["a", "b"]


def test_random_worlds() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        nodes, replicas = random_world(rng), rng.choice((1, 1, 2, 3))
        found = partners(nodes, replicas)
        assert found == partners(rng.sample(nodes, len(nodes)), replicas), seed
        assert found.keys() == {one.node for one in nodes}, seed
        for node, keepers in found.items():
            others = {one.node for one in keepers}
            assert node not in others, seed
            assert len(others) == len(keepers) == min(replicas, len(nodes) - 1), seed
        assert set(load(found).values()) <= {min(replicas, len(nodes) - 1)}, seed


def test_a_node_less_changes_the_partner_of_the_one_before_it_alone() -> None:
    nodes = [place(f"n{number}") for number in range(64)]
    before = partners(nodes, 1)
    for lost in nodes:
        after = partners([one for one in nodes if one is not lost], 1)
        assert sum(after[node] != before[node] for node in after) == 1


def test_a_thousand_nodes_take_no_time() -> None:
    nodes = [place(f"n{number}") for number in range(1000)]
    began = time.process_time()
    partners(nodes, 2)
    assert time.process_time() - began < 2.0
