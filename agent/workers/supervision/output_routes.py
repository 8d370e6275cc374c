"""Where that goes which one worker prints: torchrun's rules for `--redirects`, `--tee` and `--local-ranks-filter`.

A pure function. A stream that neither of the first two names is on the console alone, as soon as one of them is given.
What goes to a file and to the console is *tee'd*: of such lines `--duplicate-stdout-filters` makes copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from ...configuration.logs import LogConfig
from ...output.worker_logs import OutputRoute


def routes(logs: LogConfig, local_rank: int, words: Mapping[str, object]) -> tuple[OutputRoute, OutputRoute]:
    """Of stdout and stderr; `words` are those that the template of the prefix may have."""
    prefix = Template(logs.prefix_template).safe_substitute(words)
    redirects = logs.redirects.of(local_rank) if logs.redirects is not None else 0
    tee = logs.tee.of(local_rank) if logs.tee is not None else 0
    chosen = logs.redirects is not None or logs.tee is not None
    files = logs.directory is not None
    seen = logs.local_ranks is None or local_rank in logs.local_ranks.ranks

    def route(stream: int, filters: tuple[str, ...]) -> OutputRoute:
        file = files and (not chosen or bool((redirects | tee) & stream))
        console = seen and (not files or bool(tee & stream) or not redirects & stream)
        return OutputRoute(prefix, file, console, filters if file and console else ())

    return route(1, logs.stdout_filters.texts), route(2, logs.stderr_filters.texts)
