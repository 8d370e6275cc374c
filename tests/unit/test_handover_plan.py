"""Who hands over what to whom, when nodes leave: tables of the pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.checkpoints.handover import Others, Peer, others, tasks, waits_for
from elastic_agent.rendezvous.messages import Exclusion, Limits
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Condition,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
)
from elastic_agent.worker.storage.memory.copy_header import FoundCopy, Header, RankShards
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder

# ---------------------------------------------------------------- the nodes that go on


def node(
    name: str, *, leaving: bool = False, memory: int = 7000, kept: bool = True, **more: object
) -> NodeRecord:
    found = NodeRecord(name, f"{name}-1", f"host-{name}", 1, 2, leaving=leaving, memory=memory, ready=True)
    ended = [Condition.STATE_SAVED] if kept else []
    return replace(found.having(4, Condition.STOPPED, *ended), **more)  # type: ignore[arg-type]


MEMBERS = [node(name) for name in "abc"]
WORLD = World(
    "digits",
    4,
    Phase.LAST_STEP,
    assign_ranks(tuple(MEMBERS)),
    Endpoint("host-a", 1),
    Cause(CauseKind.LEAVE, "a"),
)
A, B, C = MEMBERS
LEAVING_A, LEAVING_B = (replace(one, leaving=True) for one in (A, B))
NEW = node("n", kept=False, generation=0, conditions=frozenset())


def test_a_node_that_stands_by_hands_over_until_the_others_have_trained_for_a_minute() -> None:
    training = replace(WORLD, phase=Phase.RUNNING, generation=5)
    lasting = [one.having(5, Condition.STABLE) for one in (A, B, C)]
    for nodes, need_nothing in (([A, B, lasting[2]], False), (lasting, True)):
        found = others(training, "n", [*nodes, replace(NEW, leaving=True)])
        assert (found.busy, found.need_nothing) == ((), need_nothing)
        assert [peer.node for peer in found.go_on] == ["a", "b", "c"]
        assert bool(tasks([copy(7)], {}, found, kept=False)) is not need_nothing


def in_twos(most: int = 8) -> World:
    return replace(WORLD, limits=Limits(1, most, 0.0, None, 2))


@pytest.mark.parametrize(
    ("world", "nodes", "go_on", "leaving", "member_keeps"),
    [
        (WORLD, [LEAVING_A, B, C], "bc", "", True),
        (WORLD, [LEAVING_A, LEAVING_B, C], "c", "b", True),
        # who keeps the state comes first, who comes anew after those who stay, who is ready before who is not
        (WORLD, [LEAVING_A, node("b", kept=False), C], "cb", "", True),
        (WORLD, [LEAVING_A, NEW, C], "cn", "", True),
        (WORLD, [LEAVING_A, replace(NEW, ready=False), node("m", kept=False, generation=0)], "mn", "", False),
        (WORLD, [LEAVING_A], "", "", False),
        # one that stays, and has not kept the state after the last step, has to be given it
        (WORLD, [LEAVING_A, node("b", kept=False)], "b", "", False),
        # a new life of a member is no member
        (WORLD, [LEAVING_A, replace(C, incarnation="c-2")], "c", "", False),
        # without a memory server it takes nothing, and hands over nothing
        (WORLD, [LEAVING_A, node("b", memory=0), replace(LEAVING_B, node="c", memory=0)], "", "", True),
        # the job ends with its store
        (WORLD, [LEAVING_A, replace(LEAVING_B, hosts_store=True), C], "", "b", False),
        # those that the next world leaves out
        (
            replace(WORLD, exclusions=(Exclusion("n", "n-1", "repeated", "it fails"),)),
            [LEAVING_A, NEW],
            "",
            "",
            False,
        ),
        (in_twos(), [LEAVING_A, B, C, NEW], "bc", "", True),
        (in_twos(), [LEAVING_A, B], "b", "", True),  # it waits for another one
        (in_twos(most=2), [LEAVING_A, B, C, NEW, node("m", kept=False)], "bc", "", True),
    ],
)
def test_the_nodes_that_go_on(
    world: World, nodes: list[NodeRecord], go_on: str, leaving: str, member_keeps: bool
) -> None:
    found = others(world, "a", nodes)
    assert "".join(peer.node for peer in found.go_on) == go_on
    assert found.leaving == frozenset(leaving)
    assert found.member_keeps is member_keeps
    assert found.busy == ()


def test_where_a_node_is_and_what_it_was() -> None:
    [b, new] = others(WORLD, "a", [LEAVING_A, B, replace(NEW, address="fe80::1")]).go_on
    assert b == Peer("b", "host-b:7000", frozenset({2, 3}))
    assert new == Peer("n", "[fe80::1]:7000")


def test_who_still_has_workers() -> None:
    running = NodeRecord("b", "b-1", "host-b", 1, 2, memory=7000)
    assert others(WORLD, "a", [LEAVING_A, running, C]).busy == ("b",)


# ---------------------------------------------------------------- what is handed over


@pytest.mark.parametrize(
    ("kept", "keeps", "replicated", "waits"),
    [
        (False, False, False, True),
        (
            False,
            True,
            True,
            True,
        ),  # where there is no common last step, it may be about to overwrite the slot
        (True, False, False, False),
        (True, True, True, False),
        (True, False, True, True),  # it may still say that it keeps it
    ],
)
def test_workers_that_have_not_ended_are_waited_for_where_it_matters(
    kept: bool, keeps: bool, replicated: bool, waits: bool
) -> None:
    seen = Others(peers("b"), member_keeps=keeps, busy=("b",))
    copies = [copy(9), *([copy(9, local_rank=None)] if replicated else [])]
    assert waits_for(copies, seen, kept=kept) == (("b",) if waits else ())


def copy(
    step: int,
    rank: int = 0,
    *,
    local_rank: int | None = 0,
    of: str = "",
    slot: str = "a",
    twins: tuple[int, ...] = (),
) -> FoundCopy:
    """Of rank 2N and 2N+1 on the N-th node; `of`: a replica of that node's."""
    shards = RankShards(rank, f"{rank:016x}", rank == 0, twins) if local_rank is not None else None
    header = Header(step, 4, 0, 64, 10, run="run-a", shards=shards)
    return FoundCopy(SlotFolder.of("/checkpoints", local_rank, of), slot, header)


def peers(names: str) -> tuple[Peer, ...]:
    first = {name: 2 * place for place, name in enumerate("abc")}
    return tuple(
        Peer(name, f"host-{name}:7000", frozenset({first[name], first[name] + 1} if name in first else ()))
        for name in names
    )


def todo(
    copies: list[FoundCopy],
    go_on: str,
    leaving: str = "",
    *,
    kept: bool = True,
    keeps: bool = True,
    acked: str = "",
) -> list[tuple[int, str, str]]:
    """Step, of which folder, and the first taker, in order."""
    known = {(one.folder.name, one.slot): tuple(acked) for one in copies}
    found = tasks(copies, known, Others(peers(go_on), frozenset(leaving), keeps), kept=kept)
    names = {SlotFolder.of("/checkpoints", 0, of).name: of or "own" for of in ("", *"abc")}
    names |= {SlotFolder.of("/checkpoints").name: "state"}
    return [
        (task.copy.header.step, names[task.copy.folder.name], task.takers[0].node if task.takers else "")
        for task in found
    ]


def test_own_shards_go_to_a_node_that_goes_on_first_to_one_that_has_them() -> None:
    own = [copy(9, slot="a"), copy(8, slot="b")]
    for holder in "bcn":
        assert todo(own, "bcn", acked=holder) == [(9, "own", holder)]
    assert todo([copy(9, 0, twins=(4,))], "bc") == [(9, "own", "c")]  # rank 4 was there
    assert todo(own, "c", "b", acked="b") == [(9, "own", "c")]  # the one that has it leaves, too
    assert todo(own, "") == [(9, "own", "")]


def test_without_a_common_last_step_an_older_version_may_be_the_whole_one() -> None:
    own = [copy(9, slot="a"), copy(8, slot="b")]
    assert todo(own, "b", kept=False) == [(9, "own", "b"), (8, "own", "b")]


@pytest.mark.parametrize(
    ("go_on", "leaving", "handed_over"),
    [
        ("bc", "", False),  # it has its own
        ("c", "b", False),  # it hands them over
        ("c", "", True),  # it is gone
        ("n", "", True),
    ],
)
def test_a_replica_is_handed_over_where_its_node_does_not(
    go_on: str, leaving: str, handed_over: bool
) -> None:
    replica = copy(9, 2, of="b")
    assert [what for _, what, _ in todo([replica], go_on, leaving)] == ["b"] * handed_over


def test_two_that_have_a_replica_choose_one_taker() -> None:
    for rank in range(6):
        first, second = (
            tasks([copy(9, rank, of="b", slot=slot)], {}, Others(peers(order)), kept=True)
            for slot, order in (("a", "cnm"), ("b", "mcn"))
        )
        assert first[0].takers[0] == second[0].takers[0]
    takers = {todo([copy(9, rank)], "bcnm")[0][2] for rank in range(40)}
    assert takers == set("bcnm"), "one node takes all"


@pytest.mark.parametrize(
    ("kept", "keeps", "go_on", "expected"),
    [
        (True, True, "bc", []),  # one of them has it
        (True, False, "b", [(9, "state", "b")]),  # it stays, and does not
        (True, False, "n", [(9, "state", "n")]),
        (False, True, "cb", [(9, "state", "c")]),  # that one may have an older one
        (True, False, "", [(9, "state", "")]),
    ],
)
def test_a_state_that_is_on_all_nodes(
    kept: bool, keeps: bool, go_on: str, expected: list[tuple[int, str, str]]
) -> None:
    state = [copy(9, local_rank=None, slot="b"), copy(8, local_rank=None)]
    assert todo(state, go_on, kept=kept, keeps=keeps) == expected
