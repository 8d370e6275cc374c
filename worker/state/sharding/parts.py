"""The parts of a script, as one rank has them: taken, and given back.

Of most parts all ranks have the same, or each its pieces. A part that the script has declared to be each rank's own is
stored under a key of that rank, as its random state is. A copy of a state that is the same on all ranks has what each
of them has for itself; of a sharded one each rank's copy has its own. Where a mesh does not have all ranks, as with
pipeline parallelism, no rank knows what others lack: then each rank keeps all that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...errors import CheckpointError, CheckpointMismatch, OtherWorldSize, Sharded
from ..kinds import is_dtensor, is_fsdp1, is_sharded, is_zero, tensors_in
from ..rank_parts import Reshard, Rules, unpack
from ..state_dicts import Part, load_into, put_into, state_of, unwrapped
from .fsdp1 import Fsdp1ModuleState, Fsdp1OptimizerState, has_fsdp1, module_of
from .items import FormCache, Items
from .leaves import STRUCTURE, Archives, Leaves, Path, key_of, structure_path
from .modules import ModuleState
from .optimizers import OptimizerState, ParameterNames
from .pieces import refuse
from .reading import OpenCopy, Reader
from .table import DECLARED, OWN_PARTS, RANDOM_STATE, RANKS

_RESERVED = (RANKS, STRUCTURE)
"""No part has one of these names, nor a name that begins with one and a dot."""

Own = Mapping[Path, Any]
"""What one rank has for itself, by its path below that of the rank."""


class Prepared:
    """All that a rank needs has been read, and nothing has changed. `own`: what this rank alone had, by name."""

    def __init__(self, applied: list[tuple[str, Callable[[], None]]], own: dict[str, Any]) -> None:
        self._applied = applied
        self.own = own

    def apply(self) -> None:
        """Change all parts. They keep nothing of the copies' memory. Raises CheckpointMismatch."""
        for name, put in self._applied:
            try:
                put()
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointMismatch(
                    f"{name!r} of the checkpoint does not fit this script: {error}"
                ) from error


class ShardedParts:
    """Of one Checkpointer."""

    def __init__(self, parts: Mapping[str, Part], of_rank_0: Collection[str], of_each_rank: Rules) -> None:
        self._parts = dict(parts)
        self._of_rank_0 = frozenset(of_rank_0)
        self._rules = dict(of_each_rank)
        shared = {name: part for name, part in self._parts.items() if name not in self._rules}
        modules = {
            name: module
            for name, part in shared.items()
            if not isinstance(part, dict) and isinstance(module := unwrapped(part), torch.nn.Module)
        }
        names = ParameterNames(modules)
        self._states = {name: _state_of_part(name, part, modules, names) for name, part in shared.items()}
        self._modules = modules.values()
        self._forms = FormCache()
        self._archives = Archives()
        self._shared: tuple[int, bool] | None = None
        """Of a world of that size, whether all ranks have the same of what is not spread."""

    def refuse(self) -> None:
        """Raises Sharded or NotPlainData, naming part and tensor, for what cannot be carried."""
        for name, part in self._parts.items():
            if is_zero(part):
                raise Sharded(
                    f"part {name!r} is a ZeroRedundancyOptimizer, which torch's own state_dict functions do not carry: "
                    "use fully_shard(), which spreads the optimizer's state over the ranks, too"
                )
        for name in (*self._of_rank_0, *self._rules):
            if is_sharded({name: self._parts[name]}):
                whose = "rank 0's" if name in self._of_rank_0 else "each rank's own"
                raise Sharded(
                    f"part {name!r} is spread over ranks, and declared to be {whose}: declare it no more"
                )
        for one in self._states.values():
            one.refuse()

    # ---------------------------------------------------------------- taking

    def own_parts(self) -> Own:
        """Of this rank."""
        if not self._rules:
            return {}
        return own_parts_of({name: state_of(self._parts[name]) for name in self._rules})

    def take(
        self,
        rank: int,
        world_size: int,
        step: int,
        *,
        common: bool,
        own: Mapping[int, Own],
        instead: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    ) -> Items:
        """This rank's pieces. `common`: with what all ranks have alike; `own`: with what these ranks have for
        themselves; `instead`: of these parts, which are dicts, other ones.

        Raises NotPlainData and Sharded, and what the parts' `state_dict` raises.
        """
        if self._shared is None or self._shared[0] != world_size:
            self._shared = (world_size, self._covers(world_size))
        _, shared = self._shared
        # What one rank refuses of another part must not keep it from coming where all meet.
        found = {name: self._states[name].take(shared=shared) for name in self._collective_first()}
        for name, state in instead.items():
            found[name] = Leaves().add(state, (name,), ordered=shared)
        leaves = Leaves()
        for name in self._states:
            leaves.extend(found[name])
        for one, states in own.items():
            for path, state in states.items():
                leaves.add(state, _own_path(one, *map(str, path)), ordered=True)
        form, tensors = taken = self._forms.take(leaves, world_size, shared=shared)
        if not common:
            form, left = form.without_common
            tensors = [tensors[number] for number in left]
        values = []
        for path, value in leaves.others:
            key, is_common = key_of(path), shared and path[0] != RANKS
            if common or not is_common:
                values.append((key, path, self._archives.of(path, value, step), is_common))
        return Items(form, tensors, values, bool(self._rules), rank, taken)

    def _collective_first(self) -> list[str]:
        return sorted(self._states, key=lambda name: not self._states[name].is_collective)

    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """With its part, what this rank has of each weight and buffer."""
        found: Iterator[tuple[str, Any]] = (
            (name, one) for name, part in self._parts.items() for one in tensors_in(part)
        )
        return ((name, one.to_local() if is_dtensor(one) else one) for name, one in found)

    def _covers(self, world_size: int) -> bool:
        """Whether all ranks have all parts: every mesh has all ranks."""
        for part in self._parts.values():
            if any(ranks < world_size for ranks in _ranks_of_units(part)):
                return False
            for one in tensors_in(part):
                mesh: Any = one
                if is_dtensor(one) and mesh.device_mesh.size() < world_size:
                    return False
        return True

    # ---------------------------------------------------------------- giving back

    def begin_load(self) -> None:
        """All ranks, together, before `prepare`."""
        for state in self._states.values():
            state.begin_load()

    def prepare(
        self,
        copies: Mapping[int, OpenCopy],
        rank: int,
        world_size: int,
        old_world_size: int,
        *,
        some: bool = False,
    ) -> Prepared:
        """Read all that this rank needs of the old ranks' copies; nothing changes yet. `some`: there may be more parts.

        Raises CheckpointMismatch, by name, where the state does not fit, OtherWorldSize where a part of each rank has
        no rule, and what the copies' `read` raises.
        """
        same = world_size == old_world_size
        has_stages = not self._covers(world_size)
        reader = Reader(copies, rank if same else None, has_stages=has_stages)
        unknown = {str(path[0]) for path in reader.paths.values()} - {*self._states, *_RESERVED}
        if unknown and not (has_stages or some):
            lacks = self._states.keys() - _saved_parts(reader)
            raise CheckpointMismatch(
                f"the checkpoint has the parts {sorted(unknown)}, which this script does not have"
                + (f", and lacks its parts {sorted(lacks)}" if lacks else "")
                + ": give Checkpointer the state that was saved, or use another directory"
            )
        reader.read_values()
        prepared = {name: state.prepare(reader) for name, state in self._states.items()}
        # What one rank cannot put into another part must not keep it from coming where all meet.
        applied = [(name, prepared[name]) for name in self._collective_first()]
        ranks = self._ranks_read(rank, world_size, old_world_size)
        mine = {key: path for one in ranks for key, path in reader.under(_own_path(one)).items()}
        alone = {
            name: {one: reader.want_state(_own_path(one, OWN_PARTS, name)) for one in ranks}
            for name in self._rules
        }
        names = {str(path[2]) for path in mine.values()} if same else set()
        own = {
            name: reader.want_state(_own_path(rank, name))
            for name in names - {OWN_PARTS, DECLARED, STRUCTURE}
        }
        reader.read_values(list(mine))
        for one in ranks:
            key = key_of(_own_path(one, DECLARED))
            self._check_declared(one, reader.value(key) if key in mine else [], some=some)
        for name in self._rules:
            states = {one: state() for one, state in alone[name].items()}
            applied.append((name, self._put_own(name, states, rank, world_size, same)))
        return Prepared(applied, {name: state() for name, state in own.items()})

    def prepare_file(
        self, payload: Mapping[str, Any], rank: int, world_size: int, *, some: bool = False
    ) -> Prepared:
        """As `prepare`, of what a file of the version before has (`storage/disk/old_format`): all of the state, and of
        each rank a row. Its tensors are mapped."""
        saved, rows, random_states = payload["state"], payload.get("ranks", ()), payload["rng"]
        if saved.keys() != self._states.keys() and not (some and self._states.keys() <= saved.keys()):
            raise CheckpointMismatch(
                f"the checkpoint has the parts {sorted(saved)}, this script's state is {sorted(self._states)}: give "
                "Checkpointer the state that was saved, or use another directory"
            )
        same = world_size == len(random_states)
        ranks = self._ranks_read(rank, world_size, len(random_states))
        alone = {one: unpack(rows[one]) if rows else {} for one in ranks}
        for one, states in alone.items():
            self._check_declared(one, sorted(states), some=some)
        applied: list[tuple[str, Callable[[], None]]] = [
            (name, functools.partial(load_into, self._parts[name], saved[name], self._modules))
            for name in self._states
        ]
        for name in self._rules:
            of_part = {one: states[name] for one, states in alone.items()}
            applied.append((name, self._put_own(name, of_part, rank, world_size, same)))
        return Prepared(applied, {RANDOM_STATE: random_states[rank].clone()} if same else {})

    def _check_declared(self, rank: int, saved: Sequence[str], *, some: bool) -> None:
        """Raises CheckpointMismatch where other parts were each rank's own."""
        if saved != sorted(self._rules) and not (some and self._rules.keys() <= set(saved)):
            raise CheckpointMismatch(
                f"the checkpoint holds of rank {rank} {saved}, this script declares {sorted(self._rules)}: give "
                "Checkpointer the same per_rank, or use another directory"
            )

    def _put_own(
        self, name: str, states: dict[int, Any], rank: int, world_size: int, same: bool
    ) -> Callable[[], None]:
        state = self._reshaped(name, self._rules[name], states, rank, world_size, same)
        return functools.partial(put_into, self._parts[name], state, self._modules)

    def _ranks_read(self, rank: int, world_size: int, old_world_size: int) -> Sequence[int]:
        """The old ranks of which this rank reads what was theirs alone. Raises OtherWorldSize."""
        if world_size == old_world_size:
            return [rank]
        without = sorted(name for name, rule in self._rules.items() if rule is None)
        if without:
            raise OtherWorldSize(
                f"the checkpoint holds {without} of each of {old_world_size} ranks, and this world has {world_size}: "
                f"start with {old_world_size} workers again, or say how to reshape it: "
                f"Checkpointer(..., per_rank={{{without[0]!r}: rule}})"
            )
        return range(old_world_size) if self._rules else ()

    def _reshaped(
        self, name: str, rule: Reshard | None, states: dict[int, Any], rank: int, world_size: int, same: bool
    ) -> Any:
        if same:
            return states[rank]
        assert rule is not None
        try:
            return rule(states, rank, world_size)
        except Exception as error:
            raise CheckpointMismatch(
                f"the rule of {name!r} in per_rank cannot reshape the checkpoint from {len(states)} ranks to "
                f"{world_size}: {error!r}"
            ) from error


def own_parts_of(states: Mapping[str, Any]) -> Own:
    """Of one rank, these states of the parts that are its own."""
    found: dict[Path, Any] = {(OWN_PARTS, name): state for name, state in states.items()}
    return {**found, (DECLARED,): sorted(states)}


def refuse_names(parts: Iterable[str]) -> None:
    """Raises ValueError for a part whose keys could be those of something else."""
    for name in parts:
        if any(name == one or name.startswith(f"{one}.") for one in _RESERVED):
            raise ValueError(
                f"a part of the state cannot be called {name!r}, as checkpoints use it: rename it"
            )


def common_tensors(items: Items) -> list[tuple[str, str, torch.Tensor]]:
    """With part and key, those that all ranks should have alike."""
    assert items.taken is not None
    form, tensors = items.taken
    return [(str(row.path[0]), key_of(row.path[1:]), tensors[row.source]) for row in form.rows if row.common]


class _OtherState:
    """One part that is a dict, or any object with a state of its own."""

    is_collective = False

    def __init__(self, name: str, part: Part, modules: Iterable[torch.nn.Module]) -> None:
        self._name = name
        self._part = part
        self._modules = modules

    def refuse(self) -> None:
        """Raises Sharded or NotPlainData."""
        if isinstance(self._part, dict):
            found = Leaves().add(self._part, (self._name,))
            for path, one in zip(found.paths, found.tensors, strict=True):
                refuse(self._name, key_of(path[1:]), one)

    def take(self, *, shared: bool) -> Leaves:
        # Where ranks have other parts of a state, none knows the order of all.
        return Leaves().add(state_of(self._part), (self._name,), ordered=shared)

    def begin_load(self) -> None:
        """Nothing has to be done by all ranks together."""

    def prepare(self, reader: Reader) -> Callable[[], None]:
        at = (self._name,)
        saved = reader.under(at)
        if not saved and key_of(structure_path(at)) not in reader.paths:
            raise CheckpointMismatch(
                f"the checkpoint has no part {self._name!r}: give Checkpointer the state that was saved, or use "
                "another directory"
            )
        present: dict[str, torch.Tensor] = {}
        if isinstance(self._part, dict) or not all(map(reader.is_whole, filter(reader.is_tensor, saved))):
            present = Leaves().add(state_of(self._part), at).by_key

        def like(key: str) -> torch.Tensor | None:
            if is_dtensor(one := present.get(key)):
                return one
            if not reader.is_whole(key):
                raise CheckpointMismatch(
                    f"{key!r} is spread over ranks in the checkpoint, and this script has no DTensor there that "
                    "says how it is to be spread: put one there before load()"
                )
            return None

        state = reader.want_state(at, like)
        return lambda: put_into(self._part, state(), self._modules)


def _state_of_part(
    name: str, part: Part, modules: Mapping[str, torch.nn.Module], names: ParameterNames
) -> ModuleState | OptimizerState | _OtherState:
    if name in modules:
        kind = Fsdp1ModuleState if has_fsdp1(modules[name]) else ModuleState
        return kind(name, modules[name])
    if isinstance(part, torch.optim.Optimizer):
        module = module_of(part, list(modules.values()))
        if module is not None:
            return Fsdp1OptimizerState(name, part, names, module)
        return OptimizerState(name, part, names)
    return _OtherState(name, part, modules.values())


def _saved_parts(reader: Reader) -> set[str]:
    """Of one that is empty there is its structure alone."""
    paths = reader.paths.values()
    return {str(path[0]) for path in paths} | {str(path[1]) for path in paths if path[0] == STRUCTURE}


def _ranks_of_units(part: Part) -> Iterator[int]:
    """Over which FSDP1 has spread them, and copied them."""
    module = unwrapped(part) if not isinstance(part, dict) else None
    if isinstance(module, torch.nn.Module):
        for unit in module.modules():
            if is_fsdp1(unit):
                one: Any = unit
                copies = getattr(one, "_inter_node_pg", None)
                yield one.process_group.size() * (copies.size() if copies is not None else 1)


def _own_path(rank: int, *names: str) -> Path:
    return (RANKS, str(rank), *names)
