"""What is known of one worker's end, gathered once: what it left behind, and what the machine says of it.

The worker's own report is torch's *error file*, which `@record` writes for an uncaught exception, or the last Python
traceback in its output. The user's program has written both. Reading them never raises, whatever they contain. Every
text is cleaned of what a terminal obeys, and long ones are cut.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...rendezvous.text import clean as clean_line
from ...worker.storage.memory.available_memory import own_cgroup, read_rows, upwards
from ..common.ports import find_owner
from .processes.proc import open_here

LAST_WORDS = 3
"""The last lines in which a program without a traceback says why it ended."""

_ERROR_FILE_MAX = 1024 * 1024
_EXCEPTION_MAX = 2048
_TRACEBACK_MAX = 16 * 1024

# torch puts "[rank3]: " before each line of an uncaught exception once a process group exists.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# A traceback's frame; faulthandler's `File "x", line 1 in f` has no comma and is no Python exception.
_FRAME = re.compile(r'^\s+File ".*", line \d+(, in .*)?$')
_CRASH = re.compile(r"Fatal Python error: |terminate called |Segmentation fault|Aborted")
_DETAIL = re.compile(r"nccl\w+:|Last error:|Cuda failure")
_MOST_DETAIL = 4
"""What NCCL says below the exception."""
_HEADER = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """From an error file or a traceback."""

    exception: str | None = None
    """`Type: message`, with all of its lines."""
    traceback: str | None = None


def read_error_file(path: Path) -> ErrorReport | None:
    """The error file that torch's `@record` wrote; None without one that can be used, whatever it contains."""
    try:
        with open(path, "rb", opener=open_here) as file:
            report = json.loads(file.read(_ERROR_FILE_MAX))
        message = report["message"]
        details = report if isinstance(message, str) else message.get("extraInfo")
        text = message if isinstance(message, str) else message["message"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    if not isinstance(text, str) or not text:
        return None
    stack = details.get("py_callstack") if isinstance(details, dict) else None
    if isinstance(stack, str):
        stack = cut(clean_lines(stack).strip("\n"), _TRACEBACK_MAX, keep_end=True)
    return ErrorReport(cut(clean_lines(text), _EXCEPTION_MAX), stack if isinstance(stack, str) else None)


def find_traceback(lines: Sequence[str]) -> ErrorReport | None:
    """The last Python traceback in a log's last lines, even if its beginning is no longer among them."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    frame = next((at for at in reversed(range(len(lines))) if _FRAME.match(lines[at])), None)
    if frame is None:
        return None
    end = next((at for at in range(frame + 1, len(lines)) if lines[at] and not lines[at][0].isspace()), None)
    if end is None:
        return None
    start = next((at for at in reversed(range(frame)) if lines[at] == _HEADER), 0)
    detail = [line for line in lines[end + 1 : end + 1 + _MOST_DETAIL] if _DETAIL.match(line)]
    return ErrorReport(
        exception=cut("\n".join((lines[end], *detail)), _EXCEPTION_MAX),
        traceback=cut("\n".join(lines[start : end + 1]), _TRACEBACK_MAX, keep_end=True),
    )


def find_last_words(lines: Sequence[str]) -> ErrorReport | None:
    """The traceback of a process that then aborted or crashed: only the report of that may follow it."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    end = next((at for at, line in enumerate(lines) if _CRASH.match(line)), len(lines))
    words = [line for line in lines[:end] if line.strip()]
    found = find_traceback(words)
    return found if found is not None and first_line(found.exception or "") in words[-LAST_WORDS:] else None


# --- Texts that the user's program has written: cleaned, cut, and never refused


def clean(text: str) -> str:
    """One line without control characters, which can be encoded."""
    return clean_line(text.encode("utf-8", "backslashreplace").decode()).rstrip()


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def cut(text: str, most: int, *, keep_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return "..." + text[len(text) - most + 3 :] if keep_end else text[: most - 3] + "..."


# --- Its end, with what the machine says

BY_ITSELF = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
"""Signals that a process causes itself: its last output says why."""


@dataclass(frozen=True, slots=True)
class PostMortem:
    """One worker's end. `returncode` as in `subprocess`; `log_tail`: its last lines; `master_port`: its MASTER_PORT;
    `oom_killed`: the kernel has killed a process of this agent for its memory."""

    node: str
    generation: int
    rank: int
    local_rank: int
    returncode: int
    report: ErrorReport = field(default_factory=ErrorReport)
    """Its own: from its error file, or else the last traceback in its output."""
    log_tail: tuple[str, ...] = ()
    log_file: Path | None = None
    master_port: int = 0
    asked: bool = False
    """The agent had asked the worker to end, but it may have failed before."""
    oom_killed: bool = False
    own_gpus: tuple[str, ...] = ()
    """Faults that NVML shows of its GPUs, and no earlier failure of a worker of theirs has told."""
    gpu_failed: bool = False
    """They belong to this end."""

    @property
    def exception(self) -> str:
        """Empty without one."""
        return self.report.exception or ""

    @property
    def signal(self) -> int:
        """The signal that ended the worker, also as a shell's exit code 128 + n; 0: it has exited."""
        code = self.returncode
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + signal.SIGRTMAX else 0

    @property
    def words(self) -> tuple[str, ...]:
        """The texts in which the worker says why it ended: its exception, or else its last lines. Empty if another
        process ended it by a signal."""
        if self.exception:
            return (self.exception,)
        if self.returncode < 0:
            return self.log_tail if self.signal in BY_ITSELF else ()
        return tuple(line for line in self.log_tail if line.strip())[-LAST_WORDS:]


# --- Ports: a worker that found one taken

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|\[Errno 98\]", re.IGNORECASE)
_OF_UNIX = re.compile(r"""\bipc:|\b(AF_)?UNIX\b|['"]/""", re.IGNORECASE)
_PORT = re.compile(r"\bport:? (\d{1,5})\b|(?:\]|\d|\*|localhost):(\d{1,5})\b|', (\d{1,5})[,)]")
# Of torch's client that looks for the store of its ranks, or of the server that it wants to be.
_STORE = re.compile(
    r"client socket has .*connect to \(.*, (\d{1,5})\)|server socket has failed to listen.* port: (\d{1,5})"
)


def says_port_taken(words: Sequence[str]) -> str:
    """The line with which a program ended that says that a TCP port is taken; empty: none does."""
    lines = map(first_line, words)
    return next((line for line in lines if _PORT_TAKEN.search(line) and not _OF_UNIX.search(line)), "")


def notes_of_ports(said: str, master_port: int, *, taken: bool) -> Iterator[str]:
    """Notes for the summary: the owner of the taken port, if `said` names the port, and whether the script had chosen
    another port than the agent."""
    if taken and (port := _number_in(_PORT, said)):
        yield f"port {port}: {find_owner(port)}"
        if port == master_port:
            yield "it is MASTER_PORT, where the agent serves the store: use it as a client, or another port"
    chosen = _number_in(_STORE, said)
    if chosen and master_port and chosen != master_port:
        yield f"the script has chosen port {chosen}, the agent had given it MASTER_PORT={master_port}"


def _number_in(pattern: re.Pattern[str], text: str) -> int:
    """The number of the port in the text; 0: none."""
    found = pattern.search(text)
    return int(next(filter(None, found.groups()))) if found is not None else 0


# --- Out of memory
#
# A worker that the kernel's out-of-memory killer ends does so by SIGKILL, as one that a person kills. The kernel counts
# its victims before it kills them, in `memory.events` of each cgroup, with all those below (version 2), or in
# `memory.oom_control` (version 1).

LATELY_S = 60.0
"""A process with much memory takes its time to end."""

LOOK_EVERY_S = 1.0


class OomKills:
    """Owned by one thread. Instants are seconds on the monotonic clock."""

    def __init__(self, counter: Path | None) -> None:
        """None: this kernel does not count."""
        self._counter = counter
        self._count = _kills(counter)
        self._looked_at = 0.0
        self._struck_at: float | None = None

    def update(self, now: float) -> None:
        """To be called now and then, so that an old strike is not taken for a new one."""
        if now >= self._looked_at + LOOK_EVERY_S:
            self._read_count(now)

    def lately(self, now: float) -> bool:
        self._read_count(now)
        return self._struck_at is not None and now <= self._struck_at + LATELY_S

    def _read_count(self, now: float) -> None:
        count, self._looked_at = _kills(self._counter), now
        if count is None:
            return
        if self._count is not None and count > self._count:
            self._struck_at = now
        self._count = count


def find_counter(proc: Path = Path("/proc/self")) -> Path | None:
    """Of the cgroup of this process, or of the nearest around it that counts."""
    counters = [folder / "memory.events" for folder in upwards(own_cgroup("", proc))]
    if (here := own_cgroup("memory", proc)) is not None:
        counters.append(here / "memory.oom_control")
    return next(filter(Path.exists, counters), None)


def _kills(counter: Path | None) -> int | None:
    """None: there is no count now."""
    return read_rows(counter).get("oom_kill") if counter is not None else None
