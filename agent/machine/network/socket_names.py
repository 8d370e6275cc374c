"""The user's own NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME, judged before a worker trips over them.

The libraries read them in different ways. NCCL: a list of prefixes; a leading `=` makes them whole names, a leading
`^` takes all others, `^=` both, for the whole list. gloo: a list of whole names. TensorPipe: one whole name. NCCL and
gloo take a value of one character for none; a value that fits no interface makes them fail, minutes into the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...configuration.config import Problem
from .choice import GLOO_SOCKET_IFNAME, NCCL_SOCKET_FAMILY, NCCL_SOCKET_IFNAME, TP_SOCKET_IFNAME
from .interfaces import Interface

_VERSIONS = {"AF_INET": 4, "AF_INET6": 6}


def nccl_takes(value: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that NCCL_SOCKET_IFNAME=`value` stands for."""
    others = value.startswith("^")
    exact = value[others:].startswith("=")
    words = (word.partition(":")[0] for word in value[others + exact :].split(","))  # name:port
    listed = [word for word in words if word]

    def fits(name: str) -> bool:
        # An empty list is none at all, for NCCL.
        return not listed or any(name == word if exact else name.startswith(word) for word in listed)

    return [name for name in names if fits(name) != others]


def check_socket_names(environ: Mapping[str, str], interfaces: Iterable[Interface]) -> list[Problem]:
    """What cannot work with the interfaces that exist, up or not."""
    names = [interface.name for interface in interfaces]
    problems = []
    nccl = environ.get(NCCL_SOCKET_IFNAME, "")
    if len(nccl) > 1 and not nccl_takes(nccl, names):
        expected = f"a pattern that fits an interface of this node: {', '.join(names)}"
        problems.append(Problem(NCCL_SOCKET_IFNAME, nccl, expected, _LEAVE_IT, here=True))
    for variable, words in _whole_names(environ):
        value = environ[variable]
        pattern = value.lstrip("^=")
        if pattern != value:
            expected = "whole names of interfaces: ^ and = are NCCL's language, which only NCCL understands"
            advice = "unset it, and the agent sets it" if value[0] == "^" else f"write {variable}={pattern}"
            problems.append(Problem(variable, value, expected, advice))
        elif not set(words) <= set(names):
            expected = f"whole names of interfaces of this node: {', '.join(names)}"
            problems.append(Problem(variable, value, expected, _LEAVE_IT, here=True))
    return problems


def nccl_waits_for(environ: Mapping[str, str], interfaces: Iterable[Interface]) -> bool:
    """The interfaces that the user's NCCL_SOCKET_IFNAME stands for are all down: NCCL would not see them."""
    value = environ.get(NCCL_SOCKET_IFNAME, "")
    version = _VERSIONS.get(environ.get(NCCL_SOCKET_FAMILY, ""))
    seen = [
        interface.name
        for interface in interfaces
        if interface.up and any(version in (None, address.ip.version) for address in interface.addresses)
    ]
    return len(value) > 1 and not nccl_takes(value, seen)


_LEAVE_IT = "correct it, or unset it and the agent sets it"


def _whole_names(environ: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    gloo, tensorpipe = environ.get(GLOO_SOCKET_IFNAME, ""), environ.get(TP_SOCKET_IFNAME, "")
    found = [(GLOO_SOCKET_IFNAME, gloo.split(","))] if len(gloo) > 1 else []
    return [*found, (TP_SOCKET_IFNAME, [tensorpipe])] if tensorpipe else found
