"""The Helm chart, judged by the real helm, by Kubernetes' schemas, and by the agent that reads its configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elastic_agent import __version__
from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.configuration.config import OPTIONS
from elastic_agent.agent.configuration.parse import OptionSource
from elastic_agent.agent.configuration.stopping import whole_stop_s
from elastic_agent.agent.main.run import HOST_LINGERS_S
from tests.names import ONLY_OF_COMMANDS
from tests.pods import CHART, Manifest, agent_pod, configuration, environment, pods, render, run_helm

MISSING = "kubernetes-validate is not installed: .ci/kubernetes-tools .venv"
yaml = pytest.importorskip("yaml", reason=MISSING)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=MISSING)

KUBERNETES = ("1.31", "1.37")
"""The oldest that the chart supports, and the newest whose schemas there are."""

CASES = sorted(path.stem for path in CHART.glob("ci/*.yaml"))
FACTS = {
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "3",
    "spec.nodeName": "node-3.example",
    "status.podIP": "10.1.2.3",
}

every_case = pytest.mark.parametrize("case", CASES)


@cache
def rendered(case: str) -> list[Manifest]:
    return render(CHART / f"ci/{case}.yaml")


def of_kind(case: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(case) if manifest["kind"] == kind]


def settings_of(case: str) -> dict[str, str]:
    """As the chart writes them."""
    return dict(line.split(" = ", 1) for line in configuration(rendered(case)).splitlines())


def arguments(case: str) -> list[str]:
    """Of the agent, on its command line."""
    words: list[str] = agent_pod(rendered(case))["spec"]["containers"][0].get("args", [])
    return words


# --- By helm and by Kubernetes


@every_case
def test_lint_finds_no_problem(case: str) -> None:
    ran = run_helm("lint", "--strict", CHART, "--values", CHART / f"ci/{case}.yaml")
    assert ran.returncode == 0, ran.stdout
    assert "[WARNING]" not in ran.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@every_case
def test_every_manifest_is_what_kubernetes_calls_one(case: str, version: str) -> None:
    for manifest in rendered(case):
        if manifest["kind"] != "PodMonitor":  # the Prometheus operator's
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("spelling", ["devices-per-worker", "devices_per_worker"])
def test_a_worker_for_some_of_the_pod_s_gpus(spelling: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"run": {"script": "a"}, "gpu": {"count": 8}, "config": {spelling: 2}}))
    lines = configuration(render(values)).splitlines()
    assert {"nproc-per-node = 4", "devices-per-worker = 2"} <= set(lines)


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize("release", ["elastic-agent", "x" * 53, "my-elastic-agent"])
def test_names_leave_room_for_an_index(release: str) -> None:
    manifests = render(CHART / "ci/job-own-etcd.yaml", release)
    for manifest in manifests:
        assert len(f"{manifest['metadata']['name']}-99999") <= 63
    [name] = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Job"}
    assert environment(agent_pod(manifests), FACTS)["ELASTIC_AGENT_NODE_ID"] == f"{name}-3"


# --- By the agent


@every_case
def test_the_agent_accepts_its_configuration(case: str, tmp_path: Path) -> None:
    """With the pod's own variables; only the files are elsewhere."""
    text = configuration(rendered(case))
    for path in ("/etc/elastic-agent/tls/ca.crt", "/etc/elastic-agent/tls/tls.crt", "/app/train.py",
                 "/etc/elastic-agent/tls/tls.key", "/etc/elastic-agent/password/password"):  # fmt: skip
        file = tmp_path / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
        file.chmod(0o600)
        text = text.replace(f'"{path}"', f'"{file}"')
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "main.py").touch()
    text = text.replace('"/bin/train"', '"/bin/true"').replace(
        '"/var/log/elastic-agent"', f'"{tmp_path}/log"'
    )
    text = re.sub('(memory-checkpoints) = ".*"', r'\1 = "1MiB"', text)
    config = tmp_path / "agent.toml"
    config.write_text(text)
    given = yaml.safe_load((CHART / f"ci/{case}.yaml").read_text())
    facts = {**FACTS, "status.podIP": "::" if given.get("ipv6") else "0.0.0.0"}
    variables = environment(agent_pod(rendered(case)), facts)
    assert variables.pop("ELASTIC_AGENT_CONFIG") == "/etc/elastic-agent/agent.toml"
    ran = subprocess.run(
        [sys.executable, "-m", "elastic_agent", *arguments(case), "--config", config, "--check-config"],
        env={**os.environ, **variables, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    for option, value in given.get("config", {}).items():
        assert f"\n{option.replace('_', '-')} = " in ran.stdout, f"{option}: {value}"
    assert f"node-id = {json.dumps(variables['ELASTIC_AGENT_NODE_ID'])}" in ran.stdout


# --- What every pod promises


@every_case
def test_every_pod_has_no_more_rights_than_it_needs(case: str) -> None:
    for pod in pods(rendered(case)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, (
            "a Service called elastic-agent would give it unknown options"
        )
        user = spec["securityContext"]
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        [container] = spec["containers"]
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["capabilities"]["drop"] == ["ALL"]
        as_root = user["runAsUser"] == 0
        assert as_root is (case == "daemonset-own-etcd-tls"), "it alone asks for locked memory"
        assert user.get("runAsNonRoot", False) is not as_root
        assert ("add" in rights["capabilities"]) is (as_root and container["name"] == "agent")
        assert not rights.keys() & {"privileged"}
        assert "hostPath" not in json.dumps(spec)
    assert not [manifest for manifest in rendered(case) if "Role" in manifest["kind"]]


@every_case
def test_the_grace_of_pod_agent_and_workers_come_from_one_number(case: str) -> None:
    pod_s = agent_pod(rendered(case))["spec"]["terminationGracePeriodSeconds"]
    settings = settings_of(case)
    assert pod_s >= whole_stop_s(int(settings["stop-grace"])) + HOST_LINGERS_S


@every_case
def test_probes_ask_the_agent_alone_and_only_readiness_knows_of_the_store(case: str) -> None:
    [container] = agent_pod(rendered(case))["spec"]["containers"]
    paths = {
        which: container[f"{which}Probe"]["httpGet"]["path"] for which in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    [port] = container["ports"]
    assert environment(agent_pod(rendered(case)), FACTS)["ELASTIC_AGENT_HTTP_ADDRESS"].endswith(
        f":{port['containerPort']}"
    )


@every_case
def test_a_pod_may_start_for_longer_than_its_agent_waits_for_a_network(case: str) -> None:
    """Until then nobody answers the startup probe."""
    [container] = agent_pod(rendered(case))["spec"]["containers"]
    startup_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert startup_s > int(settings_of(case)["join-timeout"]) + 60


@every_case
def test_selectors_find_the_agents_and_nothing_else(case: str) -> None:
    agents = agent_pod(rendered(case))["metadata"]["labels"]
    others = [
        pod["metadata"]["labels"] for pod in pods(rendered(case)) if pod["metadata"]["labels"] != agents
    ]
    for manifest in rendered(case):
        selector = manifest["spec"].get("selector", {}) if "spec" in manifest else {}
        selector = selector.get("matchLabels", selector)
        if selector:
            own = manifest["metadata"]["name"].endswith("-etcd")
            assert (selector.items() <= agents.items()) is not own, manifest["kind"]
            assert any(selector.items() <= other.items() for other in others) is own, manifest["kind"]


def test_the_chart_knows_the_options_of_the_agent() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = {name for option in OPTIONS if OptionSource.FILE in option.sources for name in option.names}
    known = {*names, *(name.replace("-", "_") for name in names)}
    assert schema["properties"]["config"]["propertyNames"]["enum"] == sorted(known)


# --- The Job


def test_a_job_ends_by_the_agents_exit_codes() -> None:
    [job] = of_kind("job-c10d", "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_action = {
        rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule
    }
    assert by_action == {
        "FailJob": {
            ExitCode.FAILED,
            ExitCode.CRASH_LOOP,
            ExitCode.NOT_ON_DISK,
            ExitCode.MISMATCH,
            ExitCode.BAD_CONFIG,
        },
        "Ignore": {ExitCode.STOPPED_BY_SIGINT, ExitCode.STOPPED_BY_SIGTERM},
    }
    another_pod_may_help = set(ExitCode) - ONLY_OF_COMMANDS - set().union(*by_action.values())
    assert another_pod_may_help == {
        ExitCode.SUCCESS,
        ExitCode.UNLIKE_THE_JOB,
        ExitCode.NO_ANSWER,
        ExitCode.AGENT_FAILED,
        ExitCode.NO_NETWORK,
        ExitCode.NOT_HERE,
        ExitCode.UNKILLABLE,
        ExitCode.LATER,
        ExitCode.LOOP_STUCK,
        ExitCode.LEFT_IN_TIME,
    }


def test_the_pods_of_a_job_meet_at_the_first_of_them() -> None:
    [job], [service] = of_kind("job-c10d", "Job"), of_kind("job-c10d", "Service")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    name, subdomain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert f'rdzv-endpoint = "{name}-0.{subdomain}:29400"' in configuration(rendered("job-c10d"))


# --- The pool


# --- Values that make no sense


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": {}}, "what should the workers run? Set one of run.script, run.module and run.program; none is set"),
        ({"run": {"script": "a", "module": "b"}}, "set are run.script and run.module"),
        ({"mode": "statefulset"}, "mode"),
        ({"nods": {"min": 1}}, "nods"),
        ({"nodes": {"min": 3, "max": 2}}, "nodes.min is 3, more than nodes.max, which is 2"),
        ({"nodes": {"min": "two"}}, "/nodes/min"),
        ({"run": {"script": "a", "args": [0.1]}}, "/run/args/0"),
        ({"workersPerNode": "all"}, "/workersPerNode"),
        ({"gpu": {"count": -1}}, "/gpu/count"),
        (
            {"gpu": {"count": 8}, "config": {"devices-per-worker": 3}},
            "gpu.count is 8, which config.devices-per-worker, 3, does not divide",
        ),
        ({"sharedMemory": "8 GB"}, "/sharedMemory"),
        ({"config": {"min_nodes": 2}}, "config.min_nodes: the chart sets this option itself"),
        ({"config": {"etcd-user": "x"}}, "config.etcd-user: the chart sets this option itself"),
        ({"config": {"max-restarts": {"n": 1}}}, "/config/max-restarts"),
        ({"config": {"lease-tl": "2s"}}, "lease-tl"),
        ({"env": {"ELASTIC_AGENT_NODE_ID": "x"}}, "env.ELASTIC_AGENT_NODE_ID: the chart sets this variable itself"),
        ({"mode": "daemonset"}, "mode daemonset: where do the nodes meet? Set etcd.endpoints"),
        ({"mode": "pool"}, "mode pool: its jobs are submitted when it runs, so run.script has no meaning"),
        ({"mode": "pool", "run": {}}, "mode pool: where do the nodes meet? Set etcd.endpoints"),
        ({"c10d": {"endpoint": "node1:29400"}}, "c10d.endpoint names a node"),
        ({"etcd": {"endpoints": ["http://h:1"]}}, "/etcd/endpoints/0"),
        ({"etcd": {"endpoints": ["h"]}}, "etcd: set either etcd.tls.secretName, or etcd.insecure=true"),
        (
            {"etcd": {"endpoints": ["h"], "insecure": True, "tls": {"secretName": "s"}}},
            "etcd: set either etcd.tls.secretName, or etcd.insecure=true",
        ),
        ({"etcd": {"endpoints": ["h"], "deploy": True}}, "etcd.deploy makes an etcd, and etcd.endpoints names another"),
        ({"etcd": {"deploy": True, "tls": {"secretName": "s"}}}, "etcd.deploy with TLS needs two Secrets"),
        (
            {"etcd": {"endpoints": ["h"], "insecure": True, "auth": {"user": "u"}}},
            "etcd.auth.user and etcd.auth.secretName (a Secret with the key password) belong together",
        ),
        ({"etcd": {"insecure": True}}, "say how to reach an etcd, but there is none"),
        (
            {"etcd": {"deploy": True, "insecure": True}, "c10d": {"endpoint": "h:1"}},
            "c10d.endpoint is h:1, but the nodes meet in etcd",
        ),
        ({"hostNetwork": True}, "hostNetwork: a NetworkPolicy does not hold"),
        ({"rdma": {"ipcLock": True}}, "securityContext.runAsUser=0 and rdma.ipcLock=true need each other"),
        ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser=0 and rdma.ipcLock=true need each other"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(
    given: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"run": {"script": "/train.py"}, **given}))
    ran = run_helm("template", "x", CHART, "--values", values)
    assert ran.returncode != 0
    assert message in ran.stderr


# --- What the documentation says


def test_every_helm_command_of_the_documentation_makes_what_kubernetes_accepts(tmp_path: Path) -> None:
    page = (CHART.parents[2] / "docs/deploy.md").read_text()
    text = page.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        name = re.match(r"# (\S+\.yaml)", block)
        assert name is not None, block
        (tmp_path / name[1]).write_text(block)
    claim = yaml.safe_load((tmp_path / "checkpoints.yaml").read_text())
    kubernetes_validate.validate(claim, KUBERNETES[-1], strict=True)
    commands = re.findall(
        r"^    helm (?:install|upgrade) (\S+) deploy/helm/elastic-agent (.*)$", text, re.MULTILINE
    )
    assert len(commands) >= 4
    for release, options in commands:
        words = [str(tmp_path / word) if word.endswith(".yaml") else word for word in shlex.split(options)]
        ran = run_helm("template", release, CHART, *words)
        assert ran.returncode == 0, (options, ran.stderr)
        for manifest in yaml.safe_load_all(ran.stdout):
            kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)
