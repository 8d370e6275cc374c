"""Takes, saves and loads a state that is the same on every rank: rank 0's is written, and every rank loads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from ...errors import CheckpointError
from ...ranks.group import current_group
from ...state.rank_parts import Rules
from ...state.state_dicts import Part
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.memory.copy_header import Header
from ...storage.memory.slot_memory import memory_of
from ...wire.environment import WorkerEnv, own_environment
from ..loading.state_loader import StateLoader
from .contents import Contents
from .just_in_time import JustInTime
from .saver import Saver


class ReplicatedState(Saver):
    """See `Checkpointer` for what its methods promise."""

    def __init__(
        self,
        files: CheckpointFiles,
        parts: Mapping[str, Part],
        of_rank_0: Collection[str],
        rules: Rules,
        *,
        max_failed_saves: int,
        read_only: bool,
    ) -> None:
        env = WorkerEnv.of(os.environ)
        memory = None if read_only else memory_of(own_environment(), files.directory, is_sharded=False)
        # All ranks show that they have the same state, also those that do not have what is rank 0's: a copy of their
        # node would be another state.
        contents = Contents(parts, of_rank_0, rules, is_compared=memory is not None)
        if of_rank_0 and memory is not None and not memory.place.is_on_node_of_rank_0:
            memory = None
        super().__init__(files, contents, memory, DiskSaver(files, env), max_failed_saves)
        self._read_only = read_only
        self._env = env
        self._loader = StateLoader(files, contents, memory, env, is_sharded=False, read_only=read_only)

    def load(self) -> int:
        loaded = self._loader.load(self.finish_last_write)
        step = loaded.step
        # The step just loaded may be saved again: where the files came from another node this is its second copy.
        self.floor = step - 1
        self._contents.comparison.began(step)
        if self._memory is not None:
            self._memory.resumed_from = step
        if not self._read_only:
            self.loaded(step)
            if self._contents.is_compared:
                self._contents.comparison.publish_at_next_step(current_group())
        if isinstance(loaded.what, Header) and current_group().rank == 0:
            self.write_loaded(loaded.what)
        return step

    def just_in_time(self) -> contextlib.AbstractContextManager[None]:
        if own := sorted(self._contents.of_each_rank):
            raise CheckpointError(
                f"just_in_time() cannot keep {own}, of which a rank that dies has its own: "
                "leave it out and give Checkpointer memory_every=1"
            )
        memory, address = self._memory, self._env.socket
        if memory is None or not address:
            return contextlib.nullcontext()
        self.register()
        return JustInTime(memory.place, address)
