"""The state of the GPUs, from `nvidia-smi`: on a broken GPU NVML may hang, which must not happen in this process."""

from __future__ import annotations

import shutil
import subprocess

from ....rendezvous.text import clean

PROGRAM = "nvidia-smi"
MOST_BYTES = 256 * 1024
_SECTIONS = "MEMORY,UTILIZATION,ECC,TEMPERATURE,POWER,CLOCK,PERFORMANCE,PIDS,ROW_REMAPPER"


class Question:
    """Asked, and not answered yet."""

    def __init__(self, program: subprocess.Popen[bytes]) -> None:
        self._program = program

    def end(self, within_s: float) -> str:
        """The answer; empty where none came within that time."""
        try:
            text, _ = self._program.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self._program.kill()  # and not waited for: it may hang in the driver
            return ""
        return "\n".join(map(clean, text[:MOST_BYTES].decode(errors="replace").splitlines()))


def ask() -> Question | None:
    """None where there is no driver's program."""
    program = shutil.which(PROGRAM)
    if program is None:
        return None
    command = [program, "-q", "-d", _SECTIONS]
    try:
        answer = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError:
        return None
    return Question(answer)
