"""Opening the store: which password is used, and what is not loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.configuration.rendezvous import STORES, EtcdConfig, RendezvousConfig
from elastic_agent.agent.rendezvous_io.store_opening import etcd_password, open_to_look
from elastic_agent.rendezvous.errors import StoreRefused
from elastic_agent.rendezvous.records import Endpoint
from tests.contract.test_store import KINDS

ROOT = Path(__file__).parents[2]


def test_the_password_is_read_anew_and_only_one_newline_is_not_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "password"
    etcd = EtcdConfig(user="u", password_file=file)
    for content, password in ((b"first\n", "first"), (b" second\r\n\n", " second\r\n"), ("ä".encode(), "ä")):
        file.write_bytes(content)
        assert etcd_password(etcd) == password


def test_a_password_file_without_text_is_refused_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"secret\xff")
    with pytest.raises(StoreRefused, match=f"--etcd-password-file {file} holds no UTF-8 text") as caught:
        etcd_password(EtcdConfig(user="u", password_file=file))
    assert "secret" not in str(caught.value)


def test_an_agent_with_a_store_in_memory_loads_neither_torch_nor_grpc() -> None:
    code = """
import queue, sys
import elastic_agent.agent.main.run
from elastic_agent.agent.configuration.config import Command, Config
from elastic_agent.agent.rendezvous_io.store_opening import open_store
open_store(Config(Command("script", "train.py")), None, None, queue.SimpleQueue()).grant(5.0)
sys.exit(" ".join({"torch", "grpc"} & set(sys.modules)) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_each_store_with_a_folder_can_be_chosen_and_has_a_place_in_the_contract() -> None:
    folders = {store.parent.name for store in ROOT.glob("rendezvous/*/store.py")}
    assert folders | {"memory"} == set(STORES)
    assert {name.partition("-")[0] for name in KINDS} == set(STORES) | {"scoped"}


def test_a_look_at_a_store_that_an_agent_hosts_needs_its_address() -> None:
    place = RendezvousConfig("c10d", (Endpoint("no.such.name.invalid", 29400),))
    with pytest.raises(StoreRefused, match=r"--rdzv-endpoint: 'no\.such\.name\.invalid' does not resolve"):
        open_to_look(place, 1.0)
