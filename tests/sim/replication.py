"""Shards, their replicas and all that can happen to them, in one thread and virtual time.

The code under test is the real one: which nodes are partners, when ranks may copy and what they keep, which version is
loaded, and what a memory server brings, takes and drops. Simulated are the slots with every piece of what is in them,
training in lockstep, the servers' connections piece by piece, and the nemesis: it kills nodes and workers at any
instant, starts servers anew, breaks connections, lets nodes come and go, has slots read and memory run out. The
promises are checked at the very event that would break one:

    R1   with one replica or more, no single node's loss loses a version that was acknowledged as replicated
    R2   a worker's death does not lose the newest version that all ranks had sealed
    R3   what is loaded is whole and not torn: every shard is of this one version
    R4   a rank's copy and its replicas are on different nodes
    R5   in the end, without faults, the newest version is acknowledged, and nothing is kept that is of no more use

A version counts as acknowledged from the instant at which the files of all ranks say so. Two things end that earlier: a
copy that must be made before the ranks have seen it, and one that is made while a partner is out of reach, both as
documented.

`python -m tests.sim.replication SEED` replays one run and prints its story.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from elastic_agent.worker.checkpointing.loading.selection import (
    CopyPlace,
    Offer,
    Source,
    choose_source,
    unusable,
)
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.memory.copy_header import FoundCopy, Header, RankShards
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.replication.copy_rule import (
    CopyVerdict,
    Decision,
    Readiness,
    Replication,
    SlotState,
    Version,
    has,
    may_copy,
    oldest_needed,
    slot_to_overwrite,
)
from elastic_agent.worker.storage.replication.partners import Keeper, NodePlace, partners
from elastic_agent.worker.storage.replication.replica_rules import is_abandoned, is_superfluous, is_twin

from .checks import PromiseBroken

CALM_AT, END_AT = 120.0, 200.0
STEP_S = 1.0
MUST_AFTER_S = 4.0
"""So long a copy that must be made waits for acknowledgments."""
GIVEN_UP_AFTER_S = 6.0
MOST_NODES = 5

BUGS = (
    "acknowledged before the last byte",
    "both copies on one node",
    "a stale replica is chosen",
    "the older slot is overwritten before the newer was acknowledged",
    "a version counts with a rank missing",
    "replicas are dropped too early",
    "each rank overwrites its older slot",
    "a replica's older slot is overwritten",
    "the first copy does not wait for the loaded version's replicas",
    "a transfer goes on in another copy's bytes",
    "the newest whole version is overwritten",
    "who will have the same shards counts for the loaded version, too",
    "nodes that stand by offer nothing",
)
"""Planted on purpose, one at a time: each must be caught, or the checks prove nothing."""

Token = tuple[Version, str]
"""What a piece really is: of which version, and of which shards."""
Key = tuple[int, str]
"""A folder: the local rank, and the node whose replica it is; empty: of this node's own worker."""


def key_of(place: CopyPlace) -> Key:
    return place.folder.local_rank or 0, place.folder.origin


@dataclass
class Slot:
    """`pieces` are what the bytes are, whatever the header says."""

    header: Header | None = None
    pieces: list[Token] = field(default_factory=list)
    writing: bool = False
    readers: int = 0
    acks: tuple[Version, int, frozenset[str], frozenset[str]] | None = None
    """Version, the generation that named the partners, who has it, and who was given up."""


@dataclass
class Incoming:
    """A replica of which some pieces are here; the server has it in its own memory."""

    header: Header
    slot: Slot
    boot: int


@dataclass(frozen=True)
class Order:
    """What a node's workers have told its server: to whom it brings copies, of which digests; `loaded` of the version
    that they have loaded."""

    generation: int
    resumed: Version
    partners: tuple[Keeper, ...]
    loaded: tuple[Keeper, ...]

    def gets(self, partner: str, header: Header) -> bool:
        assert header.shards is not None
        chosen = self.loaded if header.version <= self.resumed else self.partners
        return any(one.node == partner and header.shards.digest in one.digests for one in chosen)

    def abandons(self, version: Version) -> bool:
        return is_abandoned(version, generation=self.generation, resumed=self.resumed)


class Node:
    """One node: the agent's memory, and the server that it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.boot = 0
        self.folders: dict[Key, tuple[Slot, Slot]] = {}
        self.incoming: dict[Key, Incoming] = {}
        self.order: Order | None = None
        self.bringing: set[str] = set()
        self.failing_since: dict[str, float] = {}
        self.given_up: set[str] = set()

    def slots(self, key: Key) -> tuple[Slot, Slot]:
        return self.folders.setdefault(key, (Slot(), Slot()))

    def sealed(self) -> Iterator[tuple[Key, int, Slot, Header]]:
        for key, slots in self.folders.items():
            for place, slot in enumerate(slots):
                if slot.header is not None:
                    yield key, place, slot, slot.header


class Team:
    """The workers of one generation."""

    def __init__(self, generation: int, nodes: list[Node], per_node: int, groups: int) -> None:
        self.generation = generation
        self.nodes = nodes
        self.world_size = len(nodes) * per_node
        self.alive = True
        self.training = False
        self.step = 0
        self.resumed_from = 0
        self.protected: Version | None = None
        self.ranks = [(node, local) for node in nodes for local in range(per_node)]
        # Replica groups, as HSDP has them, where the world can be divided so.
        self.shards = self.world_size // (groups if self.world_size % groups == 0 else 1)
        self.needs: list[frozenset[str]] = []
        """By rank, the partners that are to have its copies."""
        self.loaded_needs: list[frozenset[str]] = []
        """Those that are to have its copy of the loaded version."""
        self.resumed: Version = (0, 0)
        self.released: tuple[Version, Version] = ((0, 0), (0, 0))
        """What is newer than the one and older than the other gives way to a copy that must be made."""
        self.whole: Version | None = None
        """The newest that all ranks had sealed."""
        self.calls = 0

    def digest(self, rank: int) -> str:
        return f"{self.world_size:08x}{rank % self.shards:08x}"

    def twins(self, rank: int) -> tuple[int, ...]:
        return tuple(r for r in range(rank % self.shards, self.world_size, self.shards) if r != rank)


class Replicating:
    """One run."""

    def __init__(self, seed: int, bug: str | None = None, *, tell: bool = False) -> None:
        self.seed, self.bug, self.tell = seed, bug, tell
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.seen: Counter[str] = Counter()
        self.story: deque[str] = deque(maxlen=300)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.per_node = rng.choice((1, 1, 2))
        self.groups = rng.choice((1, 1, 1, 2))
        self.replicas = rng.choice((1, 1, 1, 1, 2))
        self.multiple = random.Random(~seed).choice((1, 1, 2))
        """Nodes beyond a multiple stand by."""
        self.pieces = rng.randint(1, 4)
        self.piece_s = rng.choice((0.02, 0.1, 0.3, 0.6))
        """The longest time that a piece takes to a partner."""
        self.write_s = rng.choice((0.05, 0.3, 1.5))
        self.every = rng.choice((1, 1, 2, 3))
        self.save_every = rng.choice((5, 9, 1000))
        self.shards_of: dict[Version, int] = {}
        """Of each version, how many different shards make it whole."""
        self.whole_floor: Version | None = None
        """The newest version that all ranks had sealed."""
        self.losses_since_whole = 0
        self.names = itertools.count(1)
        self.nodes: list[Node] = []
        self.broken: dict[frozenset[str], float] = {}
        """Until when two nodes do not reach each other."""
        self.generation = 0
        self.team: Team | None = None
        self.disk: Manifest | None = None
        self.floor: Version | None = None
        """The newest version that was acknowledged as replicated, and has been promised since."""
        self.losses = 0
        """Of nodes, since then."""
        for _ in range(rng.randint(2, 4)):
            self.add_node()
        self.after(0.0, self.form)
        self.after(rng.uniform(3, 12), self.fault)
        self.after(1.0, self.read_some)

    # ------------------------------------------------------------ the machinery

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), action))

    def soon(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        self.after(self.rng.uniform(low_s, high_s), action)

    def say(self, text: str) -> None:
        self.story.append(f"{self.now:8.2f} {text}")
        if self.tell:
            print(self.story[-1])

    def require(self, holds: bool, promise: str, what: str) -> None:
        if not holds:
            story = "\n".join(self.story)
            raise PromiseBroken(f"seed {self.seed}, {self.now:.2f} s, {promise}: {what}\n{story}")

    def add_node(self) -> None:
        node = Node(f"n{next(self.names)}")
        self.nodes.append(node)
        self.say(f"{node.name} comes")

    def play(self) -> None:
        while self._queue and self._queue[0][0] <= END_AT:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.check_end()

    # ------------------------------------------------------------ what is really there

    def holders(self, version: Version, nodes: Sequence[Node]) -> tuple[int, set[str], bool]:
        """World size, the digests of that version that are whole somewhere, and whether what is common is there."""
        digests: set[str] = set()
        world, common = 0, False
        for node in nodes:
            for _, _, slot, header in node.sealed():
                if header.version == version and header.shards is not None:
                    if slot.pieces == [(version, header.shards.digest)] * self.pieces:
                        digests.add(header.shards.digest)
                        common |= header.shards.common
                    world = header.world_size
        return world, digests, common

    def is_whole(self, version: Version, nodes: Sequence[Node]) -> bool:
        world, digests, common = self.holders(version, nodes)
        shards = len({digest for digest in digests if int(digest[:8], 16) == world})
        wanted = self.shards_of.get(version, 0)
        return bool(world) and common and shards == wanted

    def check(self) -> None:
        """R1 at this instant: any one node may be lost, if none was lost since the acknowledgment."""
        if self.floor is None or self.losses > 1:
            return
        gone: list[Node | None] = [None, *self.nodes] if not self.losses else [None]
        versions = {header.version for node in self.nodes for *_, header in node.sealed()}
        newer = sorted((one for one in versions if one >= self.floor), reverse=True)
        for lost in gone:
            left = [node for node in self.nodes if node is not lost]
            if left and not self.on_disk(self.floor) and not any(self.is_whole(v, left) for v in newer):
                name = lost.name if lost is not None else "no node"
                self.require(
                    False, "R1", f"the loss of {name} loses {self.floor}, {self.losses} nodes lost before"
                )

    def on_disk(self, version: Version) -> bool:
        return self.disk is not None and (self.disk.generation, self.disk.step) >= version

    # ------------------------------------------------------------ a generation begins

    def form(self) -> None:
        if self.team is not None and self.team.alive:
            return
        alive = [node for node in self.nodes if node.alive]
        if not alive:
            self.add_node()
            self.after(1.0, self.form)
            return
        self.generation += 1
        before = self.team.nodes if self.team is not None else []
        alive.sort(key=lambda node: node not in before)  # a member makes room for no other node
        most = alive[:MOST_NODES]
        members = most[: len(most) // self.multiple * self.multiple] or most
        if self.rng.random() < 0.3:
            self.rng.shuffle(members)
        team = self.team = Team(self.generation, members, self.per_node, self.groups)
        offers = self.offers(team)
        source = choose_source(offers)
        self.seen["unusable"] += bool(unusable(offers, source))
        self.say(
            f"generation {team.generation} of {[node.name for node in team.nodes]} loads "
            f"{source.version if source else None}; floor {self.floor}, {self.losses} lost"
        )
        self.judge_choice(source)
        if source is not None:
            team.step = team.resumed_from = source.what.step
        if source is not None and isinstance(source.what, Header):
            team.protected = source.version
        self.soon(0.1, 2.0, lambda: self.loaded(team, source))

    def offers(self, team: Team) -> list[Offer]:
        found = []
        for rank, (node, local) in enumerate(team.ranks):
            copies = self.copies_on(node) if local == 0 else ()
            found.append(Offer(self.disk if rank == 0 else None, (), copies, node.name, f"{node.name}:1"))
        for node in self.nodes:
            if node.alive and node not in team.nodes and self.bug != "nodes that stand by offer nothing":
                found.append(Offer(None, (), self.copies_on(node), node.name, f"{node.name}:1"))
        return found

    def copies_on(self, node: Node) -> tuple[FoundCopy, ...]:
        return tuple(
            FoundCopy(SlotFolder("d" * 16, at, origin), "ab"[place], self.claimed(header, origin))
            for (at, origin), place, _, header in node.sealed()
        )

    def claimed(self, header: Header, origin: str) -> Header:
        assert header.shards is not None
        if self.bug == "a stale replica is chosen" and origin:
            newest = max(one.version for node in self.nodes for *_, one in node.sealed())
            return replace(header, generation=newest[0], step=newest[1])
        if self.bug == "a version counts with a rank missing":
            others = tuple(rank for rank in range(header.world_size) if rank != header.shards.rank)
            return replace(header, shards=replace(header.shards, twins=others))
        return header

    def judge_choice(self, source: Source | None) -> None:
        version = source.version if source is not None else None
        by_name = {node.name: node for node in self.nodes}
        if source is not None and isinstance(source.what, Header):
            self.seen["loaded from memory"] += 1
            for rank, places in enumerate(source.places):
                for place in places:
                    assert self.team is not None
                    on_team = by_name[place.node] in self.team.nodes
                    self.seen["loaded from a node that stands by"] += not on_team
                    slot = by_name[place.node].slots(key_of(place))["ab".index(place.slot)]
                    wanted = (
                        source.version,
                        f"{source.world_size:08x}{rank % self.shards_of[source.version]:08x}",
                    )
                    torn = slot.pieces != [wanted] * self.pieces
                    self.require(not torn, "R3", f"{place} has {slot.pieces} for rank {rank}")
            if any(place.folder.origin and len(places) == 1 for places in source.places for place in places):
                self.seen["loaded from a replica alone"] += 1
        elif source is not None:
            self.seen["loaded from disk"] += 1
        if self.floor is not None and self.losses < 2:
            self.require(
                version is not None and version >= self.floor, "R1", f"{version} is below {self.floor}"
            )
        if self.whole_floor is not None and not self.losses_since_whole:
            self.require(
                version is not None and version >= self.whole_floor,
                "R2",
                f"{version} is below {self.whole_floor}",
            )
        if version is None or (self.floor is not None and version < self.floor):
            self.floor = None

    def loaded(self, team: Team, source: Source | None) -> None:
        if not team.alive:
            return
        if source is not None and source.places and source.world_size == team.world_size:
            self.fetch(team, source)
        team.resumed = team.protected or (0, 0)
        digests = [team.digest(rank) for rank in range(team.world_size)]
        loaded = [self.loaded_digest(team, rank) for rank in range(team.world_size)]
        if self.bug == "who will have the same shards counts for the loaded version, too":
            loaded = digests
        chosen, team.needs = self.partners(team, digests)
        chosen_then, team.loaded_needs = self.partners(team, loaded)
        for node in team.nodes:
            order = Order(team.generation, team.resumed, chosen[node.name], chosen_then[node.name])
            self.soon(0.0, 0.5, lambda node=node, order=order: self.ordered(team, node, order))  # type: ignore[misc]
        if self.bug == "replicas are dropped too early":
            for node in team.nodes:
                self.settle(node, (team.generation, 0))
        team.training = True
        self.soon(0.5, 1.0, lambda: self.step(team))

    def loaded_digest(self, team: Team, rank: int) -> str:
        node, local = team.ranks[rank]
        for slot in node.slots((local, "")):
            if slot.header is not None and slot.header.version == team.resumed:
                assert slot.header.shards is not None
                return slot.header.shards.digest
        return ""

    def partners(
        self, team: Team, digests: Sequence[str]
    ) -> tuple[dict[str, tuple[Keeper, ...]], list[frozenset[str]]]:
        """By node, for shards of these digests; and by rank, who is to have them."""
        places = [
            NodePlace(
                node.name,
                f"{node.name}:1",
                frozenset(digests[rank] for rank, (at, _) in enumerate(team.ranks) if at is node) - {""},
            )
            for node in team.nodes
        ]
        chosen = partners(places, self.replicas)
        if self.bug == "both copies on one node":
            chosen = {one.node: (Keeper(one.node, one.digests),) for one in places}
        return chosen, [
            frozenset(one.node for one in chosen[node.name] if digests[rank] in one.digests)
            for rank, (node, _) in enumerate(team.ranks)
        ]

    def fetch(self, team: Team, source: Source) -> None:
        """Each rank that has no copy of the loaded version in its own slots takes its old one there."""
        by_name = {node.name: node for node in self.nodes}
        for rank, (node, local) in enumerate(team.ranks):
            slots = node.slots((local, ""))
            place = source.places[rank][0]
            shards = place.header.shards
            target = slot_to_overwrite(self.states(team, rank), source.version)
            if (
                shards is None
                or any(one.node == node.name for one in source.places[rank])
                or target is None
                or any(s.header and s.header.version == source.version for s in slots)
            ):
                continue
            there = by_name[place.node].slots(key_of(place))["ab".index(place.slot)]
            if not by_name[place.node].alive or there.header != place.header:
                continue
            slots[target].header, slots[target].pieces = place.header, list(there.pieces)
            slots[target].acks = None
            self.seen["a rank took its old copy"] += 1
        self.check()

    def ordered(self, team: Team, node: Node, order: Order) -> None:
        """The server, and the workers for their own slots, drop what is abandoned."""
        if not (node.alive and team.alive):
            return
        node.order = order
        node.failing_since.clear()
        node.given_up.clear()
        for slot in (slot for slots in node.folders.values() for slot in slots):
            slot.acks = None
        for key, _, slot, header in list(node.sealed()):
            if key[1] and order.abandons(header.version):
                slot.header = None
                self.seen["abandoned"] += 1
        for key, incoming in list(node.incoming.items()):
            if order.abandons(incoming.header.version):
                self.give_up(node, key)
        self.check()
        self.kick(node)

    # ------------------------------------------------------------ training

    def step(self, team: Team) -> None:
        if not team.alive:
            return
        team.step += 1
        if team.step % self.save_every == 0:
            self.call(team, self.now + MUST_AFTER_S)
        elif team.step % self.every == 0:
            self.call(team, None)
        else:
            self.after(STEP_S, lambda: self.step(team))

    def call(self, team: Team, must_at: float | None) -> None:
        """`remember`; or with an instant `save`, which goes on asking until then."""
        everyone: list[Readiness | None] = [None] * team.world_size

        def bring(rank: int) -> None:
            if not team.alive:
                return
            everyone[rank] = Readiness.from_bytes(Readiness(self.states(team, rank)).to_bytes())
            ready = [one for one in everyone if one is not None]
            if len(ready) == team.world_size:
                self.decide(team, ready, must_at)

        for rank in range(team.world_size):
            self.soon(0.0, 0.2, lambda rank=rank: bring(rank))  # type: ignore[misc]

    def states(self, team: Team, rank: int) -> tuple[SlotState, SlotState]:
        node, local = team.ranks[rank]
        first, second = (self.state(team, rank, slot) for slot in node.slots((local, "")))
        return first, second

    def state(self, team: Team, rank: int, slot: Slot) -> SlotState:
        version = slot.header.version if slot.header is not None else None
        found = Replication.PENDING
        if version is not None and rank < len(team.needs):
            nodes, given_up = self.acknowledged(team, slot)
            needs = team.loaded_needs if version == team.resumed else team.needs
            missing = needs[rank] - nodes
            found = Replication.PENDING if missing - given_up else Replication.DEGRADED
            found = found if missing else Replication.ACKNOWLEDGED
        if self.bug == "the older slot is overwritten before the newer was acknowledged" or (
            self.bug == "the first copy does not wait for the loaded version's replicas"
            and version is not None
            and version[0] < team.generation
        ):
            found = Replication.ACKNOWLEDGED
        return SlotState(version, found, bool(slot.readers), slot.writing)

    def acknowledged(self, team: Team, slot: Slot) -> tuple[frozenset[str], frozenset[str]]:
        if slot.acks is None or slot.header is None or slot.acks[0] != slot.header.version:
            return frozenset(), frozenset()
        if slot.acks[1] != team.generation:
            return frozenset(), frozenset()
        return slot.acks[2:]

    def decide(self, team: Team, everyone: list[Readiness], must_at: float | None) -> None:
        must = must_at is not None and self.now >= must_at
        if self.bug == "the newest whole version is overwritten" and self.rng.random() < 0.3:
            must = True
        verdict = may_copy(everyone, (team.generation, team.step), team.protected, must=must)
        team.protected = verdict.protected
        self.seen[f"verdict {verdict.decision.value}"] += 1
        self.say(f"step {team.step}: {verdict.decision.value}, keeps {verdict.protected} {verdict.reason}")
        self.went_on_without(everyone, verdict)
        version = oldest_needed(everyone, team.generation)
        if version is not None:
            for node in team.nodes:
                self.soon(0.0, 0.3, lambda node=node: self.settle(node, version))  # type: ignore[misc]
        if verdict.copies:
            self.released(team, everyone, verdict, must and self.bug is None)
            for rank in range(team.world_size):
                self.soon(0.0, 0.3, lambda rank=rank: self.begin(team, rank, team.step, verdict))  # type: ignore[misc]
            if must_at is not None:
                step = team.step
                self.after(1.0, lambda: self.write(team, (team.generation, step), self.now + 10))
        elif must_at is not None and verdict.decision is Decision.WAIT and self.now < must_at + 10:
            self.after(0.5, lambda: self.call(team, must_at))
            return
        self.after(STEP_S, lambda: self.step(team))

    def went_on_without(self, everyone: Sequence[Readiness], verdict: CopyVerdict) -> None:
        """The version to keep has not all of its replicas, and what was before it is kept no longer."""
        protected = verdict.protected
        if self.floor is None or protected is None or protected <= self.floor:
            return
        if any(
            slot.replication is Replication.DEGRADED
            for one in everyone
            for slot in one.slots
            if slot.version == protected
        ):
            self.floor = None
            self.seen["went on without a partner"] += 1

    def released(self, team: Team, everyone: Sequence[Readiness], verdict: CopyVerdict, must: bool) -> None:
        """What is promised no longer, by a decision that is documented to cost that."""
        protected = verdict.protected
        known = protected is not None and protected[0] == team.generation
        if must and self.whole_floor is not None and protected is not None:
            self.whole_floor = min(self.whole_floor, protected)
        if must and self.floor is not None and (protected is None or protected < self.floor or not known):
            self.floor = protected if known else None
        if must:
            team.released = protected or (0, 0), (team.generation, team.step)
            self.seen["had to copy"] += 1

    def begin(self, team: Team, rank: int, step: int, verdict: CopyVerdict) -> None:
        if not team.alive or (step != team.step and self.rng.random() < 0.5):
            return  # what a rank does by chance alone: its worker hit an error of its own
        states = self.states(team, rank)
        protected = None if self.bug == "each rank overwrites its older slot" else verdict.protected
        target = slot_to_overwrite(states, protected)
        if has(states, (team.generation, step)):
            return
        if target is None:
            self.seen["a slot was busy after all"] += 1
            return
        node, local = team.ranks[rank]
        slot = node.slots((local, ""))[target]
        slot.header, slot.acks, slot.pieces, slot.writing = None, None, [], True
        self.check()
        if self.now < CALM_AT and self.rng.random() < 0.02:
            slot.writing = False
            self.seen["no room"] += 1
            return
        header = Header(
            step,
            team.generation,
            team.resumed_from,
            team.world_size,
            self.pieces,
            shards=RankShards(rank, team.digest(rank), local == 0, team.twins(rank), verdict.protected),
        )
        self.shards_of[header.version] = team.shards
        self.soon(0.0, self.write_s, lambda: self.copy(team, node, slot, header))

    def copy(self, team: Team, node: Node, slot: Slot, header: Header) -> None:
        if not (team.alive and node.alive):
            return
        assert header.shards is not None
        if len(slot.pieces) < self.pieces:
            slot.pieces.append((header.version, header.shards.digest))
            self.soon(0.0, self.write_s / self.pieces, lambda: self.copy(team, node, slot, header))
            return
        slot.header, slot.writing = header, False
        if all(
            any(s.header and s.header.version == header.version for s in at.slots((local, "")))
            for at, local in team.ranks
        ):
            self.whole_floor, self.losses_since_whole = header.version, 0
            self.seen["whole"] += 1
        self.acked(team, header.version)
        self.kick(node)

    def write(self, team: Team, version: Version, until: float) -> None:
        """To disk, from the slots, which are held meanwhile."""
        if not team.alive:
            return
        slots = [
            slot
            for node, local in team.ranks
            for slot in node.slots((local, ""))
            if slot.header is not None and slot.header.version == version
        ]
        if len(slots) < team.world_size:
            if self.now < until:
                self.after(0.5, lambda: self.write(team, version, until))
            return
        for slot in slots:
            slot.readers += 1

        def done() -> None:
            for slot in slots:
                slot.readers -= 1
            if team.alive:
                name = f"step-{version[1]:012d}-{'a' * 16}.pt"
                self.disk = Manifest(version[1], version[0], team.world_size, name, 1, "a" * 64)
                self.seen["on disk"] += 1

        self.soon(0.5, 6.0, done)

    # ------------------------------------------------------------ the memory servers

    def kick(self, node: Node) -> None:
        """Begin to bring what partners do not have."""
        if not node.alive or node.order is None:
            return
        for partner in dict.fromkeys(one.node for one in (*node.order.partners, *node.order.loaded)):
            if partner not in node.bringing:
                node.bringing.add(partner)
                order, boot = node.order, node.boot
                self.soon(0.0, 0.1, functools.partial(self.bring, node, order, boot, partner))

    def is_now(self, node: Node, order: Order, boot: int) -> bool:
        return node.alive and node.boot == boot and node.order is order

    def newest(self, node: Node, order: Order) -> dict[Key, tuple[Slot, Header]]:
        found: dict[Key, tuple[Slot, Header]] = {}
        for key, _, slot, header in node.sealed():
            if not key[1] and not order.abandons(header.version):
                there = found.get(key)
                if there is None or there[1].version < header.version:
                    found[key] = slot, header
        return found

    def bring(self, node: Node, order: Order, boot: int, partner: str) -> None:
        if not self.is_now(node, order, boot):
            if node.alive and node.boot == boot:
                node.bringing.discard(partner)
                self.kick(node)
            return
        missing = {}
        for key, (slot, header) in self.newest(node, order).items():
            acks = slot.acks
            known = acks is not None and acks[:2] == (header.version, order.generation)
            if order.gets(partner, header) and not (known and acks is not None and partner in acks[2]):
                missing[key] = header
        if not missing:
            node.bringing.discard(partner)
            return
        key = max(missing, key=lambda at: (missing[at].version, -at[0]))
        slot = self.newest(node, order)[key][0]
        to = next((one for one in self.nodes if one.name == partner), None)
        if to is None or not to.alive or self.is_cut(node, to):
            self.failed(node, order, boot, partner)
            return
        self.offer(node, order, boot, partner, to, key, slot, missing[key])

    def is_cut(self, one: Node, other: Node) -> bool:
        return self.broken.get(frozenset((one.name, other.name)), 0.0) > self.now

    def failed(self, node: Node, order: Order, boot: int, partner: str, *, refused: bool = False) -> None:
        since = node.failing_since.setdefault(partner, self.now)
        late = refused or self.now - since >= GIVEN_UP_AFTER_S
        if late and partner not in node.given_up:
            node.given_up.add(partner)
            self.seen["given up"] += 1
            for slot, header in self.newest(node, order).values():
                self.acknowledge(node, order, slot, header, None)
        self.soon(0.1, 1.0, lambda: self.bring(node, order, boot, partner))

    def offer(
        self,
        node: Node,
        order: Order,
        boot: int,
        partner: str,
        to: Node,
        key: Key,
        slot: Slot,
        header: Header,
    ) -> None:
        """The partner's answer: it has that copy, or takes the pieces from one on, or cannot now."""
        replica = (key[0], node.name)

        if to.order is not None and to.order.abandons(header.version):
            self.failed(node, order, boot, partner, refused=True)
            return
        if any(
            found == header if at == replica else not at[1] and is_twin(found, header)
            for at, _, _, found in to.sealed()
        ):
            self.seen["had it already"] += 1
            self.heard(node, order, boot, partner, slot, header)
            return
        incoming = to.incoming.get(replica)
        mixed = self.bug == "a transfer goes on in another copy's bytes"
        if incoming is not None and incoming.boot == to.boot and (incoming.header == header or mixed):
            self.seen["went on after a break"] += bool(incoming.slot.pieces)
            incoming.header = header
        else:
            self.give_up(to, replica)
            slots = to.slots(replica)
            assert header.shards is not None
            protected = None if self.bug == "a replica's older slot is overwritten" else header.shards.keep
            first, second = (
                SlotState(s.header.version if s.header else None, held=bool(s.readers), writing=s.writing)
                for s in slots
            )
            target = slot_to_overwrite((first, second), protected)
            if target is None:
                self.seen["a replica was busy"] += 1
                self.failed(node, order, boot, partner, refused=True)
                return
            slots[target].header, slots[target].pieces, slots[target].writing = None, [], True
            to.incoming[replica] = incoming = Incoming(header, slots[target], to.boot)
            self.check()
        self.piece(node, order, boot, partner, to, replica, slot, header, incoming)

    def piece(
        self,
        node: Node,
        order: Order,
        boot: int,
        partner: str,
        to: Node,
        replica: Key,
        slot: Slot,
        header: Header,
        incoming: Incoming,
    ) -> None:
        def arrived(token: Token | None, into: Incoming) -> None:
            if not self.is_now(node, order, boot):
                self.bring(node, order, boot, partner)
                return
            lost = to.incoming.get(replica) is not into or to.boot != into.boot
            if not to.alive or self.is_cut(node, to) or lost:
                self.seen["a connection broke"] += 1
                self.failed(node, order, boot, partner)
                return
            if token is not None:
                into.slot.pieces.append(token)
                self.piece(node, order, boot, partner, to, replica, slot, header, into)
                return
            del to.incoming[replica]
            into.slot.header, into.slot.writing = header, False
            self.seen["replicated"] += 1
            self.soon(0.0, 0.1, lambda: self.heard(node, order, boot, partner, slot, header))

        newest = self.newest(node, order).get((replica[0], ""))
        if newest is None or newest[1] != header or slot.header != header:
            self.seen["superseded"] += 1
            if to.incoming.get(replica) is incoming:
                self.give_up(to, replica)
            self.soon(0.0, 0.1, lambda: self.bring(node, order, boot, partner))
            return
        count = len(incoming.slot.pieces)
        early = self.bug == "acknowledged before the last byte" and count == self.pieces - 1
        if early:
            self.soon(0.0, 0.1, lambda: self.heard(node, order, boot, partner, slot, header))
        token = slot.pieces[count] if count < self.pieces else None
        self.soon(0.0, self.piece_s if token else 0.05, lambda: arrived(token, incoming))

    def give_up(self, node: Node, key: Key) -> None:
        incoming = node.incoming.pop(key, None)
        if incoming is not None:
            incoming.slot.writing = False
            incoming.slot.pieces = []

    def heard(self, node: Node, order: Order, boot: int, partner: str, slot: Slot, header: Header) -> None:
        """An acknowledgment has come back; or not, where the connection broke."""
        to = next((one for one in self.nodes if one.name == partner), None)
        if self.is_now(node, order, boot) and to is not None and not self.is_cut(node, to):
            node.failing_since.pop(partner, None)
            node.given_up.discard(partner)
            if slot.header == header:
                self.acknowledge(node, order, slot, header, partner)
        self.bring(node, order, boot, partner)

    def acknowledge(self, node: Node, order: Order, slot: Slot, header: Header, by: str | None) -> None:
        known = slot.acks is not None and slot.acks[:2] == (header.version, order.generation)
        nodes = slot.acks[2] if known and slot.acks is not None else frozenset()
        nodes |= {by} if by is not None else set()
        slot.acks = header.version, order.generation, nodes, frozenset(node.given_up)
        if self.team is not None and self.team.alive:
            self.acked(self.team, header.version)

    def acked(self, team: Team, version: Version) -> None:
        """Whether that version now counts as replicated."""
        if version[0] != team.generation or (self.floor is not None and version <= self.floor):
            return
        if team.released[0] < version < team.released[1]:
            return
        for rank, (node, local) in enumerate(team.ranks):
            slot = next(
                (s for s in node.slots((local, "")) if s.header and s.header.version == version), None
            )
            if slot is None:
                return
            others = {team.ranks[twin][0].name for twin in team.twins(rank)} - {node.name}
            nodes = self.acknowledged(team, slot)[0]
            if not team.needs[rank] <= nodes or not (team.needs[rank] or others):
                return
        self.floor, self.losses = version, 0
        self.seen["acknowledged"] += 1
        self.say(f"{version} is acknowledged by all")
        for rank, (node, _) in enumerate(team.ranks):
            self.require(
                node.name not in team.needs[rank],
                "R4",
                f"{node.name} keeps the replica of its own rank {rank}",
            )
        self.check()

    def settle(self, node: Node, version: Version) -> None:
        for key, slots in list(node.folders.items()):
            versions = [slot.header.version for slot in slots if slot.header is not None]
            incoming = node.incoming.get(key)
            if incoming is not None:
                versions.append(incoming.header.version)
            if key[1] and is_superfluous(versions, version):
                del node.folders[key]
                self.seen["dropped"] += 1
        self.check()

    # ------------------------------------------------------------ the nemesis

    def fault(self) -> None:
        if self.now > CALM_AT:
            self.broken.clear()
            return
        rng = self.rng
        what = rng.choices(
            ("node", "worker", "server", "cut", "leave", "join", "two nodes"), (4, 4, 3, 3, 1, 2, 0.5)
        )[0]
        if not self.nodes:
            what = "join"
        node = rng.choice(self.nodes or [None])  # type: ignore[list-item]
        self.seen[f"fault {what}"] += 1
        if what == "node":
            self.lose(node, "is killed")
        elif what == "two nodes":
            self.lose(node, "is killed")
            if self.nodes:
                self.lose(rng.choice(self.nodes), "is killed with it")
        elif what == "worker":
            self.end_team("a worker dies")
        elif what == "server":
            self.say(f"the server of {node.name} starts anew")
            node.boot += 1
            for key in list(node.incoming):
                self.give_up(node, key)
            node.bringing.clear()
            node.failing_since.clear()
            node.given_up.clear()
            self.soon(0.1, 2.0, lambda: self.serve_anew(node))
        elif what == "cut" and len(self.nodes) > 1:
            one, other = rng.sample(self.nodes, 2)
            until = self.now + rng.choice((0.2, 2.0, 12.0))
            self.broken[frozenset((one.name, other.name))] = until
            self.say(f"{one.name} and {other.name} are cut until {until:.2f}")
        elif what == "leave" and len(self.nodes) > 1:
            self.lose(node, "leaves")
        elif what == "join":
            self.end_team("a node joins")
            self.add_node()
        if self.now < CALM_AT - 10 or self.nodes:
            self.soon(0.5, 15.0, self.fault)

    def serve_anew(self, node: Node) -> None:
        """The order is kept, and who has what."""
        self.kick(node)

    def lose(self, node: Node, how: str) -> None:
        self.say(f"{node.name} {how}")
        node.alive = False
        self.nodes.remove(node)
        self.losses += 1
        self.losses_since_whole += 1
        if self.losses > 1:
            self.floor = None
        self.check()
        self.end_team(f"{node.name} {how}")
        if self.rng.random() < 0.7 or not self.nodes:
            self.soon(0.1, 5.0, self.replace_lost)

    def replace_lost(self) -> None:
        self.add_node()
        self.end_team("a node comes in place of one")

    def end_team(self, why: str) -> None:
        team = self.team
        if team is None or not team.alive:
            return
        self.say(f"generation {team.generation} ends: {why}")
        team.alive = False
        for node, local in team.ranks:
            for slot in node.slots((local, "")):
                slot.writing = False
        self.soon(0.1, 3.0, self.form)

    def read_some(self) -> None:
        """Any slot may be read at any time, for a while."""
        slots = [slot for node in self.nodes for _, _, slot, _ in node.sealed()]
        if slots and self.now < CALM_AT:
            slot = self.rng.choice(slots)
            slot.readers += 1

            def done() -> None:
                slot.readers -= 1

            self.soon(0.05, 1.5, done)
        self.soon(0.2, 3.0, self.read_some)

    def check_end(self) -> None:
        team = self.team
        self.require(team is not None and team.alive, "R5", "no generation runs")
        assert team is not None
        newest = (team.generation, team.step - 3 * self.every - 10)
        if len(team.nodes) > 1 and self.piece_s <= 0.3:
            self.require(
                self.floor is not None and self.floor >= newest, "R5", f"{self.floor} at step {team.step}"
            )
            names = {node.name for node in team.nodes}
            for node in team.nodes:
                left = [key for key in node.folders if key[1] and key[1] not in names]
                self.require(not left, "R5", f"{node.name} still has replicas {left}")


if __name__ == "__main__":
    run = Replicating(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None, tell=True)
    run.play()
    print(run.seen)
