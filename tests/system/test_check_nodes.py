"""`elastic-agent check --nodes` for real: processes of several nodes, in a network with a packet filter."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from tests.etcd_servers import EtcdCluster, etcd_cluster
from tests.names import PEER_CHECKS
from tests.waiting import wait_for

from .networks import DROP, Network, network

NODES = "abcd"
COMMAND = (sys.executable, "-m", "elastic_agent", "check", "--json")
SYN = f"tcp flags & (syn | ack) == syn {DROP}"
NO_ALL_REDUCE = """\
import os, sys
if any("all_reduce_main" in word for word in sys.orig_argv):
    os._exit(1)
"""
SLOW = "limit rate over 2 mbytes/second counter drop"


@dataclass
class Checking:
    """One node's command, with what it prints in files."""

    name: str
    folder: Path
    words: Sequence[str]
    enter: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with (
            open(self.folder / f"{self.name}.out", "w") as out,
            open(self.folder / f"{self.name}.err", "w") as err,
        ):
            self.process = subprocess.Popen(
                [*self.enter, *COMMAND, "--node-id", self.name, *self.words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **self.environ},
            )

    @property
    def said(self) -> str:
        return (self.folder / f"{self.name}.err").read_text()

    @property
    def report(self) -> dict[str, object]:
        document = json.loads((self.folder / f"{self.name}.out").read_text())
        del document["seconds"]
        return dict(document)


@contextlib.contextmanager
def ended(nodes: Sequence[Checking]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()


def failed(report: dict[str, object]) -> list[tuple[str, list[str], list[list[str]]]]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return [(one["check"], one["nodes"], one["links"]) for one in findings if one["outcome"] == "fail"]


@pytest.fixture
def net() -> Iterator[Network]:
    with network("store", *NODES) as net:
        yield net


@pytest.fixture
def store(net: Network) -> Iterator[EtcdCluster]:
    with etcd_cluster(places=[net["store"].place]) as cluster:
        yield cluster


def start(net: Network, store: EtcdCluster, folder: Path, environ: dict[str, str]) -> list[Checking]:
    ((address, port),) = store.endpoints
    words = [
        "--nodes=4",
        "--wait=30s",
        "--port-range=25000-25010",
        f"--rdzv-endpoint=etcd://{address}:{port}",
        "--rdzv-id=job",
        "--etcd-insecure",
        "--lease-ttl=3s",
    ]
    return [Checking(name, folder, words, net[name].enter, environ) for name in NODES]


def test_a_filter_and_a_node_that_is_killed_are_named_by_all_others(
    net: Network, store: EtcdCluster, tmp_path: Path
) -> None:
    """Node a drops what c begins; one of the other two is killed. No all-reduce is waited for."""
    net["a"].disturb(SYN, towards=[net["c"]], sent=False)
    (tmp_path / "sitecustomize.py").write_text(NO_ALL_REDUCE)
    nodes = start(net, store, tmp_path, {"PYTHONPATH": str(tmp_path)})
    with ended(nodes):
        first = wait_for_stage(nodes)
        victim = nodes["abcd".index("b" if first != "b" else "d")]
        victim.process.kill()
        others = [node for node in nodes if node is not victim]
        assert [node.process.wait(120.0) for node in others] == [ExitCode.FAILED] * 3, [
            node.said for node in others
        ]
    report, *same = [node.report for node in others]
    assert same == [report] * 2
    assert "kvs" not in json.loads(store.ctl("get", "", "--prefix", "--keys-only")), "something stays behind"
    assert sorted(one for one in failed(report) if one[0] != "peer-all-reduce") == [
        ("peer-present", [victim.name], []),
        ("peer-reachable", [], [["a", "c"]]),
    ]
    assert net["a"].disturbed > 0
    (filtered,) = [one for one in found(report) if one["check"] == "peer-reachable"]
    assert f"from c to a ({net['a'].address} port 250" in str(filtered["summary"])
    assert "packet filter" in str(filtered["summary"])


@pytest.mark.long
def test_a_slow_node_is_named(net: Network, store: EtcdCluster, tmp_path: Path) -> None:
    net["c"].disturb(SLOW, towards=[net[name] for name in "abd"])
    nodes = start(net, store, tmp_path, {})
    with ended(nodes):
        assert [node.process.wait(150.0) for node in nodes] == [ExitCode.FAILED] * 4, [
            node.said for node in nodes
        ]
    report = nodes[0].report
    assert ["c"] in [one["nodes"] for one in found(report) if one["check"] == "peer-bandwidth"], report


def wait_for_stage(nodes: Sequence[Checking]) -> str:
    """The name of the node with rank 0, once the nodes try each other."""

    def first() -> Checking | None:
        for node in nodes:
            if "tries to reach" in node.said:
                return node
            assert node.process.poll() is None, node.said
        return None

    found = wait_for(first, "the nodes to try each other", 60.0, seen=lambda: [node.said for node in nodes])
    assert found is not None
    return found.name


def found(report: dict[str, object]) -> list[dict[str, object]]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return findings


@pytest.mark.long
def test_two_nodes_on_this_machine_reduce_in_the_store_that_one_hosts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--nodes=2", "--wait=60s", f"--rdzv-endpoint=127.0.0.1:{port}"]
    nodes = [Checking(name, tmp_path, words) for name in "ab"]
    with ended(nodes):
        codes = [node.process.wait(100.0) for node in nodes]
    said = [codes, *(node.said for node in nodes)]
    # This machine may lack something else, of which its own checks tell.
    one, other = (
        [finding for finding in found(node.report) if finding["check"] in PEER_CHECKS] for node in nodes
    )
    assert one == other
    assert sorted(str(finding["check"]) for finding in one) == sorted(PEER_CHECKS)
    assert {finding["outcome"] for finding in one} == {"ok"}, [one, said]
