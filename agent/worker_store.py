"""The workers' own store: one fresh TCPStore for each generation, on a socket that was bound long before.

torchrun keeps one store for all restarts, and on torch 2.13 the second process group finds the first one's keys
and hangs. Here the master node's agent serves a new store on a listening socket bound when it joined: nobody can
take the port in between, and a worker that connects before the store is up waits in the backlog instead of
failing and retrying half a second later.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger(__name__)


class WorkerStore:
    """Serves one generation's store until `close`. Importing torch takes seconds, so a thread does it."""

    def __init__(self, listener: socket.socket, on_error: Callable[[str], None]) -> None:
        """Takes over `listener`. `on_error` is called from the thread if the store cannot be served."""
        self._listener = listener
        self._on_error = on_error
        self._store: TCPStore | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._serve, name="worker-store", daemon=True).start()

    def close(self) -> None:
        """The store's keys die with it; a worker that still asks is cut off."""
        with self._lock:
            self._closed = True
            self._store = None
            self._listener.close()

    def _serve(self) -> None:
        try:
            from torch.distributed import TCPStore

            with self._lock:
                if self._closed:
                    return
                host, port = self._listener.getsockname()[:2]
                self._store = TCPStore(
                    host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=self._listener.detach(),
                )
        except Exception as error:
            # Whatever it is, the workers would wait for this store until their own timeout: end them now.
            log.exception("the workers' store cannot be served")
            self._on_error(f"the workers' store cannot be served: {error}")
