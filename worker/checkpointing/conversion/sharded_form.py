"""A sharded checkpoint, read into a whole state and made of one.

What is made has a file for each rank of the world that saved: that of rank 0 has all but what each rank has for itself.
Any world and mesh loads it, as it does what ranks have written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import torch

from ...errors import CheckpointMismatch
from ...state.sharding.items import FormCache, Items, Joined, Leaf, Taken
from ...state.sharding.layout import ShardLayout, ShardLayouts
from ...state.sharding.leaves import STRUCTURE, Archives, Path, key_of, split
from ...state.sharding.pieces import refuse
from ...state.sharding.reading import OpenCopy, Reader, WantedTensor
from ...state.sharding.table import DECLARED, OWN_PARTS, RANDOM_STATE, RANKS
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.manifests import Manifest
from ...storage.disk.sharded.commit import Commit, commit, new_attempt
from ...storage.disk.sharded.dcp_index import metadata_of
from ...storage.disk.sharded.parts import Part, write_part
from ...storage.memory.shard_memory import header_of_shards
from ...storage.memory.slot_memory import RankPlace
from ...storage.memory.slots import PIECE_BYTES
from .whole_state import GROUPS, STATE, WholeState, is_optimizer, named, names_of_parameters, numbered

"""What a rank has for itself, see `ShardedParts`."""


# ---------------------------------------------------------------- reading


def read_sharded(files: CheckpointFiles, manifest: Manifest, *, keep_names: bool) -> WholeState:
    """`keep_names`: those of an optimizer's parameters stay beside their numbers. Raises BadCheckpoint,
    CheckpointMismatch."""
    with contextlib.ExitStack() as stack:
        copies: dict[int, OpenCopy] = {}
        for rank in range(manifest.world_size):
            copy = stack.enter_context(files.open_rank(manifest, rank))
            copies[rank] = OpenCopy(copy.table, copy.read, None)
        return read_copies(copies, manifest.step, keep_names=keep_names)


def read_copies(copies: Mapping[int, OpenCopy], step: int, *, keep_names: bool) -> WholeState:
    """Raises CheckpointMismatch where some of a tensor is missing, and what the copies' `read` raises."""
    reader = Reader(copies, None)
    wanted = {key: WantedTensor.like(reader, key, None) for key in reader.paths if reader.is_tensor(key)}
    reader.read_values(list(reader.paths))
    reader.read()

    def state_at(path: Path) -> Any:
        return reader.state(path, lambda key: wanted[key].made())

    paths = list(reader.paths.values())
    names = dict.fromkeys(str(path[0]) for path in paths)
    names |= dict.fromkeys(str(path[1]) for path in paths if path[0] == STRUCTURE and "." not in str(path[1]))
    whole = WholeState(step, {})
    for name in names:
        if name not in (RANKS, STRUCTURE):
            whole.states[name] = _state(reader, name, state_at, keep_names)
    ranks = sorted({int(path[1]) for path in paths if path[0] == RANKS})
    for rank in ranks:
        at = RANKS, str(rank)
        if (*at, RANDOM_STATE) in paths:
            whole.rng.append(state_at((*at, RANDOM_STATE)))
        if (*at, DECLARED) in paths:
            declared = state_at((*at, DECLARED))
            whole.own.append({name: state_at((*at, OWN_PARTS, name)) for name in declared})
    for what in (whole.rng, whole.own):
        if what and len(what) != len(ranks):
            raise CheckpointMismatch(f"step {step}: some ranks lack what others have for themselves")
    return whole


def _state(reader: Reader, name: str, state_at: Callable[[Path], Any], keep_names: bool) -> Any:
    parameters = {str(path[2]): None for path in reader.under((name, STATE)).values() if len(path) > 2}
    if key_of((name, GROUPS)) in reader.paths or reader.under((name, GROUPS)):
        groups = state_at((name, GROUPS))
        by_name = {STATE: {one: state_at((name, STATE, one)) for one in parameters}, GROUPS: groups}
        if is_optimizer(by_name, str):
            return numbered(by_name, keep_names=keep_names)
    return state_at((name,))


# ---------------------------------------------------------------- writing


def write_sharded(
    files: CheckpointFiles, whole: WholeState, parameter_names: Sequence[str] | None
) -> list[str]:
    """Durably, in a directory that has no checkpoint. Returns the doubts about the parameters of its optimizers (see
    `Numbering`). Raises OSError, CheckpointError."""
    states = dict(whole.states)
    doubts = []
    for name, state in whole.states.items():
        if name in (RANKS, STRUCTURE):
            raise CheckpointMismatch(f"a part of a sharded state cannot be called {name!r}")
        if is_optimizer(state):
            numbering = names_of_parameters(name, whole.states, parameter_names)
            states[name] = named(name, state, numbering.names)
            doubts.append(numbering.doubt)
    attempt = new_attempt(files, whole.step, 0)
    tables = {}
    for rank in range(whole.world_size):
        layout = _layout(_roots(whole, states, rank), rank, whole.step)
        tables[rank] = layout.table
        place = RankPlace("", 0, rank, 0, whole.world_size, files.run.id)
        header = header_of_shards(layout, place, whole.step, whole.step, common=rank == 0)
        write_part(files, Part(attempt, 0), header, partial(_pour, layout), lambda: None)
    index = metadata_of(tables)
    manifest = commit(files, Commit(attempt, whole.step, 0, whole.world_size, index, 0.0), lambda: None)
    _prove(files, manifest)
    return [doubt for doubt in doubts if doubt]


def _roots(whole: WholeState, states: Mapping[str, Any], rank: int) -> list[tuple[Path, Any]]:
    """What lies where in this rank's copy."""
    roots: list[tuple[Path, Any]] = []
    for name, state in states.items() if rank == 0 else ():
        if is_optimizer(state, str):
            roots += [((name, STATE, one), kept) for one, kept in state[STATE].items() if kept]
            roots.append(((name, GROUPS), state[GROUPS]))
        else:
            roots.append(((name,), state))
    at = RANKS, str(rank)
    if rank < len(whole.rng):
        roots.append(((*at, RANDOM_STATE), whole.rng[rank]))
    if rank < len(whole.own):
        own = whole.own[rank]
        roots += [((*at, OWN_PARTS, name), state) for name, state in own.items()]
        roots.append(((*at, DECLARED), sorted(own)))
    return roots


def _layout(roots: list[tuple[Path, Any]], rank: int, step: int) -> ShardLayout:
    """Raises NotPlainData for what a sharded state does not carry."""
    paths: list[Path] = []
    tensors: list[torch.Tensor] = []
    leaves: list[Leaf] = []
    for at, state in roots:
        common = at[0] != RANKS
        # That of an optimizer is found by name.
        found_paths, found, others = split(state, at, ordered=not common or len(at) == 1)
        for path, tensor in zip(found_paths, found, strict=True):
            refuse(str(at[0]), key_of(path), tensor)
        paths += found_paths
        tensors += found
        leaves += [Leaf(*other, common) for other in others]
    split_at = next((number for number, path in enumerate(paths) if path[0] == RANKS), len(paths))
    taken = [
        Taken(*FormCache().take(paths[:split_at], tensors[:split_at], 1, shared=True), leaves),
        Taken(*FormCache().take(paths[split_at:], tensors[split_at:], 0, shared=False), []),
    ]
    form, sources = Joined().join(taken, common=True)
    archives = Archives()
    values = [
        (key_of(leaf.path), leaf.path, archives.of(key_of(leaf.path), leaf.value, step), leaf.common)
        for leaf in leaves
    ]
    return ShardLayouts().lay_out(Items(form, sources, values, True, rank))


def _pour(layout: ShardLayout, sink: BinaryIO) -> None:
    target = torch.empty(layout.size, dtype=torch.uint8)
    array: Any = target.numpy()
    with memoryview(array) as view:
        layout.copy_to(view, target)
        for offset in range(0, layout.size, PIECE_BYTES):
            with view[offset : offset + PIECE_BYTES] as piece:
                sink.write(piece)


def _prove(files: CheckpointFiles, manifest: Manifest) -> None:
    """Read all of it again. Raises BadCheckpoint."""
    files.open(manifest.step).stream.close()
    buffer = bytearray(PIECE_BYTES)
    for rank in range(manifest.world_size):
        with files.open_rank(manifest, rank) as copy, memoryview(buffer) as view:
            for offset in range(0, copy.header.size, PIECE_BYTES):
                with view[: min(PIECE_BYTES, copy.header.size - offset)] as piece:
                    copy.read(offset, piece)
