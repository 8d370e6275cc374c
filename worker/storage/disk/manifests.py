"""Manifests, and the names of all files of a checkpoint directory: see `checkpoint_files` for their purpose."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated

from ....codec import Checked, Count, Invalid, Positive, Text, from_plain, plain
from ...wire.files import read_whole
from ...wire.messages import RUN_NAME, RunNameOrNone
from ...wire.sealed import seal_fields, unseal

SCHEMA = 2
_WITHOUT_RUN = 1
"""The schema of manifests that name no run."""

_RUN = rf"-(?P<run>{RUN_NAME.pattern})-[0-9a-f]{{8}}"
MANIFEST_NAME = re.compile(r"step-(\d{12,19})\.json")
DATA_NAME = re.compile(rf"step-(?P<step>\d{{12,19}})(?:{_RUN})?-(?P<digest>[0-9a-f]{{16}})\.pt")
TEMPORARY_NAME = re.compile(rf"tmp-(?P<generation>\d{{8,19}})-\d{{12,19}}(?:{_RUN})?\.(?:pt|json)")
_MAX_MANIFEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Manifest(Checked):
    """What one checkpoint must look like to be believed: the step, its writer, and its data file's digest."""

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
        match = DATA_NAME.fullmatch(self.file)
        named = (int(match["step"]), match["run"] or "", match["digest"]) if match else None
        if named != (self.step, self.run, self.sha256[:16]):
            raise Invalid(f"manifest.file is {self.file!r}, which is not this step's data file")

    def to_json(self) -> bytes:
        body = plain(self)
        if self.run:
            return seal_fields({"schema": SCHEMA, **body}, indent=1)
        del body["run"]
        return seal_fields({"schema": _WITHOUT_RUN, **body}, indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Raises Invalid."""
        schema, body = unseal(raw, "manifest", _WITHOUT_RUN, SCHEMA)
        if schema == _WITHOUT_RUN:
            body.setdefault("run", "")
        return from_plain(cls, body)


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


def runs_with_data(dir_fd: int, step: int) -> set[str]:
    """Whose data files of `step` are here."""
    matches = map(DATA_NAME.fullmatch, os.listdir(dir_fd))
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
