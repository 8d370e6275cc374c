"""Questions to a cloud's metadata server: its address is link-local, and what answers there is this machine's host."""

from __future__ import annotations

from collections.abc import Callable

from ....rendezvous.records import Endpoint
from ...common.http_client import NoAnswer, Reply, request
from .notice import Question, SourceUnreachable

MAX_BYTES = 256 * 1024
"""Of the body: Azure's document names every machine of a scale set."""

TIMEOUT_S = 1.0


class MetadataServer:
    """An `Ask`."""

    def __init__(self, host: str, clock: Callable[[], float], port: int = 80) -> None:
        self._server = Endpoint(host, port)
        self._clock = clock

    def __call__(self, question: Question) -> Reply:
        path, method, headers = question.path, question.method, question.headers
        try:
            return request(
                self._server, path, self._clock, TIMEOUT_S, MAX_BYTES, method=method, headers=headers
            )
        except (OSError, NoAnswer) as error:
            raise SourceUnreachable(f"{path}: {error!r}") from error
