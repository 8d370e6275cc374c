"""What some tests cannot do without: how to get it, and one line of it at the end of a run that has skipped them.

Under CI (`CI` in the environment) a test that lacks what CI can install has failed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Need:
    name: str
    told: str
    """In the reason of a skip; a regular expression."""
    how: str
    """To get it."""
    installable: bool = True


NEEDS = (
    Need("a GPU", "needs a GPU", "a machine that has one, and `make gpu`", installable=False),
    Need("etcd", r"\betcd\b", ".ci/system-packages etcd"),
    Need("Prometheus", "promtool|prometheus", ".ci/system-packages prometheus"),
    Need("Chromium", "chromium", ".ci/system-packages browser"),
    Need("Kubernetes tools", "kubernetes-validate|helm is|PyYAML", ".ci/kubernetes-tools .venv"),
    Need("systemd's tools", r"systemd-.* missing", ".ci/system-packages systemd"),
    Need("network tools", r"\b(ip|nft)\b.* missing", ".ci/system-packages network"),
    Need("Slurm", "slurm", ".ci/system-packages slurm", installable=False),
    Need("a C compiler", "C compiler", "the package gcc"),
    Need("setuptools", "setuptools", "pip install 'setuptools>=77'"),
    Need(
        "root, mounts, namespaces or cgroups",
        r"\broot\b|mount|FUSE|namespace|cgroup|container|not permitted|not supported|cannot be made",
        "run it as root, in a container with `docker run --privileged`",
        installable=False,
    ),
)


def need_of(reason: str) -> Need | None:
    """None: it is no lack of this machine, but the test's own word that it has no such case."""
    return next((need for need in NEEDS if re.search(need.told, reason, re.IGNORECASE)), None)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped."""
    assert isinstance(report.longrepr, tuple)
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Makes a failure of a skip that CI could have run."""
    if not os.environ.get("CI") or not report.skipped or not isinstance(report.longrepr, tuple):
        return
    reason = reason_of(report)
    need = need_of(reason)
    if need is not None and need.installable:
        report.outcome = "failed"
        report.longrepr = f"skipped under CI, which can have {need.name}: {reason}. To do: {need.how}"


def summary(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """A line for each need that was not met, and for each other reason of a skip."""
    told: Counter[str] = Counter()
    for report in reports:
        reason = reason_of(report)
        need = need_of(reason)
        told[f"without {need.name}. To have them run: {need.how}" if need is not None else reason] += 1
    return [f"{count} skipped: {words}" for words, count in told.items()]


def skip_without(tools: Sequence[str], package: str, only_root: str) -> None:
    """Skips the test for another user than root, and where a tool of that package is missing."""
    if os.geteuid() != 0:
        pytest.skip(only_root)
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: .ci/system-packages {package}")
