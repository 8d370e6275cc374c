"""Reads what a job has printed from the daemons of its nodes, each of which has its own part.

A file is read piece by piece, and its daemon keeps nothing of who reads: one that stalls holds nothing up. What cannot
be read is said once, with its place, and the others are shown.
"""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ...agent.commands.store_command import CannotDo, pause
from ...agent.common.exits import ExitCode
from ...agent.common.http_client import NoAnswer, request
from ...agent.configuration.parse import YES_OR_NO, Option, whole_number
from ...agent.configuration.settings import Settings
from ...agent.output.worker_logs import STREAMS
from ...codec import Invalid
from ...rendezvous.store.interface import Store
from ..job_logs import MOST_ANSWER, LogRequest, Piece, split_piece
from ..records import Job, JobResult, PoolNode, PoolView, Run
from .jobs import LiveView, code_of, find_job, pool_command

ANSWER_S = 3.0
AT_ONCE = 32
"""Nodes that are asked at the same time."""
LOOK_S = 2.0
"""Between two looks for a newer generation, and two questions to a node that did not answer."""
LONGEST_LINE = 64 * 1024

_T = TypeVar("_T")

Show = Callable[[str, bytes], None]
"""Called with a stream and whole lines, but for the last one of a file."""
Warn = Callable[[str], None]


class Unreadable(Exception):
    """This node's part cannot be read now; the text says why."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting
        """It has nothing of the job."""


Ask = Callable[[PoolNode, LogRequest], tuple[Piece, bytes]]
"""Raises Unreadable."""


def ask_daemon(node: PoolNode, wanted: LogRequest) -> tuple[Piece, bytes]:
    """Raises Unreadable."""
    if node.http is None:
        raise Unreadable("its daemon answers on its own loopback only (--http-address)")
    bearer = {"Authorization": f"Bearer {node.token}"}
    try:
        reply = request(node.http, wanted.target, time.monotonic, ANSWER_S, MOST_ANSWER, headers=bearer)
    except ConnectionRefusedError:
        raise Unreadable(f"no process listens at {node.http}: its daemon has ended") from None
    except OSError:
        raise Unreadable(f"no answer from {node.http} within {ANSWER_S:g} s") from None
    except NoAnswer as error:
        raise Unreadable(f"what answers at {node.http} is another program: {error}") from None
    if reply.status == 404:
        raise Unreadable("it has nothing of the job", lasting=True)
    if reply.status != 200:
        raise Unreadable(f"its daemon at {node.http} answers with status {reply.status}")
    try:
        return split_piece(reply.body)
    except Invalid:
        raise Unreadable(f"what answers at {node.http} is of another version of elastic-agent") from None


@dataclass(slots=True)
class _File:
    """How far one file has been read."""

    node: str
    wanted: LogRequest
    """The next piece of it."""
    begun: bytes = b""
    """The line that has not ended yet."""

    def take(self, piece: Piece, data: bytes) -> bytes:
        """The lines that have ended since. A file that is shorter than before is another one."""
        if piece.size < self.wanted.start:
            self.wanted = replace(self.wanted, start=0)
            return b""
        self.wanted = replace(self.wanted, start=self.wanted.start + len(data))
        whole = self.begun + data
        end = whole.rfind(b"\n") + 1
        if len(whole) - end > LONGEST_LINE:
            end = len(whole)
        self.begun = whole[end:]
        return whole[:end]

    def rest(self) -> bytes:
        lines, self.begun = self.begun, b""
        return lines and lines + b"\n"


def nodes_of(view: PoolView, job: str) -> tuple[str, ...]:
    """Nodes that are known to have, or to have had, a part in the job's newest attempt."""
    run: Run | None = view.plan.run_of(job)
    result: JobResult | None = view.result_of(job)
    names = result.nodes if result is not None else ()
    if run is not None:
        names = (*run.left, *(seat.node for seat in run.seats))
    return tuple(dict.fromkeys(names))


class Reader(ABC):
    """Files of a job on its nodes, read piece by piece."""

    def __init__(self, job: str, show: Show, warn: Warn, ask: Ask = ask_daemon) -> None:
        self._job, self._show, self._warn, self._ask = job, show, warn, ask
        self._files: dict[str, _File] = {}
        self._prefixed = False
        self._said: set[str] = set()
        """Nodes of which was said what cannot be read."""

    @property
    def found(self) -> bool:
        """Some node has something of the job."""
        return bool(self._files)

    @abstractmethod
    def read(self, view: PoolView, *, all_of_it: bool) -> bool:
        """What is new; `all_of_it`: up to the end that each file had when it was first asked for. Returns whether there
        is more."""

    def finish(self) -> None:
        """Show lines that have not ended, too."""
        for file in self._files.values():
            self._print(file, file.rest())

    def _read(
        self, node: PoolNode, file: _File, first: tuple[Piece, bytes] | None = None, *, all_of_it: bool
    ) -> bool:
        """`first`: the next piece, if it is here already. Raises Unreadable."""
        piece, data = first or self._ask(node, file.wanted)
        size = piece.size
        self._print(file, file.take(piece, data))
        while all_of_it and data and file.wanted.start < size:
            piece, data = self._ask(node, file.wanted)
            self._print(file, file.take(piece, data))
        return file.wanted.start < size and not all_of_it

    def _print(self, file: _File, lines: bytes) -> None:
        if lines:
            mark = file.node.encode() + b": "
            shown = re.sub(rb"(?m)^(?=.|\n)", mark, lines) if self._prefixed else lines
            self._show(file.wanted.stream, shown)

    def _complain(self, node: str, what: str, place: str | None) -> None:
        if node not in self._said:
            self._said.add(node)
            self._warn(f"node {node}{what}" + (f"; what it has is in {place} there" if place else ""))

    def _name_the_gone(self, view: PoolView, parts: tuple[str, ...], nodes: Mapping[str, PoolNode]) -> None:
        result = view.result_of(self._job)
        for name in parts:
            if name not in nodes:
                place = result.logs.get(name) if result is not None else None
                self._complain(name, " has left the pool", place)


class JobLog(Reader):
    """What the job's agents print, of all nodes: with a name before each line where there are several."""

    def __init__(self, job: str, show: Show, warn: Warn, ask: Ask = ask_daemon) -> None:
        super().__init__(job, show, warn, ask)
        self._without: set[str] = set()
        """Nodes that had nothing of the job when they were asked."""
        self._again_at: dict[str, float] = {}

    def read(self, view: PoolView, *, all_of_it: bool) -> bool:
        parts = nodes_of(view, self._job)
        nodes = {node.node: node for node in view.nodes}
        self._name_the_gone(view, parts, nodes)
        now = time.monotonic()
        due = {
            name: node
            for name, node in nodes.items()
            if (name in parts or name not in self._without) and self._again_at.get(name, now) <= now
        }
        over, more = view.result_of(self._job) is not None, False
        answers = _at_once(lambda node: self._ask(node, self._file(node).wanted), due)
        pieces = {name: one for name, one in answers.items() if not isinstance(one, Unreadable)}
        self._prefixed = len({*parts, *pieces, *self._files}) > 1
        for name, answer in answers.items():
            if isinstance(answer, Unreadable):
                self._put_off(nodes[name], answer, parts, over=over)
                continue
            self._without.discard(name)
            self._files[name] = file = self._file(nodes[name])
            try:
                more |= self._read(nodes[name], file, answer, all_of_it=all_of_it)
            except Unreadable as error:
                self._put_off(nodes[name], error, parts, over=over)
        return more

    def _file(self, node: PoolNode) -> _File:
        return self._files.get(node.node) or _File(node.node, LogRequest(self._job))

    def _put_off(self, node: PoolNode, error: Unreadable, parts: tuple[str, ...], *, over: bool) -> None:
        if node.node not in parts or (error.lasting and not over):
            self._without.add(node.node)
            return
        self._again_at[node.node] = time.monotonic() + LOOK_S
        self._complain(node.node, f": {error}", None if error.lasting else node.log_of(self._job))


class RankLog(Reader):
    """What one rank of the newest generation prints, on the two streams as it does."""

    def __init__(self, job: str, rank: int, show: Show, warn: Warn, ask: Ask = ask_daemon) -> None:
        super().__init__(job, show, warn, ask)
        self._rank, self._node, self._generation = rank, "", 0
        self._look_at = float("-inf")

    def read(self, view: PoolView, *, all_of_it: bool) -> bool:
        nodes = {node.node: node for node in view.nodes}
        now = time.monotonic()
        if all_of_it or now >= self._look_at:
            self._look_at = now + LOOK_S
            name, generation = self._newest(view, nodes)
            if generation > self._generation:
                self._read_files(nodes, all_of_it=True)
                self.finish()
                self._node, self._generation = name, generation
                wanted = LogRequest(self._job, rank=self._rank, generation=generation)
                self._files = {one: _File(name, replace(wanted, stream=one)) for one in STREAMS}
                self._warn(f"rank {self._rank} of generation {generation}, on node {name}:")
        return self._read_files(nodes, all_of_it=all_of_it)

    def _newest(self, view: PoolView, nodes: Mapping[str, PoolNode]) -> tuple[str, int]:
        """The newest generation in which it has printed something, and the node that has it; 0: none."""
        parts = nodes_of(view, self._job)
        asked = nodes if not self.found else {name: nodes[name] for name in parts if name in nodes}
        best = "", 0
        for name, answer in _at_once(
            lambda node: self._ask(node, LogRequest(self._job, rank=self._rank))[0].newest, asked
        ).items():
            if not isinstance(answer, Unreadable):
                best = max(best, (name, answer), key=lambda one: one[1])
            elif name in parts:
                self._fail(nodes[name], answer)
        self._name_the_gone(view, parts, nodes)
        return best

    def _read_files(self, nodes: Mapping[str, PoolNode], *, all_of_it: bool) -> bool:
        node, more = nodes.get(self._node), False
        if node is None:
            return False
        try:
            for file in self._files.values():
                more |= self._read(node, file, all_of_it=all_of_it)
        except Unreadable as error:
            self._fail(node, error)
            return False
        return more

    def _fail(self, node: PoolNode, error: Unreadable) -> None:
        if not error.lasting:
            self._complain(node.node, f": {error}", f"{node.logs}/{self._job}")


def _at_once(ask: Callable[[PoolNode], _T], nodes: Mapping[str, PoolNode]) -> dict[str, _T | Unreadable]:
    """What each node answers, or why it does not."""

    def one(node: PoolNode) -> _T | Unreadable:
        try:
            return ask(node)
        except Unreadable as error:
            return error

    if not nodes:
        return {}
    with ThreadPoolExecutor(min(AT_ONCE, len(nodes)), thread_name_prefix="ask") as threads:
        return dict(zip(nodes, threads.map(one, nodes.values()), strict=True))


_USAGE = """\
usage: elastic-agent logs JOB [--rank N] [--follow]

Shows what the agents of a job of a pool print, its workers' lines among it, on all its nodes: with the node's name
before each line where there are several. With --rank it is what that rank of the newest generation prints, on stdout
and stderr as it does. With --follow it goes on until the job has ended; the exit code is then that of wait.
"""

FOLLOW_S = 0.5
"""Between two looks at the files of a job that goes on."""
_MOST_RANKS = 1 << 20

RANK: Option[int | None] = Option(
    "rank", whole_number(0, _MOST_RANKS), "of one worker alone, of its newest generation", metavar="N"
)
FOLLOW: Option[bool] = Option(
    "follow", YES_OR_NO, "go on until the job has ended", default="false", flag=True
)


def logs(words: Sequence[str]) -> int:
    return pool_command("logs", words, _USAGE, _logs, RANK, FOLLOW, subject="JOB")


def _logs(store: Store, view: PoolView, name: str, settings: Settings) -> int:
    job, rank, live = find_job(view, name), settings[RANK].value, LiveView(store, view)
    reader = JobLog(job.job, show, say) if rank is None else RankLog(job.job, rank, show, say)
    if settings[FOLLOW].value:
        code = follow(live, job, reader)
        return code if code is not None else ExitCode.STOPPED_BY_SIGINT
    reader.read(view, all_of_it=True)
    reader.finish()
    if reader.found:
        return ExitCode.SUCCESS
    if waits := live.waits_for(job):
        say(f"job {job.job} ({job.name}) waits and has printed nothing: {waits}")
        return ExitCode.SUCCESS
    if rank is not None:
        raise CannotDo(ExitCode.NO_JOB, f"no node has a file of rank {rank} of job {job.job} ({job.name})")
    raise CannotDo(
        ExitCode.NO_JOB, f"no node has anything of job {job.job} ({job.name}): {_places(live, job)}"
    )


def follow(
    live: LiveView, job: Job, reader: Reader, interrupted: Callable[[], bool] = lambda: False
) -> int | None:
    """Until the job has ended: its code, as `wait` has it. None as soon as it is `interrupted`."""
    waited_for, first = "", True
    while not interrupted():
        if (result := live.view.result_of(job.job)) is not None:
            reader.read(live.view, all_of_it=True)
            reader.finish()
            say(f"job {job.job} ({job.name}): {result.outcome.value}: {result.reason}")
            return code_of(result)
        if live.state(job.job) is None:
            raise CannotDo(ExitCode.NO_JOB, f"job {job.job} is not in the pool any more")
        if (waits := live.waits_for(job)) and waits != waited_for:
            say(f"job {job.job} ({job.name}) waits: {waits}")
        waited_for = waits
        more = reader.read(live.view, all_of_it=first)
        first = False
        pause(0.0)
        live.wait(0.0 if more else FOLLOW_S)
    return None


def show(stream: str, lines: bytes) -> None:
    output = sys.stderr if stream == "stderr" else sys.stdout
    output.flush()
    output.buffer.write(lines)
    output.buffer.flush()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _places(live: LiveView, job: Job) -> str:
    result = live.view.result_of(job.job)
    places = [f"{node}:{path}" for node, path in result.logs.items()] if result is not None else []
    return f"it was in {', '.join(places)}" if places else "it has printed nothing yet, or its nodes are gone"
