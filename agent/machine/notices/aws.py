"""Notices of EC2's metadata server (IMDSv2): a spot instance is interrupted, or AWS recommends to replace it.

The interruption comes two minutes ahead at best, and none is promised. A rebalance recommendation says that one has
become likely: it has no deadline, and may come for an instance that then lives on for days. It is a leave only where
the user has asked for that (`aws-rebalance`).

EC2 asks for a poll every 5 seconds. We poll each second: a part of the two minutes may have passed already.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ....codec import Invalid, load_object
from ...common.http_client import Reply
from .notice import Ask, BadResponse, Hint, Notice, Question, quoted, read_rfc3339

HOST = "169.254.169.254"
TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"

TOKEN_TTL_S = 6 * 3600
TOKEN_HEADER = "X-aws-ec2-metadata-token"

_ACTIONS = ("terminate", "stop", "hibernate")


def read_token(reply: Reply) -> str:
    """Raises BadResponse, without what may be a secret."""
    text = reply.body.decode("latin-1").strip()
    if reply.status != 200 or not re.fullmatch(r"[!-~]{1,512}", text):
        raise BadResponse(f"{TOKEN_PATH}: status {reply.status}, no token in {len(reply.body)} bytes")
    return text


def read_action(reply: Reply) -> Notice | None:
    """Of `ACTION_PATH`, which is not there until there is a notice. Raises BadResponse."""
    if reply.status == 404:
        return None
    action, at = _fields(reply, ACTION_PATH, "action", "time")
    if action not in _ACTIONS:
        raise BadResponse(f"{ACTION_PATH}: action {quoted(action)}")
    return Notice(f"AWS interrupts this spot instance ({action}) at {at}", _instant(at, ACTION_PATH))


def read_rebalance(reply: Reply) -> str | None:
    """Of `REBALANCE_PATH`: since when EC2 recommends to replace this instance. Raises BadResponse."""
    if reply.status == 404:
        return None
    (since,) = _fields(reply, REBALANCE_PATH, "noticeTime")
    _instant(since, REBALANCE_PATH)
    return since


def _fields(reply: Reply, path: str, *names: str) -> list[str]:
    try:
        if reply.status != 200:
            raise Invalid(f"status {reply.status}")
        values = [load_object(reply.body, "the answer").get(name) for name in names]
    except Invalid as error:
        raise BadResponse(f"{path}: {error}, {quoted(reply.body)}") from None
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(names):
        raise BadResponse(f"{path}: texts {' and '.join(names)} are missing, {quoted(reply.body)}")
    return texts


def _instant(text: str, path: str) -> float:
    try:
        return read_rfc3339(text)
    except ValueError as error:
        raise BadResponse(f"{path}: {quoted(text)} is {error}") from None


@dataclass(slots=True)
class Aws:
    """A source. `clock` is monotonic."""

    ask: Ask
    clock: Callable[[], float]
    leaves_on_rebalance: bool = False
    interval_s: float = 1.0
    _token: str = ""
    _token_until: float = 0.0

    def poll(self) -> Notice | Hint | None:
        notice = read_action(self._get(ACTION_PATH))
        if notice is not None:
            return notice
        since = read_rebalance(self._get(REBALANCE_PATH))
        if since is None:
            return None
        text = f"AWS recommends since {since} to replace this instance, which may be interrupted soon"
        return Notice(text, within_s=None) if self.leaves_on_rebalance else Hint(text)

    def _get(self, path: str) -> Reply:
        if self.clock() >= self._token_until:
            self._renew()
        reply = self.ask(Question(path, {TOKEN_HEADER: self._token}))
        if reply.status == 401:  # the server forgets tokens when the machine was paused
            self._renew()
            reply = self.ask(Question(path, {TOKEN_HEADER: self._token}))
        return reply

    def _renew(self) -> None:
        asked_at = self.clock()
        wanted = {f"{TOKEN_HEADER}-ttl-seconds": str(TOKEN_TTL_S)}
        self._token = read_token(self.ask(Question(TOKEN_PATH, wanted, "PUT")))
        self._token_until = asked_at + TOKEN_TTL_S / 2
