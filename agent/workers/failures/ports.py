"""A worker that found its port taken: how programs word that, which port it was, and who holds it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

from ...common.ports import PortOwner
from .facts import LAST_WORDS
from .texts import first_line

# EADDRINUSE of a TCP port, as Python and asyncio, torch, gloo, and ZeroMQ word it in an exception that says nothing
# else first; as any program does; and where these name the port.
_PORT_TAKEN = re.compile(
    r"""(?:[\w.]+\.)?(?:
        OSError:\ \[Errno\ 98\]\ (?:error\ while\ attempting\ to\ bind\ .*)?address\ already\ in\ use
      | (?:DistNetworkError|RuntimeError):\ The\ server\ socket\ has\ failed\ .*(?:EADDRINUSE|address\ already\ in\ use)
      | RuntimeError:\ (?:\[[^]]*gloo[^]]*\].*)?address\ already\ in\ use
      | ZMQError:\ address\ already\ in\ use
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_SAYS_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|\[Errno 98\]", re.IGNORECASE)
_OF_UNIX = re.compile(r"""\bipc:|\b(AF_)?UNIX\b|['"]/""", re.IGNORECASE)
_PORT = re.compile(r"\bport:? (\d{1,5})\b|(?:\]|\d|\*|localhost):(\d{1,5})\b|', (\d{1,5})[,)]")
# Of torch's client that looks for the store of its ranks, or of the server that it wants to be.
_STORE = re.compile(
    r"client socket has .*connect to \(.*, (\d{1,5})\)|server socket has failed to listen.* port: (\d{1,5})"
)


def wanted_a_port(exception: str) -> bool:
    """The exception says that a TCP port is taken, and nothing else."""
    return _PORT_TAKEN.match(exception) is not None and not _OF_UNIX.search(first_line(exception))


def says_port_taken(log_tail: Sequence[str]) -> str:
    """The line among a program's last ones that says that a TCP port is taken; empty: none does."""
    last = [line for line in log_tail if line.strip()][-LAST_WORDS:]
    return next((line for line in last if _SAYS_PORT_TAKEN.search(line) and not _OF_UNIX.search(line)), "")


def notes_of_ports(said: str, master_port: int, owner_of: Callable[[int], PortOwner] | None) -> Iterator[str]:
    """Notes for the summary: the owner of the taken port, if `said` names the port, and whether the script had chosen
    another port than the agent."""
    if owner_of is not None and (port := _number_in(_PORT, said)):
        owner = owner_of(port)
        agent = owner.pid == os.getpid()
        yield f"port {port}: {f'pid {owner.pid}, the agent itself' if agent else owner.words}"
        if port == master_port:
            yield "it is MASTER_PORT, where the agent serves the store: use it as a client, or another port"
    chosen = _number_in(_STORE, said)
    if chosen and master_port and chosen != master_port:
        yield f"the script has chosen port {chosen}, the agent had given it MASTER_PORT={master_port}"


def _number_in(pattern: re.Pattern[str], text: str) -> int:
    """The number of the port in the text; 0: none."""
    found = pattern.search(text)
    return int(next(filter(None, found.groups()))) if found is not None else 0
