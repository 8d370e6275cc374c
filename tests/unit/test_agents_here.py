"""Finding agents on this machine: what they leave is found, and what another user could have put there is not."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_agent.agent.machine.agents_here import (
    RUN_DIR_PREFIX,
    agents_here,
    announce,
    keep_from_tmpfiles,
    run_directory_parent,
    run_directory_parents,
    stores_here,
)
from elastic_agent.rendezvous.records import Endpoint

ME = os.getuid()
HERE = Endpoint("127.0.0.1", 9100)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / f"{RUN_DIR_PREFIX}abc"
    path.mkdir(mode=0o700)
    announce(path, ("127.0.0.1", 9100))
    return path


def test_systemd_tmpfiles_leaves_a_run_directory_alone(run_dir: Path) -> None:
    """It skips a folder that it cannot lock."""
    descriptor = keep_from_tmpfiles(run_dir)
    theirs = os.open(run_dir, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(theirs)


@pytest.mark.parametrize(
    ("listening", "asked"),
    [
        (("10.0.0.1", 9100), Endpoint("10.0.0.1", 9100)),
        (("0.0.0.0", 9100), Endpoint("127.0.0.1", 9100)),
        (("::", 9100), Endpoint("::1", 9100)),
    ],
)
def test_an_agent_is_found_where_it_listens(
    tmp_path: Path, run_dir: Path, listening: tuple[str, int], asked: Endpoint
) -> None:
    announce(run_dir, listening)
    assert agents_here([tmp_path, tmp_path / "none"], ME) == (asked,)


def test_the_stores_of_their_jobs_are_found_each_once(tmp_path: Path, run_dir: Path) -> None:
    words = {"rdzv-backend": "c10d", "rdzv-endpoint": "10.0.0.1:29400", "rdzv-id": "digits"}
    for name in ("one", "two"):
        other = tmp_path / f"{RUN_DIR_PREFIX}{name}"
        other.mkdir(mode=0o700)
        announce(other, ("127.0.0.1", 1), {**words, "what-else": "is left out"})
    assert stores_here([tmp_path], ME) == (words,), "one agent's job has none"


def test_not_even_root_believes_the_store_of_another_user(tmp_path: Path, run_dir: Path) -> None:
    """It may name a file as the one with the password, and a server to send that to."""
    announce(run_dir, ("127.0.0.1", 1), {"rdzv-id": "x", "etcd-password-file": "/etc/shadow"})
    os.chown(run_dir, 12345, -1) if ME == 0 else None
    assert stores_here([tmp_path], 0 if ME == 0 else ME + 1) == ()


def test_several_agents_are_found_each_once(tmp_path: Path, run_dir: Path) -> None:
    for name, port in (("one", 1), ("two", 2)):
        other = tmp_path / f"{RUN_DIR_PREFIX}{name}"
        other.mkdir(mode=0o700)
        announce(other, ("127.0.0.1", port))
    found = agents_here([tmp_path, tmp_path], ME)
    assert sorted(http.port for http in found) == [1, 2, 9100]


def test_an_agent_that_has_gone_is_not_found(tmp_path: Path, run_dir: Path) -> None:
    (run_dir / "agent.json").unlink()
    assert agents_here([tmp_path], ME) == ()


def test_only_its_user_and_root_believe_it(tmp_path: Path, run_dir: Path) -> None:
    assert agents_here([tmp_path], ME + 1) == ()
    assert agents_here([tmp_path], 0) == (HERE,)


def writable_folder(run_dir: Path) -> None:
    run_dir.chmod(0o770)


def writable_file(run_dir: Path) -> None:
    (run_dir / "agent.json").chmod(0o602)


def link_to_a_folder(run_dir: Path) -> None:
    elsewhere = run_dir.with_name("elsewhere")
    run_dir.rename(elsewhere)
    run_dir.symlink_to(elsewhere)


def link_to_a_file(run_dir: Path) -> None:
    file = run_dir / "agent.json"
    file.rename(run_dir / "other")
    file.symlink_to(run_dir / "other")


def pipe(run_dir: Path) -> None:
    (run_dir / "agent.json").unlink()
    os.mkfifo(run_dir / "agent.json", 0o600)


def folder(run_dir: Path) -> None:
    (run_dir / "agent.json").unlink()
    (run_dir / "agent.json").mkdir(mode=0o700)


def containing(content: bytes) -> Callable[[Path], None]:
    def write(run_dir: Path) -> None:
        (run_dir / "agent.json").write_bytes(content)

    return write


@pytest.mark.parametrize(
    "spoil",
    [
        writable_folder,
        writable_file,
        link_to_a_folder,
        link_to_a_file,
        pipe,
        folder,
        containing(b""),
        containing(b"\xff"),
        containing(b"[]"),
        containing(b'{"v": 2, "http": {"address": "127.0.0.1", "port": 1}}'),
        containing(b'{"v": 1, "http": "127.0.0.1:1", "store": {}}'),
        containing(b'{"v": 1, "http": {"address": "127.0.0.1", "port": 1}, "store": {"rdzv-id": 7}}'),
        containing(b'{"v": 1, "http": {"address": "127.0.0.1", "port": 65536}}'),
        containing(b'{"v": 1, "http": {"address": "127.0.0.1", "port": 1}, "store": {}}'.ljust(5000)),
    ],
)
def test_what_another_could_have_put_there_is_left_alone(
    tmp_path: Path, run_dir: Path, spoil: Callable[[Path], None]
) -> None:
    assert agents_here([tmp_path], ME) == (HERE,)
    spoil(run_dir)
    assert agents_here([tmp_path], ME) == ()


def test_a_service_has_its_run_directory_where_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "job7"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", "/")
    for given in ({}, {"RUNTIME_DIRECTORY": ""}, {"RUNTIME_DIRECTORY": "/run/none"}):
        assert run_directory_parent(given) == "/"
    monkeypatch.setattr("elastic_agent.agent.machine.agents_here.MAX_PARENT_BYTES", len(str(own)))
    monkeypatch.setattr("elastic_agent.agent.machine.agents_here.SERVICES", tmp_path)
    for given in (str(own), f"{own}:/run/another"):
        assert run_directory_parent({"RUNTIME_DIRECTORY": given}) == str(own)
    assert own in run_directory_parents()
    monkeypatch.setattr("elastic_agent.agent.machine.agents_here.MAX_PARENT_BYTES", len(str(own)) - 1)
    assert run_directory_parent({"RUNTIME_DIRECTORY": str(own)}) == "/", "no socket would fit below"
