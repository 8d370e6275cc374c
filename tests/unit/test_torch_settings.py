"""The table of NCCL's and torch's settings: which rows hold, by version, timeouts and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.common.variables import USER, settle
from elastic_agent.agent.configuration.stopping import TimeoutConfig
from elastic_agent.agent.machine.devices import CURRENT, Software, find_software
from elastic_agent.agent.workers.environment import torch_settings

GPU = Software("2.13.0+cu130", "2.30.7")
CPU = Software("2.13.0+cpu")

PLAIN: dict[str, Any] = {"software": GPU, "timeouts": TimeoutConfig()}
RECORDED = PLAIN | {"flight_records": Path("/logs/gen3/flight_records")}


def seen(facts: dict[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    settings = settle(environment or {}, torch_settings(**facts))
    return {variable.name: variable.value for variable in settings}


def test_on_a_cpu_nothing_is_said_of_nccl_but_what_torchrun_says_too() -> None:
    assert seen(PLAIN | {"software": CPU}) == {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }


def test_several_workers_do_not_each_take_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in seen(PLAIN)
    assert seen(PLAIN | {"workers": 2})["OMP_NUM_THREADS"] == "1"


def test_the_flight_recorder_keeps_its_records_by_generation() -> None:
    recorder = {name: value for name, value in seen(RECORDED).items() if "_FR_" in name}
    assert recorder == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/gen3/flight_records/rank_",
    }


def test_dumps_that_would_not_be_found_are_left_where_torch_puts_them() -> None:
    assert not any("TEMP_FILE" in name for name in seen(PLAIN))


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_setting_that_the_user_has_made_under_either_name_stands_alone(name: str) -> None:
    set_for_worker = seen(PLAIN, {name: "7"})
    assert {name: value for name, value in set_for_worker.items() if "BUFFER_SIZE" in name} == {name: "7"}


def test_whatever_the_user_has_set_is_the_users() -> None:
    ours = torch_settings(GPU, TimeoutConfig(60.0), workers=2)
    mine = {variable.name: "mine" for variable in ours if variable.yielding}
    assert {variable.name: variable.value for variable in settle(mine, ours) if variable.by == USER} == mine
    (decree,) = [variable.name for variable in settle(mine, ours) if variable.by != USER]
    assert decree == "ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S", "set by an option, not by the environment"


# --- Timeouts


@pytest.mark.parametrize(
    ("timeouts", "group", "heartbeat"),
    [
        (TimeoutConfig(), None, None),
        (TimeoutConfig(hang=60.0), "120", "180"),
        (TimeoutConfig(hang=10.25), "20.5", "31"),
    ],
)
def test_each_rung_of_the_ladder_follows_from_the_one_below(
    timeouts: TimeoutConfig, group: str | None, heartbeat: str | None
) -> None:
    set_for_worker = seen(PLAIN | {"timeouts": timeouts})
    assert set_for_worker.get("ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S") == group
    assert set_for_worker.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC") == heartbeat


# --- Versions


def test_the_software_of_this_interpreter_alone_is_known() -> None:
    assert find_software({}).torch is not None
    assert find_software({"PYTHON_EXEC": "/another/python"}) == CURRENT


def test_torch_itself_still_knows_these_names() -> None:
    """Against the torch that is installed: a name that it has dropped would be set in vain."""
    import torch

    here = Path(torch.__file__).parent
    headers = "".join(
        (here / "include/torch/csrc/distributed/c10d" / name).read_text()
        for name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp")
    )
    library = (here / "lib/libtorch_cpu.so").read_bytes()
    for name in seen(RECORDED | {"timeouts": TimeoutConfig(60.0)}):
        if name.startswith("TORCH_"):
            assert name in headers or name.encode() in library, name
