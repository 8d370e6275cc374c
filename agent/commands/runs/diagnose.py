"""`elastic-agent diagnose RUN`: pack the files of a run into one archive, to send it to those who help.

It reads files, asks no agent and changes nothing. The run may still go on.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from .... import __version__
from ...common.exits import CommandCode
from ...configuration.parse import PATH, Group, Option
from ...configuration.settings import Settings
from ...output.masking import secrets_in
from ..store_command import CannotDo
from .bundle import Bundled, write_bundle
from .run_folders import run_command

_USAGE = """\
usage: elastic-agent diagnose [RUN] [--output FILE.tar.gz] [--log-dir DIR]

Writes logs, evidence, journals and settings of a run into one archive, with everything masked that looks like a secret.
RUN is the folder of a run, or the name of a job: then it is the newest run of that job below --log-dir, or where agents
without one keep their files. Without RUN it is the newest run there. Files on the disks of other nodes are not
included: copy them into the folder first.
"""

DIAGNOSE_OPTIONS = Group("diagnose")
OUTPUT: Option[Path | None] = DIAGNOSE_OPTIONS.option(
    "output",
    PATH,
    "the archive, which must not be there yet (default: the folder's name with .tar.gz, in the current folder)",
    metavar="FILE",
)


def main(words: Sequence[str]) -> int:
    """Returns a `CommandCode`."""
    return run_command("diagnose", words, _USAGE, DIAGNOSE_OPTIONS, _work)


def _work(folder: Path, command_line: Settings) -> None:
    folder = folder.resolve()
    target = command_line[OUTPUT].value or Path(f"{folder.name}.tar.gz")
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb") as archive:
                done = write_bundle(archive, folder, _about, secrets_in(os.environ))
        except BaseException:
            target.unlink()
            raise
    except OSError as error:
        reason = f"{target}: {error.strerror}; name another with --output"
        raise CannotDo(CommandCode.CANNOT, reason) from None
    print(target, flush=True)
    print(
        f"elastic-agent diagnose: {done.files} files. Secrets that were recognized are masked; look through the "
        "archive before you send it to others",
        file=sys.stderr,
    )


def _about(done: Bundled) -> str:
    lines = [
        f"elastic-agent {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{done.files} files, {done.bytes} bytes",
        *done.notes,
    ]
    return "\n".join(lines) + "\n"
