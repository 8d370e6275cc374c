"""The few calls of NVML that we need, through ctypes: the library comes with the driver, and no package is needed.

Names and signatures are those of nvml.h. A call that this driver or this kind of GPU does not know is None.
"""

from __future__ import annotations

import ctypes

from ..rules.gpu_faults import UNUSABLE

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
_UNCORRECTED, _SINCE_RESET = 1, 0


class NvmlError(Exception):
    """What NVML says is wrong; `code` as in nvml.h, 0 where it has not been asked."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Nvml:
    """Started by `start`. All calls may hang on a sick driver. Those about a GPU raise NvmlError if it is lost."""

    def __init__(self) -> None:
        """Raises OSError where there is no such library."""
        self._library = ctypes.CDLL(LIBRARY)

    def start(self) -> None:
        """Raises NvmlError."""
        self._ask("nvmlInit_v2")

    def driver(self) -> str:
        text = ctypes.create_string_buffer(_TEXT)
        self._ask("nvmlSystemGetDriverVersion", text, _TEXT)
        return text.value.decode(errors="replace")

    def device(self, name: str) -> ctypes.c_void_p:
        """By PCI address, uuid or index. Raises NvmlError."""
        handle = ctypes.c_void_p()
        if name.isdigit():
            self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            way = "UUID" if name.startswith(("GPU-", "MIG-")) else "PciBusId_v2"
            self._ask(f"nvmlDeviceGetHandleBy{way}", name.encode(), ctypes.byref(handle))
        return handle

    def uncorrected(self, device: ctypes.c_void_p) -> int | None:
        count = ctypes.c_ulonglong()
        known = self._know(
            "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_RESET, ctypes.byref(count)
        )
        return count.value if known else None

    def remapped_rows(self, device: ctypes.c_void_p) -> tuple[int, bool, bool] | None:
        """For uncorrected errors; whether some wait for a reset; whether one has failed."""
        numbers = [ctypes.c_uint() for _ in range(4)]
        if not self._know("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, numbers)):
            return None
        _, uncorrected, pending, failed = (number.value for number in numbers)
        return uncorrected, bool(pending), bool(failed)

    def retirement_pending(self, device: ctypes.c_void_p) -> bool | None:
        """Whether pages of memory wait to be taken out of use, as on GPUs that remap no rows."""
        pending = ctypes.c_uint()
        known = self._know("nvmlDeviceGetRetiredPagesPendingStatus", device, ctypes.byref(pending))
        return bool(pending.value) if known else None

    def throttled(self, device: ctypes.c_void_p) -> int | None:
        """The bits of the reasons for low clocks."""
        bits = ctypes.c_ulonglong()
        known = self._know("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.byref(bits))
        return bits.value if known else None

    def persistent(self, device: ctypes.c_void_p) -> bool | None:
        mode = ctypes.c_uint()
        return (
            bool(mode.value)
            if self._know("nvmlDeviceGetPersistenceMode", device, ctypes.byref(mode))
            else None
        )

    def _know(self, name: str, *arguments: object) -> bool:
        try:
            self._ask(name, *arguments)
        except NvmlError as error:
            if error.code in UNUSABLE:
                raise
            return False
        return True

    def _ask(self, name: str, *arguments: object) -> None:
        call = getattr(self._library, name, None)
        if call is None:
            raise NvmlError(f"this driver has no {name}")
        answer = call(*arguments)
        if answer != 0:
            raise NvmlError(self._words(answer), answer)

    def _words(self, answer: int) -> str:
        words = getattr(self._library, "nvmlErrorString", None)
        if words is None:
            return f"error {answer}"
        words.restype = ctypes.c_char_p
        return (words(answer) or b"").decode(errors="replace") or f"error {answer}"
