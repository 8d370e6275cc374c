"""What jobs print: kept by the daemon of each of their nodes, and read from all of them.

A daemon keeps what the job's agents print on its node in DIR/<node>/<job>.log, below its log directory: the newest
`KEPT`. The folders of the jobs' runs, with a file for each worker, are beside, as without
a pool (`agent/output/log_files.py`).

It is read over the HTTP that a daemon answers anyway, piece by piece, so that a daemon keeps nothing of who reads, and
one that stalls holds nothing up. What cannot be read is said once, and the others are shown.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

from ..agent.common.http_client import NoAnswer, request
from ..health.http import TEXT, Page, PageRequest
from ..rendezvous.text import NAME
from ..threads import Thread
from .records import PoolNode, PoolView

LOGS_PATH = "/logs"
"""Of a daemon's page, for who has the token of its record."""
MOST_BYTES = 256 * 1024
"""Of one answer there."""

KEPT = 1000


class JobLogs:
    """Of one node."""

    def __init__(self, root: Path, node: str, token: str) -> None:
        """The token in this node's record opens them: who reads the store may read them."""
        self._folder = root / node
        self._token = token.encode()

    def begin(self, job: str) -> BinaryIO:
        """The open file for what the job's agents print here. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        output = (self._folder / f"{job}.log").open("ab")
        with contextlib.suppress(OSError):
            os.utime(output.fileno())  # the newest: no other job is here now
        Thread(self._prune, "job-logs", lambda: None).start()
        return output

    def _prune(self) -> None:
        """In a thread of its own: a disk takes its time for a thousand files."""
        with contextlib.suppress(OSError):
            for log in sorted(self._folder.glob("*.log"), key=lambda log: log.lstat().st_mtime)[:-KEPT]:
                log.unlink()

    def page(self, request: PageRequest) -> Page:
        """A piece of what a job has printed here."""
        if not hmac.compare_digest(request.token.encode(), self._token):
            missing = b"the token in this node's record of the pool is missing\n"
            return Page(HTTPStatus.UNAUTHORIZED, TEXT, missing)
        try:
            piece = self.read(request.query.get("job", ""), int(request.query.get("start", 0)))
        except (ValueError, OverflowError, OSError) as error:
            return Page(HTTPStatus.BAD_REQUEST, TEXT, f"{type(error).__name__}\n".encode())
        return Page(HTTPStatus.OK, "application/octet-stream", piece)

    def read(self, job: str, start: int) -> bytes:
        """What the job's agents have printed, from this byte on; `MOST_BYTES` at most, and empty where nothing of the
        job is on this node. Raises OSError."""
        path = self._folder / f"{job}.log"
        if NAME.fullmatch(job) is None or not path.exists():
            return b""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(fd, MOST_BYTES, start) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)


# ---------------------------------------------------------------- as commands read it

ANSWER_S = 3.0
AT_ONCE = 32
"""Nodes that are asked at the same time."""


def ask_daemon(node: PoolNode, job: str, start: int) -> bytes:
    """What this node has of the job from this byte on; empty where it has nothing yet. Raises NoAnswer, OSError."""
    if node.http is None:
        raise NoAnswer("its daemon answers on its own loopback only (--http-address)")
    bearer = {"Authorization": f"Bearer {node.token}"}
    target = f"{LOGS_PATH}?{urlencode({'job': job, 'start': start})}"
    reply = request(node.http, target, time.monotonic, ANSWER_S, MOST_BYTES, headers=bearer)
    if reply.status != HTTPStatus.OK:
        raise NoAnswer(f"its daemon at {node.http} answers with status {reply.status}")
    return reply.body


def nodes_of(view: PoolView, job: str) -> tuple[str, ...]:
    """Nodes that have, or had, a part in the job's newest attempt."""
    result, run = view.result_of(job), view.plan.run_of(job)
    if run is not None:
        return tuple(dict.fromkeys((*run.left, *(allocation.node for allocation in run.allocations))))
    return result.nodes if result is not None else ()


class LogReader:
    """What the job's agents print, on all nodes of its newest attempt. Each of their lines names its node."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._read_to: dict[str, int] = {}
        """By node."""
        self._complained: set[str] = set()

    @property
    def found(self) -> bool:
        """Some node has something of the job."""
        return bool(self._read_to)

    def read(self, view: PoolView) -> bool:
        """Shows the lines that are new, as far as they have ended; whether there is more."""
        names, nodes = nodes_of(view, self._job), {node.node: node for node in view.nodes}
        for name in names:
            if name not in nodes:
                self._complain(name, "has left the pool; what it has is in its daemon's --log-dir")
        asked = [nodes[name] for name in names if name in nodes]
        if not asked:
            return False
        with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="ask") as threads:
            pieces = list(threads.map(self._piece, asked))
        for node, piece in zip(asked, pieces, strict=True):
            self._show(node.node, piece)
        return any(len(piece) == MOST_BYTES for piece in pieces)

    def _piece(self, node: PoolNode) -> bytes:
        try:
            return ask_daemon(node, self._job, self._read_to.get(node.node, 0))
        except (OSError, NoAnswer) as error:
            self._complain(node.node, f"cannot be read: {error}")
            return b""

    def _show(self, name: str, piece: bytes) -> None:
        whole = piece[: piece.rfind(b"\n") + 1]
        if not whole and len(piece) == MOST_BYTES:
            whole = piece  # a part of a very long line
        if whole:
            self._read_to[name] = self._read_to.get(name, 0) + len(whole)
            sys.stdout.flush()
            sys.stdout.buffer.write(whole)
            sys.stdout.buffer.flush()

    def _complain(self, name: str, what: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            print(f"node {name} {what}", file=sys.stderr, flush=True)
