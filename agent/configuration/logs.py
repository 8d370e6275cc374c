"""Where the output of workers goes (console, files), how a line on the console begins, and the agent's own log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .types.option import Group, Option
from .types.parsers import (
    PATH,
    Parser,
    read_local_ranks,
    read_log_level,
    read_streams,
    read_template,
    read_texts,
)
from .types.values import LocalRanks, LogLevel, Streams, Texts

LOGS = Group("Logs")
LOG_DIR: Option[Path | None] = LOGS.option(
    "log-dir",
    PATH,
    "also write each worker's output into files below DIR (default: console only)",
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
    Parser("one line of text", read_template),
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
QUIET = LOGS.flag(
    "quiet",
    "short for --log-level warning: the workers' own output, and of the agent only warnings and errors",
    shorthand=True,
)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What `supervision.output_routes` decides by, and the level of the agent's own log."""

    directory: Path | None = LOG_DIR.field()
    """None: there are no files, unless others of these want some."""
    redirects: Streams | None = REDIRECTS.field()
    tee: Streams | None = TEE.field()
    """Both None: all streams go to the console and, with a directory, to files."""
    local_ranks: LocalRanks | None = LOCAL_RANKS_FILTER.field()
    """None: all."""
    stdout_filters: Texts = STDOUT_FILTERS.field()
    stderr_filters: Texts = STDERR_FILTERS.field()
    prefix_template: str = PREFIX_TEMPLATE.field()
    level: LogLevel = LOG_LEVEL.field()

    @property
    def wants_files(self) -> bool:
        """Also without a directory."""
        asked = any(streams is not None and streams.of_any(3) for streams in (self.redirects, self.tee))
        return asked or bool(self.stdout_filters.texts or self.stderr_filters.texts)
