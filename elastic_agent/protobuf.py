"""Imports of modules that use protobuf: etcd's messages need its pure Python implementation; OpenTelemetry's work with
any.

A process chooses the implementation once, by an environment variable, when protobuf is first imported. So every module
that may be the first to import it is imported here, one after the other. The variables are set only meanwhile:
processes that this one starts must not inherit them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_loading = threading.Lock()


@contextlib.contextmanager
def pure_python(variables: Mapping[str, str] = {}) -> Iterator[None]:
    """Imports within it get protobuf's pure Python implementation, if none was loaded before."""
    chosen = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python", **variables}
    with _loading:
        before = {name: os.environ.get(name) for name in chosen}
        os.environ.update(chosen)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
