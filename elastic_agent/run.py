"""torchrun's module by another name: `python -m elastic_agent.run`, and what libraries import from it.

`get_args_parser` is torch's own, for callers that fill its options in; `run` reads them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .agent.configuration.parse import join_texts
from .launcher import run_agent

_ELSEWHERE = ("help", "module", "no_python")


def get_args_parser() -> argparse.ArgumentParser:
    """torchrun's."""
    from torch.distributed.run import get_args_parser as of_torchrun

    parser: argparse.ArgumentParser = of_torchrun()
    return parser


def words_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The command line that says the same as `args`.

    A value that is torchrun's default is left out, since it cannot be told apart from one that was not given: so a job
    goes on while there is progress where torchrun would not restart it. Write `--max-restarts=0` to `main` for that.
    """
    words = []
    nodes = str(getattr(args, "nnodes", "1"))
    static = nodes.isdecimal() and nodes != "1" and not getattr(args, "rdzv_endpoint", "")
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        if (
            not action.option_strings
            or action.dest in _ELSEWHERE
            or value in (None, "", [])
            or value is False
        ):
            continue
        first_node = static and action.dest == "node_rank"  # its rank is the default
        if value == action.default and not first_node:
            continue
        name = max(action.option_strings, key=len).replace("_", "-")
        if isinstance(value, list):  # of texts to look for
            value = join_texts(value)
        words += [name] if value is True else [f"{name}={value}"]
    switch = (
        "-m" if getattr(args, "module", False) else "--no-python" if getattr(args, "no_python", False) else ""
    )
    return [*words, *filter(None, [switch]), "--", args.training_script, *args.training_script_args]


def run(args: argparse.Namespace) -> None:
    """Runs the job that `args`, of `get_args_parser`, describe. Raises LaunchError when it fails."""
    run_agent(words_of(args, get_args_parser()))


def main(args: Sequence[str] | None = None) -> None:
    """As the command, with these words. Raises LaunchError where the command would end with a code but 0."""
    run_agent(sys.argv[1:] if args is None else list(args))


if __name__ == "__main__":
    from .__main__ import start

    start()
