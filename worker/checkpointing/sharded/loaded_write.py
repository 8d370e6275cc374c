"""Brings to disk what was loaded from memory: at once where all ranks have it in their own slots, and else by `wait`.

A checkpoint that only memory has is lost with the nodes that have it. Until it, or a newer step, is given to the disk,
`LoadedWrite` says so: to `Checkpointer.wait`, and in the log when the script ends.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import CheckpointError
from ...ranks.group import Group, all_did, current_group
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.commit import new_token
from ...storage.disk.sharded_save import ShardedSave
from ...storage.memory.slot_memory import SlotMemory
from ...storage.replication.copy_rule import Version
from ...wire.environment import WorkerEnv
from .contents import ShardContents
from .meeting import Brought, meet
from .sharded_saves import DirectoryCheck, ShardedSaves

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loaded:
    """Of one Checkpointer. It outlives the Checkpointer, until the process ends."""

    step: int = 0
    copied: int | None = None
    """The newest step since then that all ranks were to copy."""
    is_written: bool = True
    """It, or a newer step, was given to the disk: on all ranks the same."""
    digests: Sequence[str] = ()
    """Of the weights as they were loaded, where that is not written."""

    def say_at_exit(self, disk: DiskSaver) -> None:
        if not self.is_written and not disk.ends_at_once:
            logger.error(
                "the state that was loaded from memory is not on disk: step=%d. Let the script call wait() on all "
                "ranks before it ends",
                self.step,
            )


class LoadedWrite:
    """Of one Checkpointer. What it does is a collective."""

    def __init__(
        self,
        files: CheckpointFiles,
        contents: ShardContents,
        memory: SlotMemory | None,
        disk: DiskSaver,
        saves: ShardedSaves,
        directory: DirectoryCheck,
        env: WorkerEnv,
    ) -> None:
        self._files = files
        self._contents = contents
        self._memory = memory
        self._disk = disk
        self._saves = saves
        self._directory = directory
        self._env = env
        self._loaded = _Loaded()
        atexit.register(self._loaded.say_at_exit, disk)

    def began(self, step: int) -> None:
        """All ranks have loaded the state of `step`. Where it came out of memory, `order` follows."""
        self._loaded.step, self._loaded.copied = step, None
        self._loaded.is_written, self._loaded.digests = True, ()

    def copied(self, step: int) -> None:
        """All ranks were to copy that newer step."""
        self._loaded.copied = step

    def superseded(self) -> None:
        """A newer step was given to the disk."""
        self._loaded.is_written = True

    def order(self, version: Version) -> None:
        """Let this version be durable soon, unless it is on disk.

        Where it is not in all ranks' own slots, as after a change of the world, `ensure` sees to it if no save comes.
        """
        group, memory, step = current_group(), self._memory, version[1]
        table, digest, size = b"", "", 0
        if memory is not None and self._disk.has_writer and memory.digest_of(version):
            try:
                with memory.hold(version) as held:
                    shards = held.header.shards
                    of_this_world = held.header.world_size == group.world_size
                    if shards is not None and shards.rank == group.rank and of_this_world:
                        offset, length = held.header.table
                        table = os.pread(held.stream.fileno(), length, offset)
                        digest, size = shards.digest, held.header.size
            except (OSError, ValueError) as error:
                logger.warning("the loaded state is not brought to disk: step=%d reason=%s", step, error)
        is_durable = group.rank == 0 and self._is_on_disk(version)
        brought = Brought(step, digest, size, token=new_token(), has_new_table=self._saves.is_new(table))
        met = meet(group, brought._replace(durable=is_durable))
        self._loaded.is_written = met.durable
        if met.durable:
            return
        if met.some_refused:
            self._loaded.digests = self._contents.digests()
            return
        try:
            self._directory.require(group)
        except CheckpointError as refusal:
            logger.warning("the loaded state is not brought to disk: step=%d reason=%s", step, refusal)
            return
        if met.some_have_new_tables:
            self._saves.exchange(table, group)
        self._loaded.is_written = True

        def hand(save: ShardedSave) -> None:
            assert memory is not None
            self._disk.promise(save)
            self._disk.begin(*memory.lend(version))

        self._saves.order(self._disk, step, met, group, hand)

    def end(self) -> None:
        """The script is done with it."""
        self._loaded.say_at_exit(self._disk)
        atexit.unregister(self._loaded.say_at_exit)

    def ensure(self, save: Callable[[int], object]) -> bool:
        """Whether what was loaded, as long as nothing has changed since, or a newer step that all ranks have copied, is
        given to the disk now, or was before. `save` lets all ranks write the state as it is, and calls `superseded`.
        """
        loaded = self._loaded
        if loaded.is_written:
            return True
        if loaded.copied is not None:
            self.order((self._env.generation, loaded.copied))
        elif self._is_unchanged(current_group()):
            save(loaded.step)
        if not loaded.is_written and self._env.local_rank == 0:
            logger.warning(
                "what was loaded from memory is not on disk, save a newer step: step=%d", loaded.step
            )
        return loaded.is_written

    def _is_unchanged(self, group: Group) -> bool:
        return all_did(group, lambda: self._contents.digests() == self._loaded.digests, "nothing is written")

    def _is_on_disk(self, version: Version) -> bool:
        """A checkpoint of that step by an older generation is of a past that was given up since."""
        try:
            newest = self._files.newest_manifest()
        except OSError:
            return False
        return newest is not None and (
            newest.step == version[1] and newest.generation >= version[0] and newest.run == self._files.run.id
        )
