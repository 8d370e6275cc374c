"""The agent's own error file: what a scheduler reads is what torchrun would have written."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_agent.agent.main import process
from elastic_agent.agent.main.process import ERROR_FILE, write_error_file
from elastic_agent.rendezvous.records import Failure

PATIENCE_S = 20.0

FAILURE = Failure(
    generation=7,
    fingerprint="signal 11: ValueError: no",
    summary="killed by SIGSEGV: ValueError: no",
    cause="exception",
    node="b",
    rank=3,
    local_rank=1,
    returncode=-11,
    exception="ValueError: no",
    traceback="Traceback (most recent call last):\n  ...\nValueError: no",
)


def written(path: Path, failure: Failure | None = None) -> dict[str, object]:
    write_error_file({ERROR_FILE: str(path)}, 3, "crash loop", failure, 1700000000.9)
    document: dict[str, object] = json.loads(path.read_text())
    return document


def test_torchs_own_reader_understands_it(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    written(path, FAILURE)
    read = ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file=str(path))
    assert read.timestamp == 1700000000
    assert read.message["message"] == "ValueError: no"


def test_the_first_failed_worker_is_named_with_its_traceback_and_code(tmp_path: Path) -> None:
    message = written(tmp_path / "error.json", FAILURE)["message"]
    assert message == {
        "message": "ValueError: no",
        "extraInfo": {"py_callstack": FAILURE.traceback, "timestamp": "1700000000", "rank": "3", "node": "b"},
        "errorCode": -11,
    }


def test_without_a_worker_to_blame_it_has_the_agents_own_reason(tmp_path: Path) -> None:
    message = written(tmp_path / "error.json")["message"]
    assert message == {
        "message": "crash loop",
        "extraInfo": {"py_callstack": "", "timestamp": "1700000000"},
        "errorCode": 3,
    }


def test_it_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_error_file({}, 1, "failed", None, 0.0)
    assert not caplog.messages
    write_error_file({ERROR_FILE: str(tmp_path / "none" / "error.json")}, 1, "failed", None, 0.0)
    assert "is not written" in caplog.text


def test_a_disk_that_does_not_answer_delays_the_end_no_longer_than_is_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "WITHIN_S", 0.1)
    path = tmp_path / "error.json"
    unanswered = Path(f"{path}.{os.getpid()}")
    os.mkfifo(unanswered)  # who opens it to write waits for a reader
    ends = threading.Thread(target=write_error_file, args=({ERROR_FILE: str(path)}, 1, "failed", None, 0.0))
    ends.start()
    ends.join(PATIENCE_S)
    ended = not ends.is_alive()
    os.close(os.open(unanswered, os.O_RDONLY | os.O_NONBLOCK))
    assert ended
    assert "is not written within" in caplog.text
