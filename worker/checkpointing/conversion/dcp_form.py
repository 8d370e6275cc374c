"""A directory of `torch.distributed.checkpoint` (DCP) that another program has written, read into a whole state.

Its index is a pickle. The unpickler here makes objects of DCP's own classes and of nothing else, so that no code comes
out of it: this is the one place in this library that unpickles, and only where a person asks for it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointMismatch
from ...state.sharding.leaves import loaded, unflatten
from ...storage.disk.shard_files import METADATA_NAME
from ...wire.files import open_directory, open_for_reading
from .whole_state import WholeState, is_optimizer, numbered

MOST_BYTES = 1 << 30
_OF_DCP = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""By module, what an index may name; of `torch` also its dtypes."""


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for all that is not on the list."""
        if name in _OF_DCP.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of DCP's classes")


def read_dcp(directory: Path, step: int) -> WholeState:
    """Raises OSError, CheckpointMismatch."""
    with open_directory(str(directory)) as dir_fd:
        try:
            index = _read_index(dir_fd)
            leaves = {key: _leaf(dir_fd, index, key) for key in index.state_dict_metadata}
            return WholeState(step, _states(index, leaves))
        except OSError:
            raise
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{directory}: {error}") from error
        except Exception as error:
            raise CheckpointMismatch(f"{directory} cannot be read: {error!r}") from error


def _read_index(dir_fd: int) -> Any:
    with open_for_reading(dir_fd, METADATA_NAME) as stream:
        raw = stream.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise CheckpointMismatch(f"{METADATA_NAME} is longer than {MOST_BYTES} bytes")
    try:
        index = _IndexReader(io.BytesIO(raw)).load()
        if not isinstance(index.state_dict_metadata, dict) or not isinstance(index.storage_data, dict):
            raise TypeError(f"it holds {type(index).__name__}")
    except Exception as error:
        raise CheckpointMismatch(
            f"{METADATA_NAME} is no index of torch.distributed.checkpoint: {error}"
        ) from error
    return index


def _states(index: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
    paths = index.planner_data
    if not isinstance(paths, dict) or set(paths) != set(leaves):
        raise CheckpointMismatch(
            f"{METADATA_NAME} does not say which parts the names belong to: it was saved without flatten_state_dict"
        )
    state = unflatten([(tuple(paths[key]), leaf) for key, leaf in leaves.items()])
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointMismatch(f"{METADATA_NAME} is of a state without names for its parts")
    return {
        name: numbered(part, keep_names=True) if is_optimizer(part, str) else part
        for name, part in state.items()
    }


def _leaf(dir_fd: int, index: Any, key: str) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    found = index.state_dict_metadata[key]
    if not isinstance(found, TensorStorageMetadata):
        return _archive(dir_fd, index.storage_data[MetadataIndex(key)], key)
    whole = torch.empty(found.size, dtype=found.properties.dtype)
    is_read = torch.zeros(found.size, dtype=torch.bool)
    for chunk in found.chunks:
        piece = _archive(dir_fd, index.storage_data[MetadataIndex(key, chunk.offsets)], key)
        if not isinstance(piece, torch.Tensor) or piece.shape != chunk.sizes:
            raise CheckpointMismatch(f"a piece of {key!r} has another shape than {METADATA_NAME} says")
        place, is_place_read = whole, is_read
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            place, is_place_read = place.narrow(dim, offset, size), is_place_read.narrow(dim, offset, size)
        if is_place_read.any():
            raise CheckpointMismatch(f"two pieces of {key!r} overlap")
        place.copy_(piece)
        is_place_read.fill_(True)
    if left := whole.numel() - int(is_read.count_nonzero()):
        raise CheckpointMismatch(f"{left} of {whole.numel()} elements of {key!r} are in no file")
    return whole


def _archive(dir_fd: int, place: Any, key: str) -> Any:
    if getattr(place, "transform_descriptors", None):
        raise CheckpointMismatch(f"{key!r} is compressed or encrypted by an extension of DCP's storage")
    name = place.relative_path
    if os.path.basename(name) != name:
        raise CheckpointMismatch(f"{METADATA_NAME} names {name!r}, which is no file of its directory")
    with open_for_reading(dir_fd, name) as stream:
        raw = os.pread(stream.fileno(), place.length, place.offset)
    if len(raw) != place.length:
        raise CheckpointMismatch(f"{name} ends before {key!r} does")
    return loaded(raw)
