"""Loads what uses protobuf: etcd's messages, which need its implementation in Python, and OpenTelemetry's, which do not
care.

The implementation is chosen once in a process, when protobuf is first imported, by a variable of the environment. So
all that may be first load here, one after the other. The variables hold while they load and no longer: processes that
this one starts must not inherit them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_loading = threading.Lock()


@contextlib.contextmanager
def pure_python(variables: Mapping[str, str] = {}) -> Iterator[None]:
    """While it lasts, what is imported gets protobuf's implementation in Python, if none was loaded before."""
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
