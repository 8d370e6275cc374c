"""Where each byte of a checkpoint file belongs, before there is one; and the copy of all tensors to their places.

`lay_out` lets `torch.save` write all of the file but the tensors' bytes (`torch.serialization.skip_data`), and notes
which storages it met and where it left them out. So shared storages, views and tied weights are what torch makes of
them. On a CPU the copy is over when `copy_to` returns; a GPU copies while the process goes on, and whatever it
computes next waits for the copy on the GPU itself.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, cast

import torch

_ALWAYS_FIRST = -1000


class CannotLayOut(RuntimeError):
    """This version of torch shows too little of where it puts a tensor's bytes: there are no copies in memory."""


class _Recorder(threading.local):
    """The storages that torch has met in the present `torch.save` of this thread, in the order of their numbers."""

    storages: list[torch.UntypedStorage] | None = None


_recorder = _Recorder()
_registered = False


def _note(storage: Any) -> None:
    """torch asks where each storage that it saves lives; None leaves the answer to others."""
    if _recorder.storages is not None:
        _recorder.storages.append(storage)


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        torch.serialization.register_package(_ALWAYS_FIRST, _note, lambda _storage, _location: None)


class _Sink:
    """A file for `torch.save` that keeps what is written, and where a tensor's bytes were left out."""

    def __init__(self) -> None:
        self.size = 0
        self.written: list[tuple[int, bytearray]] = []
        """In whole stretches, for torch writes a few bytes at a time."""
        self.left_out: list[tuple[int, int]] = []

    def write(self, data: bytes | memoryview, /) -> int:
        begin, stretch = self.written[-1] if self.written else (0, bytearray())
        if not self.written or begin + len(stretch) != self.size:
            stretch = bytearray()
            self.written.append((self.size, stretch))
        stretch += data
        self.size += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise CannotLayOut(
                f"torch {torch.__version__} leaves a tensor out in a way that is not known here"
            )
        self.left_out.append((self.size, offset))
        self.size += offset
        return self.size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered here."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint file of `size` bytes: what is `written` is known, and at each offset a storage's bytes belong."""

    size: int
    written: list[tuple[int, bytearray]]
    storages: list[tuple[int, torch.UntypedStorage]]

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where this tensor's storage begins in the file."""
        wanted = tensor.untyped_storage()
        return next(offset for offset, storage in self.storages if storage is wanted)

    def copy_to(self, view: memoryview, target: torch.Tensor) -> list[torch.cuda.Event]:
        """Fill `target`, the bytes that `view` shows; what a GPU still copies is there when its events are over."""
        for offset, data in self.written:
            view[offset : offset + len(data)] = data
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for offset, storage in self.storages:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            place = target[offset : offset + storage.nbytes()]
            if storage.device.type == "cuda":
                copy_beside(place, source, streams)
            else:
                place.copy_(source)
        return [over(device, stream) for device, stream in streams.items()]


def lay_out(payload: Any) -> Layout:
    """How `torch.save` would write this. Raises CannotLayOut, and what the payload's own pickling raises."""
    _register()
    sink = _Sink()
    met: list[torch.UntypedStorage] = []
    _recorder.storages = met
    try:
        with torch.serialization.skip_data():
            torch.save(payload, cast(Any, sink))
    finally:
        _recorder.storages = None
    # By identity, in the order of their numbers, as torch does; of an empty one there is nothing to leave out.
    distinct = [one for one in {id(storage): storage for storage in met}.values() if one.nbytes()]
    left_out = [(offset, length) for offset, length in sink.left_out if length]
    if [storage.nbytes() for storage in distinct] != [length for _, length in left_out]:
        raise CannotLayOut(
            f"torch {torch.__version__} left out {len(left_out)} storages of {len(distinct)}, or of other sizes"
        )
    offsets = [offset for offset, _ in left_out]
    return Layout(sink.size, sink.written, list(zip(offsets, distinct, strict=True)))


def copy_beside(
    place: torch.Tensor, source: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]
) -> None:
    """Copy while the GPU's own work goes on, behind what has changed `source` up to now."""
    device = source.device
    if device not in streams:
        streams[device] = stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as below
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(streams[device]):
        place.copy_(source, non_blocking=True)
    source.record_stream(streams[device])


def over(device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of the copy. The GPU does nothing that could change the state before; this process need not wait."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    torch.cuda.current_stream(device).wait_event(event)
    return event
