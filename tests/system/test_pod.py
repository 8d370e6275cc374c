"""Pods of the chart with real agents: not root, nothing writable but volumes, Secrets as a kubelet mounts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.etcd_servers import etcd_cluster, make_certificates
from tests.pods import TREE, Kubelet, agent_pod, render

from .harness import Agent, Job
from .networks import Network, network
from .processes import MARKER
from .test_pid1 import FIRST, pid_outside, status_of

pytest.importorskip("yaml", reason="PyYAML is not installed: .ci/kubernetes-tools .venv")

Secrets: TypeAlias = Mapping[str, Mapping[str, Path]]


@pytest.fixture(autouse=True)
def _containers(tmp_path: Path) -> None:
    script = f"mount -t tmpfs t {tmp_path}; cd {tmp_path}; mkdir upper work root; chroot / setpriv --version"
    script += "; mount -t overlay o -o lowerdir=/,upperdir=upper,workdir=work root"
    words = ["unshare", "--pid", "--mount", "--fork", "sh", "-ec", script]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no containers can be made here (as root they can): {tried.stderr.strip()}")


@pytest.fixture
def net() -> Iterator[Network]:
    with network("pod-0", "pod-1", "etcd") as made:
        yield made


class Pods:
    """The pods of one release, each on a host of the network; `values` is what the test is about."""

    def __init__(
        self, job: Job, net: Network, values: Mapping[str, Any], secrets: Secrets, *args: str
    ) -> None:
        self._job, self._net, self._secrets = job, net, secrets
        common = {
            "run": {"script": f"{TREE}/tests/system/recorder.py", "args": list(args)},
            "nodes": {"min": 2, "max": 2},
            "logSize": "1Gi",
            "env": {MARKER: job.id, "SYSTEM_TEST_HISTORY": "/data/history.jsonl"},
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        (job.folder / "values.yaml").write_text(json.dumps({**common, **values}))
        job.folder.chmod(0o777)
        (job.folder / "history.jsonl").chmod(0o666)
        self._names = job.folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        self._manifests = render(job.folder / "values.yaml")

    def start(self, index: int, *words: str) -> Agent:
        """From now on the pod has its name, as a headless Service gives it. `words`: a command in that pod instead."""
        host, name = self._net[f"pod-{index}"], f"x-elastic-agent-{index}"
        with self._names.open("a") as names:
            names.write(f"{host.address} {name}.x-elastic-agent\n")
        name += "".join(words[:1])
        folder = self._job.folder / name
        folder.mkdir()
        claims = {"data": self._job.folder}
        kubelet = Kubelet(folder, self._manifests, self._names, self._secrets, claims)
        facts = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "spec.nodeName": f"node-{index}",
            "status.podIP": host.address,
        }
        agent = Agent(name, [*host.enter, *kubelet.command(facts, *words)], os.environ, folder / "log")
        self._job.agents.append(agent)
        return agent

    def probe(self, index: int, which: str) -> int:
        """The status that the kubelet's probe gets; 0 when nobody answers."""
        [container] = agent_pod(self._manifests)["spec"]["containers"]
        get = container[which]["httpGet"]
        [port] = [port["containerPort"] for port in container["ports"] if port["name"] == get["port"]]
        url = f"http://{self._net[f'pod-{index}'].address}:{port}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def test_two_pods_meet_in_an_etcd_behind_tls_and_end_with_success(
    job: Job, net: Network, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    made.issue("server", "etcd", f"IP:{net['etcd'].address}")
    made.issue("client", "agent")
    names = {"ca.crt": "ca.pem", "tls.crt": "client.pem", "tls.key": "client.key"}
    secret = {key: made.file(name) for key, name in names.items()}
    with etcd_cluster(tls=made, places=[net["etcd"].place]) as cluster:
        [(host, port)] = cluster.endpoints
        values = {"etcd": {"endpoints": [f"{host}:{port}"], "tls": {"secretName": "client"}}}
        pods = Pods(job, net, values, {"client": secret}, "--steps=20")
        agents = [pods.start(0), pods.start(1)]
        assert [agent.exit_code() for agent in agents] == [0, 0]
    [generation] = job.generations()
    assert sorted(generation.nodes) == [agent.name for agent in agents]
    assert {record["rank"] for record in job.history(what="end")} == {0, 1}
    for agent in agents:
        assert not agent.says("Read-only|Permission denied|warning:")


@pytest.mark.long
def test_the_pods_of_a_pool_run_what_is_submitted_in_one_of_them(
    job: Job, net: Network, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    made.issue("server", "etcd", f"IP:{net['etcd'].address}")
    made.issue("client", "agent")
    names = {"ca.crt": "ca.pem", "tls.crt": "client.pem", "tls.key": "client.key"}
    secret = {key: made.file(name) for key, name in names.items()}
    with etcd_cluster(tls=made, places=[net["etcd"].place]) as cluster:
        [(host, port)] = cluster.endpoints
        etcd = {"endpoints": [f"{host}:{port}"], "tls": {"secretName": "client"}}
        values = {"mode": "pool", "run": {}, "nodes": {"min": 1, "max": 4}, "etcd": etcd}
        pods = Pods(job, net, values, {"client": secret})
        daemons = [pods.start(0), pods.start(1)]
        for index in (0, 1):
            job.wait_for(lambda: pods.probe(index, "readinessProbe") == 200, f"pod {index} to be ready")  # noqa: B023
        script = f"{TREE}/tests/system/recorder.py"
        submit = pods.start(0, "submit", "--min-nodes=2", "--", script, "--steps=20")
        assert submit.exit_code() == 0
        wait = pods.start(1, "wait", submit.text.split()[-1])
        assert wait.exit_code() == 0
        assert {record["rank"] for record in job.history(what="end")} == {0, 1}
        assert [pods.probe(index, "livenessProbe") for index in (0, 1)] == [200, 200]
        for daemon in daemons:
            assert not daemon.says("Read-only|Permission denied|warning:")


@pytest.mark.long
def test_pods_wait_for_the_first_of_them_say_how_they_are_and_end_as_asked(job: Job, net: Network) -> None:
    pods = Pods(job, net, {}, {}, "--exit-0-on-sigterm")
    early = pods.start(1)
    job.wait_for_text(early, "waiting up to 600 s .* for a host name .*x-elastic-agent-0.x-elastic-agent")
    assert pods.probe(1, "startupProbe") == 0
    pods.start(0)
    job.wait_for_training(world=2)
    assert [pods.probe(1, f"{which}Probe") for which in ("startup", "liveness", "readiness")] == [200] * 3
    first = pid_outside(job, FIRST, node=early.name)
    assert status_of(first)["Uid"].split() == ["10001"] * 4
    assert int(status_of(first)["CapPrm"], 16) == 0
    os.kill(first, signal.SIGTERM)
    assert early.exit_code() == 128 + signal.SIGTERM
    assert {record["rank"] for record in job.history(what="sigterm")} == {0, 1}
    job.wait_for(lambda: pods.probe(0, "readinessProbe") == 503, "the pod that is alone not to be ready")
    assert pods.probe(0, "livenessProbe") == 200
