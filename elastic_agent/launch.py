"""`python -m elastic_agent.launch`, for those used to `python -m torch.distributed.launch`.

Each script gets `--local-rank=N` as its first argument, unless `--use-env` says that it reads LOCAL_RANK.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .agent.configuration.config import ARGS
from .agent.configuration.reading.sources import read_argv
from .agent.configuration.types.option import Group

USE_ENV = Group("Launch").flag("use-env", "the script reads LOCAL_RANK, and gets no --local-rank")


def words_of(argv: Sequence[str]) -> list[str]:
    """The command line of `elastic-agent` that does the same."""
    given = read_argv(argv, (USE_ENV,)).given
    if ARGS.name not in given:
        return list(argv)  # without a script: for its error, or its help
    args = given[ARGS.name].value
    assert isinstance(args, tuple)
    script_at = len(argv) - len(args)
    options = [word for word in argv[:script_at] if word.replace("_", "-") != "--use-env"]
    own = [] if USE_ENV.name in given else ["--local-rank=${local_rank}"]
    return [*options, *own, *args]


if __name__ == "__main__":
    from .__main__ import start

    sys.argv[1:] = words_of(sys.argv[1:])
    start()
