"""The random state of this process: Python's, numpy's (where it is used), torch's on the CPU and on every CUDA device.

It is captured into a few kilobytes of bytes that `torch.load(weights_only=True)` reads back, so that a restarted
rank draws exactly the numbers that it would have drawn.
"""

from __future__ import annotations

import importlib
import io
import random
import struct
import sys
from typing import Any

import torch


def capture() -> bytes:
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    # Asking a process that never touched its GPU would create a CUDA context on it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it without annotations
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = plain(sys.modules["numpy"].random.get_state(legacy=False))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def restore(captured: bytes) -> None:
    """Continue the random numbers where `capture` was called. CUDA devices beyond those captured keep theirs."""
    state = torch.load(io.BytesIO(captured), map_location="cpu", weights_only=True)
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        for device, device_state in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])


def plain(value: Any) -> Any:
    """numpy's state with its arrays as lists: the generator's `set_state` takes both."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


# ---------------------------------------------------------------- at every step

_PYTHON = struct.Struct(
    "=i625Id?"
)  # version, the words, the second half of a Gaussian pair, and whether there is one
_NUMPY = struct.Struct("=iid")  # position, whether there is half a Gaussian pair, and that
_LENGTH = struct.Struct("=I")
_NUMPY_WORDS = 624 * 4


def snapshot() -> bytes:
    """Like `capture`, made for every step: plain words, in microseconds."""
    version, words, gauss = random.getstate()
    parts = [_PYTHON.pack(version, *words, gauss or 0.0, gauss is not None), _numpy_snapshot()]
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    parts += [state.numpy().tobytes() for state in states]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def restore_snapshot(raw: bytes) -> None:
    parts = []
    offset = 0
    while offset < len(raw):
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size + length
        parts.append(raw[offset - length : offset])
    version, *words, gauss, has_gauss = _PYTHON.unpack(parts[0])
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    if parts[1]:
        position, has_half, half = _NUMPY.unpack_from(parts[1], _NUMPY_WORDS)
        numpy = importlib.import_module("numpy")
        key = numpy.frombuffer(parts[1], dtype=numpy.uint32, count=624)
        numpy.random.set_state(("MT19937", key, position, has_half, half))
    cpu, *cuda = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts[2:]]
    torch.set_rng_state(cpu)
    if torch.cuda.is_available():
        for device, state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)


def _numpy_snapshot() -> bytes:
    """Empty where numpy is not in use, or draws by another generator than its usual one."""
    if "numpy" not in sys.modules:
        return b""
    name, key, position, has_half, half = sys.modules["numpy"].random.get_state(legacy=True)
    return key.tobytes() + _NUMPY.pack(position, has_half, half) if name == "MT19937" else b""
