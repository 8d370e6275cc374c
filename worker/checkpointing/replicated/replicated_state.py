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
from ...storage.memory.node_memory import memory_of
from ...wire.environment import WorkerEnv, own_environment
from .contents import Contents
from .drain_saver import ReplicatedDrainSaver
from .just_in_time import JustInTime
from .loader import Loader
from .saver import Copies, Saver


class ReplicatedState:
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
        self._files = files
        self._read_only = read_only
        memory = memory_of(own_environment(), files.directory) if not read_only else None
        # All ranks show that they have the same state, also those that do not have what is rank 0's: a copy of their
        # node would be another state.
        self._contents = Contents(parts, of_rank_0, rules, is_compared=memory is not None)
        if of_rank_0 and memory is not None and not memory.place.is_on_node_of_rank_0:
            memory = None
        self._memory = memory
        self._env = WorkerEnv.of(os.environ)
        self._disk = disk = DiskSaver(files, self._env)
        copies = Copies(memory, disk)
        self._saver = Saver(files, self._contents, copies, disk, max_failed_saves)
        self._loader = Loader(files, self._contents, memory, self._env, read_only=read_only)
        self.drain_saver = ReplicatedDrainSaver(files.directory, self._contents, copies, disk, self._saver)

    def load(self) -> int:
        loaded = self._loader.load(self._saver.finish_last_write)
        step = loaded.step
        # The step just loaded may be saved again: where the files came from another node this is its second copy.
        self._saver.floor = step - 1
        self._contents.comparison.began(step)
        if self._memory is not None:
            self._memory.resumed_from = step
        if not self._read_only:
            self.drain_saver.loaded(step)
        if isinstance(loaded.what, Header) and current_group().rank == 0:
            self._saver.write_loaded(loaded.what)
        return step

    def save(self, step: int) -> bool:
        return self._saver.save(step)

    def wait(self) -> bool:
        return self._saver.wait()

    def remember(self, step: int) -> bool:
        return self._saver.remember(step)

    def just_in_time(self) -> contextlib.AbstractContextManager[None]:
        if own := sorted(self._contents.of_each_rank):
            raise CheckpointError(
                f"just_in_time() cannot keep {own}, of which a rank that dies has its own: "
                "leave it out and give Checkpointer memory_every=1"
            )
        memory, address = self._memory, self._env.socket
        if memory is None or not address:
            return contextlib.nullcontext()
        self.drain_saver.register()
        return JustInTime(memory.place, address)
