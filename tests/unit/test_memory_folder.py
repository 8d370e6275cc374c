"""The agent's folder in memory: who may enter, how large it may be, and that nobody's stays behind."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from elastic_agent.agent.checkpoints import folder as folder_module
from elastic_agent.agent.checkpoints.folder import make_folder


def test_a_folder_is_its_owners_alone_and_goes_with_the_agent(tmp_path: Path) -> None:
    made = make_folder(1 << 20, tmp_path)
    assert made is not None
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert made.limit == 1 << 20
    (made.path / "a.pt").write_bytes(b"state")
    made.close()
    assert not list(tmp_path.iterdir())


def test_the_limit_is_shown_in_a_unit_of_which_it_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for limit, text in (
        (20 << 20, "20.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 10, "5.0 KiB"),
        (900, "900 bytes"),
    ):
        made = make_folder(limit, tmp_path)
        assert made is not None
        assert f"checkpoints in memory: at most {text} in {made.path}" in caplog.text
        made.close()


def test_by_default_half_of_the_shared_memory_may_be_used(tmp_path: Path) -> None:
    made = make_folder(None, tmp_path)
    assert made is not None
    found = os.statvfs(tmp_path)
    assert made.limit == found.f_blocks * found.f_frsize // 2
    made.close()


def test_switched_off_there_is_none(tmp_path: Path) -> None:
    assert make_folder(0, tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_there_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert make_folder(None, tmp_path / "missing") is None
    assert "no checkpoints in memory, they go to disk only" in caplog.text


def test_what_a_killed_agent_and_guard_left_is_removed_and_what_lives_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = make_folder(None, tmp_path)
    dead = make_folder(None, tmp_path)
    assert living is not None
    assert dead is not None
    os.close(dead.lock)
    other = tmp_path / "somebody-else"
    other.mkdir()
    young = make_folder(None, tmp_path)
    assert young is not None
    assert dead.path.exists(), "it could be one that is just being made"
    monkeypatch.setattr(folder_module, "YOUNG_S", -1.0)
    (tmp_path / "elastic-agent-link").symlink_to(other)
    last = make_folder(None, tmp_path)
    assert last is not None
    assert not dead.path.exists()
    assert all(path.exists() for path in (living.path, young.path, last.path, other))
    for each in (living, young, last):
        each.close()
