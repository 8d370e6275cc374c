"""The random state of this process: Python's, numpy's (where it is used), torch's on the CPU and on every CUDA device.

It is captured into a few kilobytes of bytes that `torch.load(weights_only=True)` reads back, so that a restarted
rank draws exactly the numbers that it would have drawn.
"""

from __future__ import annotations

import importlib
import io
import random
import sys
from typing import Any

import torch


def capture() -> bytes:
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    # Asking a process that never touched its GPU would create a CUDA context on it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it without annotations
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
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


def _plain(value: Any) -> Any:
    """numpy's state with its arrays as lists: the generator's `set_state` takes both."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
