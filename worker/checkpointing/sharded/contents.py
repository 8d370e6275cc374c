"""What a checkpoint of a sharded state holds of one rank: its shards, what it has for itself, its random state.

What all ranks should have alike is compared, as of a replicated state: the first rank of each node keeps it for its
node, and no rank could tell whose of several different ones is the right one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ...errors import CheckpointError, Sharded
from ...ranks.comparison import Comparison, digests_of, has_bits
from ...ranks.group import Group, tried
from ...state import rng
from ...state.rank_parts import Rules
from ...state.sharding.layout import ShardLayout, ShardLayouts
from ...state.sharding.parts import ShardedParts, common_tensors
from ...state.sharding.table import RANDOM_STATE
from ...state.state_dicts import Part, modules_in


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A rank's copy, or why there can be none; `common` is the digest of what all ranks should have alike."""

    layout: ShardLayout | None
    refusal: CheckpointError | None
    common: bytes | None = None


class ShardContents:
    """Of one Checkpointer."""

    def __init__(self, parts: Mapping[str, Part], of_rank_0: Collection[str], rules: Rules) -> None:
        self.parts = ShardedParts(parts, of_rank_0, rules)
        self.given = dict(parts)
        self._of_rank_0 = sorted(of_rank_0)
        self._layouts = ShardLayouts()
        self.comparison = Comparison()

    def refuse(self) -> None:
        """Raises Sharded, or NotPlainData, for what cannot be carried."""
        if self._of_rank_0:
            raise Sharded(
                f"parts {self._of_rank_0} are declared to be rank 0's, which is not carried beside a sharded state: "
                "rank 0 may be lost with its node. Declare them per_rank, or leave them out"
            )
        self.parts.refuse()

    def lay_out(self, step: int, group: Group, *, common: bool, compare: bool = False) -> LaidOut:
        """This rank's copy after `step`. Raises nothing: the other ranks wait for this one.

        `compare`: with the digest that all ranks `compare` then.
        """
        alike: list[tuple[str, str, torch.Tensor]] = []

        def lay_out() -> ShardLayout:
            random_state = torch.frombuffer(bytearray(rng.capture()), dtype=torch.uint8)
            own = {group.rank: {(RANDOM_STATE,): random_state, **self.parts.own_parts()}}
            items = self.parts.take(group.rank, group.world_size, step, common=common, own=own)
            if compare:
                alike.extend(common_tensors(items))
            return self._layouts.lay_out(items)

        layout, refusal = tried(lay_out, "a state cannot be taken")
        if not compare:
            return LaidOut(layout, refusal)
        digest = self.comparison.digest_of(lambda: alike, modules_in(self.given), group)
        return LaidOut(layout, refusal, digest)

    def digests(self) -> list[str]:
        """Of each weight and buffer here: others after any step of training.

        What counts changes in place is no such sign: fused and foreach optimizers leave it as it is.
        """
        return digests_of([one for _, one in self.parts.local_tensors() if has_bits(one)])
