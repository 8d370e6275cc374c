"""The relations that must hold between settings, and with this machine's files.

Each rule is a `Rule`. It names the options that it involves: where one of them could not be read, the rule is not
judged, so that one mistake is one problem.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...rendezvous.etcd import ETCD
from ...rendezvous.records import Endpoint
from .config import (
    MAX_NODES,
    MIN_NODES,
    MODULE,
    NO_PYTHON,
    NODES_MULTIPLE_OF,
    RUN_PATH,
    SCRIPT,
    Problem,
)
from .load import Setting, Settings
from .parse import MOST_NODES, Option, in_words
from .rendezvous import (
    BACKEND,
    CLUSTERS,
    ENDPOINT,
    ETCD_CA,
    ETCD_CERT,
    ETCD_INSECURE,
    ETCD_KEY,
    ETCD_OPTIONS,
    ETCD_PASSWORD_FILE,
    ETCD_USER,
    JOB_ID,
    JOIN_TIMEOUT,
    LAST_CALL,
    LEASE_TTL,
    POOL,
    SHARED,
    STORES,
)

_NEEDED_WITH: tuple[tuple[Option[Any], Option[Any], str], ...] = (
    (ETCD_KEY, ETCD_CERT, "add --etcd-cert FILE"),
    (ETCD_CERT, ETCD_KEY, "add --etcd-key FILE"),
    (ETCD_CERT, ETCD_CA, "add --etcd-ca FILE, by which the server is known"),
    (ETCD_PASSWORD_FILE, ETCD_USER, "add --etcd-user NAME, or leave the password out"),
    (ETCD_USER, ETCD_PASSWORD_FILE, "add --etcd-password-file FILE"),
)
"""An option, another one that must come with it, and advice."""

_ETCDS: tuple[Option[Any], ...] = (BACKEND, ENDPOINT, *ETCD_OPTIONS)


class Rule(NamedTuple):
    """`option` is where the advice would be followed; `others` are involved, too."""

    holds: object
    option: Option[Any]
    expected: str
    advice: str
    others: tuple[Option[Any], ...] = ()


def check_relations(settings: Settings, *, of_pool: bool = False) -> list[tuple[set[str], Problem]]:
    """The broken rules, each with the names of the options that it involves; none where one of them is unreadable.

    `of_pool`: the store is a pool's own, and no job's in it.
    """
    broken = []
    for rule in _rules(settings, of_pool=of_pool):
        involved = {option.name for option in (rule.option, *rule.others)}
        if not rule.holds and not settings.broken & involved:
            setting = settings[rule.option]
            origin = f"{rule.option.name} (default)" if setting.is_default else setting.origin
            broken.append((involved, Problem(origin, setting.text or None, rule.expected, rule.advice)))
    return broken


def _rules(settings: Settings, *, of_pool: bool) -> Iterator[Rule]:
    yield from _of_nodes_and_times(settings)
    yield from _of_the_store(settings, of_pool=of_pool)
    if settings[BACKEND].value == ETCD.name:
        yield from _of_etcd(settings)
    for target in (MODULE, NO_PYTHON):
        holds = settings[target].value is None or not settings[RUN_PATH].value
        expected = f"a script, and not {settings[target].origin}"
        yield Rule(holds, RUN_PATH, expected, "leave out one of them", (target,))
    script = settings[SCRIPT].value
    if script is not None:
        found, advice = _script_problem(script)
        yield Rule(not found, SCRIPT, f"a Python file, but {found}", advice)


def _less(
    settings: Settings, lower: Option[Any], upper: Option[Any], blamed: Option[Any], *, equal: bool = False
) -> Rule:
    """Of two numbers."""
    low, high = settings[lower].value, settings[upper].value
    other = upper if blamed is lower else lower
    unlike = "at most" if equal else "less than" if blamed is lower else "more than"
    expected = f"{unlike} {other.name}, which is {_in_force(settings[other])}"
    advice = f"lower --{lower.name} or raise --{upper.name}"
    return Rule(low < high or (equal and low == high), blamed, expected, advice, (other,))


def _of_nodes_and_times(settings: Settings) -> Iterator[Rule]:
    yield _less(settings, MIN_NODES, MAX_NODES, MIN_NODES, equal=True)
    multiple = settings[NODES_MULTIPLE_OF]
    for option in (MIN_NODES, MAX_NODES):
        nodes = settings[option].value or 0
        below = nodes // multiple.value * multiple.value
        fitting = [str(number) for number in (below, below + multiple.value) if 1 <= number <= MOST_NODES]
        yield Rule(
            nodes % multiple.value == 0,
            option,
            f"a multiple of nodes-multiple-of, which is {_in_force(multiple)}",
            f"use --{option.name} {' or '.join(fitting)}",
            (NODES_MULTIPLE_OF,),
        )
    yield _less(settings, LEASE_TTL, JOIN_TIMEOUT, JOIN_TIMEOUT)
    yield _less(settings, LAST_CALL, JOIN_TIMEOUT, LAST_CALL)


def _of_the_store(settings: Settings, *, of_pool: bool) -> Iterator[Rule]:
    backend, address, most = settings[BACKEND], settings[ENDPOINT].value, settings[MAX_NODES]
    kind, shared, clusters = STORES[str(backend.value)], in_words(SHARED), in_words(CLUSTERS)
    endpoints, meant = (address.endpoints, address.backend) if address is not None else ((), None)
    in_pool, place = of_pool or settings[POOL].value is not None, (BACKEND,)
    if meant not in (None, kind.name):
        expected = f"an endpoint of {kind} ({backend.origin})"
        yield Rule(False, ENDPOINT, expected, f"use --rdzv-backend {meant}, or an endpoint of {kind}", place)
    elif kind.of_one_machine:
        expected = f"{shared}, because only the jobs of a pool can meet in a {kind} store"
        advice = (
            f"submit the job to this machine's pool (elastic-agent submit), or use --rdzv-backend {shared}"
        )
        yield Rule(in_pool, BACKEND, expected, advice, (POOL,))
        expected = f"a folder, because {kind} ({backend.origin}) is for one machine"
        advice = f"write {kind}:///FOLDER, or use --rdzv-backend {shared} for a pool of several machines"
        yield Rule(address is None or meant, ENDPOINT, expected, advice, place)
    elif not kind.shared:
        expected = (
            f"{shared}, because max-nodes is {_in_force(most)} and no other node can join a {kind} store"
        )
        advice = f"use --rdzv-backend {shared}, or --max-nodes 1"
        yield Rule(most.value == 1, BACKEND, expected, advice, (MAX_NODES, MIN_NODES))
        expected = f"{shared}, because an endpoint is given ({settings[ENDPOINT].origin}) and a {kind} store has none"
        yield Rule(
            address is None, BACKEND, expected, "leave out --rdzv-endpoint or --rdzv-backend", (ENDPOINT,)
        )
    elif not kind.cluster:
        expected = "a port from 1 to 65535, or localhost:0"
        advice = "choose one port for all nodes, or leave the endpoint out and this agent hosts the store"
        yield Rule(all(one.port for one in endpoints), ENDPOINT, expected, advice, place)
        expected = f"one endpoint, because {kind} ({backend.origin}) has no more"
        advice = f"use --rdzv-backend {clusters} for the members of an {clusters} cluster, else name one host"
        yield Rule(len(endpoints) <= 1, ENDPOINT, expected, advice, place)
        if of_pool and (distant := _distant(endpoints)):
            yield Rule(
                settings[ETCD_INSECURE].value,
                ENDPOINT,
                f"{clusters} with TLS for a pool, because {distant} is not this machine's loopback, a {kind} store "
                "has no TLS, and who writes to a pool's store runs commands on its nodes",
                f"write {clusters}://HOST:PORT with --etcd-ca FILE, or add --etcd-insecure where all who reach that"
                " port may run commands here",
                (BACKEND, ETCD_INSECURE),
            )
    for option in ETCD_OPTIONS if kind is not ETCD else ():
        allowed = option is ETCD_INSECURE and in_pool
        expected = f"--rdzv-backend {ETCD} with it, not {kind} ({backend.origin})"
        advice = f"use --rdzv-backend {ETCD}, or leave this out"
        unset = settings[option].value == option.default_value
        yield Rule(allowed or unset, option, expected, advice, (BACKEND, ENDPOINT))


def _of_etcd(settings: Settings) -> Iterator[Rule]:
    address, insecure = settings[ENDPOINT].value, settings[ETCD_INSECURE].value
    endpoints = address.endpoints if address is not None else ()
    advice = "add --rdzv-endpoint HOST1:2379,HOST2:2379,HOST3:2379"
    yield Rule(endpoints, ENDPOINT, "the members of the etcd cluster", advice, _ETCDS)
    advice = "name the port that etcd's clients use, 2379 unless you chose another"
    yield Rule(all(one.port for one in endpoints), ENDPOINT, "ports from 1 to 65535", advice, _ETCDS)
    expected = "a name for this job, because one etcd serves many"
    advice = "add --rdzv-id NAME, the same on all nodes and used by no other job"
    yield Rule(settings[JOB_ID].value is not None, JOB_ID, expected, advice, (BACKEND, ENDPOINT))
    tls = any(settings[option].value is not None for option in (ETCD_CA, ETCD_CERT, ETCD_KEY))
    distant = _distant(endpoints)
    expected = f"TLS, because {distant} is not this machine's loopback"
    advice = "add --etcd-ca FILE, or --etcd-insecure to send everything as plain text"
    yield Rule(tls or insecure or not distant, ENDPOINT, expected, advice, _ETCDS)
    expected = "no TLS with it, which --etcd-ca, --etcd-cert and --etcd-key ask for"
    advice = "leave out --etcd-insecure, and TLS is used"
    yield Rule(not (tls and insecure), ETCD_INSECURE, expected, advice, _ETCDS)
    for option, needed, advice in _NEEDED_WITH:
        alone = settings[option].value is not None and settings[needed].value is None
        yield Rule(not alone, option, f"--{needed.name} with it", advice, _ETCDS)
    for option in (ETCD_CA, ETCD_CERT, ETCD_KEY, ETCD_PASSWORD_FILE):
        path = settings[option].value
        if path is not None:
            found, expected = _stat_readable(path), "a file that exists, can be read and is not empty"
            advice = f"check the path, seen from {os.getcwd()}, and its permissions"
            yield Rule(found is not None and found.st_size, option, expected, advice, (BACKEND, ENDPOINT))
            public = option in (ETCD_KEY, ETCD_PASSWORD_FILE) and found and _readable_by_others(found)
            expected, advice = "a file that neither group nor others can read", f"run: chmod 600 {path}"
            yield Rule(not public, option, expected, advice, (BACKEND, ENDPOINT))


def _script_problem(script: str) -> tuple[str, str]:
    """What is wrong with it and what to do; two empty texts when nothing is."""
    if os.path.isdir(script):
        return "it is a folder", "name a file in it, or run a package with -m NAME"
    if not os.path.lexists(script):
        return "there is none of this name", f"check the path, seen from {os.getcwd()}"
    if _stat_readable(Path(script)) is None:
        return "this user cannot read it", "check its kind and permissions: ls -lL"
    return "", ""


def _in_force(setting: Setting[Any]) -> str:
    value = f"{setting.value:g} s" if isinstance(setting.value, float) else setting.value
    return f"{value} ({setting.origin})"


def _readable_by_others(found: os.stat_result) -> bool:
    """Root may lend a file to a group: so a Kubernetes Secret with fsGroup reaches a process that is not root."""
    lent = found.st_uid == 0 and os.geteuid() != 0
    return bool(found.st_mode & (stat.S_IROTH if lent else stat.S_IRGRP | stat.S_IROTH))


def _stat_readable(path: Path) -> os.stat_result | None:
    """None for what is no file, or cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) and os.access(path, os.R_OK) else None


def _distant(endpoints: tuple[Endpoint, ...]) -> str:
    """Those that are not on this machine's loopback, as far as the text shows: a name may mean another machine
    tomorrow."""
    return ", ".join(str(endpoint) for endpoint in endpoints if not _is_loopback(endpoint))


def _is_loopback(endpoint: Endpoint) -> bool:
    try:
        return ipaddress.ip_address(endpoint.address).is_loopback
    except ValueError:
        return endpoint.address == "localhost"
