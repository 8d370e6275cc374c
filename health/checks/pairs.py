"""Checks between nodes: who tries whom, how two try each other, and what follows for which node or link.

First each node tries to reach the others, then pairs do an all-reduce, in rounds: in each, every node meets another
one. Every wait has an end, whatever the other side does. `elastic-agent check --nodes` (`agent/commands/check.py`) has
the workers of a job do so.

*Verdict.* A failed pair accuses two nodes and the link between them. A node is *cleared* when one pair with it passed.
So a failed pair of two cleared nodes is a bad *link*, and a node without a passed pair that failed with two cleared
ones is a bad *node*. What remains is in *doubt*, as with two nodes alone: that is said, and never guessed.

*Slow* is what has less than half of the median of the other pairs: what a link should do is not known. Pairs of one
machine are left out of that, but where all nodes are on one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated, Any, TypeAlias

from ...codec import AtMost, Checked, Count, Text, Within
from .finding import Finding, Outcome, listed, probe_command

MOST_NODES = 4096
MOST_TRIED = 64
"""Other nodes that one tries to reach: of more, the nearest in the order of the nodes."""
MOST_WORDS = 2048
"""Characters of a summary."""
ROUNDS = 3
"""So that two others of each node tell whether it is the node."""
ACCUSERS = 2
SLOW, MUCH_TOO_SLOW = 0.5, 0.25
"""Of the usual rate: a warning, and a failure."""
LEAST_USUAL = 4
"""Nodes: of three, two may have a short way of their own."""

Pair: TypeAlias = tuple[str, str]
"""Two nodes, as `pair_of` orders them."""
Node = Annotated[str, Text(128, re.compile(r"[A-Za-z0-9._-]{1,128}"))]
Trait = Annotated[str, Text(64)]
AllReduce: TypeAlias = tuple[Annotated[float, Within(0, 2**60)], Annotated[str, Text(512)]]
"""Bytes per second, and what went wrong; empty: nothing."""


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def rounds(nodes: Sequence[str]) -> Iterator[tuple[Pair, ...]]:
    """The first ones of a tournament; of an odd number of nodes one rests in each.

    >>> list(rounds(["a", "b", "c"]))
    [(('b', 'c'),), (('a', 'c'),), (('a', 'b'),)]
    """
    circle = [*nodes, *([""] if len(nodes) % 2 else [])]
    for _ in range(min(ROUNDS, len(circle) - 1)):
        both = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        yield tuple(pair_of(*pair) for pair in both if all(pair))
        circle[1:] = [circle[-1], *circle[1:-1]]


def tried_by(node: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Whom it tries to reach."""
    place = nodes.index(node)
    others = [*nodes[place + 1 :], *nodes[:place]]
    half = MOST_TRIED // 2
    return tuple(others if len(others) <= MOST_TRIED else others[:half] + others[-half:])


# --- What nodes say

OBSTACLES = {
    "dropped": (
        "no answer to SYN, though the node is there: a packet filter drops, or a cable or VLAN is wrong",
        "look at `nft list ruleset` on both nodes, and at security groups and NetworkPolicies between them: open the"
        " port, and those of --port-range; else look at cables, VLANs and routes",
    ),
    "refused": (
        "refused: no process listens there, or a packet filter rejects",
        "look whether the check still runs on that node, and for a `reject` rule (nft list ruleset)",
    ),
    "no-route": (
        "no route to it, no answer to ARP, or a packet filter rejects it",
        "look at `ip route get ADDRESS`, `ip neigh`, and `nft list ruleset` on both nodes; choose interfaces that see"
        " each other",
    ),
    "silent": (
        "the connection comes to be, and then nothing passes",
        "a firewall cuts connections, or packets are larger than the network takes (ping -M do -s 1472 ADDRESS)",
    ),
    "stranger": (
        "another program or machine answers there",
        "two machines have that address (arping -D), or NAT or a proxy lead elsewhere",
    ),
    "own": ("it cannot ask", "look at what the node that asks lacks: ports, descriptors, its address"),
}
"""Why a node does not reach another one, and what to do."""


@dataclass(frozen=True, slots=True)
class NodeFacts(Checked):
    """One node of a check."""

    node: Node
    address: Annotated[str, Text(256)]
    machine: Trait = ""
    """The same for all that one kernel runs; empty: not known."""
    traits: dict[str, Trait] = field(default_factory=dict)
    """By the names of `TRAITS`; what is not known is not there."""
    findings: Annotated[tuple[Finding, ...], AtMost(32)] = ()
    """Of its own checks, those that are not ok."""
    port: Count = 0
    """Where it answers the others."""
    token: Trait = ""
    """What it answers there."""
    store_port: Count = 0
    """Where the store of an all-reduce with this node listens."""
    seen: Annotated[tuple[Node, ...], AtMost(MOST_TRIED)] = ()
    """Other nodes that took part when it began this check for the first time."""

    @property
    def has_torch(self) -> bool:
        return self.traits.get("torch", "none") != "none"


@dataclass(frozen=True, slots=True)
class NodeResults(Checked):
    """What one node has found out."""

    tried: Annotated[tuple[Node, ...], AtMost(MOST_TRIED)] = ()
    blocked: dict[Node, Trait] = field(default_factory=dict)
    """Those of `tried` that it does not reach."""
    all_reduces: dict[Node, AllReduce] = field(default_factory=dict)
    """By the other node."""


# --- Does another node answer? What the kernel says tells obstacles apart

CONNECT_S = 3.0
"""The kernel sends SYN at once and after 1 s, and a third one just after this time."""
ANSWER_S = 2.0
AT_ONCE = 64

_BY_ERRNO = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "dropped",
    errno.ECONNRESET: "silent",
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES), "no-route"),
}


def reach(address: str, others: Iterable[NodeFacts]) -> dict[str, str]:
    """Those that do not answer, and why. `address` is this node's own. Never raises."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tried = pool.map(lambda other: (other.node, obstacle_to(address, other)), others)
        return {node: obstacle for node, obstacle in tried if obstacle is not None}


def obstacle_to(address: str, other: NodeFacts) -> str | None:
    family = socket.AF_INET6 if ":" in other.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(CONNECT_S)
            connection.bind((address, 0))
            connection.connect((other.address, other.port))
        except TimeoutError:
            return "dropped"
        except OSError as error:
            return _BY_ERRNO.get(error.errno or 0, "own")
        try:
            connection.settimeout(ANSWER_S)
            answer = connection.makefile("rb").read(len(other.token))
        except OSError:
            return "silent"
    if not answer:
        return "silent"
    return None if answer == other.token.encode() else "stranger"


def serve(listener: socket.socket, token: str) -> None:
    """Until the listener is shut down. Nothing is read of those who connect."""
    listener.settimeout(None)
    while True:
        try:
            client, _ = listener.accept()
        except ConnectionError:  # the client's, already gone
            continue
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            client.sendall(token.encode())


# --- An all-reduce, as the workers of a job do it, by a process on each node that imports torch

ELEMENTS = 1 << 20
"""Floats: 4 MiB."""
TIMES = 4
"""Of which the fastest one counts: the first sets up connections, and a machine may be busy for a moment."""
ALL_REDUCE_S = 30.0
"""For each step of the two."""
WITHIN_S = 75.0
"""With the import of torch, which takes long on a busy machine, or from a file system over the network."""


def all_reduce(number: int, here: NodeFacts, other: NodeFacts, listener: socket.socket) -> AllReduce:
    """On this node, at the same time as on `other`. The first of the two hosts the store, on its `listener`. Never
    raises. For a worker: the agent has told it which interface its libraries are to use."""
    first = pair_of(here.node, other.node)[0] == here.node
    host = here if first else other
    # NCCL refuses two processes on one GPU, as two nodes on one machine may have it.
    apart = here.address != other.address
    nccl = apart and all(
        one.traits.get("number of GPUs", "0") != "0" and "NCCL" in one.traits for one in (here, other)
    )
    place = (host.address, host.store_port, listener.fileno() if first else None)
    order = json.dumps((f"check-{number}", "nccl" if nccl else "gloo", *place))
    try:
        done = subprocess.run(
            [*probe_command(sys.executable, __name__, "all_reduce_main"), order],
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WITHIN_S,
        )
        return float(done.stdout), ""
    except subprocess.TimeoutExpired:
        problem = f"it hangs: no result within {WITHIN_S:g} s"
    except OSError as error:
        problem = f"{sys.executable}: {error.strerror}"
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        problem = last or f"it ended with {done.returncode}"
    return 0.0, problem[:512]


def all_reduce_main() -> None:
    """In the process."""
    out = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output: NCCL its version, where NCCL_DEBUG is set
    import torch
    import torch.distributed as dist

    key, backend, address, port, listener = json.loads(sys.argv[2])
    rank, timeout = 0 if listener is not None else 1, timedelta(seconds=ALL_REDUCE_S)
    own: dict[str, Any] = {} if rank else {"is_master": True, "master_listen_fd": listener}
    store = dist.PrefixStore(
        key, dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout, **own)
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    device, took = "cuda" if backend == "nccl" else "cpu", []
    for _ in range(TIMES):
        tensor = torch.full((ELEMENTS,), rank + 1.0, device=device)
        began = time.monotonic()
        dist.all_reduce(tensor)
        if not bool((tensor == 3.0).all()):  # waits for the device, too
            raise ArithmeticError("the sum is wrong: memory, a device or a network card changes data")
        took.append(time.monotonic() - began)
    dist.barrier()
    os.write(out, f"{4 * ELEMENTS / min(took)}\n".encode())
    # Torch may hang in its own end, when the other node is gone.
    os._exit(0)


# --- The verdict


@dataclass(frozen=True, slots=True)
class Verdict:
    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    doubts: tuple[Pair, ...] = ()


def locate_faults(passed: Mapping[Pair, bool]) -> Verdict:
    """`passed`: whether each pair that was tried did."""
    cleared = {node for pair, well in passed.items() if well for node in pair}
    failed = [pair for pair, well in passed.items() if not well]
    accused = Counter(node for pair in failed for node in set(pair) - cleared if cleared.intersection(pair))
    nodes = {node for node, times in accused.items() if times >= ACCUSERS}
    links = [pair for pair in failed if cleared.issuperset(pair)]
    doubts = [pair for pair in failed if pair not in links and not nodes.intersection(pair)]
    return Verdict(tuple(sorted(nodes)), tuple(sorted(links)), tuple(sorted(doubts)))


def slowness(rates: Mapping[Pair, float]) -> dict[Pair, float]:
    """Of each pair its rate as a part of the usual one; nothing where there are no two others to compare with."""
    others = {pair: [rate for other, rate in rates.items() if other != pair] for pair in rates}
    return {
        pair: rates[pair] / (statistics.median_high(usual) or 1.0)
        for pair, usual in others.items()
        if len(usual) > 1
    }


# --- The report


@dataclass(frozen=True, slots=True)
class PeerFinding(Finding):
    """One about several nodes. `nodes` and `links` are what is bad, or with `decided` false, what may be."""

    nodes: Annotated[tuple[Node, ...], AtMost(MOST_NODES)] = ()
    links: Annotated[tuple[tuple[Node, Node], ...], AtMost(MOST_NODES)] = ()
    decided: bool = True


@dataclass(frozen=True, slots=True)
class PairsReport(Checked):
    """What every node prints. `missing` is how many nodes did not come."""

    nodes: Annotated[tuple[Node, ...], AtMost(MOST_NODES)]
    missing: Count
    findings: Annotated[tuple[PeerFinding, ...], AtMost(512)]


def make_report(wanted: int, nodes: Sequence[NodeFacts], given: Mapping[str, NodeResults]) -> PairsReport:
    """`nodes` are those that are there at the end or were lately, `given` what those that are there have found out.
    Nothing follows from what was tried with one that has ended."""
    came = {node.node: node for node in nodes}
    there = {name: node for name, node in came.items() if name in given}
    gone = sorted({*(name for node in nodes for name in node.seen), *came} - set(there))
    findings = [*_present(wanted, [*there], gone), *_own(nodes)]
    if len(there) > 1:
        findings += [*_reach(there, given), *_all_reduces(there, given), *_differences(nodes)]
    findings.sort(key=lambda one: one.outcome.rank)
    names = tuple(sorted([*there, *gone]))
    return PairsReport(names, max(0, wanted - len(names)), tuple(findings[:512]))


def _present(wanted: int, there: Sequence[str], gone: Sequence[str]) -> Iterator[PeerFinding]:
    names = sorted([*there, *gone])
    if len(names) < wanted:
        advice = (
            "look on the others whether `elastic-agent check` runs there, with the same --nodes, --rdzv-endpoint and"
            " --rdzv-id; --wait sets how long to wait"
        )
        summary = f"{len(names)} of {wanted} nodes came: {listed(names, 64)}"
        yield PeerFinding("peer-present", Outcome.FAIL, summary, advice)
    elif not gone:
        yield PeerFinding("peer-present", Outcome.OK, f"all {len(names)} nodes came: {listed(names, 64)}")
    for node in gone:
        summary = f"node {node} ended, or hangs, in the middle of the check"
        advice = f"look at what `elastic-agent check` has printed on {node}, and whether that machine is up"
        yield PeerFinding("peer-present", Outcome.FAIL, summary, advice, (node,))


def _own(nodes: Sequence[NodeFacts]) -> Iterator[PeerFinding]:
    for node in nodes:
        for one in node.findings:
            bad = (node.node,) if one.outcome is Outcome.FAIL else ()
            summary = f"node {node.node}: {one.summary}"[:MOST_WORDS]
            yield PeerFinding(one.check, one.outcome, summary, one.advice, bad)


def _judged(
    check: str,
    passed: Mapping[Pair, bool],
    good: str,
    show: Callable[[Pair], str],
    advise: Callable[[Sequence[Pair]], str],
    outcome: Callable[[Sequence[Pair]], Outcome] = lambda pairs: Outcome.FAIL,
) -> Iterator[PeerFinding]:
    """One finding for each bad node, one for all bad links, and one for what is in doubt; or that all is well."""
    verdict = locate_faults(passed)
    failed = [pair for pair, well in passed.items() if not well]

    def words(pairs: Sequence[Pair]) -> str:
        return listed([show(pair) for pair in pairs], 8)[:MOST_WORDS]

    if not failed:
        yield PeerFinding(check, Outcome.OK if passed else Outcome.UNKNOWN, good)
    for node in verdict.nodes:
        pairs = [pair for pair in failed if node in pair]
        yield PeerFinding(check, outcome(pairs), f"node {node}: {words(pairs)}", advise(pairs), (node,))
    if links := verdict.links:
        yield PeerFinding(check, outcome(links), words(links), advise(links), (), links)
    if doubts := verdict.doubts:
        nodes = tuple(sorted({node for pair in doubts for node in pair}))
        summary = f"{words(doubts)}; whether it is one of the nodes, or what lies between, more nodes tell"
        yield PeerFinding(check, outcome(doubts), summary, advise(doubts), nodes, doubts, decided=False)


def _reach(there: Mapping[str, NodeFacts], given: Mapping[str, NodeResults]) -> Iterator[PeerFinding]:
    blocked: dict[tuple[str, str], str] = {}
    passed: dict[Pair, bool] = {}
    for source, results in given.items():
        for target in filter(there.__contains__, results.tried):
            pair, obstacle = pair_of(source, target), results.blocked.get(target)
            passed[pair] = passed.get(pair, True) and obstacle is None
            if obstacle is not None:
                blocked[source, target] = obstacle

    def ways(pair: Pair) -> list[tuple[str, str]]:
        return [way for way in (pair, (pair[1], pair[0])) if way in blocked]

    def show(pair: Pair) -> str:
        words = [
            f"from {source} to {target} ({there[target].address} port {there[target].port}):"
            f" {OBSTACLES[blocked[source, target]][0]}"
            for source, target in ways(pair)
        ]
        return "; ".join(words) + ("; the way back is open" if len(words) == 1 else "")

    def advise(pairs: Sequence[Pair]) -> str:
        obstacles = dict.fromkeys(blocked[way] for pair in pairs for way in ways(pair))
        return ". ".join(OBSTACLES[obstacle][1] for obstacle in obstacles)

    yield from _judged("peer-reachable", passed, f"{len(passed)} pairs reach each other", show, advise)


def _all_reduces(there: Mapping[str, NodeFacts], given: Mapping[str, NodeResults]) -> Iterator[PeerFinding]:
    problems: dict[Pair, str] = {}
    rates: dict[Pair, float] = {}
    for name, results in given.items():
        for other in filter(there.__contains__, results.all_reduces):
            pair, (rate, problem) = pair_of(name, other), results.all_reduces[other]
            problems[pair] = problems.get(pair) or problem
            rates[pair] = min(rate, rates.get(pair, rate))
    without = sorted(name for name, node in there.items() if not node.has_torch)
    good = f"{len(problems)} pairs did it" if problems else f"not tried: no torch on {listed(without)}"
    advice = (
        "if the nodes reach each other else, a packet filter lets only some ports through: gloo and NCCL choose any"
        " free port (net.ipv4.ip_local_port_range), so open all between the nodes"
    )
    yield from _judged(
        "peer-all-reduce",
        {pair: not problem for pair, problem in problems.items()},
        good,
        lambda pair: f"between {' and '.join(pair)}: {problems[pair]}",
        lambda pairs: advice,
    )
    machines = {name: node.machine or name for name, node in there.items()}
    apart = len(set(machines.values())) > 1
    known = {
        pair: rate
        for pair, rate in rates.items()
        if not problems[pair] and not (apart and machines[pair[0]] == machines[pair[1]])
    }
    yield from _bandwidth(known)


def _bandwidth(rates: Mapping[Pair, float]) -> Iterator[PeerFinding]:
    parts = slowness(rates)
    usual = statistics.median_high(rates.values()) if rates else 0.0
    sure = len({node for pair in rates for node in pair}) >= LEAST_USUAL

    def outcome(pairs: Sequence[Pair]) -> Outcome:
        return Outcome.FAIL if sure and min(map(parts.__getitem__, pairs)) < MUCH_TOO_SLOW else Outcome.WARN

    good = (
        f"an all-reduce moves {usual / 1e6:.4g} MB/s, at least {min(rates.values(), default=0.0) / 1e6:.4g}"
    )
    judged = _judged(
        "peer-bandwidth",
        {pair: parts.get(pair, 1.0) >= SLOW for pair in rates},
        good if rates else "not measured",
        lambda pair: (
            f"{rates[pair] / 1e6:.4g} MB/s between {' and '.join(pair)}, {parts[pair]:.0%} of the usual"
        ),
        lambda pairs: (
            "look for a link that came up with less than its speed (ethtool), for errors (ethtool -S), for another"
            " MTU, and for others that use it now"
        ),
        outcome,
    )
    for one in judged:
        yield one if sure or not one.nodes else replace(one, decided=False)


# --- What they have in common

_ONE_IMAGE = "give all nodes one image, or one environment"

TRAITS = {
    "MTU": ("same-network", "large packets may vanish, and collectives hang: ip link set dev NAME mtu N"),
    "link speed": ("same-network", "the slowest link sets the pace of all: check cables and switch ports"),
    "number of RDMA ports": ("same-network", "check `rdma link`, or set NCCL_IB_DISABLE=1 on all"),
    "address family": (
        "same-network",
        "workers of one family do not reach the other: choose --local-addr alike",
    ),
    "version of Python": ("same-software", _ONE_IMAGE),
    "torch": ("same-software", f"collectives fail or hang between versions: {_ONE_IMAGE}"),
    "NCCL": ("same-software", f"NCCL refuses to work with another version of itself: {_ONE_IMAGE}"),
    "NVIDIA driver": ("same-software", "upgrade the older ones: NCCL and CUDA fall back, or fail"),
    "number of GPUs": ("same-software", "one that is missing has fallen off the bus (dmesg: Xid 79)"),
}
"""What nodes should share: the check, and what to do. A difference is never more than a warning."""


def _differences(nodes: Sequence[NodeFacts]) -> Iterator[PeerFinding]:
    well = {"same-network", "same-software"}
    for trait, (check, advice) in TRAITS.items():
        counts = Counter(node.traits[trait] for node in nodes if trait in node.traits)
        if len(counts) < 2:
            continue
        well.discard(check)
        usual, most = counts.most_common(1)[0]
        odd = [node for node in nodes if node.traits.get(trait, usual) != usual]
        words = listed([f"{node.traits[trait]} on {node.node}" for node in odd])
        summary = f"the {trait} differs: {usual} on {most} of {len(nodes)} nodes, but {words}"
        yield PeerFinding(check, Outcome.WARN, summary, advice, tuple(node.node for node in odd))
    for check in sorted(well):
        names = ", ".join(trait for trait, (of, _) in TRAITS.items() if of == check)
        yield PeerFinding(check, Outcome.OK, f"the same on all nodes: {names}")
