"""`python -m elastic_agent.launch`, for those used to `python -m torch.distributed.launch`.

Each script gets `--local-rank=N` as its first argument, unless `--use-env` says that it reads LOCAL_RANK.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .agent.configuration.config import ARGS
from .agent.configuration.load import read_argv
from .agent.configuration.parse import Group

USE_ENV = Group("Launch").flag("use-env", "the script reads LOCAL_RANK, and gets no --local-rank")


def words_of(argv: Sequence[str]) -> list[str]:
    """The command line of `elastic-agent` that does the same. A script that a file names gets no --local-rank."""
    given = read_argv(argv, (USE_ENV,)).given
    if ARGS.name not in given:
        return [word for word in argv if not _is_use_env(word)]  # for its error, or its help
    args = given[ARGS.name].value
    assert isinstance(args, tuple)
    options = [word for word in argv[: len(argv) - len(args)] if not _is_use_env(word)]
    own = [] if USE_ENV.name in given and given[USE_ENV.name].value else ["--local-rank=${local_rank}"]
    return [*options, *own, *args]


def _is_use_env(word: str) -> bool:
    return word.partition("=")[0].replace("_", "-") == "--use-env"


if __name__ == "__main__":
    from .__main__ import start

    sys.argv[1:] = words_of(sys.argv[1:])
    start()
