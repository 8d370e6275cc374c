"""torchrun's module by another name: `python -m elastic_agent.run`, and `main` for programs that call it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .launcher import run_agent


def main(args: Sequence[str] | None = None) -> None:
    """As the command, with these words. Raises LaunchError where the command would end with a code but 0."""
    run_agent(sys.argv[1:] if args is None else list(args))


if __name__ == "__main__":
    from .__main__ import start

    start()
