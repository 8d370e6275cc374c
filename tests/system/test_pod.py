"""Pods of the chart with real agents: not root, nothing writable but volumes, Secrets as a kubelet mounts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_servers import Certificates, EtcdCluster, etcd_cluster, make_certificates
from tests.pods import TREE, Kubelet, agent_pod, render

from .harness import MARKER, Agent, Job, port_for_a_store
from .test_init import FIRST, pid_outside, status_of

pytest.importorskip("yaml", reason="PyYAML is not installed: .ci/kubernetes-tools .venv")


@pytest.fixture(autouse=True)
def _containers(tmp_path: Path) -> None:
    script = f"mount -t tmpfs t {tmp_path}; cd {tmp_path}; mkdir upper work root; chroot / setpriv --version"
    script += "; mount -t overlay o -o lowerdir=/,upperdir=upper,workdir=work root"
    words = ["unshare", "--pid", "--mount", "--fork", "sh", "-ec", script]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no containers can be made here (as root they can): {tried.stderr.strip()}")


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    made.issue("server", "etcd")
    made.issue("client", "agent")
    return made


@pytest.fixture(scope="module")
def etcd(credentials: Certificates) -> Iterator[EtcdCluster]:
    with etcd_cluster(tls=credentials) as cluster:
        yield cluster


class Pods:
    """Two pods of one release, on addresses of their own on this machine."""

    def __init__(self, job: Job, etcd: EtcdCluster, credentials: Certificates, *args: str) -> None:
        self.job = job
        values = {
            "run": {"script": f"{TREE}/tests/system/recorder.py", "args": list(args)},
            "nodes": {"min": 2, "max": 2},
            "etcd": {
                "endpoints": [f"{host}:{port}" for host, port in etcd.endpoints],
                "tls": {"secretName": "etcd-client"},
            },
            "jobId": job.id,
            "logSize": "1Gi",
            "metrics": {"port": port_for_a_store()},
            "env": {MARKER: job.id, "SYSTEM_TEST_HISTORY": "/data/history.jsonl"},
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        (job.folder / "values.yaml").write_text(json.dumps(values))
        job.folder.chmod(0o777)
        (job.folder / "history.jsonl").chmod(0o666)
        self._manifests = render(job.folder / "values.yaml")
        self._secret = {
            "ca.crt": credentials.file("ca.pem"),
            "tls.crt": credentials.file("client.pem"),
            "tls.key": credentials.file("client.key"),
        }

    def start(self, index: int) -> Agent:
        address = f"127.0.0.{index + 2}"
        folder = self.job.folder / address
        folder.mkdir()
        kubelet = Kubelet(folder, self._manifests, {"etcd-client": self._secret}, {"data": self.job.folder})
        facts = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "status.podIP": address,
        }
        agent = Agent(f"x-elastic-agent-{index}", kubelet.command(facts), os.environ, folder / "log")
        self.job.agents.append(agent)
        return agent

    def probe(self, index: int, which: str) -> int:
        """The status that the kubelet's probe gets."""
        [container] = agent_pod(self._manifests)["spec"]["containers"]
        get = container[which]["httpGet"]
        [port] = [port["containerPort"] for port in container["ports"] if port["name"] == get["port"]]
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.{index + 2}:{port}{get['path']}", timeout=5
            ) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def test_two_pods_meet_train_and_end_with_success(
    job: Job, etcd: EtcdCluster, credentials: Certificates
) -> None:
    pods = Pods(job, etcd, credentials, "--steps=20")
    agents = [pods.start(0), pods.start(1)]
    assert [agent.exit_code() for agent in agents] == [0, 0]
    [generation] = job.generations()
    assert sorted(generation.nodes) == [agent.name for agent in agents]
    assert {record["rank"] for record in job.history(what="end")} == {0, 1}
    for agent in agents:
        assert not agent.says("Read-only|Permission denied|warning:"), agent.text


def test_probes_say_how_it_is_and_sigterm_ends_a_pod_as_asked(
    job: Job, etcd: EtcdCluster, credentials: Certificates
) -> None:
    pods = Pods(job, etcd, credentials, "--exit-0-on-sigterm")
    lonely = pods.start(0)
    job.wait_for(lambda: pods.probe(0, "startupProbe") == 200, "the agent to start")
    job.wait_for_text(lonely, "waiting for 1 more")
    assert pods.probe(0, "livenessProbe") == 200
    assert pods.probe(0, "readinessProbe") == 503
    pods.start(1)
    job.wait_for_training(world=2)
    assert pods.probe(0, "readinessProbe") == 200
    first = pid_outside(job, FIRST, node="x-elastic-agent-0")
    assert status_of(first)["Uid"].split() == ["10001"] * 4
    assert int(status_of(first)["CapPrm"], 16) == 0
    os.kill(first, signal.SIGTERM)
    assert lonely.exit_code() == 128 + signal.SIGTERM
    assert {record["rank"] for record in job.history(what="sigterm")} == {0, 1}
