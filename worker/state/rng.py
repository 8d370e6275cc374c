"""The random state of this process: Python's, numpy's (where it is used), torch's on the CPU and on every CUDA device.

It is captured into some ten kilobytes of plain words, within microseconds, so that a restarted rank draws exactly the
numbers that it would have drawn. Of numpy that is the state of its usual global generator.
"""

from __future__ import annotations

import importlib
import io
import random
import struct
import sys
from typing import Any

import torch

_PYTHON = struct.Struct(
    "=i625Id?"
)  # version, the words, the second half of a Gaussian pair, and whether there is one
_NUMPY = struct.Struct("=iid")  # position, whether there is half a Gaussian pair, and that
_LENGTH = struct.Struct("=I")
_NUMPY_WORDS = 624 * 4
_ARCHIVE = b"PK"


def capture() -> bytes:
    version, words, gauss = random.getstate()
    parts = [_PYTHON.pack(version, *words, gauss or 0.0, gauss is not None), _of_numpy()]
    states = [torch.get_rng_state()]
    # Asking a process that never touched its GPU would create a CUDA context on it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it without annotations
        states += torch.cuda.get_rng_state_all()
    parts += [state.numpy().tobytes() for state in states]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def restore(captured: bytes) -> None:
    """Continue the random numbers where `capture` was called. CUDA devices beyond those captured keep theirs.

    There may be zeros behind what was captured.
    """
    if captured.startswith(_ARCHIVE):
        _restore_archive(captured)
        return
    parts: list[bytes] = []
    offset = 0
    while offset + _LENGTH.size <= len(captured):
        (length,) = _LENGTH.unpack_from(captured, offset)
        if not length and len(parts) > 2:
            break
        offset += _LENGTH.size + length
        parts.append(captured[offset - length : offset])
    version, *words, gauss, has_gauss = _PYTHON.unpack(parts[0])
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    if parts[1]:
        position, has_half, half = _NUMPY.unpack_from(parts[1], _NUMPY_WORDS)
        numpy = importlib.import_module("numpy")
        key = numpy.frombuffer(parts[1], dtype=numpy.uint32, count=624)
        numpy.random.set_state(("MT19937", key, position, has_half, half))
    cpu, *cuda = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts[2:]]
    torch.set_rng_state(cpu)
    _restore_cuda(cuda)


def _of_numpy() -> bytes:
    """Empty where numpy is not in use, or draws by another generator than its usual one."""
    if "numpy" not in sys.modules:
        return b""
    name, key, position, has_half, half = sys.modules["numpy"].random.get_state(legacy=True)
    return key.tobytes() + _NUMPY.pack(position, has_half, half) if name == "MT19937" else b""


def plain(value: Any) -> Any:
    """numpy's state with its arrays as lists: the generator's `set_state` takes both."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _restore_archive(captured: bytes) -> None:
    """As older checkpoints have it: what `torch.save` writes."""
    state: dict[str, Any] = torch.load(io.BytesIO(captured), map_location="cpu", weights_only=True)
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    _restore_cuda(state.get("cuda", []))
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])


def _restore_cuda(states: list[torch.Tensor]) -> None:
    if torch.cuda.is_available():
        for device, state in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
