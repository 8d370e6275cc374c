"""Replicas of this node's shards on other nodes, as one worker sees them: its orders, and what was acknowledged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import SlotMemory
from ...storage.replication.acks import read_acks
from ...storage.replication.client import ORDER_S, order
from ...storage.replication.copy_rule import Readiness, Replication, SlotState, Version
from ...storage.replication.messages import AbandonNewer, Order, Partner, Replicate, Settled
from ...storage.replication.partners import NodePlace, partners
from ...wire.environment import WorkerEnv
from ...wire.messages import SLOT_NAMES
from .meeting import RankHome

logger = logging.getLogger(__name__)

REPLICA_PATIENCE_S = 1.0
"""For which a save waits until the copy before has its replicas: after that it overwrites this one."""
SLOT_PATIENCE_S = 10.0
"""For which it waits until nothing reads the slot that it needs: after that all ranks write while training waits."""
LOOK_S = 0.01
"""Between two looks at the slots and their replicas."""
BEGIN_S = 2.0
"""For the order that begins the replicas of a generation: the memory server may only be starting."""
LONGEST_S = 60.0
SLOWEST_BYTES_PER_S = 10e6
"""A copy that is not acknowledged after both is taken for one whose partners are out of reach."""


class ShardReplicas:
    """Of one Checkpointer's shards. The first worker of a node gives the orders of its node."""

    def __init__(
        self, directory: str, env: WorkerEnv, memory: SlotMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._env = env
        self._memory = memory
        self._clock = clock
        self._partners: frozenset[str] = frozenset()
        """The nodes that keep replicas of this worker's shards."""
        self._partners_of_loaded: frozenset[str] = frozenset()
        """Those that are to have replicas of the version `_resumed`."""
        self._resumed: Version = (0, 0)
        self._nodes = 1
        self._has_twins = False
        """Another node's workers hold the shards of this one."""
        self._settled: Version | None = None
        self._pending: tuple[Version, float] | None = None
        """The newest version that was seen without its acknowledgments, and since when."""
        self._warned = False
        self._lost_order = False
        """The newest one. Said once in a row."""

    def began(self, homes: Sequence[RankHome], resumed: Version) -> None:
        """All ranks have loaded the version `resumed`, and told where they are: `homes` are by rank.

        From here on this node's copies are brought to its partners.
        """
        node, local_rank = self._env.node, self._memory.place.local_rank
        nodes: dict[str, list[RankHome]] = {}
        for home in homes:
            nodes.setdefault(home.node, []).append(home)
        new = _Distribution(nodes, lambda home: home.digest, node, self._env.memory_replicas)
        # A twin may be gone, and ranks that have the shards of another one from now on lack what was loaded.
        old = _Distribution(nodes, lambda home: home.loaded, node, self._env.memory_replicas)
        self._partners, self._partners_of_loaded = new.partners_of(local_rank), old.partners_of(local_rank)
        self._resumed = resumed
        self._nodes = len(nodes)
        self._has_twins = new.has_twins_of(local_rank)
        self._settled, self._pending = None, None
        if not self._memory.keeps_common or not self._env.memory_server:
            return
        ordered = tuple(
            Partner(one, nodes[one][0].address, new.local_ranks_for(one), old.local_ranks_for(one))
            for one in dict.fromkeys((*new.chosen, *old.chosen))
        )
        self._order(Replicate(self._directory, self._env.generation, resumed, ordered), BEGIN_S)

    def readiness(self, writing: str | None) -> Readiness:
        """Of this worker's slots; `writing` is the one into which a GPU still copies."""
        headers = self._memory.headers()
        first, second = (self._state(name, headers.get(name), name == writing) for name in SLOT_NAMES)
        return Readiness((first, second))

    def outlives_node(self, version: Version) -> bool | None:
        """Whether other nodes have what this worker has of that version, or this is the only node; None: not yet."""
        if self._nodes == 1:
            return True
        if not self._partners:
            return self._has_twins
        for name, header in self._memory.headers().items():
            if header.version == version:
                state = self._replication(name, version, header.size)
                return None if state is Replication.PENDING else state is Replication.ACKNOWLEDGED
        return False

    def settled(self, version: Version | None) -> None:
        """Replicas of older versions than this one need not be kept, see `oldest_needed`."""
        if version is None or version == self._settled:
            return
        self._settled = version
        if self._memory.keeps_common and self._env.memory_server:
            self._order(Settled(self._directory, *version))

    def abandon_newer(self, version: Version) -> None:
        """Training goes on from this version: what this node keeps for others of newer ones must not be loaded."""
        if self._memory.keeps_common and self._env.memory_server:
            generation, step = max(version, (0, 0))
            self._order(AbandonNewer(self._directory, generation, step))

    def _order(self, message: Order, within_s: float = ORDER_S) -> None:
        lost = not order(self._env.memory_server, message, within_s)
        if lost and not self._lost_order:
            logger.warning(
                "the memory server of this node takes no orders, replicas may be missing or old; the agent's log says "
                "more: order=%s",
                type(message).__name__,
            )
        self._lost_order = lost

    def _state(self, name: str, header: Header | None, writing: bool) -> SlotState:
        if writing:
            return SlotState(writing=True)
        held = not self._memory.is_free(name)
        if header is None:
            return SlotState(held=held)
        return SlotState(header.version, self._replication(name, header.version, header.size), held)

    def _replication(self, name: str, version: Version, size: int) -> Replication:
        partners_of_it = self._partners_of_loaded if version == self._resumed else self._partners
        if not partners_of_it:
            return Replication.ACKNOWLEDGED
        acks = read_acks(self._memory.folder, name, version, self._env.generation)
        missing = partners_of_it.difference(acks.nodes)
        if not missing:
            return Replication.ACKNOWLEDGED
        if missing <= set(acks.unreachable) or self._is_late(version, size):
            return Replication.DEGRADED
        return Replication.PENDING

    def _is_late(self, version: Version, size: int) -> bool:
        """A server that is gone says nothing, not even that it has given up."""
        now = self._clock()
        if self._pending is None or self._pending[0] < version:
            self._pending = version, now
        since = self._pending[1] if self._pending[0] == version else now
        if now - since < LONGEST_S + size / SLOWEST_BYTES_PER_S:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                "shards have no replicas on other nodes, training goes on without; do the nodes reach each other's "
                "memory servers (docs/security.md has the ports)? step=%d partners=%s",
                version[1],
                sorted(self._partners | self._partners_of_loaded),
            )
        return True


class _Distribution:
    """Who has which shards of one version, and to whom this node brings its own."""

    def __init__(
        self,
        nodes: Mapping[str, Sequence[RankHome]],
        digest: Callable[[RankHome], str],
        node: str,
        replicas: int,
    ) -> None:
        """`nodes`: by name, the ranks of each in their order; `node` is this one."""
        places = [
            NodePlace(name, homes[0].address, frozenset(map(digest, homes)) - {""})
            for name, homes in nodes.items()
        ]
        chosen = partners(places, replicas)[node]
        self.chosen = {one.node: one.digests for one in chosen}
        self._mine = [digest(home) for home in nodes[node]]
        self._elsewhere = frozenset[str]().union(*(one.digests for one in places if one.node != node))

    def partners_of(self, local_rank: int) -> frozenset[str]:
        mine = self._mine[local_rank]
        return frozenset(node for node, digests in self.chosen.items() if mine in digests)

    def has_twins_of(self, local_rank: int) -> bool:
        """Whether another node's workers have the same shards."""
        return self._mine[local_rank] in self._elsewhere

    def local_ranks_for(self, node: str) -> tuple[int, ...]:
        """Whose copies go to that node."""
        digests = self.chosen.get(node, frozenset())
        return tuple(rank for rank, digest in enumerate(self._mine) if digest in digests)
