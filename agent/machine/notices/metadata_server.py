"""One question over HTTP to a metadata server: answered whole, in time and within a size, or not at all.

Never through a proxy: the address is link-local, and what answers there is this machine's own host.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from typing import Any

from .notice import Question, Reply, Silent

MOST_BYTES = 256 * 1024
"""Of the body: Azure's document names every machine of a scale set."""

TIMEOUT_S = 1.0


class _Bounded(socket.socket):
    """All that is read of it comes before one deadline."""

    left_s: Callable[[], float]

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self.left_s())
        return super().recv_into(*args)


class MetadataServer:
    """An `Ask`."""

    def __init__(self, host: str, clock: Callable[[], float], port: int = 80) -> None:
        self._address = host, port
        self._clock = clock

    def __call__(self, question: Question) -> Reply:
        deadline = self._clock() + TIMEOUT_S

        def left_s() -> float:
            if (left := deadline - self._clock()) <= 0.0:
                raise TimeoutError(f"no whole answer within {TIMEOUT_S:g} s")
            return left

        connection = http.client.HTTPConnection(*self._address)
        try:
            with _Bounded(socket.AF_INET, socket.SOCK_STREAM) as bounded:
                bounded.left_s = left_s
                bounded.settimeout(TIMEOUT_S)
                bounded.connect(self._address)
                connection.sock = bounded
                connection.request(
                    question.method, question.path, headers={**question.headers, "Connection": "close"}
                )
                response = connection.getresponse()
                body = response.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Silent(f"{question.path}: {error!r}") from error
        finally:
            connection.close()
        if len(body) > MOST_BYTES:
            raise Silent(f"{question.path}: an answer of more than {MOST_BYTES} bytes")
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, body, headers)
