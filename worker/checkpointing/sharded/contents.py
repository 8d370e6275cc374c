"""What a checkpoint of a sharded state holds of one rank: its shards, what it has for itself, its random state.

What all ranks should have alike is compared, as of a replicated state: the first rank of each node keeps it for its
node, and no rank could tell whose of several different ones is the right one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ...errors import CheckpointError, Sharded
from ...ranks.fingerprint import Look, look_at_tensors
from ...ranks.group import Group
from ...ranks.refusals import tried
from ...ranks.replicas import Comparison
from ...state import rng
from ...state.rank_parts import Rules
from ...state.sharding.layout import ShardLayout, ShardLayouts
from ...state.sharding.parts import ShardedParts, common_tensors
from ...state.state_dicts import Part, modules_in

RANDOM_STATE = "rng"


class ShardContents:
    """Of one Checkpointer."""

    def __init__(self, parts: Mapping[str, Part], of_rank_0: Collection[str], rules: Rules) -> None:
        self.parts = ShardedParts(parts, of_rank_0, rules)
        self._parts = dict(parts)
        self._of_rank_0 = sorted(of_rank_0)
        self._layouts = ShardLayouts()
        self._common: list[tuple[str, str, torch.Tensor]] = []
        """With part and key, the tensors of the newest layout that are to be compared."""
        self._comparison = Comparison(self._look)

    def refuse(self) -> None:
        """Raises Sharded, or NotPlainData, for what cannot be carried."""
        if self._of_rank_0:
            raise Sharded(
                f"parts {self._of_rank_0} are declared to be rank 0's, which is not carried beside a sharded state: "
                "rank 0 may be lost with its node. Declare them of_each_rank, or leave them out"
            )
        self.parts.refuse()

    def lay_out(
        self, step: int, group: Group, *, common: bool, compare: bool = False
    ) -> tuple[ShardLayout | None, CheckpointError | None]:
        """This rank's copy after `step`, or why there can be none: the other ranks wait for this one.

        `compare`: `digest` follows.
        """

        def lay_out() -> ShardLayout:
            random_state = torch.frombuffer(bytearray(rng.capture()), dtype=torch.uint8)
            items = self.parts.take(
                group.rank, group.world_size, step, common=common, own={RANDOM_STATE: random_state}
            )
            if compare:
                self._common = common_tensors(items)
            return self._layouts.lay_out(items)

        return tried(lay_out, "a state cannot be taken")

    def digest(self) -> bytes:
        """Of what all ranks should have alike, see `Comparison`."""
        try:
            return self._comparison.digest()
        finally:
            self._common = []  # tensors may be replaced before the next

    def compare(self, group: Group, digests: Sequence[bytes], step: int) -> None:
        """Raises NotReplicated on all ranks together."""
        self._comparison.compare(group, digests, step)

    def _look(self) -> Look:
        return look_at_tensors(self._common, modules_in(self._parts))
