"""`elastic-agent convert FROM TO`: a checkpoint of one form, made into one of the other.

A job that changes from DDP to FSDP has a checkpoint that is the same on all ranks, and wants one that is sharded; one
that goes back, or another tool, wants the state in one file. See `worker/checkpointing/conversion`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.exits import CommandCode, exit_codes

FORMS = ("replicated", "sharded")

_USAGE = """\
usage: elastic-agent convert FROM TO [--to replicated|sharded] [--step N] [--parameter-names FILE]

Reads the newest checkpoint in the directory FROM, or that of step N, verifies it, and writes the same state in the
other form into the directory TO, which must be new or empty. FROM may also be a directory that
torch.distributed.checkpoint has written: then --step says which step it is of. The whole state must fit into memory.

  --to FORM               replicated: one file, which a Checkpointer of a state that is the same on all ranks loads;
                          sharded: a directory that a Checkpointer of a sharded state, and dcp.load, read
  --step N                which checkpoint of FROM
  --parameter-names FILE  names of the optimizer's parameters, one on each line, in the order of its groups. Without it
                          the numbers of a replicated checkpoint are taken for a model's parameters in their order,
                          unless the checkpoint has the names; a line of the output says so where shapes leave a doubt
"""


def main(words: Sequence[str]) -> int:
    """Returns a `CommandCode`."""
    if "--help" in words or "-h" in words:
        print(_help())
        return CommandCode.DONE
    try:
        source, target, options = read(words)
        step = int(options["step"]) if "step" in options else None
        names = _lines(Path(options["parameter-names"])) if "parameter-names" in options else None
        form = options.get("to")
        if form not in (None, *FORMS) or (step is not None and step < 0):
            raise ValueError("an option has a value that it cannot have")
    except (OSError, ValueError) as error:
        print(f"elastic-agent convert: {error}; see --help", file=sys.stderr)
        return CommandCode.BAD_CONFIG
    try:
        return _convert(source, target, form, step, names)
    except KeyboardInterrupt:
        print(f"elastic-agent convert: interrupted, {target} has no checkpoint", file=sys.stderr)
        return CommandCode.INTERRUPTED


def _convert(
    source: Path, target: Path, form: str | None, step: int | None, names: Sequence[str] | None
) -> CommandCode:
    try:
        from ...worker.checkpointing.conversion.convert import convert  # late: it needs torch
        from ...worker.errors import CheckpointError
    except ImportError as error:
        print(f"elastic-agent convert: it needs torch, which is not here: {error}", file=sys.stderr)
        return CommandCode.FAILED
    try:
        print(convert(source, target, to=form, step=step, parameter_names=names))  # type: ignore[arg-type]  # checked
    except (CheckpointError, OSError) as error:
        print(f"elastic-agent convert: {error}", file=sys.stderr)
        return CommandCode.FAILED
    return CommandCode.DONE


def _lines(path: Path) -> list[str]:
    """The lines that are not empty. Raises OSError, ValueError."""
    return [line for raw in path.read_text().splitlines() if (line := raw.strip())]


def read(words: Sequence[str]) -> tuple[Path, Path, dict[str, str]]:
    """Source, target, and options by name. Raises ValueError."""
    options: dict[str, str] = {}
    places: list[Path] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            places.append(Path(word))
            continue
        name, equals, value = word[2:].partition("=")
        if name not in ("to", "step", "parameter-names"):
            raise ValueError(f"no such option: --{name}")
        if not equals and not left:
            raise ValueError(f"--{name} needs a value")
        options[name] = value if equals else left.pop(0)
    if len(places) != 2:
        raise ValueError("expected FROM and TO")
    return places[0], places[1], options


def _help() -> str:
    return "\n".join([_USAGE, *exit_codes(CommandCode)])
