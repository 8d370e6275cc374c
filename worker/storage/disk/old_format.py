"""Checkpoints of the tree before (0.1.0 was not released then), for this release only.

Of a sharded state, with manifests of schema 3: in the directory lay one more small file for each part, `__0_0.json`,
which was what its footer is now, and `files.json` with size and sha256 of all files, for which the manifest vouched.

Of a state that is the same on all ranks, with manifests of schema 2 or 4: a file of `torch.save`, with its sha256 in
the manifest. `ShardedParts.prepare_file` takes what is in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from io import BufferedRandom, BufferedReader
from typing import Any

from ....codec import from_plain
from ...wire.files import open_for_reading, read_whole, unseal
from .manifests import FileSum, Manifest
from .shard_files import MAX_FOOTER_BYTES, DiskCopy, Footer, check_size, data_name

_LIST_NAME = "files.json"
_MAX_LIST_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def open_verified(dir_fd: int, manifest: Manifest) -> BufferedReader:
    """The one file of that checkpoint, at its beginning. Raises OSError, ValueError."""
    stream = open_for_reading(dir_fd, manifest.file)
    try:
        size = os.fstat(stream.fileno()).st_size
        if size != manifest.size:
            raise ValueError(f"{size} bytes long, the manifest says {manifest.size}")
        if sha256_of(stream) != manifest.sha256:
            raise ValueError("sha256 differs from the manifest's")
    except BaseException:
        stream.close()
        raise
    return stream


def sha256_of(stream: BufferedReader | BufferedRandom) -> str:
    """Of all of it. It is at its beginning before and after."""
    sha256 = hashlib.sha256()
    while block := stream.read(_READ_BYTES):
        sha256.update(block)
    stream.seek(0)
    return sha256.hexdigest()


def files_of(there: int, manifest: Manifest) -> dict[str, FileSum]:
    """Raises OSError, ValueError."""
    raw = read_whole(there, _LIST_NAME, _MAX_LIST_BYTES)
    if hashlib.sha256(raw).hexdigest() != manifest.sha256:
        raise ValueError(f"{_LIST_NAME}: sha256 differs from the manifest's")
    _, body = unseal(raw, "file_list", 1)
    return {name: FileSum.parse(one) for name, one in body["files"].items()}


def is_old(files: Mapping[str, FileSum]) -> bool:
    return _rank_name(0) in files


def open_copy(there: int, path: str, manifest: Manifest, files: Mapping[str, FileSum], rank: int) -> DiskCopy:
    """As `shard_files.open_copy`."""
    name = _rank_name(rank)
    raw = read_whole(there, name, MAX_FOOTER_BYTES)
    if FileSum(len(raw), hashlib.sha256(raw).hexdigest()) != files[name]:
        raise ValueError(f"{name}: size or sha256 differs from that in {_LIST_NAME}")
    check_size(there, data_name(rank), files[data_name(rank)].size)
    footer = _footer(unseal(raw, "rank_file", 1)[1])
    return DiskCopy(manifest.step, path, open_for_reading(there, data_name(rank)), footer)


def _footer(file: dict[str, Any]) -> Footer:
    header, shards = file["header"], file["header"]["shards"]
    fields = {
        "copied_by": header["generation"],
        **{name: file[name] for name in ("generation", "twin_of")},
        **{name: header[name] for name in ("step", "world_size", "size", "sums")},
        **{name: shards[name] for name in ("rank", "table", "digest", "common")},
    }
    return from_plain(Footer, fields)


def _rank_name(rank: int) -> str:
    return f"__{rank}_0.json"
