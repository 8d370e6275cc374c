"""What explain-env shows: everything that somebody chose, and nothing that only a world can know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.commands.explain_env import OF_A_WORLD, explain, main
from elastic_agent.agent.common.variables import USER, Variable
from elastic_agent.agent.configuration.config import Command, Config, LogConfig
from elastic_agent.agent.configuration.stopping import TimeoutConfig
from elastic_agent.agent.machine import inventory as machines
from elastic_agent.agent.machine.devices import Device, Inventory, Software
from elastic_agent.agent.machine.inventory import Machine, inspect_machine
from elastic_agent.agent.workers.environment import WorkerPlace, contract, worker_env
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
)

CONFIG = Config(Command("script", "train.py"), nproc_per_node=2, timeouts=TimeoutConfig(60.0))


@pytest.fixture(scope="module")
def machine() -> Machine:
    """This one, with GPUs, another torch and a network to talk about."""
    found = inspect_machine(CONFIG, {})
    gpus = Inventory((Device("0"), Device("1")), 8)
    return replace(found, inventory=gpus, software=Software("2.13.0+cu130", "2.30.7"))


def by_name(rows: list[Variable]) -> dict[str, Variable]:
    found = {row.name: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_each_variable_has_its_value_who_chose_it_and_why(machine: Machine) -> None:
    mine = {"NCCL_SOCKET_IFNAME": "eth7", "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "3", "HOME": "/root"}
    rows = by_name(explain(CONFIG, machine, mine))
    assert (rows["RANK"].value, rows["RANK"].by) == ("<rank>", "torchrun")
    assert (rows["LOCAL_RANK"].value, rows["LOCAL_WORLD_SIZE"].value) == ("0, 1", "2")
    assert (rows["NCCL_DEBUG"].value, rows["NCCL_DEBUG"].by) == ("WARN", "default")
    assert (rows["TORCH_FR_BUFFER_SIZE"].value, rows["TORCH_FR_BUFFER_SIZE"].by) == ("2000", "default")
    assert rows["ELASTIC_AGENT_PROCESS_GROUP_TIMEOUT_S"].value == "120"
    assert rows["GLOO_SOCKET_IFNAME"].by == "network"
    assert {name for name, row in rows.items() if row.by == USER} == mine.keys() - {"HOME"}
    assert "ours would be OMP_NUM_THREADS=1: a thread per core" in rows["OMP_NUM_THREADS"].reason
    assert all(row.reason for row in rows.values())


def test_the_dumps_are_below_the_log_directory(machine: Machine) -> None:
    rows = by_name(explain(replace(CONFIG, logs=LogConfig(Path("/logs"))), machine, {}))
    assert (
        rows["TORCH_FR_DUMP_TEMP_FILE"].value
        == f"/logs/{CONFIG.rendezvous.job_id}-<run>/gen<generation>/flight_records/rank_"
    )


def test_what_differs_from_world_to_world_is_left_open() -> None:
    def of(names: str, generation: int, port: int, me: int) -> dict[str, str]:
        nodes = tuple(NodeRecord(name, name * 2, "host", port, 2) for name in names)
        members = assign_ranks(nodes)
        master = Endpoint(f"host-{port}", port)
        world = World("job", generation, Phase.RUNNING, members, master, Cause(CauseKind.START), run=names)
        place = WorkerPlace(world, members[me], 0, Path("e"), worker_env("i", Path("r"), None, CONFIG))
        chosen = contract(place, None)
        return {variable.name: variable.value for variable in chosen}

    one, other = of("a", 1, 1, 0), of("bca", 2, 2, 2)
    assert {name for name in one if one[name] != other[name]} == OF_A_WORLD


def test_ranks_within_a_role_count_the_workers_of_all_nodes_that_have_it() -> None:
    """Also where nodes of other roles and sizes stand between them."""
    nodes = tuple(
        NodeRecord(name, name * 2, "host", 1, slots, role=role)
        for name, role, slots in [
            ("a", "reader", 4),
            ("b", "trainer", 1),
            ("c", "trainer", 2),
            ("d", "trainer", 3),
            ("e", "reader", 5),
        ]
    )
    world = World("job", 1, Phase.RUNNING, assign_ranks(nodes), Endpoint("host", 1), Cause(CauseKind.START))
    names = ("GROUP_RANK", "ROLE_NAME", "LOCAL_RANK", "RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
    found = []
    for member in world.members:
        for local_rank in range(member.slots):
            place = WorkerPlace(
                world, member, local_rank, Path("e"), worker_env("i", Path("r"), None, CONFIG)
            )
            values = {variable.name: variable.value for variable in contract(place, None)}
            found.append(" ".join(values[name] for name in names))
    assert found == [
        "0 reader 0 0 0 9 15",
        "0 reader 1 1 1 9 15",
        "0 reader 2 2 2 9 15",
        "0 reader 3 3 3 9 15",
        "1 trainer 0 4 0 6 15",
        "2 trainer 0 5 1 6 15",
        "2 trainer 1 6 2 6 15",
        "3 trainer 0 7 3 6 15",
        "3 trainer 1 8 4 6 15",
        "3 trainer 2 9 5 6 15",
        "4 reader 0 10 4 9 15",
        "4 reader 1 11 5 9 15",
        "4 reader 2 12 6 9 15",
        "4 reader 3 13 7 9 15",
        "4 reader 4 14 8 9 15",
    ]


def test_every_variable_is_a_line(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setenv("NCCL_ODD", "two\nlines \x1b[2J C:\\é")
    monkeypatch.setattr(machines, "inspect_machine", lambda config, environ: machine)
    assert main([str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "NCCL_ODD=two\\nlines \\x1b[2J C:\\é" in {line.split("  ")[0] for line in lines}
    assert all(" # " in line for line in lines)


def test_no_more_replicas_are_wanted_than_other_nodes_may_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "train.py").touch()
    assert main(["--max-nodes", "2", "--memory-replicas", "5", str(script)]) == 0
    assert "\nELASTIC_AGENT_MEMORY_REPLICAS=1 " in capsys.readouterr().out


def test_a_bad_configuration_is_refused_as_for_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--lease-ttl", "never", str(tmp_path / "none.py")]) == 78
    errors = capsys.readouterr().err
    assert "elastic-agent explain-env: 2 problems; nothing was done" in errors
    assert main(["--help"]) == 0
    assert "usage: elastic-agent explain-env" in capsys.readouterr().out
