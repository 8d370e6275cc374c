"""What is said of skipped tests, and which skip is a failure under CI."""

from __future__ import annotations

import pytest

from tests.needs import judge, need_of, summary
from tests.system.harness import MOST_LINES, in_order_of_time

CASES = {
    "etcd is not installed: .ci/system-packages etcd": "etcd",
    "promtool is not installed (Debian package: prometheus)": "Prometheus",
    "chromium is not installed (Debian package: chromium)": "Chromium",
    "kubernetes-validate is not installed: .ci/kubernetes-tools .venv": "Kubernetes tools",
    "systemd-analyze missing: .ci/system-packages systemd": "systemd's tools",
    "ip and nft missing: .ci/system-packages network": "network tools",
    "needs a GPU: torch.cuda.is_available() says that there is none": "a GPU",
    "only root may make network namespaces": "root, mounts, namespaces or cgroups",
    "no container here: systemd-nspawn ended: x": "root, mounts, namespaces or cgroups",
    "the state is in another process": None,
}


def skipped(reason: str) -> pytest.TestReport:
    longrepr = ("test_x.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_x.py::test", ("", 1, ""), {}, "skipped", longrepr, "call")


@pytest.mark.parametrize("reason", CASES)
@pytest.mark.parametrize("ci", [True, False])
def test_under_ci_a_skip_that_ci_could_have_run_has_failed(
    monkeypatch: pytest.MonkeyPatch, reason: str, ci: bool
) -> None:
    need = need_of(reason)
    assert (need.name if need is not None else None) == CASES[reason]
    monkeypatch.setenv("CI", "yes" if ci else "")
    report = skipped(reason)
    judge(report)
    assert report.failed == (ci and need is not None and need.installable)
    assert not report.failed or reason in str(report.longrepr)


def test_each_need_that_was_not_met_is_one_line_that_says_how_to_meet_it() -> None:
    assert summary(map(skipped, ["etcd is not installed", "no etcd", "the state is elsewhere"])) == [
        "2 skipped: without etcd. To have them run: .ci/system-packages etcd",
        "1 skipped: the state is elsewhere",
    ]


def test_logs_are_shown_in_order_of_time_and_not_too_many_lines() -> None:
    stamp = "2026-03-01 13:00:0{}.125+01:00 [{}] {}"
    one = [stamp.format(1, "a", "first"), "  its second line", stamp.format(4, "a", "last")]
    other = [stamp.format(2, "b", "x" * 1000), *map(str, range(MOST_LINES))]
    *_, before_last, last = shown = in_order_of_time(map("\n".join, (one, other))).splitlines()
    assert shown[0] == "[4 lines before these]"
    assert len(shown) == MOST_LINES + 1
    assert (before_last, last) == (str(MOST_LINES - 1), one[-1])
    assert in_order_of_time(["\n".join(one)]).splitlines() == one
