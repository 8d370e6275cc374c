"""How one worker ended, as data and in words: what failed first, where, with which exception, and where to read on.

What is known comes from three places, the best first: the *error file* that torch's `@record` writes for an uncaught
exception, the last Python traceback in the worker's stderr, and the *exit*: a return code as `subprocess` counts it
(negative: ended by that signal). All three are written or caused by the user's program: whatever they hold, reading
them never raises, and what does not fit is cut.

Invariant: every text in a `WorkerFailure` is bounded, has nothing that a terminal obeys, and can be encoded; only an
exception and a traceback have several lines. Its JSON form stays within `MAX_JSON` bytes, because it travels through
the store to the other nodes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ....codec import Codec, Count, Invalid, Text, Within
from ....rendezvous.text import clean
from ...common.exits import signal_name
from ...common.port_owner import PortOwner

Reason = Literal["ok", "exception", "signal", "oom", "nccl", "port", "hang", "unknown"]
"""Some of the metric `worker_exits_total`'s values for `reason`. `nccl`: the network between the workers, or NCCL
itself; `port`: a port that the worker wanted to listen on is taken; `hang`: no exit at all, the agent had waited long
enough."""

HANG_SIGNAL = signal.SIGABRT
"""What ends a worker that hangs: PYTHONFAULTHANDLER makes it print where each of its threads stands."""

MAX_JSON = 4096
_SCHEMA = 3
_ERROR_FILE_MAX = 1024 * 1024
_CAUSE_MAX = 500
_NOTE_MAX = 250
"""Of the cause's end, which says what the agent knows of it."""
_EXCEPTION_MAX = 2048
_TRACEBACK_MAX = 16 * 1024
_FINGERPRINT_MAX = 300

_TEXTS = {"node": 256, "cause": 400, "exception": 500, "traceback": 1400, "log_file": 500}
"""Bytes that each may take in the JSON form. With `_LOG_TAIL`, the numbers and the names they stay below MAX_JSON."""
_LOG_TAIL = 800

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGABRT: "the program gave up: often a C++ exception or NCCL's watchdog",
    signal.SIGBUS: "often a full /dev/shm, or a mapped file that became shorter",
    signal.SIGFPE: "arithmetic in native code, such as an integer division by zero",
    signal.SIGILL: "an instruction that this processor lacks: built for another machine",
    signal.SIGKILL: "often the kernel's out-of-memory killer or an operator",
    signal.SIGSEGV: "a fault in native code; `python -X faulthandler` shows where",
    signal.SIGTERM: "something asked it to stop",
    signal.SIGUSR1: "such as Slurm's --signal sends to all processes; this one does not handle it",
    signal.SIGUSR2: "such as Slurm's --signal sends to all processes; this one does not handle it",
}
_OOM_HINT = "the kernel's out-of-memory killer: no memory was left on this machine or in its cgroup"
_CODE_HINTS = {126: "the command could not be run", 127: "the command was not found"}

# torch puts "[rank3]: " before each line of an uncaught exception once a process group exists.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# A traceback's frame; faulthandler's `File "x", line 1 in f` has no comma and is no Python exception.
_FRAME = re.compile(r'^\s+File ".*", line \d+(, in .*)?$')
# What torch raises when NCCL or its TCPStore fails, and what NCCL's watchdog writes before it aborts the process.
_NETWORK_EXCEPTION = re.compile(r"DistBackendError|DistNetworkError|NCCL error|nccl(System|Remote)Error")
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout|watchdog thread terminated with exception"
)
# What the worker library raises on all ranks together, where the next generation would end in the same way. Ranks that
# have other values may have them from a fault, which a restart mends; sharded state is the script's.
_FINAL = re.compile(
    r"(elastic_agent\.worker\.errors\.)?(DirectoryNotShared|OtherRun|Sharded|MeshMismatch|UnsupportedTraining): "
)
# EADDRINUSE of a TCP port, as Python and asyncio, torch, gloo, and ZeroMQ word it in an exception that says nothing
# else first; as any program does; and where these name the port.
_PORT_TAKEN = re.compile(
    r"""(?:[\w.]+\.)?(?:
        OSError:\ \[Errno\ 98\]\ (?:error\ while\ attempting\ to\ bind\ .*)?address\ already\ in\ use
      | (?:DistNetworkError|RuntimeError):\ The\ server\ socket\ has\ failed\ .*(?:EADDRINUSE|address\ already\ in\ use)
      | RuntimeError:\ (?:\[[^]]*gloo[^]]*\].*)?address\ already\ in\ use
      | ZMQError:\ address\ already\ in\ use
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_SAYS_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|\[Errno 98\]", re.IGNORECASE)
_OF_UNIX = re.compile(r"""\bipc:|\b(AF_)?UNIX\b|['"]/""", re.IGNORECASE)
_PORT = re.compile(r"\bport:? (\d{1,5})\b|(?:\]|\d|\*|localhost):(\d{1,5})\b|', (\d{1,5})[,)]")
# Of torch's client that looks for the store of its ranks, or of the server that it wants to be.
_STORE = re.compile(
    r"client socket has .*connect to \(.*, (\d{1,5})\)|server socket has failed to listen.* port: (\d{1,5})"
)
_LAST_WORDS = 3
_HEADER = "Traceback (most recent call last):"
# What changes from run to run in a message: UUIDs, addresses and hashes, names of temporary files, numbers.
_VARYING = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]+\b|\btmp\w{6,}|\d+",
    re.IGNORECASE,
)


_SECONDS = re.compile("[0-9]{1,12}")


class FailureInvalid(ValueError):
    """A text is not the JSON form of a `WorkerFailure`: another program or version wrote it. Do not show it."""


@dataclass(frozen=True, slots=True)
class ExitDescription:
    text: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """From an error file or a traceback. `note`: why an error file that exists could not be used."""

    exception: str | None = None
    traceback: str | None = None
    note: str | None = None
    raised_at: int | None = None
    """Seconds since the epoch, as the worker wrote it."""


def _clean(text: str) -> str:
    return clean(text.encode("utf-8", "backslashreplace").decode()).rstrip()


def _clean_lines(text: str) -> str:
    return "\n".join(map(_clean, text.split("\n")))


_LINE = {name: Text(most, clean=_clean) for name, most in _TEXTS.items()}
_LINES = {name: Text(most, clean=_clean_lines) for name, most in _TEXTS.items()}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One worker's end. `cause` is one line that stands alone; `exception` is `Type: message`."""

    rank: Annotated[int, Within(0, 2**31 - 1)]
    local_rank: Annotated[int, Within(0, 2**31 - 1)]
    node: Annotated[str, _LINE["node"]]
    generation: Count
    returncode: Annotated[int, Within(-128, 255)]
    reason: Reason
    cause: Annotated[str, _LINE["cause"]]
    exception: Annotated[str, _LINES["exception"]] | None = None
    traceback: Annotated[str, _LINES["traceback"]] | None = None
    log_tail: tuple[Annotated[str, Text(_LOG_TAIL, clean=_clean)], ...] = ()
    log_file: Annotated[str, _LINE["log_file"]] | None = None
    raised_at: Count | None = None
    """Seconds since the epoch, by the worker's clock, if its error file says so."""

    def to_json(self) -> str:
        """A small form: the ends of the traceback and of the log, at most `MAX_JSON` bytes of ASCII."""
        texts = {name: text for name in _TEXTS if (text := getattr(self, name)) is not None}
        small: dict[str, Any] = {
            name: _fit(text, _TEXTS[name], keep_end=name == "traceback") for name, text in texts.items()
        }
        small["log_tail"] = _last_that_fit(self.log_tail, _LOG_TAIL)
        return _CODEC.encode(replace(self, **small)).decode().rstrip()

    @staticmethod
    def from_json(text: str) -> WorkerFailure:
        """Raises `FailureInvalid` for everything that `to_json` does not write."""
        try:
            return _CODEC.decode(text.encode(errors="surrogatepass"))
        except Invalid as error:
            raise FailureInvalid(str(error)) from error


_CODEC: Codec[WorkerFailure] = Codec((WorkerFailure,), version=_SCHEMA, most_bytes=MAX_JSON)


def describe_failure(
    *,
    rank: int,
    local_rank: int,
    node: str,
    generation: int,
    returncode: int,
    error_file: Path | None,
    log_tail: Sequence[str],
    log_file: Path | None,
    oom_killed: bool = False,
    master_port: int = 0,
    owner_of: Callable[[int], PortOwner],
    not_kept: bool = False,
) -> WorkerFailure:
    """What is known about this worker's end.

    `master_port`: the MASTER_PORT that the agent has given it. `owner_of` is asked about a port that it found taken.
    `not_kept`: it had done its last step in a planned change, and no Checkpointer had kept the state after it.
    """
    ended = describe_exit(returncode, oom_killed)
    log_tail = tuple(map(_clean, log_tail))
    report = (None if error_file is None else read_error_file(error_file)) or ErrorReport()
    notes = ["in its drain: no Checkpointer has kept the state after its last step"] if not_kept else []
    notes += [report.note] if report.note else []
    # A worker that a signal ended may have logged, and survived, any number of exceptions before.
    if report.exception is None and returncode > 0:
        report = find_traceback(log_tail) or report
    cause, reason = ended.text, ended.reason
    if report.exception is not None:
        cause += f": {_first_line(report.exception)}"
        if reason in ("unknown", "signal"):
            reason = _reason_of(report.exception)
        notes += _of_ports(report.exception, master_port, owner_of if reason == "port" else None)
    elif returncode > 0 and (said := _says_port_taken(log_tail)):
        reason = "port"
        cause += f": {said}"
        notes += _of_ports(said, master_port, owner_of)
    elif returncode == -signal.SIGABRT and any(_WATCHDOG.search(line) for line in log_tail):
        reason = "nccl"
    return WorkerFailure(
        rank,
        local_rank,
        node,
        generation,
        returncode,
        reason,
        _noted(cause, notes),
        report.exception,
        report.traceback,
        log_tail,
        _name_of(log_file),
        report.raised_at,
    )


def _reason_of(exception: str) -> Reason:
    if _PORT_TAKEN.match(exception) and not _OF_UNIX.search(_first_line(exception)):
        return "port"
    return "nccl" if _NETWORK_EXCEPTION.search(exception) else "exception"


def _says_port_taken(log_tail: Sequence[str]) -> str:
    """The line in which a program without a traceback gives that as its last words; empty if it has others."""
    last = [line for line in log_tail if line.strip()][-_LAST_WORDS:]
    return next((line for line in last if _SAYS_PORT_TAKEN.search(line) and not _OF_UNIX.search(line)), "")


def _of_ports(said: str, master_port: int, owner_of: Callable[[int], PortOwner] | None) -> Iterator[str]:
    """Who holds the port that was taken, if one was and `said` names it; and whether the script had chosen another than
    the agent."""
    if owner_of is not None and (port := _number_in(_PORT, said)):
        owner = owner_of(port)
        agent = owner.pid == os.getpid()
        yield f"port {port}: {f'pid {owner.pid}, the agent itself' if agent else owner.words}"
        if port == master_port:
            yield "it is MASTER_PORT, where the agent serves the store: use it as a client, or another port"
    chosen = _number_in(_STORE, said)
    if chosen and master_port and chosen != master_port:
        yield f"the script has chosen port {chosen}, the agent had given it MASTER_PORT={master_port}"


def _number_in(pattern: re.Pattern[str], text: str) -> int:
    """Of the port that the text names; 0: none."""
    found = pattern.search(text)
    return int(next(filter(None, found.groups()))) if found is not None else 0


def _noted(cause: str, notes: Sequence[str]) -> str:
    end = _cut("".join(f"; {note}" for note in notes), _NOTE_MAX)
    return _cut(cause, _CAUSE_MAX - len(end)) + end


def hang_failure(
    node: str, generation: int, rank: int, local_rank: int, cause: str, log_file: Path | None
) -> WorkerFailure:
    """The end that the agent makes of a worker that hangs."""
    cause, file = _cut(cause, _CAUSE_MAX), _name_of(log_file)
    return WorkerFailure(rank, local_rank, node, generation, -HANG_SIGNAL, "hang", cause, log_file=file)


def _name_of(log_file: Path | None) -> str | None:
    return None if log_file is None else _clean(str(log_file))


def describe_exit(returncode: int, oom_killed: bool = False) -> ExitDescription:
    """`oom_killed`: the kernel counted an out-of-memory kill among the workers meanwhile."""
    if returncode == 0:
        return ExitDescription("exit code 0", "ok")
    if returncode < 0:
        number = -returncode
        if number == signal.SIGKILL and oom_killed:
            return ExitDescription(f"killed by SIGKILL (signal 9; {_OOM_HINT})", "oom")
        hint = f"; {_SIGNAL_HINTS[number]}" if number in _SIGNAL_HINTS else ""
        return ExitDescription(f"killed by {signal_name(number)} (signal {number}{hint})", "signal")
    if 128 < returncode <= 128 + signal.SIGRTMAX:
        by = f"a shell's way to say: killed by {signal_name(returncode - 128)}"
        return ExitDescription(f"exit code {returncode} ({by})", "signal")
    hint = f" ({_CODE_HINTS[returncode]})" if returncode in _CODE_HINTS else ""
    return ExitDescription(f"exit code {returncode}{hint}", "unknown")


def read_error_file(path: Path) -> ErrorReport | None:
    """What torch's `@record` left there; None if there is no such file. Never raises for anything it may hold."""
    try:
        report = json.loads(_read_regular_file(path))
        message = report["message"]
        details = report if isinstance(message, str) else message.get("extraInfo")
        text = message if isinstance(message, str) else message["message"]
        if not isinstance(text, str) or not text:
            raise TypeError
    except FileNotFoundError:
        return None
    except OSError as error:
        return ErrorReport(note=_clean(f"its error file {path} cannot be read: {error.strerror or error}"))
    except (ValueError, RecursionError) as error:
        return ErrorReport(note=_clean(f"its error file {path} is not usable: {error}"))
    except (TypeError, KeyError, AttributeError):
        return ErrorReport(note=_clean(f"its error file {path} is not usable: it has no message"))
    details = details if isinstance(details, dict) else {}
    traceback = details.get("py_callstack")
    if isinstance(traceback, str):
        traceback = _cut(_clean_lines(traceback).strip("\n"), _TRACEBACK_MAX, keep_end=True)
    else:
        traceback = None
    exception = _cut(_clean_lines(text), _EXCEPTION_MAX)
    return ErrorReport(exception, traceback, raised_at=_instant(details.get("timestamp")))


def _instant(timestamp: object) -> int | None:
    """torch writes whole seconds as a text, older forms a number."""
    text = str(timestamp)
    return int(text) if _SECONDS.fullmatch(text) else None


def find_traceback(lines: Sequence[str]) -> ErrorReport | None:
    """The last Python traceback in a log's last lines, even if its beginning is no longer among them."""
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    frame = next((at for at in reversed(range(len(lines))) if _FRAME.match(lines[at])), None)
    if frame is None:
        return None
    end = next((at for at in range(frame + 1, len(lines)) if lines[at] and not lines[at][0].isspace()), None)
    if end is None:
        return None
    start = next((at for at in reversed(range(frame)) if lines[at] == _HEADER), 0)
    return ErrorReport(
        exception=_cut(lines[end], _EXCEPTION_MAX),
        traceback=_cut("\n".join(lines[start : end + 1]), _TRACEBACK_MAX, keep_end=True),
    )


def fingerprint(failure: WorkerFailure) -> str:
    """The same text for the same failure in another generation, on another rank or node; for crash loops."""
    ended = f"signal {-failure.returncode}" if failure.returncode < 0 else f"exit code {failure.returncode}"
    if failure.exception is None:
        return ended
    return f"{ended}: {_VARYING.sub('#', _first_line(failure.exception))}"[:_FINGERPRINT_MAX]


def is_final(failure: WorkerFailure) -> bool:
    """Whether no restart of the job helps, because of its script or its checkpoint directory: a person must act."""
    return failure.exception is not None and _FINAL.match(failure.exception) is not None


def summarize(first: WorkerFailure, others: Sequence[WorkerFailure]) -> str:
    """A block for a tired person: which worker failed first, why, where to read on, and who else failed."""
    rule = "=" * 80
    lines = [
        rule,
        f"Worker failure in generation {first.generation}: {_who(first)} failed first",
        f"  cause:    {first.cause}",
        f"  log file: {first.log_file or 'none (set --log-dir to keep one per rank)'}",
    ]
    if first.exception is not None and "\n" in first.exception:
        lines += ["  exception:", *_indented(first.exception)]
    shown: set[str] = set()
    if first.traceback is not None:
        lines += ["  traceback:", *_indented(first.traceback)]
        shown.update(first.traceback.split("\n"))
    last = [line for line in first.log_tail if _RANK_PREFIX.sub("", line) not in shown]
    if last:
        lines += ["  last lines of its output:", *_indented("\n".join(last))]
    if others:
        lines.append("  failed after it, usually because of it:")
        lines += [f"    {_who(other)}: {other.cause}" for other in others]
    return "\n".join([*lines, rule])


def _who(failure: WorkerFailure) -> str:
    return f"rank {failure.rank} (local rank {failure.local_rank} on node {failure.node})"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.split("\n")]


def _read_regular_file(path: Path) -> bytes:
    # A worker chose what lies there: no link to elsewhere, and no pipe that would make the agent wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        content = os.read(fd, _ERROR_FILE_MAX + 1)
    finally:
        os.close(fd)
    if not content:
        raise ValueError("it is empty")
    if len(content) > _ERROR_FILE_MAX:
        raise ValueError(f"it is larger than {_ERROR_FILE_MAX} bytes")
    return content


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _cut(text: str, most: int, *, keep_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return "..." + text[len(text) - most + 3 :] if keep_end else text[: most - 3] + "..."


def _fit(text: str, most_bytes: int, *, keep_end: bool = False) -> str:
    """`text` cut until its JSON form is within its budget."""
    size, fitting = len(text), text
    while len(json.dumps(fitting)) > most_bytes:
        size = size * 9 // 10
        fitting = _cut(text, size + 3, keep_end=keep_end)
    return fitting


def _last_that_fit(lines: Sequence[str], most_bytes: int) -> tuple[str, ...]:
    """At least the end of the last one."""
    kept: tuple[str, ...] = ()
    for line in reversed(lines):
        if kept and len(json.dumps((line, *kept))) > most_bytes:
            break
        kept = (_fit(line, most_bytes - 2, keep_end=True), *kept)
    return kept
