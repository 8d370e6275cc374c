"""`elastic-agent readmit NODE`: end the exclusion of a node at once, without a cool-down or a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....rendezvous.coordinator.exclusions import left_out, readmit
from ....rendezvous.records import NodeRecord, World
from ....rendezvous.statements.exclusion import Exclusion
from ....rendezvous.store.interface import Store
from ....rendezvous.text import shortened
from ...common.exits import CommandCode
from ...configuration.rendezvous import RendezvousConfig
from ...configuration.settings import Settings
from ..store_command import CannotDo, store_command
from .exclude import rewrite
from .job_nodes import meeting_place_for

_USAGE = """\
usage: elastic-agent readmit NODE
       elastic-agent readmit NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Ends the exclusion of a node, also one that the job itself has decided: at once, without a cool-down or a check. The job
takes the node in by a planned change, if there is room for it.
"""


def main(words: Sequence[str]) -> int:
    """Returns an `CommandCode`."""
    return store_command("readmit", words, _USAGE, meeting_place_for("readmit"), _work)


def _work(store: Store, place: RendezvousConfig, node: str, command_line: Settings, left_s: float) -> None:
    readmit_node(store, place.job_id, node, lambda line: print(line, flush=True))


def readmit_node(store: Store, job: str, node: str, show: Callable[[str], None]) -> None:
    """Raises CannotDo, StoreError and RecordInvalid."""

    def change(world: World, nodes: Sequence[NodeRecord]) -> tuple[Exclusion, ...]:
        out = left_out(world.exclusions)
        if node not in out:
            raise CannotDo(
                CommandCode.NOT_FOUND,
                f"node {node!r} of job {job!r} is not excluded; those that are: {shortened(out) or 'none'}",
            )
        return readmit(world.exclusions, frozenset({node}))

    rewrite(store, job, change)
    show(f"node {node} is readmitted to job {job}")
