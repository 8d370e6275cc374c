"""Which nodes keep the replicas of which."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from elastic_agent.worker.storage.replication.partners import Keeper, NodePlace, partners


def place(node: str, domain: str = "", digests: str = "", address: str = "10.0.0.1:7000") -> NodePlace:
    return NodePlace(node, address, domain, frozenset(digests.split() or [f"shard of {node}"]))


def world(domains: str) -> list[NodePlace]:
    """One node for each letter, which is its domain."""
    return [place(f"node{number}", domain) for number, domain in enumerate(domains)]


def names(found: dict[str, tuple[Keeper, ...]]) -> dict[str, list[str]]:
    return {node: [one.node for one in keepers] for node, keepers in found.items()}


def load(found: dict[str, tuple[Keeper, ...]]) -> Counter[str]:
    return Counter(one.node for keepers in found.values() for one in keepers)


def same_domain(nodes: list[NodePlace], found: dict[str, tuple[Keeper, ...]]) -> int:
    domains = {one.node: one.domain for one in nodes}
    return sum(domains[node] == domains[one.node] for node, keepers in found.items() for one in keepers)


def random_world(rng: random.Random) -> list[NodePlace]:
    racks = rng.randint(1, 6)
    nodes = [place(f"n{number}", f"rack{rng.randrange(racks)}") for number in range(rng.randint(1, 40))]
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


@pytest.mark.parametrize(
    "domains", ["ab", "aabb", "aaabbb", "abc", "aaabbc", "aabbcc", "aaaabbbb", "aaaabbcc"]
)
def test_partners_are_in_another_domain(domains: str) -> None:
    nodes = world(domains)
    found = partners(nodes, 1)
    assert same_domain(nodes, found) == 0
    assert set(load(found).values()) == {1}


@pytest.mark.parametrize("domains", ["aabb", "aaabbb", "abc", "aabbcc", "aaaabbcc"])
def test_the_first_partner_of_two_is_in_another_domain(domains: str) -> None:
    found = partners(world(domains), 2)
    assert same_domain(world(domains), {node: keepers[:1] for node, keepers in found.items()}) == 0


def test_a_domain_that_is_too_large_keeps_its_own() -> None:
    """Rather than that one node keeps the replicas of three."""
    nodes = world("aaab")
    found = partners(nodes, 1)
    assert set(load(found).values()) == {1}
    assert same_domain(nodes, found) == 2


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
        loads = load(found)
        most = max(loads.values(), default=0)
        assert most <= replicas + (replicas > 1), (seed, loads)
        largest = max(Counter(one.domain for one in nodes).values())
        if replicas == 1:
            expected = max(0, 2 * largest - len(nodes)) if len(nodes) > 1 else 0
            assert same_domain(nodes, found) <= expected, seed


@pytest.mark.parametrize(("domains", "most"), [("", 2.01), ("abcdefgh", 5), ("ab", 16)])
def test_a_node_more_or_less_changes_few_partners(domains: str, most: float) -> None:
    """On the average, of 64 nodes: without labels exactly the node before it."""
    rng = random.Random(1)
    nodes = [place(f"n{number}", rng.choice(domains) if domains else "") for number in range(64)]
    before = partners(nodes, 1)
    changed = []
    for lost in nodes:
        after = partners([one for one in nodes if one is not lost], 1)
        changed.append(sum(after[node] != before[node] for node in after))
    assert sum(changed) / len(changed) <= most, changed


@pytest.mark.parametrize("domains", ["", "a", "ab", "aaab", "abcdefghijklmnopqrstuvwxyz"])
def test_a_thousand_nodes_take_no_time(domains: str) -> None:
    nodes = [place(f"n{n}", domains[n % len(domains)] if domains else "") for n in range(1000)]
    began = time.process_time()
    partners(nodes, 2)
    assert time.process_time() - began < 2.0
