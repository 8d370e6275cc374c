"""The relations that must hold between settings, and with this machine's files.

Every rule names the options it involves: where one of them could not be read, the rule is not judged, so that one
mistake is one problem.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...rendezvous.etcd.kind import ETCD
from ...rendezvous.records import Endpoint
from ...rendezvous.store.store_kind import StoreKind
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
from .options import COMMANDS
from .parse import MOST_NODES, Option
from .rendezvous import (
    BACKEND,
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
)
from .settings import Setting, Settings
from .stopping import (
    DRAIN_TIMEOUT,
    HANG_TIMEOUT,
    PROCESS_GROUP_TIMEOUT,
    STOP_GRACE,
)
from .values import CLUSTERS, SHARED, STORES, in_words


def check_relations(settings: Settings, *, of_pool: bool = False) -> list[tuple[set[str], Problem]]:
    """The broken rules, each with the names of the options that it involves; none where one of them is unreadable.

    `of_pool`: the store is a pool's own, and no job's in it.
    """
    rules = _Rules(settings)
    _check_nodes_and_times(rules)
    _check_training_timeouts(rules)
    _check_meeting_place(rules, of_pool=of_pool)
    if settings[BACKEND].value == ETCD.name:
        _check_etcd_endpoints(rules)
        _check_etcd_credentials(rules)
    for target in (MODULE, NO_PYTHON):
        rules.expect(
            settings[target].value is None or not settings[RUN_PATH].value,
            RUN_PATH,
            f"a script, and not {settings[target].origin}",
            "leave out one of them",
            target,
        )
    script = settings[SCRIPT].value
    if script is not None:
        found, advice = _script_problem(script)
        rules.expect(not found, SCRIPT, f"a Python file, but {found}", advice)
    return [(involved, problem) for involved, problem in rules.broken if not settings.broken & involved]


def _script_problem(script: str) -> tuple[str, str]:
    """What is wrong with it and what to do; two empty texts when nothing is."""
    path = Path(script)
    if os.path.isdir(path):
        return "it is a folder", "name a file in it, or run a package with -m NAME"
    if not os.path.lexists(path):
        meant = get_close_matches(script, (*COMMANDS, "--help", "--version"), n=1, cutoff=0.7)
        guess = f"did you mean elastic-agent {meant[0]}? Else " if meant else _scripts_like(path)
        return "there is none of this name", f"{guess}check the path, seen from {os.getcwd()}"
    if _stat_readable(path) is None:
        return "this user cannot read it", "check its kind and permissions: ls -lL"
    with open(path, "rb") as file:
        if file.read(4) == b"\x7fELF":
            return (
                "it is machine code",
                "to run a program, write --no-python PROGRAM; a library is no program",
            )
    return "", ""


def _scripts_like(path: Path) -> str:
    with contextlib.suppress(OSError):
        scripts = [name for name in os.listdir(path.parent) if name.endswith(path.suffix)]
        for name in get_close_matches(path.name, scripts, n=1):
            return f"did you mean {path.with_name(name)}? Else "
    return ""


_NEEDED_WITH: tuple[tuple[Option[object], Option[object], str, str], ...] = (
    (ETCD_KEY, ETCD_CERT, "a certificate with it", "add --etcd-cert FILE"),
    (ETCD_CERT, ETCD_KEY, "its key with it", "add --etcd-key FILE"),
    (ETCD_CERT, ETCD_CA, "an authority with it, by which the server is known", "add --etcd-ca FILE"),
    (ETCD_PASSWORD_FILE, ETCD_USER, "a user with it", "add --etcd-user NAME, or leave the password out"),
    (ETCD_USER, ETCD_PASSWORD_FILE, "a password with it", "add --etcd-password-file FILE"),
)
"""An option, another one that must come with it, what is expected, and advice."""


class _Rules:
    """The settings, and the rules that they were found to break."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.broken: list[tuple[set[str], Problem]] = []

    def expect(
        self, holds: bool, option: Option[object], expected: str, advice: str, *others: Option[object]
    ) -> None:
        """`option` is where the advice would be followed; `others` are involved, too."""
        if not holds:
            setting = self.settings[option]
            origin = f"{option.name} (default)" if setting.is_default else setting.origin
            involved = {option.name, *(other.name for other in others)}
            self.broken.append((involved, Problem(origin, setting.text or None, expected, advice)))

    def expect_less(self, lower: Option[Any], upper: Option[Any], *, or_equal: bool = False) -> None:
        """Of two numbers, where both are set."""
        low, high = self.settings[lower], self.settings[upper]
        if low.value is not None and high.value is not None:
            self.expect(
                low.value < high.value or (or_equal and low.value == high.value),
                lower,
                f"{'at most' if or_equal else 'less than'} {upper.name}, which is {_in_force(high)}",
                f"lower --{lower.name} or raise --{upper.name}",
                upper,
            )

    def expect_of_etcd(self, holds: bool, option: Option[object], expected: str, advice: str) -> None:
        self.expect(holds, option, expected, advice, BACKEND, ENDPOINT, *ETCD_OPTIONS)


def _check_nodes_and_times(rules: _Rules) -> None:
    settings = rules.settings
    rules.expect_less(MIN_NODES, MAX_NODES, or_equal=True)
    for option in (MIN_NODES, MAX_NODES):
        _check_multiple(rules, option)
    lease = settings[LEASE_TTL]
    rules.expect(
        settings[JOIN_TIMEOUT].value > lease.value,
        JOIN_TIMEOUT,
        f"more than lease-ttl, which is {_in_force(lease)}",
        "raise --join-timeout or lower --lease-ttl",
        LEASE_TTL,
    )
    rules.expect_less(LAST_CALL, JOIN_TIMEOUT)
    if settings[DRAIN_TIMEOUT].value != 0:
        rules.expect_less(DRAIN_TIMEOUT, STOP_GRACE)


def _check_multiple(rules: _Rules, option: Option[int] | Option[int | None]) -> None:
    multiple, nodes = rules.settings[NODES_MULTIPLE_OF], rules.settings[option].value
    if nodes is None:
        return
    below = nodes // multiple.value * multiple.value
    fitting = [str(number) for number in (below, below + multiple.value) if 1 <= number <= MOST_NODES]
    rules.expect(
        nodes % multiple.value == 0,
        option,
        f"a multiple of nodes-multiple-of, which is {_in_force(multiple)}",
        f"use --{option.name} {' or '.join(fitting)}",
        NODES_MULTIPLE_OF,
    )


def _check_training_timeouts(rules: _Rules) -> None:
    hang, group = rules.settings[HANG_TIMEOUT], rules.settings[PROCESS_GROUP_TIMEOUT]
    if isinstance(hang.value, float) and group.value is not None:
        rules.expect(
            hang.value < group.value,
            PROCESS_GROUP_TIMEOUT,
            f"more than hang-timeout, which is {_in_force(hang)}",
            "raise --process-group-timeout, or leave it out and it is twice --hang-timeout",
            HANG_TIMEOUT,
        )


def _check_meeting_place(rules: _Rules, *, of_pool: bool) -> None:
    settings = rules.settings
    kind = STORES[str(settings[BACKEND].value)]
    if kind.of_one_machine:
        _check_store_of_one_machine(rules, kind, of_pool=of_pool)
    elif not kind.shared:
        _check_store_of_one_agent(rules, kind)
    elif not kind.cluster:
        _check_hosted_store(rules, kind, of_pool=of_pool)
    if kind is not ETCD:
        in_pool = of_pool or settings[POOL].value is not None
        for option in ETCD_OPTIONS:
            rules.expect(
                settings[option].value == option.default_value or (option is ETCD_INSECURE and in_pool),
                option,
                f"--rdzv-backend {ETCD} with it, not {kind} ({settings[BACKEND].origin})",
                f"use --rdzv-backend {ETCD}, or leave this out",
                BACKEND,
                ENDPOINT,
            )


def _check_store_of_one_machine(rules: _Rules, kind: StoreKind, *, of_pool: bool) -> None:
    settings = rules.settings
    backend, address, shared = settings[BACKEND], settings[ENDPOINT].value, in_words(SHARED)
    rules.expect(
        of_pool or settings[POOL].value is not None,
        BACKEND,
        f"{shared}, because only the jobs of a pool can meet in a {kind} store",
        f"submit the job to this machine's pool (elastic-agent submit), or use --rdzv-backend {shared}",
        POOL,
    )
    rules.expect(
        address is None or address.backend == kind.name,
        ENDPOINT,
        f"a folder, because {kind} ({backend.origin}) is for one machine",
        f"write {kind}:///FOLDER, or use --rdzv-backend {shared} for a pool of several machines",
        BACKEND,
    )


def _check_store_of_one_agent(rules: _Rules, kind: StoreKind) -> None:
    settings = rules.settings
    address, most, shared = settings[ENDPOINT].value, settings[MAX_NODES], in_words(SHARED)
    rules.expect(
        most.value == 1,
        BACKEND,
        f"{shared}, because max-nodes is {_in_force(most)} and no other node can join a {kind} store",
        f"use --rdzv-backend {shared}, or --max-nodes 1",
        MAX_NODES,
        MIN_NODES,
    )
    rules.expect(
        address is None,
        BACKEND,
        f"{shared}, because an endpoint is given ({settings[ENDPOINT].origin}) and a {kind} store has none",
        "leave out --rdzv-endpoint or --rdzv-backend",
        ENDPOINT,
    )


def _check_hosted_store(rules: _Rules, kind: StoreKind, *, of_pool: bool) -> None:
    settings = rules.settings
    backend, address, clusters = settings[BACKEND], settings[ENDPOINT].value, in_words(CLUSTERS)
    endpoints, meant = (address.endpoints, address.backend) if address is not None else ((), None)
    rules.expect(
        all(endpoint.port for endpoint in endpoints),
        ENDPOINT,
        "a port from 1 to 65535, or localhost:0",
        "choose one port for all nodes, or leave the endpoint out and this agent hosts the store",
        BACKEND,
    )
    rules.expect(
        address is None or address.backend is None,
        ENDPOINT,
        f"an endpoint of {kind} ({backend.origin})",
        f"use --rdzv-backend {meant}, which the URL stands for, or write HOST:PORT",
        BACKEND,
    )
    rules.expect(
        len(endpoints) <= 1 or (address is not None and address.backend is not None),
        ENDPOINT,
        f"one endpoint, because {kind} ({backend.origin}) has no more",
        f"use --rdzv-backend {clusters} if these are the members of an {clusters} cluster, else name one host",
        BACKEND,
    )
    distant = [str(endpoint) for endpoint in endpoints if not _is_loopback(endpoint)]
    rules.expect(
        not (of_pool and distant) or settings[ETCD_INSECURE].value,
        ENDPOINT,
        f"{clusters} with TLS for a pool, because {', '.join(distant)} is not this machine's loopback, a {kind} "
        "store has no TLS, and who writes to a pool's store runs commands on its nodes",
        f"write {clusters}://HOST:PORT with --etcd-ca FILE, or add --etcd-insecure where all who reach that port"
        " may run commands here",
        BACKEND,
        ETCD_INSECURE,
    )


def _check_etcd_endpoints(rules: _Rules) -> None:
    settings = rules.settings
    address = settings[ENDPOINT].value
    endpoints = address.endpoints if address is not None else ()
    rules.expect_of_etcd(
        bool(endpoints),
        ENDPOINT,
        "the members of the etcd cluster",
        "add --rdzv-endpoint HOST1:2379,HOST2:2379,HOST3:2379",
    )
    rules.expect_of_etcd(
        all(endpoint.port for endpoint in endpoints),
        ENDPOINT,
        "ports from 1 to 65535",
        "name the port that etcd's clients use, 2379 unless you chose another",
    )
    rules.expect(
        settings[JOB_ID].value is not None,
        JOB_ID,
        "a name for this job, because one etcd serves many",
        "add --rdzv-id NAME, the same on all nodes and used by no other job",
        BACKEND,
        ENDPOINT,
    )
    distant = [str(endpoint) for endpoint in endpoints if not _is_loopback(endpoint)]
    tls = any(settings[option].value is not None for option in (ETCD_CA, ETCD_CERT, ETCD_KEY))
    rules.expect_of_etcd(
        tls or settings[ETCD_INSECURE].value or not distant,
        ENDPOINT,
        f"TLS, because {', '.join(distant)} is not this machine's loopback",
        "add --etcd-ca FILE, or --etcd-insecure to send everything as plain text",
    )
    rules.expect_of_etcd(
        not (tls and settings[ETCD_INSECURE].value),
        ETCD_INSECURE,
        "no TLS with it, which --etcd-ca, --etcd-cert and --etcd-key ask for",
        "leave out --etcd-insecure, and TLS is used",
    )


def _check_etcd_credentials(rules: _Rules) -> None:
    settings = rules.settings
    for option, needed, expected, advice in _NEEDED_WITH:
        alone = settings[option].value is not None and settings[needed].value is None
        rules.expect_of_etcd(not alone, option, expected, advice)
    for path in (ETCD_CA, ETCD_CERT, ETCD_KEY, ETCD_PASSWORD_FILE):
        _check_file(rules, path, private=path in (ETCD_KEY, ETCD_PASSWORD_FILE))


def _check_file(rules: _Rules, option: Option[Path | None], *, private: bool) -> None:
    path = rules.settings[option].value
    if path is None:
        return
    found = _stat_readable(path)
    rules.expect(
        found is not None and found.st_size > 0,
        option,
        "a file that exists, can be read and is not empty",
        f"check the path, seen from {os.getcwd()}, and its permissions",
        *(BACKEND, ENDPOINT),
    )
    rules.expect(
        found is None or not private or not _readable_by_others(found),
        option,
        "a file that neither group nor others can read",
        f"run: chmod 600 {path}",
        *(BACKEND, ENDPOINT),
    )


def _in_force(setting: Setting[Any]) -> str:
    unit = " s" if isinstance(setting.value, float) else ""
    return f"{setting.value:g}{unit} ({setting.origin})"


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


def _is_loopback(endpoint: Endpoint) -> bool:
    """As far as the text shows: a name is not resolved, for it may mean another machine tomorrow."""
    try:
        return ipaddress.ip_address(endpoint.address).is_loopback
    except ValueError:
        return endpoint.address == "localhost"
