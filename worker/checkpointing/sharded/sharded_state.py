"""Takes, saves and loads a state that no rank has whole: each rank its shards, all of them together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence

from ...errors import CheckpointError
from ...ranks.group import Group, current_group, together
from ...state.rank_parts import Rules
from ...state.state_dicts import Part
from ...steps import progress
from ...storage.disk.async_save import DiskSaver
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.memory.slot_memory import local_rank_of, memory_of
from ...wire.environment import WorkerEnv, own_environment
from ..loading.state_loader import LoadedState, StateLoader
from .contents import ShardContents
from .meeting import RankHome
from .saving import ShardSaving
from .shard_replicas import ShardReplicas

logger = logging.getLogger(__name__)


class ShardedState(ShardSaving):
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
        memory = None if read_only else memory_of(own_environment(), files.directory, is_sharded=True)
        contents = ShardContents(parts, of_rank_0, rules)
        super().__init__(
            files,
            contents,
            memory,
            ShardReplicas(files.directory, env, memory) if memory is not None else None,
            DiskSaver(files, env),
            env,
            max_failed_saves,
            keeps_common=local_rank_of(os.environ) == 0,
        )
        self._read_only = read_only
        if self._disk.has_writer and not read_only:
            self._disk.wake()
        self._was_accepted = False
        self._is_one_run = bool(env.run)
        """All ranks have the same run."""
        self._loading = StateLoader(files, contents, memory, env, is_sharded=True, read_only=read_only)
        self._end_first_copy: Callable[[], None] = lambda: None

    def load(self) -> int:
        self._join_run()
        if not self._read_only:
            self.require_one_name()
        loaded = self._loading.load(self.finish_last_write)
        if not self._read_only:
            self.began(loaded.step, loaded.version)
            self.loaded(loaded.step)
            homes = self._begin_replicas(current_group(), loaded)
            if loaded.version is not None and any(home.loaded != home.digest for home in homes):
                self._copy_at_next_step()
            if loaded.version is not None:
                self.write_loaded(loaded.version)
        return loaded.step

    def save(self, step: int) -> bool:
        self._accept()
        self._join_run()
        return super().save(step)

    def remember(self, step: int) -> bool:
        self._accept()
        self._join_run()
        return super().remember(step)

    def just_in_time(self) -> contextlib.AbstractContextManager[None]:
        raise CheckpointError(
            "just_in_time() cannot keep a sharded state: what a rank that dies had, no other rank has. Leave it "
            "out and give Checkpointer memory_every=1: then a failure costs the step under way"
        )

    def _accept(self) -> None:
        """Before the first save: raises Sharded or NotPlainData on all ranks, for what cannot be carried."""
        if not self._was_accepted:
            together(current_group(), self._contents.refuse, "nothing saved")
            self._was_accepted = True

    def _join_run(self) -> None:
        """Without an agent no rank knows which run the others are of, and all of them write: they take rank 0's."""
        if not self._is_one_run:
            run = current_group().exchange(self._files.run)[0]
            self._files.join(run)
            self._is_one_run = True

    def _copy_at_next_step(self) -> None:
        """What was loaded lies as the world before this one had it, some of it on one node alone: only each rank's own
        copy gets a replica. A copy of the next step gives all of it a second home again.
        """

        def copy(step: int) -> None:
            try:
                if not self.is_over:
                    self.remember(step)
                    if self.waits:
                        return
            except CheckpointError as refusal:
                logger.warning(
                    "the state gets no second copy before it is saved: step=%d reason=%s", step, refusal
                )
            end()

        self._end_first_copy()
        end = self._end_first_copy = progress.on_step(copy, stage=progress.Stage.STATE)

    def _begin_replicas(self, group: Group, loaded: LoadedState) -> Sequence[RankHome]:
        """All ranks tell where they are and what they have, by rank; then each node knows its partners."""
        layout = self._contents.lay_out(loaded.step, group, common=False).layout
        resumed = loaded.version or (0, 0)
        env, memory = self._env, self._memory
        home = RankHome(
            env.node,
            env.memory_address,
            layout.digest if layout is not None else "",
            memory.digest_of(resumed) if memory is not None else "",
        )
        homes = group.exchange(home)
        if self._replicas is not None:
            self._replicas.began(homes, resumed)
        return homes
