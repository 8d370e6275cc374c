"""Machines with several interfaces: real gloo jobs find the one that leads to the others, and train over it alone.

The counters of the interfaces say where the bytes went, so that a choice that only looks right does not pass.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .all_reducer import MEGABYTES, TIMES
from .harness import Agent, Job
from .networks import Cable, Cabling, Machine, made

ALL_REDUCER = Path(__file__).with_name("all_reducer.py")

TRAINING_BYTES = MEGABYTES * 2**20 * TIMES * 0.9
"""Each of two ranks sends a little more than that; its last bytes may be under way when it looks."""
SILENCE_BYTES = 50_000
"""What an interface may say that has no part in the training."""
PORT = 29400


@pytest.fixture
def cabling() -> Iterator[Cabling]:
    with made(Cabling) as cabling:
        yield cabling


def join(job: Job, machine: Machine, name: str, *options: str, **environment: str) -> Agent:
    script = (ALL_REDUCER, job.folder)
    return job.start(
        name, "--nnodes=2", *options, script=script, environment=environment, enter=machine.enter
    )


def trained_over(job: Job, name: str) -> tuple[str, dict[str, Any]]:
    """The interface that carried the training on that node, and what its worker saw."""
    for agent in job.agents:
        assert agent.exit_code(within_s=90) == 0
    result = json.loads((job.folder / f"{name}.json").read_text())
    sent = result["bytes"]
    carriers = [interface for interface, count in sent.items() if count > SILENCE_BYTES]
    assert len(carriers) == 1, sent
    assert sent[carriers[0]] > TRAINING_BYTES, sent
    return carriers[0], result["environment"]


def test_of_three_interfaces_the_one_that_leads_to_the_others(job: Job, cabling: Cabling) -> None:
    """The others lead nowhere, one of them with the default route, and their names come first and last."""
    for number, name in enumerate("ab", 1):
        machine = cabling.machine(name)
        office, storage = f"10.{number}.0", f"10.{number}.1"
        cabling.connect(machine, Cable("eth0", f"office-{name}", f"{office}.5/24", gateway=f"{office}.1"))
        cabling.connect(machine, Cable("eth1", "fabric", f"10.9.0.{number}/24"))
        cabling.connect(machine, Cable("eth2", f"storage-{name}", f"{storage}.5/24"))
        join(job, machine, name, f"--rdzv-endpoint=10.9.0.1:{PORT}")
    for number, name in enumerate("ab", 1):
        carrier, environment = trained_over(job, name)
        assert carrier == "eth1"
        assert environment["MASTER_ADDR"] in ("10.9.0.1", "10.9.0.2"), "the first of them"
        assert environment["NCCL_SOCKET_IFNAME"] == "=eth1"
        assert f"at http://10.9.0.{number}:" in job.agents[number - 1].text


@pytest.mark.long
def test_the_users_choice_may_have_another_name_on_each_node(job: Job, cabling: Cabling) -> None:
    """The rendezvous is reached over another network, which could carry the training just as well."""
    chosen = {"a": "enp1s0f0", "b": "ibs5"}
    for number, name in enumerate(chosen, 1):
        machine = cabling.machine(name)
        cabling.connect(machine, Cable("eth0", "office", f"10.1.0.{number}/24"))
        cabling.connect(machine, Cable(chosen[name], "fabric", f"10.9.0.{number}/24"))
        options = (f"--rdzv-endpoint=10.1.0.1:{PORT}", f"--local-addr={chosen[name]}")
        join(job, machine, name, *options)
    for name, interface in chosen.items():
        carrier, environment = trained_over(job, name)
        assert carrier == interface
        assert environment["GLOO_SOCKET_IFNAME"] == interface
        assert environment["MASTER_ADDR"].startswith("10.9.0.")


@pytest.mark.long
def test_ipv6_alone(job: Job, cabling: Cabling) -> None:
    for number, name in enumerate("ab", 1):
        machine = cabling.machine(name)
        cabling.connect(machine, Cable("eth0", "fabric", f"fd09::{number}/64"))
        join(job, machine, name, f"--rdzv-endpoint=[fd09::1]:{PORT}")
    for name in "ab":
        carrier, environment = trained_over(job, name)
        assert carrier == "eth0"
        assert environment["MASTER_ADDR"] in ("fd09::1", "fd09::2")
        assert environment["NCCL_SOCKET_FAMILY"] == "AF_INET6"


@pytest.mark.long
def test_dockers_bridge_with_its_one_subnet_on_every_node(job: Job, cabling: Cabling) -> None:
    """It is the first one and as fast as any, and there is no route to ask for: this agent hosts the store."""
    machines = {name: cabling.machine(name) for name in "ab"}
    for number, machine in enumerate(machines.values(), 1):
        machine.add_docker()
        cabling.connect(machine, Cable("eth0", "fabric", f"10.9.0.{number}/24"))
    first = join(job, machines["a"], "a")
    invitation = job.wait_for_text(first, r"--rdzv-endpoint=(\S+) --rdzv-id=(\S+)")
    join(job, machines["b"], "b", f"--rdzv-endpoint={invitation[1]}", f"--rdzv-id={invitation[2]}")
    for name in "ab":
        carrier, environment = trained_over(job, name)
        assert carrier == "eth0"
        assert environment["MASTER_ADDR"].startswith("10.9.0.")


@pytest.mark.long
def test_an_interface_that_comes_up_after_the_start(job: Job, cabling: Cabling) -> None:
    """Which the user has named: meanwhile the default route would lead to the rendezvous, as it seems."""
    machines = {}
    for number, name in enumerate("ab", 1):
        machines[name] = machine = cabling.machine(name)
        office = f"10.{number}.0"
        cabling.connect(machine, Cable("eth0", f"office-{name}", f"{office}.5/24", gateway=f"{office}.1"))
        cabling.connect(machine, Cable("eth1", "fabric", f"10.9.0.{number}/24", down=True))
        join(job, machine, name, f"--rdzv-endpoint=10.9.0.1:{PORT}", "--local-addr=eth1")
    for agent in job.agents:
        job.wait_for_text(agent, r"waiting up to 600 s \(--join-timeout\) for interface eth1 to come up")
        machines[agent.name].switch_on("eth1")
    for name in "ab":
        assert trained_over(job, name)[0] == "eth1"


@pytest.mark.parametrize(
    ("options", "stop", "code"),
    [
        (("--lease-ttl=1", "--join-timeout=2"), None, 71),
        pytest.param((), signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param((), signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_no_agent_waits_for_ever(
    job: Job, cabling: Cabling, options: tuple[str, ...], stop: signal.Signals | None, code: int
) -> None:
    machine = cabling.machine("a")
    cabling.connect(machine, Cable("eth0", "fabric", "10.9.0.1/24", down=True))
    agent = join(job, machine, "a", f"--rdzv-endpoint=10.9.0.2:{PORT}", *options)
    if stop is not None:
        job.wait_for_text(agent, "a route to the rendezvous")
        agent.signal(stop)
    assert agent.exit_code() == code
    if stop is None:
        assert agent.says(r"for a route to the rendezvous .*: check cables")


def test_what_this_machine_does_not_have_is_refused_at_once(job: Job, cabling: Cabling) -> None:
    machine = cabling.machine("a")
    cabling.connect(machine, Cable("eth0", "fabric", "10.9.0.1/24"))
    agent = join(job, machine, "a", "--local-addr=10.9.0.7")
    assert agent.exit_code() == 73
    for problem in ("--local-addr '10.9.0.7'",):
        assert problem in agent.text
    assert agent.says("1 problem; nothing was done")
