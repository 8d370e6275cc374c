"""What other ways to start a job say on the command line of `elastic-agent`."""

from __future__ import annotations

import operator
import shlex
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig as TorchConfig

from elastic_agent import launcher
from elastic_agent.launcher import LaunchConfig, elastic_launch


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        (LaunchConfig(), "--min-nodes=1 --max-nodes=1 --nproc-per-node=1"),
        (
            LaunchConfig(1, 4, "gpu", "job", "etcd", "h:1", {"lease_ttl": 3}, 0, "h2", {"preload": "none"}),
            "--local-addr=h2 --max-nodes=4 --max-restarts=0 --min-nodes=1 --nproc-per-node=gpu --preload=none"
            " --rdzv-backend=etcd --rdzv-conf=lease_ttl=3 --rdzv-endpoint=h:1 --rdzv-id=job",
        ),
        (
            LaunchConfig(
                1, 2, rdzv_endpoint="h:1", rdzv_backend="c10d", options={"log-line-prefix-template": "a b"}
            ),
            "--log-line-prefix-template=a\\ b --max-nodes=2 --min-nodes=1 --nproc-per-node=1 --rdzv-backend=c10d"
            " --rdzv-endpoint=h:1",
        ),
    ],
)
def test_a_launch_config_is_options(config: LaunchConfig, ours: str) -> None:
    assert sorted(launcher.words_of(config)) == sorted(shlex.split(ours))


def test_a_launch_config_of_torch_is_refused() -> None:
    config: Any = TorchConfig(1, 1, 1)
    with pytest.raises(TypeError, match="what else there is in its options"):
        elastic_launch(config, len)()


def test_the_function_s_name_is_the_argument_that_agents_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[str]] = []
    monkeypatch.setattr(launcher, "run_agent", lambda words, variables: passed.append(words))
    monkeypatch.setattr(launcher, "_results", lambda folder: {})
    for function in (abs, operator.attrgetter("x")):
        launcher.elastic_launch(launcher.LaunchConfig(1, 1, 1), function)()
    names = ["builtins.abs", "operator.attrgetter"]
    assert [words[-3:] for words in passed] == [["-m", launcher.WORKER, name] for name in names]


def test_what_cannot_be_sent_to_workers_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="cannot be sent to other processes"):
        elastic_launch(LaunchConfig(), len)(number for number in range(3))
