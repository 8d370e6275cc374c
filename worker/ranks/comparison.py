"""Whether rank 0's state may stand for that of all ranks, which is what a Checkpointer saves and every rank loads.

State of which each rank has only a part must never be saved so: the other ranks would go on with a part that is not
theirs, and nothing would show it. What has a type that shows it is refused before (`kinds.refuse_sharded`); tensor
parallelism and ZeRO with plain tensors, and PowerSGD's error feedback, have none.

So each rank makes a digest of names, shapes, dtypes, and all bits, and all compare theirs: at every save and at the end
of a planned change, where all meet anyway; and through the process group's store where no rank may wait for another
(copies in memory). On the CPU, where it takes as long as a few copies, bits are compared once after training has
changed the state, and again when a part that is no module holds more tensors than it did then: error feedback begins
late. On a device, where it takes no time to speak of, they are compared at every save.

Ranks differ by right in the buffers of modules (statistics of BatchNorm), of which names and shapes are compared
only, in all that is no tensor, and in parts that the script has declared to be rank 0's.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import CheckpointError, NotReplicated
from ..state.kinds import flat_bytes, refuse_sharded, refuse_tensor
from ..state.state_dicts import Part, modules_in, state_of, unwrapped
from ..steps import progress
from .group import Group, raise_together, tried

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""For ranks that do not come to a step at which this one copies its state. It is waited for once."""

REFUSED = hashlib.sha256(b"refused").digest()
"""In the place of a digest, where a state was refused."""
DIGEST_BYTES = len(REFUSED)

ROW = 255
"""Values that are added up to one. An odd number: what all of them have in common does not cancel out."""
FEW_BYTES = 8192
"""That stay as they are."""
ROWS_ON_CPU, ROWS_ON_DEVICE = 128, 1 << 14
"""That are weighed at once. On the CPU no more than torch leaves to one thread: several would wait for each other for
seconds where all cores are busy. On a device 33 MB, which a full one still has."""

_PLAIN = (
    "a Checkpointer carries of plain tensors only what is the same on every rank, to the last bit. Where these are "
    "shards, use fully_shard() or parallelize_module() before the Checkpointer is made, or leave them out of its state "
    "and save them with torch.distributed.checkpoint"
)

_numbers = itertools.count()


# ---------------------------------------------------------------- digests


class Entry(NamedTuple):
    """One tensor as one rank has it. `bits` is the digest of these; empty where only the form is compared."""

    part: str
    key: str
    form: str
    bits: str = ""


@torch.no_grad()
def digests_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Of the bits of each, in their order; with one transfer for each device. The same on every rank and device.

    Any one element that differs is found, any two that have changed places, and an offset.
    """
    reduced = [_reduced(_bytes_of(tensor)) for tensor in tensors]
    found = [""] * len(reduced)
    for device in {one.device for one in reduced}:
        here = [place for place, one in enumerate(reduced) if one.device == device]
        raw = torch.cat([reduced[place] for place in here]).cpu().numpy().data
        end = 0
        for place in here:
            begin, end = end, end + len(reduced[place])
            found[place] = hashlib.sha256(raw[begin:end]).hexdigest()[:32]
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return flat_bytes(tensor.resolve_conj().resolve_neg().contiguous())


def _reduced(raw: torch.Tensor) -> torch.Tensor:
    """One sum of each row, of which the same is made again until they are few; beside what is no whole row.

    A sum has a weight for each place in its row, so that changes do not cancel out, as those of two rows and two
    columns do in plain sums: of halves of words first, since a weight cannot tell two changes of a highest bit apart.
    """
    if len(raw) <= FEW_BYTES:
        return raw
    if len(raw) % 4 or raw.storage_offset() % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4))
    weights, at_once = _weights(raw.device), ROWS_ON_CPU if raw.device.type == "cpu" else ROWS_ON_DEVICE
    values, kept = raw.view(torch.int32), []
    while values.nbytes > FEW_BYTES:
        whole = len(values) // ROW * ROW
        kept.append(values[whole:].view(torch.uint8))
        rows = values[:whole].view(-1, ROW)
        values = torch.cat([(some * weights).sum(1) for some in torch.split(rows, at_once)])
    return torch.cat([*kept, values.view(torch.uint8)])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd, and all different in their lower halves: no change of a value is lost, nor two opposite ones in a row."""
    raw = hashlib.shake_256(b"weights").digest(8 * ROW)
    return (torch.frombuffer(bytearray(raw), dtype=torch.int64) | 1).to(device)


def has_bits(tensor: torch.Tensor) -> bool:
    """Where those lie that are made of other tensors is unknown."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def tensors_in(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
        return
    items: Iterator[tuple[Any, Any]]
    if isinstance(state, Mapping):
        items = iter(state.items())
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return
    for key, value in items:
        yield from tensors_in(value, f"{path}.{key}" if path else str(key))


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A nested one has none."""
    return () if tensor.is_nested else tuple(tensor.shape)


# ---------------------------------------------------------------- compared


class Comparison:
    """What all ranks should have alike, as this rank sees it; the collective in which they compare it."""

    def __init__(self) -> None:
        self._mine: list[Entry] = []
        self._refusal: CheckpointError | None = None
        self._resumed_from = 0
        """The step at which training began here: up to there ranks may be equal only because all have just begun."""
        self._known: list[Entry] | None = None
        """The forms of what was the same on all ranks, to the last bit."""

    def began(self, step: int) -> None:
        """All ranks have loaded the state of `step`, together."""
        self._resumed_from, self._known = step, None

    def digest_of(
        self,
        take: Callable[[], Iterable[tuple[str, str, torch.Tensor]]],
        modules: Sequence[torch.nn.Module],
        group: Group,
        *,
        whole: bool = False,
    ) -> bytes:
        """What this rank brings to the collective that begins a save; `take` finds parts, keys and tensors.

        Raises nothing: what went wrong is raised on all ranks together. `whole`: with all bits, although they were
        compared before.
        """
        mine, self._refusal = tried(
            lambda: self._entries(list(take()), modules, group, whole), "a state cannot be taken"
        )
        self._mine = mine or []
        return hashlib.sha256(json.dumps(self._mine).encode()).digest() if mine is not None else REFUSED

    def _entries(
        self,
        found: list[tuple[str, str, torch.Tensor]],
        modules: Sequence[torch.nn.Module],
        group: Group,
        whole: bool,
    ) -> list[Entry]:
        """In an order that is the same on all ranks, as that of their keys is not."""
        if group.world_size == 1:
            return []
        forms = [Entry(part, key, f"{_shape_of(tensor)} {tensor.dtype}") for part, key, tensor in found]
        whole = whole or sorted(forms) != self._known
        buffers = {buffer.data_ptr() for module in modules for buffer in module.buffers() if has_bits(buffer)}
        compared = {
            place: tensor
            for place, (_, _, tensor) in enumerate(found)
            if has_bits(tensor)
            and tensor.data_ptr() not in buffers
            and (whole or tensor.device.type != "cpu")
        }
        for place, bits in zip(compared, digests_of(list(compared.values())), strict=True):
            forms[place] = forms[place]._replace(bits=bits)
        return sorted(forms)

    def compare(self, group: Group, digests: Sequence[bytes], step: int) -> None:
        """All ranks have brought theirs, after `step`. Raises, on all together, NotReplicated, or what one has met."""
        if len(set(digests)) > 1 or self._refusal is not None:
            raise_together(group, self._refusal)
            pair = _pair_of(digests)
            entries = group.gather(json.dumps(self._mine).encode() if group.rank in pair else b"")
            raise NotReplicated(_problem(digests, pair, [entries[rank] for rank in pair]))
        if step > self._resumed_from:
            self._known = [entry._replace(bits="") for entry in self._mine]


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
        self._proven: int | None = None
        """The outline with which all ranks were the same."""
        self._published: _Published | None = None
        self.cancel_publish: Callable[[], None] = lambda: None
        """Ends what `publish_at_next_step` has begun."""

    def began(self, step: int) -> None:
        """All ranks have loaded the state of `step`, together."""
        super().began(step)
        self._proven, self._published = None, None
        self._loads += 1

    @property
    def proven(self) -> bool:
        return self._proven == self._outline()

    def digest(self, group: Group, *, whole: bool = False) -> bytes:
        """As `digest_of`, of all parts."""
        return self.digest_of(self._take, modules_in(self._state), group, whole=whole)

    def compare(self, group: Group, digests: Sequence[bytes], step: int) -> None:
        """As `Comparison.compare`, and remember that they were the same."""
        super().compare(group, digests, step)
        if step > self._resumed_from:
            self._proven = self._outline()

    def _take(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        refuse_sharded(self._state)
        for name, part in self._state.items():
            for key, tensor in tensors_in(state_of(part), ""):
                refuse_tensor(part, name, key, tensor)
                if name not in self._of_rank_0:
                    yield name, key, tensor

    def _outline(self) -> int:
        """Of what is compared and grows while training goes on; cheap enough for every step."""
        grows: list[Any] = []
        for name, part in self._state.items():
            one = part if isinstance(part, dict) else unwrapped(part)
            if name in self._of_rank_0 or isinstance(one, torch.nn.Module):
                continue
            if isinstance(one, torch.optim.Optimizer):
                grows.append(tuple(map(len, one.state.values())))
            else:
                found = tensors_in(state_of(part), "")
                grows.append(tuple((key, _shape_of(tensor), tensor.dtype) for key, tensor in found))
        return hash(tuple(grows))

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
        """Put this rank's digest where the others can see it. Does not wait, and raises nothing."""
        former = self._published
        again = former.times + 1 if former is not None and former.step == step else 0
        prefix = f"elastic-agent/replicas/{self._number}/{self._loads}/{step}/{again}"
        digest = self.digest(group, whole=True)
        self._published = _Published(prefix, group, step, again, self._outline(), digest.hex(), self._mine)
        try:
            self._published.publish()
        except RuntimeError as error:
            logger.warning("the other ranks cannot see this one's state: step=%d reason=%s", step, error)

    def prove(self, group: Group, step: int, *, wait: bool) -> bool:
        """Whether all ranks were seen to have the same; False when some have not come yet, or the store is away.

        Raises NotReplicated on every rank that asks, and what this rank's own state raises.
        """
        outline, published = self._outline(), self._published
        if self._proven == outline:
            return True
        if published is None or published.outline != outline or published.step <= self._resumed_from < step:
            self.publish(group, step)
            published = self._published
        assert published is not None
        if self._refusal is not None:
            raise self._refusal
        try:
            if not published.all_have_come(wait=wait):
                return False
            problem = published.problem()
        except RuntimeError as error:
            logger.warning("ranks cannot be compared, so nothing is copied: step=%d reason=%s", step, error)
            return False
        if problem:
            raise NotReplicated(problem)
        if published.step > self._resumed_from:
            self._proven = outline
        return True


@dataclass(slots=True)
class _Published:
    """What one rank has put into the store at a step, where some counters grow with the ranks that have come.

    Raises RuntimeError where the store does.
    """

    prefix: str
    group: Group
    step: int
    times: int
    """Comparisons of that step before this one."""
    outline: int
    digest: str
    entries: list[Entry]
    has_waited: bool = False

    def publish(self) -> None:
        if self.group.world_size == 1:
            return
        store = _store()
        store.set(f"{self.prefix}/of/{self.group.rank}", self.digest)
        store.add(f"{self.prefix}/same/{self.digest}", 1)
        if store.add(f"{self.prefix}/come", 1) == self.group.world_size:
            store.set(f"{self.prefix}/complete", "1")

    def all_have_come(self, *, wait: bool) -> bool:
        """They are waited for no more than once."""
        if self.group.world_size == 1:
            return True
        store, key = _store(), f"{self.prefix}/complete"
        if wait and not self.has_waited:
            self.has_waited = True
            try:
                store.wait([key], timedelta(seconds=PATIENCE_S))
            except RuntimeError as error:
                logger.warning(
                    "not all ranks have come to this step, so nothing is copied: step=%d reason=%s",
                    self.step,
                    error,
                )
        return bool(store.check([key]))

    def problem(self) -> str:
        """Of ranks that have all come. Empty: they have the same."""
        world_size = self.group.world_size
        if world_size == 1 or _store().add(f"{self.prefix}/same/{self.digest}", 0) == world_size:
            return ""
        store, refused = _store(), REFUSED.hex().encode()
        digests = store.multi_get([f"{self.prefix}/of/{rank}" for rank in range(world_size)])
        if refused in digests:
            return f"the state of rank {digests.index(refused)} is refused there: see its log"
        pair = _pair_of(digests)
        if self.group.rank in pair:
            store.set(f"{self.prefix}/entries/{self.group.rank}", json.dumps(self.entries))
        keys = [f"{self.prefix}/entries/{rank}" for rank in pair]
        store.wait(keys, timedelta(seconds=PATIENCE_S))
        return _problem(digests, pair, store.multi_get(keys))


def _pair_of(digests: Sequence[bytes]) -> tuple[int, int]:
    """A rank that has what most have, rank 0 where no more have anything else, and the first that has not."""
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    return usual, next(rank for rank, digest in enumerate(digests) if digest != digests[usual])


def _problem(digests: Sequence[bytes], pair: tuple[int, int], raw: Sequence[bytes]) -> str:
    """Of two ranks with these entries, by the first tensor in which they differ."""
    usual, odd = pair
    ours, theirs = map(_by_key, raw)
    parts: dict[str, str] = {}
    for part, key in {**ours, **theirs}:
        mine, its = ours.get((part, key)), theirs.get((part, key))
        if mine == its:
            continue
        if mine is None or its is None:
            what = f"is on rank {odd if mine is None else usual} only"
        elif mine[0].form != its[0].form:
            what = f"is {mine[0].form} on rank {usual} and {its[0].form} on rank {odd}"
        else:
            what = f"has other values on rank {odd} than on rank {usual}"
        parts.setdefault(part, f"{key!r} of part {part!r} {what}")
    first, names = next(iter(parts.values())), list(parts)
    unlike = [rank for rank, digest in enumerate(digests) if digest != digests[usual]]
    all_unlike = f" (ranks unlike rank {usual}: {unlike})" if len(digests) > 2 else ""
    of_stages = (
        " Where ranks have stages of a pipeline, call fully_shard() on each, also over a mesh of one rank, before the "
        "Checkpointer is made."
    )
    return (
        f"{first}{all_unlike}: {_PLAIN}.{of_stages if first.endswith('only') else ''} "
        f"Where rank 0's is meant for all, declare it: Checkpointer(..., from_rank_0={names}); "
        f"where each rank goes on with its own: per_rank={names}"
    )


def _by_key(raw: bytes) -> dict[tuple[str, str], list[Entry]]:
    """Two keys of different types may look the same."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in itertools.starmap(Entry, json.loads(raw)):
        found.setdefault((entry.part, entry.key), []).append(entry)
    return found


def _store() -> Any:
    # torch has no public name for it; without a process group this raises ValueError.
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(f"there is no process group: {error}") from error
