"""Remembers which saves the disk has refused, so that a job whose last state is on no disk does not end with success.

The disk writer says by itself what it has not written (`UnsavedSteps`). A save that a worker writes while training
waits, as without copies in memory, is known from that worker's reports alone. They are hints: one that was lost is not
known here, and what is known changes nothing but the exit code.

One Checkpointer is told from another by its directory, and by the rank that reports: an error counts until the same
rank has brought that step, or a later one, to the same directory. Where a script reports saves of its own, which name
no directory, all of them are taken for those of one Checkpointer.
"""

from __future__ import annotations

from ....worker.wire.messages import SaveReport


class RefusedSaves:
    """Of the newest generation that has reported: what an earlier one could not save is done again by the next."""

    def __init__(self) -> None:
        self._generation = 0
        self._saved: dict[tuple[int, str], int] = {}
        """The newest step that is on disk, by local rank and directory."""
        self._refused: dict[tuple[int, str], int] = {}
        """The newest that was refused since."""

    def add(self, report: SaveReport) -> None:
        """A report of any generation. Only those of a whole checkpoint on disk count."""
        if report.tier != "local" or report.generation < self._generation:
            return
        if report.generation > self._generation:
            self._generation, self._saved, self._refused = report.generation, {}, {}
        where, step = (report.local_rank, report.directory), report.step
        if report.result == "ok":
            self._saved[where] = max(step, self._saved.get(where, step))
            if self._refused.get(where, step + 1) <= step:
                del self._refused[where]
        elif where not in self._saved or step > self._saved[where]:
            # A step that is there already may be refused too: it does not grow, or its writer was told to leave it.
            self._refused[where] = max(step, self._refused.get(where, step))

    def lost_in(self, generation: int) -> str:
        """What of this generation, which has ended with success, is not on disk; empty: nothing that is known."""
        if generation != self._generation or not self._refused:
            return ""
        (_, directory), step = max(self._refused.items(), key=lambda one: one[1])
        place = f" in {directory}" if directory else ""
        return f"step {step} is NOT on disk{place}: its save was refused, a warning of its worker says why"
