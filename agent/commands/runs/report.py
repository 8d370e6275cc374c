"""`elastic-agent report RUN`: how a run spent its time, from the journals of its agents.

It reads files, asks no agent and changes nothing. The run may still go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...common.exits import CommandCode
from ...configuration.parse import PATH, Group, Option, Parser
from ...configuration.settings import Settings
from ...observability.journal.event_file import journals, read_file
from ...observability.report.picture import FORMATS, PictureError, draw
from ...observability.report.report import Report, ReportError, report_of
from ...observability.report.text import document, lines
from ..store_command import CannotDo
from .run_folders import run_command

_USAGE = """\
usage: elastic-agent report [RUN] [--json] [--picture FILE.png|FILE.svg] [--log-dir DIR]

Shows how a run spent its time, its ETTR, the worst nodes and the slowest recoveries. RUN is the folder of a run, or
the name of a job: then it is the newest run of that job below --log-dir, or where agents without one keep their files.
Without RUN it is the newest run there.
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


def main(words: Sequence[str]) -> int:
    """Returns a `CommandCode`."""
    return run_command("report", words, _USAGE, REPORT_OPTIONS, _work)


def _work(folder: Path, command_line: Settings) -> None:
    report = _read(folder)
    shown = json.dumps(document(report)) if command_line[JSON].value else "\n".join(lines(report))
    print(shown, flush=True)
    if (picture := command_line[PICTURE].value) is not None:
        try:
            draw(report, picture)
        except PictureError as error:
            raise CannotDo(CommandCode.CANNOT, str(error)) from None


def _read(folder: Path) -> Report:
    """Raises CannotDo."""
    try:
        files = journals(folder)
        if not files:
            what = f"{folder} has no events-NODE.jsonl: name the folder of a run"
            raise CannotDo(CommandCode.NO_JOB, what)
        nodes = ((event for part in parts for event in read_file(part)) for parts in files.values())
        return report_of(folder.resolve().name, nodes)
    except ReportError as error:
        raise CannotDo(CommandCode.NO_JOB, f"{folder}: {error}") from None
    except OSError as error:
        raise CannotDo(CommandCode.NO_JOB, f"{error.filename}: {error.strerror}") from None
