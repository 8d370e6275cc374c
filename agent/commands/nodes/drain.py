"""`elastic-agent drain NODE`: ask a node of a job to leave it, and show how far that has come.

The request is a key of its own in the job's store, which the node's agent watches. It names the agent's incarnation, so
that a request that was not read in time has no effect later. The rest is as after SIGTERM to the agent: all workers end
after the same step, and the next generation goes on without the node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ....rendezvous.errors import StoreUnavailable
from ....rendezvous.records import (
    DrainRequest,
    NodeRecord,
    Phase,
    World,
    drain_key,
    life_of,
)
from ....rendezvous.store.interface import Compare, Delete, Entry, Put, Store
from ...common.exits import CommandCode
from ...configuration.parse import Option, duration
from ...configuration.rendezvous import RendezvousConfig
from ...configuration.settings import Settings
from ..store_command import CannotDo, store_command
from .job_nodes import LOOK_S, TRIES, look, meeting_place_for, no_such_node, state_of

_USAGE = """\
usage: elastic-agent drain NODE
       elastic-agent drain NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Lets a node leave its job. The workers of all nodes end after the same step and the next generation begins there,
without this node: no step is lost. It may come back: start its agent again. On the node itself, SIGTERM to the agent
does the same.
"""

TIMEOUT: Option[float] = Option(
    "timeout",
    duration(0.1),
    "how long to wait until the node has left; longer than the --stop-grace of its job",
    default="2m",
)


def main(words: Sequence[str]) -> int:
    """Returns a `CommandCode`."""
    place = meeting_place_for("drain")
    return store_command("drain", words, _USAGE, place, _work, timeout=TIMEOUT)


def _work(store: Store, place: RendezvousConfig, node: str, command_line: Settings, left_s: float) -> None:
    drain(store, place.job_id, node, left_s, lambda line: print(line, flush=True))


def drain(
    store: Store,
    job: str,
    node: str,
    timeout_s: float,
    show: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the node has left. Raises CannotDo, StoreError and RecordInvalid."""
    deadline = clock() + timeout_s
    incarnation = _ask(store, job, node)
    show(f"node {node} is asked to leave job {job}")
    shown, away = "", False
    while True:
        try:
            world, nodes, request = _read(store, job, node)
        except StoreUnavailable as error:
            if not away:
                show(f"the store does not answer, trying on: {error}")
            away = True
        else:
            away = False
            record = next((each for each in nodes if life_of(each.incarnation) == incarnation), None)
            if record is None:
                _withdraw(store, request, incarnation)
                show(f"node {node} has left; {state_of(world)}")
                return
            state = f"{'leaving' if record.leaving else 'has not read the request yet'}; {state_of(world)}"
            if state != shown:
                shown = state
                show(f"node {node}: {state}")
        if clock() >= deadline:
            raise CannotDo(
                CommandCode.LATER,
                f"node {node} had not left when --timeout was over: {shown or 'nothing is known of it'}. It was asked, "
                "and may still leave; look with elastic-agent status",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))


def _ask(store: Store, job: str, node: str) -> str:
    """Write the request; returns the incarnation that it is for."""
    for _ in range(TRIES):
        world, nodes, request = _read(store, job, node)
        if world is None and not nodes:
            raise CannotDo(
                CommandCode.NO_JOB,
                f"the store holds nothing of a job {job!r}: check --rdzv-id and --rdzv-endpoint",
            )
        record = next((each for each in nodes if each.node == node), None)
        if record is None and world is not None and world.phase is Phase.ENDED:
            raise CannotDo(CommandCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
        if record is None:
            raise CannotDo(CommandCode.NOT_FOUND, no_such_node(node, nodes, job))
        life = life_of(record.incarnation)
        compare = Compare(drain_key(node), request.mod_revision if request is not None else 0)
        if store.transact((compare,), (Put(compare.key, DrainRequest(life).to_json()),)).succeeded:
            return life
    raise StoreUnavailable(f"others write {drain_key(node)!r} all the time")


def _read(store: Store, job: str, node: str) -> tuple[World | None, Sequence[NodeRecord], Entry | None]:
    world, nodes, entries = look(store, job, drain_key(node))
    return world, nodes, entries.get(drain_key(node))


def _withdraw(store: Store, request: Entry | None, incarnation: str) -> None:
    """Delete the request of an agent that ended before it read it."""
    if request is not None and DrainRequest.from_json(request.key, request.value).incarnation == incarnation:
        store.transact((Compare(request.key, request.mod_revision),), (Delete(request.key),))
