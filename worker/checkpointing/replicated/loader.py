"""Loads the state of one Checkpointer on all ranks, and claims the directory for what training makes of it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from ...errors import BadCheckpoint, CheckpointError, NotSaved, Unconfirmed
from ...ranks.group import Group, current_group
from ...ranks.refusals import together
from ...ranks.replicas import refuse_sharded
from ...steps import progress
from ...storage.disk.checkpoint_files import CheckpointFiles
from ...storage.memory.copy_header import Header
from ...storage.memory.node_memory import NodeMemory
from ...wire.environment import WorkerEnv
from ...wire.messages import LoadResult, Tier
from ..loading.checkpoint_selection import BadState, Source
from ..loading.restore import Restore
from ..loading.resume import apply
from .contents import Contents

logger = logging.getLogger(__name__)


class Loader:
    def __init__(
        self,
        files: CheckpointFiles,
        contents: Contents,
        memory: NodeMemory | None,
        env: WorkerEnv,
        *,
        read_only: bool,
    ) -> None:
        """`read_only`: training does not go on from what is loaded, so nothing is claimed or reported."""
        self._files = files
        self._node = env.node
        self._contents = contents
        self._memory = memory
        self._read_only = read_only
        self._report = progress.Silent() if read_only else progress
        self._bad_state = None if read_only else BadState.of(env, files.run.id)
        self._speaks_for_node = not read_only and env.local_rank == 0

    def load(self, finish_last_write: Callable[[], None]) -> tuple[int, Source | None]:
        """The step, and whose state it is; 0 and None when there was none. Raises what `Checkpointer.load` raises.

        `finish_last_write` raises what became of a save that was under way.
        """
        self._report.loading()
        group, started_s, step = current_group(), time.monotonic(), 0

        def report(step: int, result: LoadResult, tier: Tier = "local") -> None:
            self._report.checkpoint_load(step, result, time.monotonic() - started_s, tier)

        def on_bad(bad: BadCheckpoint) -> None:
            logger.warning(
                "checkpoint does not verify, trying the next older one: step=%d reason=%s", bad.step, bad
            )
            report(bad.step, "corrupt")

        restore = Restore(
            group, self._files, self._memory, self._node, on_bad, self._report.load_chosen, self._bad_state
        )
        try:
            together(group, lambda: self._prepare(finish_last_write), "nothing loaded")
            self._on_rank_0(group, self._files.claim.await_former_run)
            with restore:
                source = restore.choose()
                if source is not None:
                    step = source.what.step
                    self._warn_if_set_back(source)
                    parts, of_each_rank = self._contents.parts, self._contents.of_each_rank
                    directory, memory = self._files.directory, self._memory
                    restore.load(lambda loaded: apply(loaded, parts, of_each_rank, group, directory, memory))
            related = restore.related_runs()
            self._on_rank_0(
                group, lambda: self._files.claim.take(step, related, elsewhere=restore.is_elsewhere)
            )
        except CheckpointError:
            self._files.claim.release_lock()
            if not restore.unreadable:
                self._report.load_refused()
            report(step, "error")
            raise
        if group.rank and self._speaks_for_node:
            self._files.claim.share_lock()
        in_memory = source is not None and isinstance(source.what, Header)
        report(step, "none" if source is None else "ok", "memory" if in_memory else "local")
        return step, source

    def _prepare(self, finish_last_write: Callable[[], None]) -> None:
        """No state is sharded, of the saves before no one is under way, and no agent holds locks of a past run."""
        refuse_sharded(self._contents.parts)
        if self._speaks_for_node:
            self._files.claim.release_former_locks()
        with contextlib.suppress(NotSaved, Unconfirmed):  # the log has it
            finish_last_write()

    def _warn_if_set_back(self, source: Source) -> None:
        bad = self._bad_state
        if bad is None:
            return
        if bad.covers(source.what):
            logger.warning(
                "there is no older state to go back to: step=%d bad=%d", source.what.step, bad.step
            )
        else:
            logger.warning("going on from an older state: step=%d bad=%d", source.what.step, bad.step)

    def _on_rank_0(self, group: Group, part: Callable[[], None]) -> None:
        """Let rank 0 do this, and raise on every rank what it raises."""
        does = group.rank == 0 and not self._read_only
        together(group, part if does else lambda: None, self._files.directory)
