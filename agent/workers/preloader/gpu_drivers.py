"""Whether this process has a GPU's driver open, which no fork of it may inherit.

A driver's state belongs to the process that asked for it: a fork that uses it gets errors, or writes to the parent's
memory. torch knows only of the contexts that it made itself; any library may call the driver (cuInit, NVML, HIP) while
it is imported. What they all do is open a device file, and keep it open.

In the job's interpreter, which need not know this package: standard library only.
"""

from __future__ import annotations

import os

OPEN_FILES = "/proc/self/fd"

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/dxg")
"""NVIDIA; AMD; AMD and Intel, to render; other accelerators; any, under Windows' Linux."""


def in_use(open_files: str = OPEN_FILES) -> str:
    """The first device file of a GPU among the open files of that table; empty if there is none."""
    for descriptor in os.listdir(open_files):
        try:
            path = os.readlink(os.path.join(open_files, descriptor))
        except OSError:  # the one that lists them, which is closed again
            continue
        if path.startswith(DEVICE_FILES):
            return path
    return ""
