"""What the TCPStore of a c10d store holds: messages on their way, and nothing that lasts."""

from __future__ import annotations

META_KEY = "elastic-agent/meta"
REQUEST_QUEUE = "elastic-agent/requests"
REPLY_LIMIT_BYTES = 7 * 1024 * 1024
"""TCPStore itself cuts the connection above 8 MiB."""


def reply_queue(client: str, link: int) -> str:
    return f"elastic-agent/replies/{client}/{link}"
