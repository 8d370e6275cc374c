"""`elastic-agent report RUN`: where the hours of a run went, out of the journals that its agents have kept.

It reads files, asks nobody and changes nothing. The run may be one that goes on.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...common.exits import ReportCode
from ...configuration.config import HELP, SCRIPT, ConfigError, Problem
from ...configuration.logs import LOG_DIR
from ...configuration.reading.sources import read_argv, read_environ
from ...configuration.types.option import Group, Option
from ...configuration.types.parsers import PATH, Parser
from ...observability.journal.event_file import journals, read_file
from ...observability.report.picture import FORMATS, PictureError, draw
from ...observability.report.report import Report, ReportError, report_of
from ...observability.report.text import document, lines
from ..store_command import one_line_errors
from .run_folders import NoRun, find_run

_USAGE = """\
usage: elastic-agent report RUN [--json] [--picture FILE.png|FILE.svg] [--log-dir DIR]

Shows where the hours of a run went, ETTR, the worst nodes and the slowest recoveries. RUN is the folder of a run, or
the name of a job: then it is the newest run of that job below --log-dir, or where agents without one keep their files.
The journals of all nodes should be there: copy those that are on other disks into the folder.
"""


def _read_picture(text: str) -> Path:
    path = PATH.parse(text)
    if path is None or path.suffix.lower() not in FORMATS:
        raise ValueError(f"end its name with {' or '.join(FORMATS)}")
    return path


REPORT_OPTIONS = Group("report")
JSON = REPORT_OPTIONS.flag("json", "one JSON document instead of text")
PICTURE: Option[Path | None] = REPORT_OPTIONS.option(
    "picture",
    Parser("the name of a .png or .svg file", _read_picture),
    "also draw it into FILE, which is replaced; needs 'elastic-agent[report]'",
    metavar="FILE",
)


class _NoReport(Exception):
    def __init__(self, code: ReportCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def main(words: Sequence[str]) -> int:
    """Returns a `ReportCode`."""
    run = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if run is not None else words, REPORT_OPTIONS)
    if HELP in command_line:
        print(_help())
        return ReportCode.SHOWN
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    problems = command_line.problems
    if SCRIPT in command_line:
        problems.append(command_line[SCRIPT].problem("one run", "leave it out"))
    if run is None:
        problems.append(Problem("report", None, "a run", "write its folder or its job first; see --help"))
    if problems or run is None:
        print(f"elastic-agent report: {ConfigError(problems)}", file=sys.stderr)
        return ReportCode.BAD_CONFIG
    given = (command_line if LOG_DIR in command_line else read_environ(os.environ))[LOG_DIR].value
    try:
        with one_line_errors(ReportCode.INTERRUPTED):
            report = _read(find_run(run, given))
            shown = json.dumps(document(report)) if command_line[JSON].value else "\n".join(lines(report))
            print(shown, flush=True)
            if (picture := command_line[PICTURE].value) is not None:
                draw(report, picture)
            return ReportCode.SHOWN
    except NoRun as error:
        print(f"elastic-agent report: {error}", file=sys.stderr)
        return ReportCode.NO_RUN
    except _NoReport as error:
        print(f"elastic-agent report: {error}", file=sys.stderr)
        return error.code
    except PictureError as error:
        print(f"elastic-agent report: {error}", file=sys.stderr)
        return ReportCode.NOT_WRITTEN
    except BrokenPipeError:
        return ReportCode.OUTPUT_CLOSED


def _read(folder: Path) -> Report:
    """Raises _NoReport."""
    try:
        files = journals(folder)
        if not files:
            what = f"{folder} has no events-NODE.jsonl: name the folder of a run"
            raise _NoReport(ReportCode.NO_ACCOUNT, what)
        nodes = ((event for part in parts for event in read_file(part)) for parts in files.values())
        return report_of(folder.resolve().name, nodes)
    except ReportError as error:
        raise _NoReport(ReportCode.NO_ACCOUNT, f"{folder}: {error}") from None
    except OSError as error:
        raise _NoReport(ReportCode.NO_ACCOUNT, f"{error.filename}: {error.strerror}") from None


def _help() -> str:
    codes = [f"  {int(code):>3}  {code.meaning}" for code in ReportCode]
    options = [option.help_text() for option in (*REPORT_OPTIONS, LOG_DIR)]
    return "\n".join([_USAGE, *options, "", "Exit codes:", *codes])
