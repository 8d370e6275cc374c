"""Checkpoints of a former run, kept apart from those of the run that has the directory now.

A node joins a job with a disk that holds a former job's checkpoints, newer than what the job has come to. When that
node becomes rank 0 the job saves there. It does not come from those checkpoints, so they are not its own to delete,
and a step of its own may have the name of one of them. Each is moved as it is to a directory of its run:

    before-3b9e0c51d7aa/step-000000000200-3b9e0c51d7aa-91c2f0d4-4f1c0a9be2d35577.pt
    before-3b9e0c51d7aa/step-000000000200.json

The data goes first, so a manifest in the new place always has its data beside it. Nothing reads or deletes there by
itself; a job whose checkpoint directory it is goes on from it.
"""

from __future__ import annotations

import contextlib
import os

from ...wire.files import open_own_directory
from .manifests import Manifest, manifest_name


def move_aside(dir_fd: int, manifest: Manifest) -> str:
    """Move this checkpoint, durably, also one that was moved in part; the name of where it is now. Raises OSError."""
    name = f"before-{manifest.run or 'unnamed'}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=dir_fd)
        os.fsync(dir_fd)
    with open_own_directory(name, dir_fd) as there:
        with contextlib.suppress(FileNotFoundError):  # it is there already, or there is none
            os.rename(manifest.file, manifest.file, src_dir_fd=dir_fd, dst_dir_fd=there)
        os.fsync(there)
        manifest_file = manifest_name(manifest.step)
        os.rename(manifest_file, manifest_file, src_dir_fd=dir_fd, dst_dir_fd=there)
        os.fsync(there)
        os.fsync(dir_fd)
    return name
