"""Manifests, and the names of all files of a checkpoint directory: see `checkpoint_files` for their purpose."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, SupportsIndex

from ....codec import Checked, Count, Invalid, Positive, Text, from_plain, plain
from ...wire.environment import RUN_NAME
from ...wire.files import read_whole, seal_fields, unseal
from ...wire.messages import RunNameOrNone

SCHEMA = 5
"""Of all that this version writes to disk."""
_FORMS = {2: {"file"}, 3: {"directory"}, 4: {"file", "listed"}, SCHEMA: {"listed"}}
"""By schema what the data of a checkpoint may be: one file, or a directory whose files the manifest lists or does not.
See `old_format` for those that are not written any more."""
SCHEMAS = tuple(_FORMS)
"""That this version reads."""

_RUN = rf"(?P<run>{RUN_NAME.pattern})"
MANIFEST_NAME = re.compile(r"step-(\d{12,19})\.json")
DATA_NAME = re.compile(
    rf"step-(?P<step>\d{{12,19}})(?:-{_RUN}-[0-9a-f]{{8}})?-(?P<digest>[0-9a-f]{{16}})\.pt"
)
TEMPORARY_NAME = re.compile(rf"tmp-(?P<generation>\d{{8,19}})-\d{{12,19}}-{_RUN}-[0-9a-f]{{8}}\.(?:pt|json)")
ATTEMPT_NAME = re.compile(
    rf"step-(?P<step>\d{{12,19}})-{_RUN}-(?P<generation>\d{{8,19}})-(?P<mark>[0-9a-f]{{8}})"
)
"""Of the directory that one attempt to save a state fills: no other ever has the same."""
_MAX_MANIFEST_BYTES = 4 << 20
"""One of a sharded state has some 90 for each rank."""
MOST_STEPS = 2**63 - 1


def step_number(step: SupportsIndex) -> int:
    """What a script gives as the step to save. Raises ValueError."""
    if not (hasattr(step, "__index__") and 0 <= operator.index(step) <= MOST_STEPS):
        raise ValueError(
            f"step is {step!r}, expected the number of steps that the state holds, from 0 to 2**63 - 1"
        )
    return operator.index(step)


class FileSum(NamedTuple):
    """Of one file of a checkpoint: its size, and a sha256 of what vouches for it, see `parts`."""

    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size} {self.sha256}"

    @staticmethod
    def parse(text: Any) -> FileSum:
        """Raises Invalid."""
        if not (isinstance(text, str) and _FILE_SUM.fullmatch(text)):
            raise Invalid(f"a size and a sha256 were expected, not {text!r}")
        size, sha256 = text.split()
        return FileSum(int(size), sha256)


_FILE_SUM = re.compile(r"\d{1,19} [0-9a-f]{64}")


def digest_of(files: Mapping[str, FileSum]) -> str:
    """The sha256 of a list of files."""
    lines = json.dumps({name: str(one) for name, one in files.items()}, sort_keys=True)
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest(Checked):
    """What one checkpoint must look like to be believed: the step, its writer, and its data's digest.

    `file` is a directory with `parts` parts: one of each of the `world_size` ranks, or one that has all. `size` is that
    of all data in it, and `sha256` that of the list of its files, which stands in the manifest's file only: what ranks
    tell each other stays small. Of the version before it may be one file, see `old_format`.
    """

    step: Count
    generation: Count
    world_size: Positive
    file: str
    size: Positive
    sha256: Annotated[str, Text(64, re.compile(r"[0-9a-f]{64}"))]
    run: RunNameOrNone = ""
    parts: Positive = 1

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
        if self.parts not in (1, self.world_size):
            raise Invalid(f"manifest.parts is {self.parts}, of {self.world_size} ranks")

    @property
    def is_one_file(self) -> bool:
        """It is of the version before, see `old_format`."""
        return DATA_NAME.fullmatch(self.file) is not None

    def to_json(self, files: Mapping[str, FileSum]) -> bytes:
        """`files` are those in the directory, with `digest_of` them in `sha256`."""
        listed = {name: str(one) for name, one in files.items()}
        return seal_fields({"schema": SCHEMA, **plain(self), "files": listed}, indent=1)

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Raises Invalid."""
        return _parsed(raw)[0]


def _parsed(raw: bytes) -> tuple[Manifest, dict[str, FileSum] | None]:
    """And the list of files, if it is here. Raises Invalid."""
    schema, body = unseal(raw, "manifest", *SCHEMAS)
    listed = body.pop("files", None)
    if schema != SCHEMA:
        is_one = isinstance(body.get("file"), str) and DATA_NAME.fullmatch(body["file"])
        body = {**body, "parts": 1 if is_one else body.get("world_size")}
    manifest = from_plain(Manifest, body)
    form = "listed" if listed is not None else "file" if manifest.is_one_file else "directory"
    if form not in _FORMS[schema] or (listed is not None and manifest.is_one_file):
        raise Invalid(f"manifest has schema {schema}, which is not that of {manifest.file}")
    if listed is None:
        return manifest, None
    if not isinstance(listed, dict):
        raise Invalid("manifest.files is no object")
    files = {name: FileSum.parse(one) for name, one in listed.items()}
    if digest_of(files) != manifest.sha256:
        raise Invalid("manifest.files does not match manifest.sha256")
    return manifest, files


def read_manifest(dir_fd: int, step: int) -> Manifest:
    return _read(dir_fd, step)[0]


def read_files(dir_fd: int, manifest: Manifest) -> dict[str, FileSum] | None:
    """The files in the directory of that checkpoint; None: `old_format` has them. Raises OSError, ValueError."""
    found, files = _read(dir_fd, manifest.step)
    if found != manifest:
        raise ValueError(f"{manifest_name(manifest.step)} is of another checkpoint by now")
    return files


def _read(dir_fd: int, step: int) -> tuple[Manifest, dict[str, FileSum] | None]:
    manifest, files = _parsed(read_whole(dir_fd, manifest_name(step), _MAX_MANIFEST_BYTES))
    if manifest.step != step:
        raise ValueError(f"manifest of step {manifest.step} under the name of step {step}")
    return manifest, files


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
