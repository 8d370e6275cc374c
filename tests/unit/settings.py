"""What a person writes, as the configuration reads it: for the tests of command line, environment and file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from elastic_agent.agent.configuration.config import Config, ConfigError
from elastic_agent.agent.configuration.derive import Resolved, resolve
from elastic_agent.agent.configuration.load import read_argv


def run_resolve(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Resolved:
    return resolve(read_argv(argv), environ or {}, lambda: "fresh")


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    return run_resolve(argv, environ).config


def problems_of(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ)
    return [str(problem) for problem in caught.value.problems]


def written(source: str, folder: Path, values: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that give these values through one source."""
    if source == "cli":
        return [text if name == "script" else f"--{name}={text}" for name, text in values.items()], {}
    if source == "environment":
        return [], {f"ELASTIC_AGENT_{name.upper().replace('-', '_')}": text for name, text in values.items()}
    path = folder / "agent.toml"
    path.write_text("".join(f"{name} = {json.dumps(text)}\n" for name, text in values.items()))
    return ["--config", str(path)], {}


def means_the_same(printed: Resolved, folder: Path) -> Resolved:
    """What the settings that are printed mean, as a file."""
    file = folder / "printed.toml"
    file.write_text("\n".join(printed.settings.lines()))
    return resolve(read_argv(["--config", str(file)]), {}, lambda: "another")
