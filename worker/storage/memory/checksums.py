"""Gives copies in memory their checksums while training goes on.

A copy counts from the instant at which it is sealed; a thread then reads it once and adds the checksums to its header.
Until that has come to an end, or where the process ended before, the copy's bytes cannot be verified: a load believes
its header, since to refuse such a copy would lose the very steps that it was made for. Of equal copies one with
checksums is preferred.

Only a caller that is about to change the slot waits for the thread, for a millisecond: it gives up then.

While this process copies a state the thread stands still: training waits for the copy, which takes twice as long where
the thread has one of the cores that copy. The price is that checksums come later by the time of the copies made
meanwhile. The thread keeps its priority, for at a lower one it could be left without a core while it holds the GIL.

Where steps are so short that several threads in a row had to give up, the next one does not stand still. So at most one
copy in four is slowed, and only where copies would otherwise get no checksums. A copy whose slot is overwritten sooner
than it can be read gets none, for training would have to wait, or the newest copy to be overwritten, to read it all.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import zlib
from collections.abc import Iterator

from .slots import PIECE_BYTES, Slots

_STRIDE = 1 << 20
"""Bytes between two looks at whether to give up, or to stand still."""


_LOOK_S = 0.001
"""Between two looks at whether a copy has been made."""
_GIVEN_UP = 3
"""So many threads in a row stood still and gave up: the next one goes on."""

_copying: set[object] = set()
"""One for each state that this process copies now: several Checkpointers may copy in threads of their own."""

# A child of fork has no thread that would end the copies of its parent.
os.register_at_fork(after_in_child=_copying.clear)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Checksums wait meanwhile in this process, but for the stretch that has begun."""
    copy = object()
    try:  # an exception may come from a signal handler at any moment
        _copying.add(copy)
        yield
    finally:
        _copying.discard(copy)


class ChecksumThreads:
    """The checksums of one Checkpointer's slots. For the process that fills them."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._threads: dict[str, _ChecksumThread] = {}
        self._given_up = 0
        """How many in a row."""

    def start(self, name: str) -> None:
        """That slot was sealed, or its header changed."""
        self.stop(name)
        stands_still = self._given_up % (_GIVEN_UP + 1) < _GIVEN_UP
        thread = _ChecksumThread(self._slots, name, stands_still=stands_still)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started now: this copy goes without
            return
        self._threads[name] = thread

    def reads(self, name: str) -> bool:
        """Whether the checksums of that slot are being computed."""
        return name in self._threads and self._threads[name].is_alive()

    def stop(self, *names: str) -> None:
        """These slots are about to change."""
        for name in names:
            thread = self._threads.pop(name, None)
            if thread is not None:
                thread.given_up.set()
                thread.join()
                self._given_up = 0 if thread.finished else self._given_up + 1


class _ChecksumThread(threading.Thread):
    def __init__(self, slots: Slots, name: str, *, stands_still: bool) -> None:
        """`stands_still`: while a state is copied."""
        # The end of the process does not wait for it.
        super().__init__(name="memory-sums", daemon=True)
        self.given_up = threading.Event()
        self.finished = False
        self._stands_still = stands_still
        self._slots = slots
        self._slot = name

    def run(self) -> None:
        try:
            with self._slots.hold(self._slot) as held:
                size = held.header.size
                with mmap.mmap(held.stream.fileno(), size, prot=mmap.PROT_READ) as mapping:
                    sums = self._sums(mapping, size)
                if sums:
                    self.finished = True
                    self._slots.add_sums(held, sums)
        except (OSError, ValueError):
            pass  # the copy is gone, or there is no room for its checksums

    def _sums(self, mapping: mmap.mmap, size: int) -> tuple[int, ...]:
        """As of `sums_of`; empty when it gave up."""
        sums = []
        with memoryview(mapping) as view:
            for begin in range(0, size, PIECE_BYTES):
                crc, end = 0, min(begin + PIECE_BYTES, size)
                for offset in range(begin, end, _STRIDE):
                    if not self._may_go_on():
                        return ()
                    with view[offset : min(offset + _STRIDE, end)] as stretch:
                        crc = zlib.crc32(stretch, crc)
                sums.append(crc)
        return tuple(sums)

    def _may_go_on(self) -> bool:
        """Once no state is copied, where it stands still for that; False: it is to give up."""
        while self._stands_still and _copying and not self.given_up.wait(_LOOK_S):
            pass
        return not self.given_up.is_set()
