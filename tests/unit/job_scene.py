"""A job of two nodes in a store, while a command about one of its nodes waits for it: no clock, no threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastic_agent.rendezvous.records import (
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
from elastic_agent.rendezvous.store.interface import Delete, Put
from elastic_agent.rendezvous.store.memory import MemoryStore

A = NodeRecord("a", "life-a", "host-a", 4001, slots=2)
B = NodeRecord("b", "life-b.1", "host-b", 4002, slots=1)
WORLD = World("job", 4, Phase.RUNNING, assign_ranks((A, B)), Endpoint("host-a", 4001), Cause(CauseKind.START))


class JobScene:
    """Each look of the command comes after the next thing has happened."""

    def __init__(self, *things: World | NodeRecord) -> None:
        """`things` are in the store."""
        self.store = MemoryStore()
        self.now = 0.0
        self.happens: Iterator[Callable[[], object]] = iter(())
        self.put(*things)

    def put(self, *things: World | NodeRecord) -> None:
        for thing in things:
            key = WORLD_KEY if isinstance(thing, World) else node_key(thing.node)
            self.store.transact((), (Put(key, thing.to_json()),))

    def delete(self, key: str) -> None:
        self.store.transact((), (Delete(key),))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        next(self.happens, lambda: None)()
