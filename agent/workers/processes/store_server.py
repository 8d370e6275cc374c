"""The server of the workers' store of one generation, so that the agent need not import torch for it.

`helper` starts it as `python store_server.py`, through `shim`, so that it dies with the agent wherever it is, in
the import of torch too; or a spare becomes it. Its standard input is the listening socket. It serves until it is
killed, and its keys die with it: who still asks is cut off.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn


def main() -> NoReturn:
    # Python looks first where this file lies, but the modules here are not to be imported by their bare names.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    from torch.distributed import TCPStore

    listener = socket.socket(fileno=0)
    host, port = listener.getsockname()[:2]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store:
        signal.pause()
    raise AssertionError


if __name__ == "__main__":
    main()
