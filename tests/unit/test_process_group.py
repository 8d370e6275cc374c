"""Which timeout a process group gets, on real gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_agent.worker import init_process_group
from elastic_agent.worker.ranks.process_group import default_backend
from elastic_agent.worker.wire.environment import PROCESS_GROUP_TIMEOUT

OWN = timedelta(seconds=7)


@pytest.mark.parametrize(
    ("variable", "positional", "named", "timeout_s"),
    [
        ("20.5", (), {}, 20.5),
        ("20.5", (), {"timeout": OWN}, 7.0),
        ("20.5", (None, OWN), {}, 7.0),
        (None, (), {}, 1800.0),  # torch's own for gloo
        (None, (), {"timeout": OWN}, 7.0),
    ],
)
def test_the_script_s_own_timeout_is_stronger_than_the_agents_and_that_than_torchs(
    variable: str | None,
    positional: tuple[Any, ...],
    named: dict[str, Any],
    timeout_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PROCESS_GROUP_TIMEOUT, raising=False)
    if variable is not None:
        monkeypatch.setenv(PROCESS_GROUP_TIMEOUT, variable)
    init_process_group("gloo", *positional, rank=0, world_size=1, store=dist.HashStore(), **named)
    try:
        assert dist.group.WORLD is not None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == timeout_s
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("accelerator", "available", "backend"),
    [
        (None, True, "gloo"),
        ("cuda", True, "nccl"),
        ("cuda", False, "gloo"),
        ("xpu", True, "xccl"),
        ("mps", True, "gloo"),
    ],
)
def test_the_backend_is_that_of_the_accelerator_that_is_there(
    accelerator: str | None, available: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def current(check_available: bool = False) -> torch.device | None:
        asked.append(check_available)
        return torch.device(accelerator) if accelerator is not None else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: available)
    assert default_backend() == backend
    assert asked == [True], "a build for CUDA on a host without a GPU must take gloo"


@pytest.mark.parametrize(
    ("given", "passed"),
    [({}, "gloo"), ({"backend": "gloo"}, "gloo"), ({"device_id": torch.device("cpu", 0)}, None)],
)
def test_torch_gets_a_backend_unless_it_chooses_by_the_device(
    given: dict[str, Any], passed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: calls.append(args))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    init_process_group(**given, rank=0, world_size=1, store=dist.HashStore())
    assert [call[0] for call in calls] == [passed]
