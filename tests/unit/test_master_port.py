"""A script that meets at another port than the agent has bound is warned, on each rank, and does what it did before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from elastic_agent.worker.steps.torch_workarounds import problem_of, warn_of_other_port
from elastic_agent.worker.wire.environment import NAMES

rendezvous = importlib.import_module("torch.distributed.rendezvous")

GIVEN = {NAMES["master_port"]: "41213", "RANK": "3"}


@pytest.mark.parametrize(
    ("url", "environ", "told"),
    [
        ("env://", GIVEN | {"MASTER_PORT": "41213"}, ""),
        ("env://", {"MASTER_PORT": "29500"}, ""),  # no agent
        ("env://", {NAMES["master_port"]: "x", "MASTER_PORT": "1"}, ""),
        ("tcp://node0:41213", GIVEN, ""),
        ("tcp://node0", GIVEN, ""),  # torch refuses it
        ("env://", GIVEN | {"MASTER_PORT": "29500"}, "rank 3 of this script meets at port 29500"),
        ("env://?rank=0", GIVEN, "at port none"),
        ("tcp://localhost:29500?rank=3", GIVEN, "has given it MASTER_PORT=41213"),
    ],
)
def test_another_port_is_named_beside_the_one_that_was_given(
    url: str, environ: dict[str, str], told: str
) -> None:
    found = problem_of(url, environ)
    assert told in found if told else not found


def test_torchs_handlers_are_called_with_what_they_were_called_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (GIVEN | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    handlers: dict[str, Callable[..., Any]] = {"env": lambda url, **more: iter([(url, more)])}
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", handlers)
    warn_of_other_port()
    warn_of_other_port()
    assert list(handlers["env"]("env://", timeout=5)) == [("env://", {"timeout": 5})]
    assert capsys.readouterr().err.count("meets at port 29500") == 1
