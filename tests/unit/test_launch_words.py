"""What other ways to start a job say on the command line of `elastic-agent`."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
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
            TorchConfig(1, 2, 4, run_id="none", rdzv_endpoint="h:1", rdzv_backend="c10d"),
            "--max-nodes=2 --max-restarts=3 --min-nodes=1 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=h:1"
            " --rdzv-id=none",
        ),
    ],
)
def test_a_launch_config_of_ours_or_of_torch(config: object, ours: str) -> None:
    assert sorted(launcher.words_of(config)) == sorted(ours.split())


@pytest.mark.parametrize(
    ("given", "ours", "warned"),
    [
        ({"role": "my trainer", "max_restarts": 0}, ["--role=my trainer", "--max-restarts=0"], []),
        ({"log_line_prefix_template": "a\nb"}, ["--max-restarts=3", "--log-line-prefix-template=a\nb"], []),
        (
            {"signals_to_handle": "SIGXCPU", "virtual_local_rank": True, "shutdown_timeout": 7},
            [
                *("--max-restarts=3", "--signals-to-handle=SIGXCPU"),
                *("--virtual-local-rank=true", "--shutdown-timeout=7"),
            ],
            [],
        ),
        (
            {"duplicate_stdout_filters": ["a,b", "c"], "duplicate_stderr_filters": ["d"]},
            [
                *("--max-restarts=3", "--duplicate-stdout-filters=a,,b,c"),
                "--duplicate-stderr-filters=d",
            ],
            [],
        ),
        ({"start_method": "fork", "monitor_interval": 0.1}, ["--max-restarts=3"], ["start_method"]),
        ({"logs_specs": DefaultLogsSpecs(tee=Std.ALL)}, ["--max-restarts=3"], []),
    ],
)
def test_each_field_of_torchs_config_is_an_option_or_a_warning(
    given: dict[str, Any], ours: list[str], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = launcher.words_of(TorchConfig(1, 1, 1, **given))
    assert words[:3] == ["--min-nodes=1", "--max-nodes=1", "--nproc-per-node=1"]
    assert {*words[3:]} == {*ours}
    assert [record.getMessage().replace(" is", "=").split("=")[0] for record in caplog.records] == [
        f"LaunchConfig.{name}" for name in warned
    ]


def test_the_rank_of_torchs_static_rendezvous_is_the_node_rank() -> None:
    config = TorchConfig(1, 1, 1, rdzv_endpoint="h:1", rdzv_backend="static", rdzv_configs={"rank": 0})
    assert "--node-rank=0" in launcher.words_of(config)


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
