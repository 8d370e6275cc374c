"""The copies that one worker makes of its state in the slots of this node, and takes out again.

A slot holds the very bytes of the file that `torch.save` would write (see `archive_layout`), so whatever torch can load
can be kept here. While a GPU still copies, the process goes on, and a thread seals the slot when the last byte has come
(`copies`).

What is taken out is mapped, not read: the only copy is the one that `load_state_dict` makes (see `state_dicts`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from io import BufferedRandom, BufferedReader
from typing import Any

import torch

from ...state.archive_layout import LayoutCache
from ...state.state_dicts import is_plain, prove_loadable, with_numbers
from ...wire.environment import WorkerEnv
from ...wire.run import this_run
from .copy_header import Header, NotedState
from .slot_memory import CopyUnderWay, RankPlace, SlotMemory
from .slots import HeldSlot, Slots, sums_of

logger = logging.getLogger(__name__)


class NodeMemory(SlotMemory):
    """One Checkpointer's copies in the memory of this node, as one rank sees them."""

    def __init__(self, slots: Slots, limit: int, place: RankPlace) -> None:
        """As `SlotMemory`."""
        super().__init__(slots, limit, place)
        self._proven = False
        self._layout_cache = LayoutCache()

    @property
    def copies_for_node(self) -> bool:
        """Whether this rank copies the state for all of its node."""
        return self.place.local_rank == 0

    # ---------------------------------------------------------------- putting in

    def begin_copy(
        self, payload: dict[str, Any], *, room_for_random_state: int = 0, partial: bool = False
    ) -> CopyUnderWay:
        """Copy a state into a slot, with room for all ranks' random states if it does not hold them. `seal` follows.

        `partial`: see `Header`.

        Raises NoRoom, SlotsBusy, CannotLayOut; what `prove_loadable` raises; what the states' own pickling raises.
        """
        place = self.place
        rows = torch.zeros(place.world_size, room_for_random_state, dtype=torch.uint8)
        if room_for_random_state:
            payload = {**payload, "rng": rows}
        was_plain = is_plain(payload)
        if not was_plain:
            payload = with_numbers(payload)
        layout = self._layout_cache.lay_out(payload)
        with self.costing_a_copy_only():
            opened = self._begin(layout.size)
            try:
                mapping = self._mapped(opened)
                opened.trim()
                events = layout.copy_to(mapping.view, mapping.tensor)
                if not (self._proven and was_plain):
                    prove_loadable(opened.path, payload["step"], payload["state"])
                    self._proven = True
                holes = []
                if rows.numel():
                    begin = layout.offset_of(rows)
                    holes = [
                        (begin + rank * rows.shape[1], rows.shape[1]) for rank in range(place.world_size)
                    ]
            except BaseException:
                opened.close()
                raise
        header = Header(
            payload["step"],
            place.generation,
            self.resumed_from,
            place.world_size,
            layout.size,
            tuple(holes),
            partial,
            run=place.run,
        )
        return CopyUnderWay(opened, header, events)

    def mark_partial(self, step: int) -> bool:
        """Whether this step's state is here already. From now on it counts without a record of the rank that failed."""
        return self._slots.mark_partial((self.place.generation, step))

    # ---------------------------------------------------------------- taking out

    def copies(self) -> tuple[Header, ...]:
        """Local rank 0: what is here; what cannot be believed is logged."""
        for problem in self._slots.problems():
            logger.warning("a copy in memory is left aside: reason=%s", problem)
        return tuple(self._slots.headers().values())

    def noted(self) -> tuple[NotedState, ...]:
        """Local rank 0: random states of this node's ranks, also after a state of which the copy here is gone."""
        found = self._slots.random_states.all()
        return tuple(NotedState(one.version, one.world_size, rank) for rank, one in found)

    def hold(self, version: tuple[int, int]) -> HeldSlot:
        """Open this node's copy of a state, which local rank 0 verifies.

        Raises OSError, ValueError when it is not what was offered.
        """
        held = self._hold(version)
        if (
            self.copies_for_node
            and held.header.sums
            and sums_of(held.stream, held.header.size) != held.header.sums
        ):
            held.stream.close()
            raise ValueError(f"{held.name}.pt in {self._slots.folder} does not match its checksums")
        return held

    def _hold(self, version: tuple[int, int]) -> HeldSlot:
        # A step may have been remembered and then saved: the copy without holes has all that the other has.
        found = sorted(
            self._slots.headers().items(), key=lambda one: (len(one[1].rng_holes), not one[1].sums)
        )
        for name, header in found:
            if header.version == version:
                return self._slots.hold(name)
        raise ValueError(
            f"step {version[1]} of generation {version[0]} is not in {self._slots.folder} any more"
        )

    def is_whole(self, version: tuple[int, int]) -> bool:
        """Whether a copy of that state is here which needs no records."""
        return any(
            header.version == version and not header.rng_holes for header in self._slots.headers().values()
        )

    def lend(self, version: tuple[int, int]) -> tuple[Slots, HeldSlot]:
        """For the disk: that copy, which is not overwritten until it is closed. Raises as `hold`."""
        return self._slots, self._hold(version)

    def records(self, header: Header) -> dict[int, bytes]:
        """The random states that this node's ranks have written down for that state."""
        return self._slots.random_states.of(header.version, header.world_size)

    def fill(self, version: tuple[int, int], records: dict[int, bytes]) -> None:
        """Local rank 0: complete the copy of that state, so that it needs no records any more."""
        with self._hold(version) as held:
            self._slots.fill(held, records)


def memory_of(environ: Mapping[str, str], directory: str) -> NodeMemory | None:
    """None where there is no agent, or one that grants no memory."""
    try:
        env = WorkerEnv.of(environ)
        if not env.memory:
            return None
        place = RankPlace(
            env.node,
            env.generation,
            int(environ["RANK"]),
            env.local_rank,
            int(environ["WORLD_SIZE"]),
            this_run(environ).id,
        )
        return NodeMemory(Slots(env.memory, directory), env.memory_bytes, place)
    except (KeyError, ValueError, OSError) as error:
        logger.warning("no copies in memory, checkpoints go to disk only: reason=%r", error)
        return None


def load_mapped(stream: BufferedReader | BufferedRandom) -> Any:
    """The payload in an open file; its tensors are the file's own memory, and must not outlive the load."""
    try:
        return torch.load(
            f"/proc/self/fd/{stream.fileno()}", map_location="cpu", mmap=True, weights_only=True
        )
    except (OSError, RuntimeError):  # a file system that cannot map
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
