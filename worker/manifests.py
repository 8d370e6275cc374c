"""Manifests, and the names of all files of a checkpoint directory: see `files` for what they are there for."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, fields

from .durable import checksum, open_for_reading
from .wire.messages import RUN_NAME

SCHEMA = 2
_WITHOUT_RUN = 1
"""The schema of manifests that name no run."""

_RUN = rf"-(?P<run>{RUN_NAME.pattern})-[0-9a-f]{{8}}"
MANIFEST_NAME = re.compile(r"step-(\d{12,19})\.json")
DATA_NAME = re.compile(rf"step-(?P<step>\d{{12,19}})(?:{_RUN})?-(?P<digest>[0-9a-f]{{16}})\.pt")
TEMPORARY_NAME = re.compile(rf"tmp-(?P<generation>\d{{8,19}})-\d{{12,19}}(?:{_RUN})?\.(?:pt|json)")
_MAX_MANIFEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one checkpoint must look like to be believed: the step, its writer, and its data file's digest."""

    step: int
    generation: int
    world_size: int
    file: str
    size: int
    sha256: str
    run: str = ""
    """Whose it is; empty where an older version has written it."""

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("generation", 0), ("world_size", 1), ("size", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**63:
                raise ValueError(f"manifest: {name} is {value!r}, expected an integer of at least {least}")
        if not isinstance(self.sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"manifest: sha256 is {self.sha256!r}, expected 64 hexadecimal digits")
        if not isinstance(self.run, str) or not (self.run == "" or RUN_NAME.fullmatch(self.run)):
            raise ValueError(f"manifest: run is {self.run!r}, which is no name of a run")
        match = DATA_NAME.fullmatch(self.file) if isinstance(self.file, str) else None
        told = (int(match["step"]), match["run"] or "", match["digest"]) if match else None
        if told != (self.step, self.run, self.sha256[:16]):
            raise ValueError(f"manifest: file is {self.file!r}, which is not this step's data file")

    def to_json(self) -> bytes:
        body = {"schema": SCHEMA, **asdict(self)}
        if not self.run:
            body["schema"] = _WITHOUT_RUN
            del body["run"]
        return json.dumps({**body, "check": checksum(body)}, indent=1).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Read a manifest; ValueError says what is wrong with it."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"manifest is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError(f"manifest is a JSON {type(body).__name__}, expected an object")
        schema = body.get("schema")
        if type(schema) is not int or schema not in (_WITHOUT_RUN, SCHEMA):
            raise ValueError(
                f"manifest has schema {schema!r}, this version reads {_WITHOUT_RUN} and {SCHEMA}"
            )
        if body.pop("check", None) != checksum(body):
            raise ValueError("manifest does not match its own checksum")
        del body["schema"]
        if schema == _WITHOUT_RUN:
            body.setdefault("run", "")
        if body.keys() != {field.name for field in fields(cls)}:
            raise ValueError(f"manifest has the keys {sorted(body)}")
        return cls(**body)


def read_manifest(dir_fd: int, step: int) -> Manifest:
    with open_for_reading(dir_fd, manifest_name(step)) as stream:
        raw = stream.read(_MAX_MANIFEST_BYTES + 1)
    if len(raw) > _MAX_MANIFEST_BYTES:
        raise ValueError(f"manifest is longer than {_MAX_MANIFEST_BYTES} bytes")
    manifest = Manifest.from_json(raw)
    if manifest.step != step:
        raise ValueError(f"manifest of step {manifest.step} under the name of step {step}")
    return manifest


def manifest_of(dir_fd: int, step: int) -> Manifest | None:
    """None when it cannot be read, which makes it no run's checkpoint."""
    try:
        return read_manifest(dir_fd, step)
    except (OSError, ValueError):
        return None


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
