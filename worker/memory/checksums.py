"""Gives copies in memory their checksums while training goes on.

A copy counts from the instant at which it is sealed; a thread then reads it once and adds the checksums to its header.
Until that has come to an end, or where the process ended before, the copy's bytes cannot be verified: a load believes
its header, since to refuse such a copy would lose the very steps that it was made for. Of equal copies one with
checksums is preferred.

Only a caller that is about to change the slot waits for the thread, for a millisecond: it gives up then.

While this process copies a state the thread stands still: training waits for the copy, which takes twice as long where
the thread has one of the cores that copy. The price is that checksums come later by the time of the copies made
meanwhile. The thread keeps its priority, for at a lower one it could be left without a core while it holds the GIL.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import zlib
from collections.abc import Iterator

from .slots import PIECE_BYTES, Slots

_STRIDE = 1 << 20
"""Bytes between two looks at whether to give up, or to stand still."""


class _Copying:
    """How many states this process copies now: several Checkpointers may copy in threads of their own."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()

    def add(self, number: int) -> None:
        with self.changed:
            self.count += number
            self.changed.notify_all()


_copying = _Copying()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No checksums are computed in this process meanwhile, but for the stretch that has begun."""
    _copying.add(1)
    try:
        yield
    finally:
        _copying.add(-1)


class ChecksumThreads:
    """The checksums of one Checkpointer's slots. For the process that fills them."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._threads: dict[str, _ChecksumThread] = {}

    def start(self, name: str) -> None:
        """That slot was sealed, or its header changed."""
        self.stop(name)
        thread = _ChecksumThread(self._slots, name)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started now: this copy goes without
            return
        self._threads[name] = thread

    def stop(self, *names: str) -> None:
        """These slots are about to change."""
        for name in names:
            thread = self._threads.pop(name, None)
            if thread is not None:
                thread.give_up()
                thread.join()


class _ChecksumThread(threading.Thread):
    def __init__(self, slots: Slots, name: str) -> None:
        # The end of the process does not wait for it.
        super().__init__(name="memory-sums", daemon=True)
        self.given_up = threading.Event()
        self._slots = slots
        self._slot = name

    def give_up(self) -> None:
        with _copying.changed:
            self.given_up.set()
            _copying.changed.notify_all()

    def run(self) -> None:
        try:
            with self._slots.hold(self._slot) as held:
                size = held.header.size
                with mmap.mmap(held.stream.fileno(), size, prot=mmap.PROT_READ) as mapping:
                    sums = self._sums(mapping, size)
                if sums:
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
        """Once no state is copied; False: it is to give up."""
        with _copying.changed:
            _copying.changed.wait_for(lambda: self.given_up.is_set() or not _copying.count)
        return not self.given_up.is_set()
