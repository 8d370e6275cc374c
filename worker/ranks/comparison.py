"""Whether rank 0's state may stand for that of all ranks, which is what a Checkpointer saves and every rank loads.

State of which each rank has only a part must never be saved so: the other ranks would go on with a part that is not
theirs, and nothing would show it. A Checkpointer that is made of sharded parts saves the shards of each rank, see
`checkpointing.sharded`. Refused here are parts that were sharded later, and those that no type shows: tensor
parallelism and ZeRO with plain tensors, PowerSGD's error feedback. What the script declares to be each rank's own is
saved by each rank, and not compared.
Two checks refuse it, by name:

1. By type, before any `state_dict()` is called: some are collectives, which one rank alone would never leave.
2. By a fingerprint (see `fingerprint`). Each rank makes its own and all compare them: at every save and at the end of a
   planned change, where all meet anyway; and through the process group's store where no rank may wait for another
   (copies in memory). There, equal once after training has changed the state, it is not made again before the next save
   or load, unless a part that is no module holds more tensors than it did then: error feedback begins late.

Ranks differ by right in the buffers of modules (statistics of BatchNorm), of which names and shapes are compared
only, in all that is no tensor, and in parts that the script has declared to be rank 0's.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, NotPlainData, NotReplicated, Sharded
from ..state.kinds import (
    SHARDED_TENSORS,
    SHARDING_MODULES,
    SHARDING_OPTIMIZERS,
    is_sharded,
    is_spread,
    kind_of,
)
from ..state.state_dicts import Part, state_of, unwrapped
from ..steps import progress
from .fingerprint import DRIFT, Entry, Look, difference, entries_of, farthest, look_at, shape_of, tensors_in
from .group import Group, because, raise_together

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""For ranks that do not come to a step at which this one copies its state. It is waited for once."""

REFUSED = hashlib.sha256(b"refused").digest()
"""In the place of a digest, where a state was refused."""
DIGEST_BYTES = len(REFUSED)

_TOO_LATE = (
    "it was sharded after the Checkpointer was made: make the Checkpointer after fully_shard(), "
    "FullyShardedDataParallel() or parallelize_module()"
)
_HIDDEN = (
    "a Checkpointer sees shards in modules, optimizers and dicts only, as it calls no state_dict() to find them: give "
    "it the module that has these tensors, or these tensors in a dict"
)
_WHOLE = "every rank has all of it: let it be a plain tensor, as its to_local()"
_PLAIN = (
    "a Checkpointer carries of plain tensors only what is the same on every rank. Where these are shards, use "
    "fully_shard() or parallelize_module() before the Checkpointer is made, or leave them out of its state and save "
    "them with torch.distributed.checkpoint"
)

_CARRIED_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)

_numbers = itertools.count()


# ---------------------------------------------------------------- by type


def refuse_sharded(state: Mapping[str, Part]) -> None:
    """Look at the objects themselves, and call nothing of theirs. Raises Sharded."""
    for name, part in state.items():
        if isinstance(part, dict):
            continue
        part = unwrapped(part)
        if isinstance(part, torch.nn.Module):
            _refuse_module(name, part)
        elif isinstance(part, torch.optim.Optimizer):
            if kind := kind_of(part, SHARDING_OPTIMIZERS):
                raise Sharded(f"part {name!r} is a {kind}: {_TOO_LATE}")
            for number, group in enumerate(part.param_groups):
                for index, weight in enumerate(group["params"]):
                    _refuse_tensor(part, name, f"param_groups.{number}.params.{index}", weight)


def _refuse_module(name: str, module: torch.nn.Module) -> None:
    for path, child in module.named_modules():
        if kind := kind_of(child, SHARDING_MODULES):
            where = f"module {path!r} of part {name!r}" if path else f"part {name!r}"
            raise Sharded(f"{where} is a {kind}: {_TOO_LATE}")
    for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        _refuse_tensor(module, name, key, tensor)


def _refuse_tensor(part: Part, name: str, key: str, tensor: torch.Tensor) -> None:
    if kind := kind_of(tensor, SHARDED_TENSORS):
        placed = getattr(tensor, "placements", "")
        advice = _TOO_LATE if is_sharded({name: part}) else _HIDDEN if is_spread(tensor) else _WHOLE
        raise Sharded(
            f"{key!r} of part {name!r} is a {kind}{f' placed {placed}' if placed else ''}: {advice}"
        )


def _refuse_kind(name: str, key: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        kind = "on the meta device, without values"
    elif tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout not in _CARRIED_LAYOUTS:
        kind = f"a tensor of the layout {tensor.layout}"
    else:
        return
    raise NotPlainData(
        f"{key!r} of part {name!r} is {kind}, which a Checkpointer does not carry: let its state_dict() return plain "
        "tensors"
    )


def _outline(state: Mapping[str, Part], of_rank_0: Collection[str]) -> int:
    """Of what is compared and grows while training goes on; cheap enough for every step."""
    grows: list[Any] = []
    for name, part in state.items():
        if name in of_rank_0 or isinstance(
            unwrapped(part) if not isinstance(part, dict) else part, torch.nn.Module
        ):
            continue
        if isinstance(part, torch.optim.Optimizer):
            grows.append(tuple(map(len, part.state.values())))
        else:
            grows.append(
                tuple((key, shape_of(one), one.dtype) for key, one in tensors_in(state_of(part), ""))
            )
    return hash(tuple(grows))


# ---------------------------------------------------------------- compared


class Comparison:
    """What all ranks should have alike, as this rank sees it; the collectives in which they compare it."""

    def __init__(self) -> None:
        self._mine = Look()
        self._refusal: CheckpointError | None = None
        self._has_warned_of_drift = False

    def digest_of(self, look: Callable[[], Look]) -> bytes:
        """What this rank brings to the collective that begins a save; `look` takes its fingerprint, and may raise.

        Raises nothing: what went wrong is raised on all ranks together.
        """
        self._mine, self._refusal = Look(), None
        try:
            self._mine = look()
        except CheckpointError as refusal:
            self._refusal = refusal
        except Exception as failure:
            self._refusal = because(CheckpointError, f"a state cannot be taken: {failure!r}", failure)
        return self._mine.digest() if self._refusal is None else REFUSED

    def compare(self, group: Group, digests: Sequence[bytes], step: int) -> None:
        """All ranks have brought theirs, after `step`. Raises on all of them together."""
        if len(set(digests)) == 1 and self._refusal is None:
            return
        raise_together(group, self._refusal)
        forms = group.gather(self._mine.digest_of_forms())
        if len(set(forms)) > 1:
            other = _first_other(forms)
            entries = group.gather(self._mine.to_json() if group.rank in (0, other) else b"")
            part, what = difference(entries_of(entries[0]), entries_of(entries[other]), other)
            raise NotReplicated(_refusal(part, what))
        if problem := self._judge(self._mine.entries, group.gather(self._mine.sketches())):
            raise NotReplicated(problem)

    def _judge(self, entries: Sequence[Entry], sketches: Sequence[bytes]) -> str:
        """The problem of ranks whose forms are the same. Empty, with a warning, where they have only drifted apart."""
        apart = farthest(entries, sketches)
        if apart is None:
            return ""
        part, what = apart.entry.part, f"{apart.entry.key!r} of part {apart.entry.part!r}"
        if not apart.distance <= DRIFT:
            return _refusal(part, f"{what} has other values on rank 0 than on rank {apart.rank}")
        if not self._has_warned_of_drift:
            self._has_warned_of_drift = True
            logger.warning(
                "ranks have drifted apart, rank 0's state is kept (said once): %s is %.1e of its size off on rank %d",
                what,
                apart.distance,
                apart.rank,
            )
        return ""


class ReplicatedComparison(Comparison):
    """One Checkpointer's parts as this rank has them, and whether all ranks were seen to have the same."""

    def __init__(self, state: Mapping[str, Part], of_rank_0: Collection[str]) -> None:
        super().__init__()
        if unknown := set(of_rank_0) - set(state):
            raise ValueError(
                f"from_rank_0 names {sorted(unknown)}, which are no parts of the state: expected some of "
                f"{sorted(state)}"
            )
        self._state = state
        self._of_rank_0 = frozenset(of_rank_0)
        # Of the Checkpointers of one process, in the order that all ranks make them in.
        self._number = next(_numbers)
        self._loads = 0
        self._resumed_from = 0
        """The step at which training began here: up to there ranks may be equal only because all have just begun."""
        self._proven: int | None = None
        """The outline with which all ranks were the same."""
        self._published: _StoreComparison | None = None
        self.cancel_publish: Callable[[], None] = lambda: None
        """Ends what `publish_at_next_step` has begun."""

    def began(self, step: int) -> None:
        """All ranks have loaded the state of `step`, together."""
        self._resumed_from, self._proven, self._published = step, None, None
        self._loads += 1

    def digest(self) -> bytes:
        """As `digest_of`, of all parts."""
        return self.digest_of(self._look)

    @property
    def proven(self) -> bool:
        return self._proven == self._outline()

    def _outline(self) -> int:
        return _outline(self._state, self._of_rank_0)

    def _look(self) -> Look:
        refuse_sharded(self._state)
        return look_at(self._state, self._of_rank_0, self._refuse_in_states)

    def _refuse_in_states(self, name: str, key: str, tensor: torch.Tensor) -> None:
        _refuse_tensor(self._state[name], name, key, tensor)
        _refuse_kind(name, key, tensor)

    def _equal(self, step: int) -> None:
        """All ranks were the same after `step`."""
        if step > self._resumed_from:
            self._proven = self._outline()

    def compare(self, group: Group, digests: Sequence[bytes], step: int) -> None:
        """As `Comparison.compare`, and remember that they were the same."""
        super().compare(group, digests, step)
        self._equal(step)

    # ---------------------------------------------------------------- where no rank may wait for another

    def publish_at_next_step(self, group: Group) -> None:
        """Publish at the end of the next step, so that a later comparison need not wait."""

        def publish(step: int) -> None:
            self.cancel_publish()
            if not self.proven:
                self.publish(group, step)

        self.cancel_publish()
        self.cancel_publish = progress.on_step(publish)

    def publish(self, group: Group, step: int) -> None:
        """Put this rank's fingerprint where the others can see it. Does not wait, and raises nothing."""
        digest = self.digest()
        again = (
            self._published.times + 1 if self._published is not None and self._published.step == step else 0
        )
        prefix = f"elastic-agent/replicas/{self._number}/{self._loads}/{step}/{again}"
        self._published = _StoreComparison(prefix, group, step, again, self._outline(), digest, self._mine)
        try:
            self._published.publish()
        except RuntimeError as error:
            logger.warning("the other ranks cannot see this one's state: step=%d reason=%s", step, error)

    def prove(self, group: Group, step: int, *, wait: bool) -> bool:
        """Whether all ranks were seen to have the same; False when some have not come yet, or the store is away.

        Raises NotReplicated on every rank that asks, and what this rank's own state raises.
        """
        outline = self._outline()
        if self._proven == outline:
            return True
        published = self._published
        if published is None or published.outline != outline or published.step <= self._resumed_from < step:
            self.publish(group, step)
            published = self._published
        assert published is not None
        if self._refusal is not None:
            raise self._refusal
        try:
            if not published.all_have_come(wait=wait):
                return False
            problem = "" if published.all_equal() else published.difference(self._judge)
        except RuntimeError as error:
            logger.warning("ranks cannot be compared, so nothing is copied: step=%d reason=%s", step, error)
            return False
        if problem:
            raise NotReplicated(problem)
        self._equal(published.step)
        return True


class _StoreComparison:
    """One comparison through the store: some counters that grow with the ranks that have come.

    Raises RuntimeError where the store does.
    """

    def __init__(
        self,
        prefix: str,
        group: Group,
        step: int,
        times: int,
        outline: int,
        digest: bytes,
        mine: Look,
    ) -> None:
        self.step = step
        self.times = times
        """Comparisons of that step before this one."""
        self.outline = outline
        self._prefix = prefix
        self._group = group
        self._digest = digest.hex()
        self._mine = mine
        self._waited = False

    def publish(self) -> None:
        if self._group.world_size == 1:
            return
        store = _store()
        for what, mine in (
            ("of", self._digest.encode()),
            ("forms", self._mine.digest_of_forms()),
            ("sketches", self._mine.sketches()),
        ):
            store.set(f"{self._prefix}/{what}/{self._group.rank}", mine)
        store.add(f"{self._prefix}/same/{self._digest}", 1)
        if store.add(f"{self._prefix}/come", 1) == self._group.world_size:
            store.set(f"{self._prefix}/complete", "1")

    def all_have_come(self, *, wait: bool) -> bool:
        """They are waited for no more than once."""
        if self._group.world_size == 1:
            return True
        store, key = _store(), f"{self._prefix}/complete"
        if wait and not self._waited:
            self._waited = True
            try:
                store.wait([key], timedelta(seconds=PATIENCE_S))
            except RuntimeError as error:
                logger.warning(
                    "not all ranks have come to this step, so nothing is copied: step=%d reason=%s",
                    self.step,
                    error,
                )
        return bool(store.check([key]))

    def all_equal(self) -> bool:
        world_size = self._group.world_size
        return world_size == 1 or _store().add(f"{self._prefix}/same/{self._digest}", 0) == world_size

    def difference(self, judge: Callable[[Sequence[Entry], Sequence[bytes]], str]) -> str:
        """The problem when all have come and some differ; empty where they have only drifted apart."""
        digests, refused = self._all("of"), REFUSED.hex().encode()
        if refused in digests:
            return f"the state of rank {digests.index(refused)} is refused there: see its log"
        forms = self._all("forms")
        if len(set(forms)) == 1:
            return judge(self._mine.entries, self._all("sketches"))
        other, store = _first_other(forms), _store()
        if self._group.rank in (0, other):
            store.set(f"{self._prefix}/entries/{self._group.rank}", self._mine.to_json())
        pair = [f"{self._prefix}/entries/{rank}" for rank in (0, other)]
        store.wait(pair, timedelta(seconds=PATIENCE_S))
        ours, its = map(entries_of, store.multi_get(pair))
        return _refusal(*difference(ours, its, other))

    def _all(self, what: str) -> list[bytes]:
        """What every rank has brought, by rank."""
        return list(
            _store().multi_get([f"{self._prefix}/{what}/{rank}" for rank in range(self._group.world_size)])
        )


def _refusal(part: str, what: str) -> str:
    of_stages = (
        " Where ranks have stages of a pipeline, call fully_shard() on each, also over a mesh of one rank, before the "
        "Checkpointer is made."
    )
    return (
        f"{what}: {_PLAIN}.{of_stages if what.endswith('only') else ''} "
        f"Where rank 0's is meant for all, declare it: Checkpointer(..., from_rank_0=[{part!r}]); "
        f"where each rank goes on with its own: per_rank=[{part!r}]"
    )


def _first_other(digests: Sequence[Any]) -> int:
    """The first rank that does not have what rank 0 has."""
    return next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)


def _store() -> Any:
    # torch has no public name for it; without a process group this raises ValueError.
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(f"there is no process group: {error}") from error
