"""torchrun's module by another name: `python -m elastic_agent.run`, and what libraries import from it.

`get_args_parser` is torch's own, so that whoever fills its options finds them all; `run` reads what was filled in.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .agent.common.exits import ExitCode
from .launcher import ERROR, LaunchError, _run, _why


def get_args_parser() -> argparse.ArgumentParser:
    """torchrun's."""
    from torch.distributed.run import get_args_parser as of_torchrun

    parser: argparse.ArgumentParser = of_torchrun()
    return parser


def words_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The command line that says the same as `args`, without what is only a default of torchrun's."""
    words = []
    for action in parser._actions:
        if not action.option_strings or action.dest in ("help", "module", "no_python"):
            continue
        value = getattr(args, action.dest, action.default)
        if value in (None, "", action.default) or value is False:
            continue
        name = max(action.option_strings, key=len).replace("_", "-")
        words += [name] if value is True else [f"{name}={value}"]
    switch = (
        "-m" if getattr(args, "module", False) else "--no-python" if getattr(args, "no_python", False) else ""
    )
    return [*words, *filter(None, [switch]), "--", args.training_script, *args.training_script_args]


def run(args: argparse.Namespace) -> None:
    """Runs the job that `args`, of `get_args_parser`, describe. Raises LaunchError when it fails."""
    with tempfile.TemporaryDirectory(prefix="elastic-agent-launch-") as folder:
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", f"{folder}/{ERROR}"))
        code = _run(words_of(args, get_args_parser()), error_file)
        if code != ExitCode.SUCCESS:
            raise LaunchError(_why(code, error_file), code)


def main(args: Sequence[str] | None = None) -> None:
    """As the command, with these words. Raises LaunchError where the command would end with a code but 0."""
    run(get_args_parser().parse_args(args))


if __name__ == "__main__":
    from .__main__ import start

    start()
