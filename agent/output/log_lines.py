"""The form of a line of the agent's own log: text for people, or one JSON object for programs.

    {"time": "2026-03-01T12:00:00.125Z", "level": "warning", "logger": "elastic_agent.agent.main.loop",
     "message": "leaving the job", "node": "a", "generation": 3}

A text of several lines, such as a traceback, is one line of JSON. The lines of workers on the console are not changed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any


class TextLines(logging.Formatter):
    """The form for people: `2026-03-01 13:00:00.125+01:00 [a] leaving the job`."""

    def __init__(self, node: str) -> None:
        super().__init__(f"%(asctime)s [{node}] %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """With date and zone, so that the lines of nodes in several places, and of several days, can be compared."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")


class JsonLines(logging.Formatter):
    """`generation`: the newest generation of this node's workers; 0: there was none, and the key is left out."""

    def __init__(self, node: str, generation: Callable[[], int]) -> None:
        super().__init__()
        self._node = node
        self._generation = generation

    def format(self, record: logging.LogRecord) -> str:
        whole, milliseconds = divmod(round(record.created * 1000), 1000)
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "node": self._node,
        }
        if generation := self._generation():
            line["generation"] = generation
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
