"""Where the output of workers goes (console, files), how a line on the console begins, and the agent's own log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .types.option import Group, Option
from .types.parsers import (
    PATH,
    Parser,
    one_of,
    read_local_ranks,
    read_log_level,
    read_streams,
    read_template,
    read_texts,
)
from .types.values import LocalRanks, LogFormat, LogLevel, Streams, Texts

LOGS = Group("Logs")
NO_FILES = Path(os.devnull)
LOG_DIR: Option[Path | None] = LOGS.option(
    "log-dir",
    PATH,
    "also write workers' output into files below DIR; /dev/null: no files (default: console only)",
    metavar="DIR",
    torchrun="log-dir",
)
_STREAMS = Parser(
    "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or that by local rank, like 0:3,1:2", read_streams
)
REDIRECTS: Option[Streams | None] = LOGS.option(
    "redirects",
    _STREAMS,
    "these streams go to files and not to the console, of all workers or by local rank; with it or --tee no other"
    " streams have files. Without --log-dir they are in a folder of this user's in the temporary directory; the log"
    " says where (default: all streams go to the console and, with --log-dir, to files)",
    metavar="STREAMS",
    short="-r",
    torchrun="redirects",
)
TEE: Option[Streams | None] = LOGS.option(
    "tee",
    _STREAMS,
    "these streams go to files and to the console, whatever --redirects says of them",
    metavar="STREAMS",
    short="-t",
    torchrun="tee",
)
LOCAL_RANKS_FILTER: Option[LocalRanks | None] = LOGS.option(
    "local-ranks-filter",
    Parser("local ranks with commas between, like 0,2", read_local_ranks),
    "only these workers of the node are on the console; files are as without it (default: all)",
    metavar="RANKS",
    torchrun="local-ranks-filter",
)
_TEXTS = Parser("texts with commas between; two commas stand for one in a text", read_texts)
STDOUT_FILTERS: Option[Texts] = LOGS.option(
    "duplicate-stdout-filters",
    _TEXTS,
    "lines of stdout that hold one of these texts, and go to files and to the console, are also copied to"
    " filtered_stdout.log, one for all workers of the node",
    metavar="TEXTS",
    default="",
    torchrun="duplicate-stdout-filters",
)
STDERR_FILTERS: Option[Texts] = LOGS.option(
    "duplicate-stderr-filters",
    _TEXTS,
    "the same for stderr and filtered_stderr.log",
    metavar="TEXTS",
    default="",
    torchrun="duplicate-stderr-filters",
)
PREFIX_TEMPLATE: Option[str] = LOGS.option(
    "log-line-prefix-template",
    Parser("a text", read_template),
    "how each line on the console begins, with ${role_name}, ${rank}, ${local_rank}, ${hostname}, ${node} (its name,"
    " see --node-id) and ${generation}",
    metavar="TEXT",
    default="[${node}/${rank}] ",
    torchrun="log-line-prefix-template",
)
LOG_LEVEL: Option[LogLevel] = LOGS.option(
    "log-level",
    Parser("debug, info, warning, error or critical, in any case, or a number", read_log_level),
    "the agent's own lines on stderr, from this level on; also in the variable LOGLEVEL, as torchrun has it. Output of"
    " workers is not concerned",
    metavar="LEVEL",
    default="info",
)
LOG_FORMAT: Option[LogFormat] = LOGS.option(
    "log-format",
    one_of(LogFormat),
    "the agent's own lines: for people, or each as one JSON object (time, level, logger, message, node, generation)",
    metavar="FORMAT",
    default="text",
)
QUIET = LOGS.flag(
    "quiet",
    "short for --log-level warning: the workers' own output, and of the agent only warnings and errors",
    shorthand=True,
)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The input of `worker_spec.output_routes`, and the form of the agent's own log."""

    directory: Path | None = LOG_DIR.field()
    """Below it are the files of workers; None: in the temporary directory, if `wants_files`, else there are none;
    NO_FILES: there are none."""
    redirects: Streams | None = REDIRECTS.field()
    tee: Streams | None = TEE.field()
    """Both None: all streams go to the console and, with a directory, to files."""
    local_ranks: LocalRanks | None = LOCAL_RANKS_FILTER.field()
    """None: all."""
    stdout_filters: Texts = STDOUT_FILTERS.field()
    stderr_filters: Texts = STDERR_FILTERS.field()
    prefix_template: str = PREFIX_TEMPLATE.field()
    level: LogLevel = LOG_LEVEL.field()
    format: LogFormat = LOG_FORMAT.field()

    def without_worker(self, workers: int) -> Iterator[str]:
        """Warnings of local ranks that a node with so many workers does not have."""
        named = {
            LOCAL_RANKS_FILTER.name: self.local_ranks.ranks if self.local_ranks is not None else (),
            REDIRECTS.name: [rank for rank, _ in self.redirects.by_local_rank]
            if self.redirects is not None
            else (),
            TEE.name: [rank for rank, _ in self.tee.by_local_rank] if self.tee is not None else (),
        }
        for option, ranks in named.items():
            absent = ", ".join(str(rank) for rank in ranks if rank >= workers)
            if absent:
                here = "only local rank 0" if workers == 1 else f"the local ranks 0 to {workers - 1}"
                yield f"--{option}: this node has no local rank {absent}, but {here}"

    @property
    def given_directory(self) -> Path | None:
        """None also where there are to be no files."""
        return self.directory if self.directory != NO_FILES else None

    @property
    def in_own_folder(self) -> bool:
        """Files are wanted, and no directory is given."""
        return self.directory is None and self.wants_files

    @property
    def wants_files(self) -> bool:
        """Also without a directory."""
        asked = any(streams is not None and streams.of_any(3) for streams in (self.redirects, self.tee))
        return asked or bool(self.stdout_filters.texts or self.stderr_filters.texts)
