"""Whether all ranks have the same kind of state: a sharded one, or one that is the same on every rank.

Ranks that have a sharded state meet in collectives, which a rank that has another kind never joins. So all ranks
compare what they have before the first of these. Where all call the same method, they do it in a collective. A first
copy to memory, without a load before it, waits for other ranks only where each has something for itself: there each
rank puts its kind into the process group's store.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError
from ..ranks.group import current_group

PATIENCE_S = 10.0
"""For ranks that have not come to their first copy yet; then those that wait for others do so in a collective."""


class Agreement:
    """Of one Checkpointer on one rank. Its methods raise CheckpointError where ranks have different kinds."""

    def __init__(self, directory: str, *, is_sharded: bool, copies_alone: bool) -> None:
        """`copies_alone`: a rank with this state copies it to memory without the others."""
        self._is_sharded = is_sharded
        self._copies_alone = copies_alone
        prefix = f"elastic-agent/kinds/{directory}"
        self._own, self._other = (f"{prefix}/{kind}" for kind in (is_sharded, not is_sharded))
        self._come, self._complete = f"{prefix}/come", f"{prefix}/complete"
        self._has_shown = False
        self._has_seen_all = False
        """In the store. Other ranks may not have, and still meet in the collective."""
        self._has_met = False

    def meet(self) -> None:
        """In a collective: all ranks call this together, and all raise the same."""
        if self._has_met:
            return
        kinds = current_group().gather(b"sharded" if self._is_sharded else b"")
        if len(set(kinds)) > 1:
            ranks = [rank for rank, kind in enumerate(kinds) if kind]
            raise _refusal(f"ranks {ranks} and not on the others")
        self._has_met = True

    def before_copy(self) -> None:
        """All ranks raise the same, but for those that copy alone and have not seen the other kind yet."""
        self._look(wait=not self._copies_alone)
        if not self._copies_alone:
            self.meet()

    def after_no_copy(self) -> None:
        """This rank has waited for others that did not copy: these may have shown another kind by now."""
        self._look(wait=False)

    def _look(self, *, wait: bool) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        if not (is_alone or self._has_met or self._has_seen_all) and self._is_mixed(wait=wait):
            raise _refusal(
                "this rank and not on another one" if self._is_sharded else "another rank and not on this one"
            )

    def _is_mixed(self, *, wait: bool) -> bool:
        """Whether a rank with the other kind has shown it in the store. Raises CheckpointError without the store."""
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            if not self._has_shown:
                store.add(self._own, 1)
                if store.add(self._come, 1) == dist.get_world_size():
                    store.set(self._complete, "1")
                self._has_shown = True
            if wait and not store.add(self._other, 0):
                with contextlib.suppress(RuntimeError):  # they may come in time for the collective
                    store.wait([self._complete], timedelta(seconds=PATIENCE_S))
            self._has_seen_all = store.add(self._own, 0) == dist.get_world_size()
            return bool(store.add(self._other, 0))
        except RuntimeError as error:
            raise CheckpointError(
                "the process group's store does not say whether the state is of one kind, sharded or not, on all "
                f"ranks: {error}. Its process has ended, or cannot be reached; a restart makes another one"
            ) from error


def _refusal(where: str) -> CheckpointError:
    return CheckpointError(
        f"the state is sharded on {where}: make the Checkpointer after fully_shard() or "
        "parallelize_module(), with the same parts on all ranks"
    )
