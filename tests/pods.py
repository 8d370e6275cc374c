"""The chart as helm renders it, and its pods as a kubelet and a container runtime run them, without either.

A container here is a PID namespace with its own mounts: this machine's files behind a read-only overlay, the pod's
volumes, the pod's user and nothing of root. Not imitated: cgroups and seccomp. A network of the pod's own is for the
caller to enter, with the command that runs the pod.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/elastic-agent"
TREE, PYTHON = "/opt/elastic-agent", "/opt/python"
"""Where a container has this tree and its virtual environment."""

Manifest = dict[str, Any]


@cache
def helm() -> str:
    found = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("helm is not installed: .ci/kubernetes-tools .venv")
    return found


def run_helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *map(str, words)], capture_output=True, text=True, timeout=60, check=False)


def render(values: Path, release: str = "x") -> list[Manifest]:
    import yaml

    ran = run_helm("template", release, CHART, "--namespace", "training", "--values", values)
    assert ran.returncode == 0, ran.stderr
    return [manifest for manifest in yaml.safe_load_all(ran.stdout) if manifest]


def pods(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The pod template of every controller."""
    return [manifest["spec"]["template"] for manifest in manifests if "template" in manifest.get("spec", {})]


def agent_pod(manifests: Sequence[Manifest]) -> Manifest:
    [pod] = [pod for pod in pods(manifests) if pod["spec"]["containers"][0]["name"] == "agent"]
    return pod


def configuration(manifests: Sequence[Manifest]) -> str:
    [config] = [manifest["data"] for manifest in manifests if manifest["kind"] == "ConfigMap"]
    return str(config["agent.toml"])


def environment(pod: Manifest, facts: Mapping[str, str]) -> dict[str, str]:
    """A container's variables; `facts` has the fields of the pod that are known only when it runs."""
    made: dict[str, str] = {}
    for variable in pod["spec"]["containers"][0].get("env", ()):
        if "valueFrom" in variable:
            made[variable["name"]] = facts[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            made[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], variable["value"])
    return made


@dataclass
class Kubelet:
    """Runs pods of these manifests. `secrets` and `claims` are what the cluster has of them, `hosts` the names."""

    folder: Path
    manifests: Sequence[Manifest]
    hosts: Path
    secrets: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    claims: Mapping[str, Path] = field(default_factory=dict)

    def command(self, facts: Mapping[str, str], *words: str) -> list[str]:
        """Runs the agent's container in the foreground; ends with its exit code, and it ends with this.

        `words`: instead of the container's own arguments, as `kubectl exec` runs a command beside it.
        """
        pod = agent_pod(self.manifests)
        [container] = pod["spec"]["containers"]
        user = pod["spec"]["securityContext"]
        inside = self.folder / "container"
        inside.mkdir(exist_ok=True)
        root = shlex.quote(str(inside / "root"))
        interpreters = {parent for start in (sys.base_prefix, sys.prefix) for parent in Path(start).parents}
        setup = [
            f"mount -t tmpfs container {inside}; mkdir {inside}/upper {inside}/work {root}",
            f"mount -t overlay container -o lowerdir=/,upperdir={inside}/upper,workdir={inside}/work {root}",
            *(f"chmod o+x {root}{parent}" for parent in sorted(interpreters)),
            f"mkdir -p {root}{TREE} {root}{PYTHON}",
            f"mount --bind {ROOT} {root}{TREE}; mount --bind {sys.prefix} {root}{PYTHON}",
            f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev",
            f"mount --bind {self.hosts} {root}/etc/hosts",
        ]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            setup += self._mount(volumes[mount["name"]], f"{root}{mount['mountPath']}", user)
        if container["securityContext"]["readOnlyRootFilesystem"]:
            setup.append(f"mount -o remount,bind,ro {root}")
        gid = user["runAsGroup"]
        privileges = (
            f"--reuid={user['runAsUser']} --regid={gid} --groups={user.get('fsGroup', gid)}"
            " --bounding-set=-all --inh-caps=-all --no-new-privs --pdeathsig=keep"
        )
        image = {"PATH": os.environ["PATH"], "PYTHONPATH": TREE}
        variables = shlex.join(
            f"{name}={text}" for name, text in {**image, **environment(pod, facts)}.items()
        )
        arguments = shlex.join(words or container.get("args", ()))
        command = f"env -i {variables} {PYTHON}/bin/python -m elastic_agent {arguments}"
        setup.append(f"exec chroot {root} setpriv {privileges} {command}")
        return ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-ec", "\n".join(setup)]

    def _mount(self, volume: Manifest, place: str, user: Manifest) -> list[str]:
        if "persistentVolumeClaim" in volume:
            claimed = self.claims[volume["persistentVolumeClaim"]["claimName"]]
            return [f"mkdir -p {place}; mount --bind {claimed} {place}"]
        made = [f"mkdir -p {place}; mount -t tmpfs -o mode=0777 {volume['name']} {place}"]
        projected = volume.get("projected", {"sources": ()})
        for source in projected["sources"]:
            for path, content in self._files(source).items():
                made.append(f"mkdir -p $(dirname {place}/{path}); cp {content} {place}/{path}")
                made.append(f"chmod {projected['defaultMode']:o} {place}/{path}")
                if "fsGroup" in user:  # as the kubelet does it: the group may read what its owner may
                    made.append(f"chown 0:{user['fsGroup']} {place}/{path}; chmod g=u-w {place}/{path}")
        return made

    def _files(self, source: Manifest) -> dict[str, Path]:
        if "secret" in source:
            secret = self.secrets[source["secret"]["name"]]
            return {item["path"]: secret[item["key"]] for item in source["secret"]["items"]}
        content = self.folder / "agent.toml"
        content.write_text(configuration(self.manifests))
        return {"agent.toml": content}
