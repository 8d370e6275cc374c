"""What one rank sees of its state, and how two of them differ: names, shapes, dtypes and some bytes of every tensor.

Ranks of data-parallel training can drift apart in the last bits, for instance where their processors add up a norm in
another order. That is no other state: numbers that differ by less than `DRIFT` of a tensor's size get a warning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..state.state_dicts import Part, state_of

SAMPLES = 64
"""Elements of a tensor that are compared, evenly spread over it."""

DRIFT = 0.01
"""The distance between two ranks' samples of a tensor, relative to their length, up to which they count as equal."""

_DIRECTIONS = 4
_SKETCH = struct.Struct(f"<{_DIRECTIONS + 1}f")
_HUGE = 1e18
"""In the place of what is no number."""
_STACKED = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes of which small tensors are looked at many at once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as one rank has it. `sample` is a checksum of its sample; 0 where only the form is compared."""

    part: str
    key: str
    form: str
    sample: int = 0
    is_number: bool = False
    """It has fractions, of which the last bits may differ, and is no counter."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Some elements of a tensor, on the CPU."""

    raw: torch.Tensor
    """Their bytes."""
    dtype: torch.dtype

    def elements(self) -> torch.Tensor:
        return self.raw.clone().view(self.dtype)  # a clone lies where such elements may


@dataclass(frozen=True, slots=True)
class Look:
    """All tensors of a state, and the samples of those that are compared, in one order."""

    entries: tuple[Entry, ...] = ()
    samples: tuple[Sample | None, ...] = ()

    def digest(self) -> bytes:
        """Equal on two ranks only if they have the same, to the last bit of the samples."""
        return _digest(self.entries)

    def digest_of_forms(self) -> bytes:
        """Equal also where they have other numbers."""
        return _digest([replace(entry, sample=0) if entry.is_number else entry for entry in self.entries])

    def sketches(self) -> bytes:
        """Of each tensor of numbers the length of its sample, and its shadow in some directions."""
        return b"".join(
            _sketch(sample)
            for entry, sample in zip(self.entries, self.samples, strict=True)
            if entry.is_number and sample is not None
        )

    def to_json(self) -> bytes:
        return _to_json(self.entries)


def look_at(
    state: Mapping[str, Part],
    of_rank_0: Collection[str] = (),
    refuse: Callable[[str, str, torch.Tensor], None] = lambda *_: None,
) -> Look:
    """At all parts but rank 0's own, in an order that does not depend on that of their keys, which is each rank's own.

    `refuse` is called with the part, key and tensor of each, and may raise.
    """
    found: list[tuple[str, str, torch.Tensor]] = []
    for name, part in state.items():
        for key, tensor in tensors_in(state_of(part), ""):
            refuse(name, key, tensor)
            if name not in of_rank_0:
                found.append((name, key, tensor))
    return look_at_tensors(found, [part for part in state.values() if isinstance(part, torch.nn.Module)])


def look_at_tensors(
    found: Sequence[tuple[str, str, torch.Tensor]], modules: Sequence[torch.nn.Module]
) -> Look:
    """At these, each with its part and key. Of the modules' buffers names and shapes are compared only."""
    buffers = {buffer.data_ptr() for module in modules for buffer in module.buffers() if _has_bytes(buffer)}
    compared = [tensor for _, _, tensor in found if _has_bytes(tensor) and tensor.data_ptr() not in buffers]
    samples = dict(zip(map(id, compared), _samples(compared), strict=True))
    seen: list[tuple[Entry, Sample | None]] = []
    for name, key, tensor in found:
        sample = samples.get(id(tensor))
        form = _form(shape_of(tensor), tensor.dtype)
        if sample is None:
            seen.append((Entry(name, key, form), None))
        else:
            seen.append((Entry(name, key, form, _checksum(sample), _is_number(key, sample.dtype)), sample))
    seen.sort(key=lambda one: (one[0].part, one[0].key, one[0].form, one[0].sample))
    return Look(tuple(entry for entry, _ in seen), tuple(sample for _, sample in seen))


def entries_of(raw: bytes) -> tuple[Entry, ...]:
    """Of `Look.to_json`."""
    return tuple(Entry(*one) for one in json.loads(raw))


def difference(one: Sequence[Entry], other: Sequence[Entry], rank: int) -> tuple[str, str]:
    """The part, and the problem, of the first tensor in which rank 0, `one`, and another rank differ; empty if none."""
    theirs = {(entry.part, entry.key): entry for entry in other}
    ours = {(entry.part, entry.key): entry for entry in one}
    for name in [*ours, *theirs]:
        mine, its = ours.get(name), theirs.get(name)
        if mine == its or (mine and its and mine.is_number and replace(mine, sample=its.sample) == its):
            continue
        part, key = name
        if mine is None or its is None:
            return part, f"{key!r} of part {part!r} is on rank {rank if mine is None else 0} only"
        if mine.form != its.form:
            return part, f"{key!r} of part {part!r} is {mine.form} on rank 0 and {its.form} on rank {rank}"
        return part, f"{key!r} of part {part!r} has other values on rank 0 than on rank {rank}"
    return "", ""


@dataclass(frozen=True, slots=True)
class Apart:
    """The tensor of numbers in which some rank is farthest from rank 0."""

    entry: Entry
    rank: int
    distance: float
    """Relative to the length of the sample."""


def farthest(entries: Sequence[Entry], sketches: Sequence[bytes]) -> Apart | None:
    """Of those beyond `DRIFT` the first; `sketches` by rank, of the same forms. None where there are no numbers."""
    numbers = [entry for entry in entries if entry.is_number]
    if not numbers:
        return None
    rows = [torch.tensor(list(_SKETCH.iter_unpack(raw)), dtype=torch.float64) for raw in sketches]
    found = []
    for rank, row in enumerate(rows[1:], start=1):
        length = torch.maximum(rows[0][:, 0], row[:, 0]).clamp(min=torch.finfo(torch.float32).tiny)
        distances = (rows[0][:, 1:] - row[:, 1:]).abs().amax(1) / length
        beyond = (distances > DRIFT).nonzero().flatten().tolist()
        place = beyond[0] if beyond else int(distances.argmax())
        found.append(Apart(numbers[place], rank, float(distances[place])))
    return next((one for one in found if one.distance > DRIFT), None) or max(
        found, key=lambda one: one.distance
    )


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


@functools.lru_cache(maxsize=1024)
def _form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {dtype}"


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A nested one has none."""
    return () if tensor.is_nested else tuple(tensor.shape)


@torch.no_grad()
def _samples(tensors: Sequence[torch.Tensor]) -> list[Sample]:
    """With one transfer for each device, and one call for all small tensors of a form, as an optimizer's counters."""
    alike: dict[Hashable, list[int]] = {}
    for place, tensor in enumerate(tensors):
        small = tensor.dtype in _STACKED and tensor.numel() <= SAMPLES
        form = (tensor.device, tensor.dtype, tensor.shape) if small else place
        alike.setdefault(form, []).append(place)
    rows = [_rows([tensors[place] for place in places]) for places in alike.values()]
    raws = [row.view(torch.uint8) for row in rows]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for raw in raws:
        by_device.setdefault(raw.device, []).append(raw)
    on_host = {
        device: iter(torch.cat(some).cpu().split_with_sizes([raw.numel() for raw in some]))
        for device, some in by_device.items()
    }
    found: dict[int, Sample] = {}
    for places, row, raw in zip(alike.values(), rows, raws, strict=True):
        samples = next(on_host[raw.device]).view(len(places), -1).unbind()
        found |= {place: Sample(one, row.dtype) for place, one in zip(places, samples, strict=True)}
    return [found[place] for place in range(len(tensors))]


def _rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, where they are several of one form."""
    return _row(tensors[0].detach()) if len(tensors) == 1 else torch.stack(list(tensors)).flatten()


def _row(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    count = tensor.numel()
    stride = -(-count // SAMPLES)
    if tensor.is_contiguous():
        some = tensor.reshape(-1)[::stride]
    else:  # to make a row of all of it would copy all of it
        places = torch.arange(0, count, stride, device=tensor.device)
        some = tensor[torch.unravel_index(places, tensor.shape)]
    if some.is_conj() or some.is_neg():
        some = some.resolve_conj().resolve_neg()
    return some.contiguous()


def _checksum(sample: Sample) -> int:
    return zlib.crc32(sample.raw.numpy().data) | 1 << 32


def _is_number(key: str, dtype: torch.dtype) -> bool:
    """Found by what is the same on every rank: optimizers count steps in floats."""
    counts = key.rpartition(".")[2] == "step"
    return not counts and (dtype.is_floating_point or dtype.is_complex)


def _real(some: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(some).flatten().double() if some.is_complex() else some.double()


def _sketch(sample: Sample) -> bytes:
    numbers = torch.nan_to_num(_real(sample.elements()), _HUGE, _HUGE, -_HUGE).clamp(-_HUGE, _HUGE)
    shadow = numbers @ _directions()[: len(numbers)]
    return _SKETCH.pack(float(numbers.norm()), *shadow.tolist())


@functools.cache
def _directions() -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * SAMPLES, _DIRECTIONS, generator=generator, dtype=torch.float64)


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Where those lie that are made of other tensors is unknown."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _digest(entries: Sequence[Entry]) -> bytes:
    return hashlib.sha256(_to_json(entries)).digest()


def _to_json(entries: Sequence[Entry]) -> bytes:
    return json.dumps(
        [[entry.part, entry.key, entry.form, entry.sample, entry.is_number] for entry in entries]
    ).encode()
