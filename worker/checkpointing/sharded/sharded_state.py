"""Takes, saves and loads a state that no rank has whole: each rank its shards, all of them together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from ...errors import CheckpointError
from ...ranks.group import Group, current_group
from ...ranks.refusals import together
from ...state.rank_parts import Rules
from ...state.state_dicts import Part
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.disk.sharded.shard_saver import ShardSaver
from ...storage.memory.shard_memory import local_rank_of, shard_memory_of
from ...wire.environment import WorkerEnv
from ..saving.slot_copies import SlotCopies
from .contents import ShardContents
from .loading import LoadedShards, ShardLoading
from .meeting import RankHome
from .planned_saves import ShardedPlannedSaver
from .saving import ShardSaving
from .shard_replicas import ShardReplicas


class ShardedState:
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
        self._env = WorkerEnv.of(os.environ)
        self._files = files
        self._was_accepted = False
        self._is_one_run = bool(self._env.run)
        """All ranks have the same run."""
        self._read_only = read_only
        self._memory = shard_memory_of(os.environ, files.directory) if not read_only else None
        self._replicas = (
            ShardReplicas(files.directory, self._env, self._memory) if self._memory is not None else None
        )
        self._contents = ShardContents(parts, of_rank_0, rules)
        self._saving = ShardSaving(
            files,
            self._contents,
            self._memory,
            self._replicas,
            SlotCopies(self._memory),
            ShardSaver(files, self._env),
            self._env,
            max_failed_saves,
            keeps_common=local_rank_of(os.environ) == 0,
        )
        self._loading = ShardLoading(files, self._contents, self._memory, self._env, read_only=read_only)
        self._planned = ShardedPlannedSaver(files.directory, self._memory, self._replicas, self._saving)

    def load(self) -> int:
        self._join_run()
        loaded = self._loading.load(self._saving.finish_last_write)
        if not self._read_only:
            self._saving.began(loaded.step, loaded.version)
            self._planned.loaded(loaded.step)
            self._begin_replicas(current_group(), loaded)
            if loaded.version is not None:
                self._saving.write_loaded(loaded.step, loaded.version)
        return loaded.step

    def save(self, step: int) -> bool:
        self._accept()
        self._join_run()
        return self._saving.save(step)

    def wait(self) -> bool:
        return self._saving.wait()

    def remember(self, step: int) -> bool:
        self._accept()
        self._join_run()
        return self._saving.remember(step)

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

    def _begin_replicas(self, group: Group, loaded: LoadedShards) -> None:
        """All ranks tell where they are and what they have; then each node knows its partners."""
        layout, _ = self._contents.lay_out(loaded.step, group, common=False)
        resumed = loaded.version or (0, 0)
        env, memory = self._env, self._memory
        home = RankHome(
            env.node,
            env.memory_address,
            env.failure_domain,
            layout.digest if layout is not None else "",
            memory.digest_of(resumed) if memory is not None else "",
        )
        homes = group.exchange(home)
        if self._replicas is not None:
            self._replicas.began(homes, resumed)
