"""A world whose members have all gone from the store at once: which of them may still train, and for how long.

One member that goes while others stay has stopped by its lease. All of them together may be another matter: the store
was lost with what it knew, and the leases that it had granted are still good on their side; or the members go on
through an outage because they prove to each other that they are all there (`lease_validity`), and the store has let
their leases end meanwhile. So the next world waits for those of which nothing is known, and for no longer than they can
train.

That a machine refuses connections proves nothing here: a firewall between it and all others cuts its agents off from
the store, and may send the same. But where another agent of that machine is in the store, the machine reaches it, and
an agent that was refused there and lived would have joined anew.
"""

from __future__ import annotations

from collections.abc import Collection

from ..records import CauseKind, Member, NodeRecord, World
from .lease_validity import may_be_whole


def may_still_train(
    world: World, nodes: Collection[NodeRecord], refused: Collection[str] = ()
) -> tuple[Member, ...]:
    """Empty where a member is live: the lease judges the others. Empty, too, where this world stops for a known cause.

    An agent has no workers of that world any more when it has joined anew, another one has come with the node's name,
    or it is `refused` on a machine with a live node.
    """
    live = {node.incarnation: node.node for node in nodes}
    known_cause = world.cause.kind is not CauseKind.LOST
    if known_cause or any(member.incarnation in live for member in world.members):
        return ()
    here = set(live.values())
    machines = {node.http.address for node in nodes if node.http is not None}
    return tuple(
        member
        for member in world.members
        if member.node not in here
        and not (
            member.incarnation in refused and member.http is not None and member.http.address in machines
        )
    )


def until(
    world: World, missing: Collection[Member], since: float, *, unleased_s: float, grace_s: float
) -> float:
    """When they have stopped for certain, seen by a coordinator that knows this since then.

    No member goes on beyond its lease by the proof that all are there when one of them is known not to be.
    """
    whole = len(missing) == len(world.members) and may_be_whole(world)
    return since + unleased_s + (grace_s if whole else 0.0)
