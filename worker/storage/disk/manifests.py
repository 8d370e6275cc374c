"""Manifests, and the names of all files of a checkpoint directory: see `checkpoint_files` for their purpose."""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from typing import Annotated, SupportsIndex

from ....codec import Checked, Count, Invalid, Positive, Text, from_plain, plain
from ...wire.files import read_whole, seal_fields, unseal
from ...wire.messages import RUN_NAME, RunNameOrNone

SHARDED_SCHEMA = 3
"""Of a checkpoint that is a directory of files, see `shard_files`."""
SCHEMA = 2
_WITHOUT_RUN = 1
"""The schema of manifests that name no run."""

_RUN = rf"-(?P<run>{RUN_NAME.pattern})-[0-9a-f]{{8}}"
MANIFEST_NAME = re.compile(r"step-(\d{12,19})\.json")
DATA_NAME = re.compile(rf"step-(?P<step>\d{{12,19}})(?:{_RUN})?-(?P<digest>[0-9a-f]{{16}})\.pt")
TEMPORARY_NAME = re.compile(rf"tmp-(?P<generation>\d{{8,19}})-\d{{12,19}}(?:{_RUN})?\.(?:pt|json)")
ATTEMPT_NAME = re.compile(
    rf"step-(?P<step>\d{{12,19}})-(?P<run>{RUN_NAME.pattern})-(?P<generation>\d{{8,19}})-(?P<mark>[0-9a-f]{{8}})"
)
"""Of the directory that one attempt to save a sharded state fills: no other ever has the same."""
_MAX_MANIFEST_BYTES = 4096
MOST_STEPS = 2**63 - 1


def step_number(step: SupportsIndex) -> int:
    """What a script gives as the step to save. Raises ValueError."""
    if not (hasattr(step, "__index__") and 0 <= operator.index(step) <= MOST_STEPS):
        raise ValueError(
            f"step is {step!r}, expected the number of steps that the state holds, from 0 to 2**63 - 1"
        )
    return operator.index(step)


@dataclass(frozen=True, slots=True)
class Manifest(Checked):
    """What one checkpoint must look like to be believed: the step, its writer, and its data file's digest.

    Of a sharded one `file` is a directory, `size` that of all data in it, and `sha256` that of the list of its files
    (`FileList`), which has size and digest of each.
    """

    step: Count
    generation: Count
    world_size: Positive
    file: str
    size: Positive
    sha256: Annotated[str, Text(64, re.compile(r"[0-9a-f]{64}"))]
    run: RunNameOrNone = ""
    """Whose it is; empty where an older version has written it."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if match := DATA_NAME.fullmatch(self.file):
            fits = (int(match["step"]), match["run"] or "", match["digest"]) == (
                self.step,
                self.run,
                self.sha256[:16],
            )
        elif match := ATTEMPT_NAME.fullmatch(self.file):
            fits = (int(match["step"]), match["run"], int(match["generation"])) == (
                self.step,
                self.run,
                self.generation,
            )
        else:
            fits = False
        if not fits:
            raise Invalid(f"manifest.file is {self.file!r}, which is not this step's data file")

    @property
    def is_sharded(self) -> bool:
        """Whether each rank's part is a file of its own, in the directory `file`."""
        return ATTEMPT_NAME.fullmatch(self.file) is not None

    def to_json(self) -> bytes:
        body = plain(self)
        if self.run:
            return seal_fields({"schema": SHARDED_SCHEMA if self.is_sharded else SCHEMA, **body}, indent=1)
        del body["run"]
        return seal_fields({"schema": _WITHOUT_RUN, **body}, indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Raises Invalid."""
        schema, body = unseal(raw, "manifest", _WITHOUT_RUN, SCHEMA, SHARDED_SCHEMA)
        if schema == _WITHOUT_RUN:
            body.setdefault("run", "")
        manifest = from_plain(cls, body)
        if manifest.is_sharded != (schema == SHARDED_SCHEMA):
            raise Invalid(f"manifest has schema {schema}, which is not that of {manifest.file}")
        return manifest


def read_manifest(dir_fd: int, step: int) -> Manifest:
    manifest = Manifest.from_json(read_whole(dir_fd, manifest_name(step), _MAX_MANIFEST_BYTES))
    if manifest.step != step:
        raise ValueError(f"manifest of step {manifest.step} under the name of step {step}")
    return manifest


def manifest_of(dir_fd: int, step: int) -> Manifest | None:
    """None when it cannot be read, which makes it no run's checkpoint."""
    try:
        return read_manifest(dir_fd, step)
    except (OSError, ValueError):
        return None


def readable_manifests(dir_fd: int) -> list[Manifest]:
    """Newest first."""
    return [one for step in manifest_steps(dir_fd) if (one := manifest_of(dir_fd, step)) is not None]


def data_match(name: str) -> re.Match[str] | None:
    """Of a name that a manifest may have as its `file`: step and run, and of a directory the generation."""
    return DATA_NAME.fullmatch(name) or ATTEMPT_NAME.fullmatch(name)


def runs_with_data(dir_fd: int, step: int) -> set[str]:
    """Whose data of `step` is here."""
    matches = map(data_match, os.listdir(dir_fd))
    return {match["run"] or "" for match in matches if match and int(match["step"]) == step}


def is_named(dir_fd: int, step: int, name: str) -> bool:
    """Whether a manifest may name this data file; an unreadable manifest of its step may name any."""
    try:
        return read_manifest(dir_fd, step).file == name
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def manifest_steps(dir_fd: int) -> list[int]:
    matches = map(MANIFEST_NAME.fullmatch, os.listdir(dir_fd))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def manifest_name(step: int) -> str:
    return f"step-{step:012d}.json"
