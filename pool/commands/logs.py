"""`elastic-agent logs JOB`: what a job has printed, read from the daemons of its nodes, each of which has its own part.

A file is read piece by piece, and its daemon keeps nothing of who reads: one that stalls holds nothing up. What cannot
be read is said once, and the others are shown.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

from ...agent.commands.store_command import pause
from ...agent.common.exits import CannotDo, ExitCode
from ...agent.common.http_client import NoAnswer, request
from ...agent.configuration.parse import YES_OR_NO, Option
from ...agent.configuration.settings import Settings
from ...rendezvous.store.interface import Store
from ..job_logs import MOST_BYTES, PATH
from ..records import Job, PoolNode, PoolView
from .jobs import LiveView, code_of, find_job, pool_command

ANSWER_S = 3.0
AT_ONCE = 32
"""Nodes that are asked at the same time."""
LONGEST_LINE = 64 * 1024


class Unreadable(Exception):
    """This node's part cannot be read now; the text says why."""


Ask = Callable[[PoolNode, str, int], bytes]
"""What this node has of the job from this byte on. Raises Unreadable."""


def ask_daemon(node: PoolNode, job: str, start: int) -> bytes:
    """Empty where it has nothing yet. Raises Unreadable."""
    if node.http is None:
        raise Unreadable("its daemon answers on its own loopback only (--http-address)")
    bearer = {"Authorization": f"Bearer {node.token}"}
    target = f"{PATH}?{urlencode({'job': job, 'start': start})}"
    try:
        reply = request(node.http, target, time.monotonic, ANSWER_S, MOST_BYTES, headers=bearer)
    except (OSError, NoAnswer) as error:
        raise Unreadable(f"no answer from {node.http}: {error}") from None
    if reply.status not in (200, 404):
        raise Unreadable(f"its daemon at {node.http} answers with status {reply.status}")
    return reply.body if reply.status == 200 else b""


def nodes_of(view: PoolView, job: str) -> tuple[str, ...]:
    """Nodes that have, or had, a part in the job's newest attempt."""
    result, run = view.result_of(job), view.plan.run_of(job)
    if run is not None:
        return tuple(dict.fromkeys((*run.left, *(seat.node for seat in run.seats))))
    return result.nodes if result is not None else ()


class JobLog:
    """What the job's agents print, on all nodes of its newest attempt: with a name before each line where there are
    several."""

    def __init__(
        self, job: str, show: Callable[[bytes], None], say: Callable[[str], None], ask: Ask = ask_daemon
    ) -> None:
        """`show` gets whole lines, `say` what cannot be read."""
        self._job, self._show, self._say, self._ask = job, show, say, ask
        self._read_to: dict[str, int] = {}
        self._begun: dict[str, bytes] = {}
        """By node: the line that has not ended yet."""
        self._said: set[str] = set()
        self._prefixed = False

    @property
    def found(self) -> bool:
        """Some node has something of the job."""
        return bool(self._read_to)

    def read(self, view: PoolView) -> bool:
        """Shows what is new; whether there is more."""
        names, nodes = nodes_of(view, self._job), {node.node: node for node in view.nodes}
        self._prefixed |= len(names) > 1
        for name in names:
            if name not in nodes:
                self._complain(name, "has left the pool; what it has is in its daemon's --log-dir")
        asked = [nodes[name] for name in names if name in nodes]
        if not asked:
            return False
        with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="ask") as threads:
            pieces = list(threads.map(self._piece, asked))
        for node, piece in zip(asked, pieces, strict=True):
            self._take(node.node, piece)
        return any(len(piece) == MOST_BYTES for piece in pieces)

    def finish(self) -> None:
        """Show lines that have not ended, too."""
        for name, begun in self._begun.items():
            self._print(name, begun and begun + b"\n")
        self._begun.clear()

    def _piece(self, node: PoolNode) -> bytes:
        try:
            return self._ask(node, self._job, self._read_to.get(node.node, 0))
        except Unreadable as error:
            self._complain(node.node, f"cannot be read: {error}")
            return b""

    def _take(self, name: str, piece: bytes) -> None:
        if not piece:
            return
        self._read_to[name] = self._read_to.get(name, 0) + len(piece)
        whole = self._begun.get(name, b"") + piece
        end = whole.rfind(b"\n") + 1
        if len(whole) - end > LONGEST_LINE:
            end = len(whole)
        self._begun[name] = whole[end:]
        self._print(name, whole[:end])

    def _print(self, name: str, lines: bytes) -> None:
        if lines:
            mark = name.encode() + b": "
            self._show(re.sub(rb"(?m)^(?=.|\n)", mark, lines) if self._prefixed else lines)

    def _complain(self, name: str, what: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._say(f"node {name} {what}")


_USAGE = """\
usage: elastic-agent logs JOB [--follow]

Shows what the agents of a job of a pool print, its workers' lines among it, on all its nodes: with the node's name
before each line where there are several. With --follow it goes on until the job has ended; the exit code is then that
of wait.
"""

FOLLOW_S = 0.5
"""Between two looks at the files of a job that goes on."""

FOLLOW: Option[bool] = Option(
    "follow", YES_OR_NO, "go on until the job has ended", default="false", flag=True
)


def logs(words: Sequence[str]) -> int:
    return pool_command("logs", words, _USAGE, _logs, FOLLOW, subject="JOB")


def _logs(store: Store, view: PoolView, name: str, settings: Settings) -> int:
    job, live = find_job(view, name), LiveView(store, view)
    reader = JobLog(job.job, show, say)
    if settings[FOLLOW].value:
        return follow(live, job, reader)
    while reader.read(view):
        pass
    reader.finish()
    if reader.found:
        return ExitCode.SUCCESS
    if waits := live.waits_for(job):
        say(f"job {job.job} ({job.name}) waits and has printed nothing: {waits}")
        return ExitCode.SUCCESS
    raise CannotDo(
        ExitCode.NO_JOB,
        f"no node has anything of job {job.job} ({job.name}): it has printed nothing yet, or its nodes are gone",
    )


def follow(live: LiveView, job: Job, reader: JobLog) -> int:
    """Until the job has ended: its code, as `wait` has it."""
    waited_for = ""
    while True:
        result = live.view.result_of(job.job)
        if result is None and live.state(job.job) is None:
            raise CannotDo(ExitCode.NO_JOB, f"job {job.job} is not in the pool any more")
        if (waits := live.waits_for(job)) and waits != waited_for:
            say(f"job {job.job} ({job.name}) waits: {waits}")
        waited_for = waits
        more = reader.read(live.view)
        if result is not None and not more:
            reader.finish()
            say(f"job {job.job} ({job.name}): {result.outcome.value}: {result.reason}")
            return code_of(result)
        pause(0.0)
        live.wait(0.0 if more else FOLLOW_S)


def show(lines: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
