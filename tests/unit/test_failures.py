"""Failures: what is known from exits, error files and logs, and that nothing a worker leaves can hurt the agent."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer

from elastic_agent.agent.common.exits import describe_exit
from elastic_agent.agent.workers.causes import describe_failure, fingerprint
from elastic_agent.agent.workers.failure_handler import summarize
from elastic_agent.agent.workers.post_mortem import (
    ErrorReport,
    PostMortem,
    find_traceback,
    read_error_file,
)
from elastic_agent.rendezvous.records import (
    MAX_RECORD_BYTES,
    Action,
    Failure,
    NodeRecord,
    node_key,
)
from elastic_agent.worker.errors import (
    CheckpointError,
    DirectoryNotShared,
    MeshMismatch,
    NotReplicated,
    NoUsableCheckpoint,
    OtherRun,
    UnsupportedTraining,
)
from elastic_agent.worker.state.kinds import refuse_sharded

FAILURE = Failure(
    generation=7,
    fingerprint="exit code 1: RuntimeError: boom",
    summary="exit code 1: RuntimeError: boom",
    cause="exception",
    node="n2",
    rank=3,
    local_rank=1,
    returncode=1,
    exception="RuntimeError: boom",
    traceback='Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: boom',
    log_tail=("epoch 1", "RuntimeError: boom"),
    log_file="/logs/gen7/rank3/stderr.log",
)


@pytest.mark.parametrize(
    ("returncode", "oom", "text"),
    [
        (0, False, "exit code 0"),
        (1, False, "exit code 1"),
        (1, True, "exit code 1"),
        (127, False, "exit code 127 (the command was not found)"),
        (137, False, "exit code 137 (a shell's way to say: killed by SIGKILL)"),
        (255, False, "exit code 255"),
        (
            -9,
            False,
            "killed by SIGKILL (signal 9; a user, a batch system or a user-space memory killer sent it)",
        ),
        (
            -9,
            True,
            "killed by SIGKILL (signal 9; the kernel's out-of-memory killer: no memory was left on this machine or "
            "in its cgroup)",
        ),
        (-13, False, "killed by SIGPIPE (signal 13)"),
        (-35, False, "killed by a signal without a name (signal 35)"),
    ],
)
def test_an_exit_in_words(returncode: int, oom: bool, text: str) -> None:
    assert describe_exit(returncode, oom) == text


def write(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def error_json(message: object) -> Callable[[Path], object]:
    return write(json.dumps({"message": message}).encode())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, None),
        (
            error_json(
                {"message": "ValueError: x", "extraInfo": {"py_callstack": "Trace\n", "timestamp": "17"}}
            ),
            ErrorReport("ValueError: x", "Trace"),
        ),
        (error_json("it broke"), ErrorReport("it broke")),
        (write(b'{"message": "it broke", "timestamp": 10}'), ErrorReport("it broke")),
        (write(b'{"message": "it broke", "timestamp": "10"}'), ErrorReport("it broke")),
        *(
            (error_json({"message": "E", "extraInfo": {"timestamp": clock}}), ErrorReport("E"))
            for clock in ("soon", 10**13, [1])
        ),
        (error_json({"message": "E: x"}), ErrorReport("E: x")),
        (error_json({"message": "E: x", "extraInfo": [1]}), ErrorReport("E: x")),
        (error_json({"message": "E: x", "extraInfo": {"py_callstack": 5}}), ErrorReport("E: x")),
        (error_json("a\x1b[31mred\x00\ud800"), ErrorReport("ared \\ud800")),
        (error_json("x" * 5000), ErrorReport("x" * 2045 + "...")),
        (
            error_json({"message": "E", "extraInfo": {"py_callstack": "0" * 20000 + "end"}}),
            ErrorReport("E", "..." + "0" * (16 * 1024 - 6) + "end"),
        ),
    ],
)
def test_an_error_file_is_read(
    tmp_path: Path, make: Callable[[Path], object], expected: ErrorReport | None
) -> None:
    make(tmp_path / "error.json")
    assert read_error_file(tmp_path / "error.json") == expected


@pytest.mark.parametrize(
    "make",
    [
        *map(write, (b"", b"{", b"\xff\xfe\xfd", b"[]", b"{}", b"[" * 100_000, b"1" * 10_000)),
        write(b'"' + b"x" * 1024 * 1024 + b'"'),
        *map(error_json, ("", 5, {"message": ["x"]})),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to(path.with_name("other.json")),
    ],
)
@pytest.mark.timeout(30)
def test_an_error_file_that_is_no_good_is_harmless(tmp_path: Path, make: Callable[[Path], object]) -> None:
    error_json("elsewhere")(tmp_path / "other.json")
    make(tmp_path / "error.json")
    assert read_error_file(tmp_path / "error.json") is None


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    main()",
    "    ~~~~^^",
    '  File "train.py", line 9, in main',
    "ValueError: no",
)


@pytest.mark.parametrize(
    ("lines", "exception", "traceback"),
    [
        ((), None, None),
        (("all", "is", "well"), None, None),
        (("before", *TRACEBACK, "after"), "ValueError: no", TRACEBACK),
        (tuple(f"[rank3]: {line}" for line in TRACEBACK), "ValueError: no", TRACEBACK),
        (TRACEBACK[3:], "ValueError: no", TRACEBACK[3:]),  # the beginning is out of the tail
        (TRACEBACK[:4], None, None),  # it died while it wrote
        (
            ("Traceback (most recent call last):", '  File "a", line 1, in f', "KeyError: 1", "", *TRACEBACK),
            "ValueError: no",
            TRACEBACK,
        ),
        (
            ('  File "bad.py", line 1', "    def", "       ^", "SyntaxError: invalid syntax"),
            "SyntaxError: invalid syntax",
            ('  File "bad.py", line 1', "    def", "       ^", "SyntaxError: invalid syntax"),
        ),
        (
            ("Fatal Python error: Segmentation fault", '  File "a.py", line 3 in f', "Extension modules: x"),
            None,
            None,
        ),
    ],
)
def test_the_last_traceback_is_found_in_the_log(
    lines: tuple[str, ...], exception: str | None, traceback: tuple[str, ...] | None
) -> None:
    found = find_traceback(lines)
    if traceback is None:
        assert found is None
    else:
        assert found == ErrorReport(exception, "\n".join(traceback))


@pytest.mark.parametrize(
    "script",
    [
        "def f():\n  raise KeyError('lost')\nf()",
        "try:\n  1/0\nexcept Exception as e:\n  raise KeyError('lost') from e",
        "class C: pass\nraise KeyError('lost')",
    ],
)
def test_what_python_really_prints_is_understood(tmp_path: Path, script: str) -> None:
    (tmp_path / "script.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "script.py")], capture_output=True, text=True
    )
    found = find_traceback(run.stderr.splitlines())
    assert found is not None
    assert found.exception == "KeyError: 'lost'"
    assert found.traceback is not None
    assert found.traceback.startswith("Traceback (most recent call last):")


def examined(
    tmp_path: Path, returncode: int, log_tail: tuple[str, ...] = (), oom: bool = False, master_port: int = 0
) -> Failure:
    worker = PostMortem(
        *("n2", 7, 3, 1, returncode),
        read_error_file(tmp_path / "error.json") or ErrorReport(),
        log_tail=log_tail,
        log_file=tmp_path / "stderr.log",
        master_port=master_port,
        oom_killed=oom,
    )
    return describe_failure(worker)


def test_the_error_file_tells_more_than_the_log(tmp_path: Path) -> None:
    error_json({"message": "E: file\nmore", "extraInfo": {"py_callstack": "T"}})(tmp_path / "error.json")
    failure = examined(tmp_path, 1, TRACEBACK)
    assert (failure.cause, failure.exception, failure.traceback) == ("exception", "E: file\nmore", "T")
    assert failure.summary == "exit code 1: E: file"
    assert failure.log_file == str(tmp_path / "stderr.log")


def test_without_an_error_file_the_log_tells(tmp_path: Path) -> None:
    failure = examined(tmp_path, 1, (*TRACEBACK, "\x1b[1mbye\x07"))
    assert (failure.cause, failure.summary) == ("exception", "exit code 1: ValueError: no")
    assert failure.log_tail == (*TRACEBACK, "bye")


@pytest.mark.parametrize(
    ("returncode", "oom", "reason"),
    [(-9, False, "killed"), (-9, True, "host_out_of_memory"), (0, False, "unknown"), (3, False, "unknown")],
)
def test_an_exception_that_was_only_logged_is_not_blamed_for_a_kill(
    tmp_path: Path, returncode: int, oom: bool, reason: str
) -> None:
    failure = examined(tmp_path, returncode, TRACEBACK if returncode <= 0 else ("no traceback",), oom)
    assert (failure.cause, failure.exception, failure.traceback) == (reason, None, None)
    assert failure.summary == describe_exit(returncode, oom)


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (
            ("terminate called without an active exception", "Fatal Python error: Aborted", "", "frame"),
            "exception",
        ),
        (("Fatal Python error: Segmentation fault", "", "Thread 0x1 (most recent call first):"), "exception"),
        ((), "exception"),
        (("one", "two", "three", "went on", "Fatal Python error: Aborted"), "signal"),
    ],
)
def test_a_worker_that_crashes_as_it_ends_over_an_exception_failed_for_that(
    tmp_path: Path, after: tuple[str, ...], cause: str
) -> None:
    failure = examined(tmp_path, -6, (*TRACEBACK, *after))
    assert failure.cause == cause
    assert (failure.exception == "ValueError: no") == (cause == "exception")


def test_an_exception_that_ended_in_abort_is_an_exception(tmp_path: Path) -> None:
    error_json("RuntimeError: the model is gone")(tmp_path / "error.json")
    assert examined(tmp_path, -6).cause == "exception"


def test_the_summary_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    error_json("x" * 5000 + "\nmore")(tmp_path / "error.json")
    failure = examined(tmp_path, 1)
    assert "\n" not in failure.summary
    assert len(failure.summary) == len("exit code 1: ") + 250, "notes have room behind it"


def with_exception(text: str | None, **changes: Any) -> Failure:
    return dataclasses.replace(FAILURE, exception=text, **changes)


def print_of(failure: Failure) -> str:
    return fingerprint(failure.returncode, failure.exception)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (with_exception("E: x"), with_exception("E: x\nnote", rank=0, local_rank=0, node="z", generation=9)),
        (with_exception("E: at step 17"), with_exception("E: at step 204")),
        (with_exception("E: object at 0x7f3aBC"), with_exception("E: object at 0xdeadbeef")),
        (
            with_exception("E: run 3f2b8c1e-aaaa-bbbb-cccc-0123456789ab"),
            with_exception("E: run ffffffff-1111-2222-dddd-eeeeeeeeeeee"),
        ),
        (with_exception("E: '/tmp/tmpab12_xyz/f'"), with_exception("E: '/tmp/tmpqqqqqqqq/f'")),
        (with_exception("E: [10.0.0.3]:29500 refused"), with_exception("E: [10.0.7.12]:4711 refused")),
        (with_exception(None, returncode=-9), with_exception(None, returncode=-9, log_tail=("other",))),
    ],
)
def test_the_same_failure_has_the_same_fingerprint(one: Failure, other: Failure) -> None:
    assert print_of(one) == print_of(other)


def sharded() -> Exception:
    model = torch.nn.Linear(1, 1)
    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    with pytest.raises(NotReplicated) as refusal:
        refuse_sharded({"model": model, "optimizer": optimizer})
    return refusal.value


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (OtherRun("/ckpt is in use"), True),
        (DirectoryNotShared("rank 1 does not see /ckpt"), True),
        (UnsupportedTraining("set max_steps"), True),
        (MeshMismatch("a mesh of shard 4 fits 4, 8, 12, ... ranks"), True),
        (sharded(), True),
        (NotReplicated("'weight' of part 'model' has other values on rank 0 than on rank 1"), False),
        (CheckpointError("load again"), False),
        (NoUsableCheckpoint("none verifies"), False),
        (ValueError("elastic_agent.worker.errors.OtherRun: quoted"), False),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_what_no_restart_helps_is_known_from_what_a_worker_left(
    tmp_path: Path, error: Exception, final: bool, recorded: bool
) -> None:
    """An uncaught exception: in the error file of torch's `@record`, or as Python writes it."""
    if recorded:
        error_json({"message": f"{type(error).__name__}: {error}"})(tmp_path / "error.json")
    lines = "".join(traceback.format_exception(_raised(error))).splitlines()
    failure = examined(tmp_path, 1, tuple(f"[rank3]: {line}" for line in lines))
    assert (failure.action is Action.END) == final


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


def test_different_failures_have_different_fingerprints() -> None:
    different = [
        with_exception("ValueError: x"),
        with_exception("KeyError: x"),
        with_exception("ValueError: y"),
        with_exception("ValueError: x", returncode=2),
        with_exception(None),
        with_exception(None, returncode=-1),
        with_exception(None, returncode=-9),
        with_exception("ValueError: a face in a cafe"),
    ]
    assert len({print_of(failure) for failure in different}) == len(different)
    assert len(print_of(with_exception("x" * 5000))) <= 300


def sent(failure: Failure) -> Failure:
    """As another node reads it in the record of the node that failed."""
    record = NodeRecord("n2", "n2-1", "10.0.0.1", 4711, 2, failure=failure)
    found = NodeRecord.from_json(node_key("n2"), record.to_json()).failure
    assert found is not None
    return found


def test_what_fits_is_sent_as_it_is() -> None:
    bare = dataclasses.replace(FAILURE, exception=None, traceback=None, log_tail=(), log_file=None)
    for failure in (FAILURE, bare):
        assert sent(failure) == failure


@pytest.mark.parametrize("letter", ["x", '"', "\\", "é", "\U0001f4a5", "\t"])
def test_a_failure_fits_into_a_record_and_keeps_the_ends_of_traceback_and_log(
    tmp_path: Path, letter: str
) -> None:
    stack = letter * 20_000 + "the error"
    report = {"message": letter * 5000, "extraInfo": {"py_callstack": stack}}
    error_json(report)(tmp_path / "error.json")
    failure = examined(tmp_path, 1, (letter * 2000,) * 39 + ("the last line",))
    size = len(json.dumps(dataclasses.astuple(dataclasses.replace(failure, action=None))))
    assert size <= MAX_RECORD_BYTES // 4
    read = sent(failure)
    assert read == failure
    assert read.traceback is not None
    assert read.traceback.endswith("the error")
    assert read.log_tail[-1] == "the last line"


@given(st.text(), st.lists(st.text(st.characters(exclude_characters="\n"))), st.integers(-64, 255))
def test_whatever_a_worker_prints_the_failure_can_be_sent(
    message: str, log_tail: list[str], returncode: int
) -> None:
    last = (*log_tail, '  File "x", line 1, in f', message)
    failure = describe_failure(PostMortem("n", 1, 0, 0, returncode, log_tail=last))
    read = sent(failure)
    assert read.returncode == returncode
    summarize(failure, [read], "").encode()
    failure.fingerprint.encode()


FORGED = "n\x1b]0;title\x07\nfake\r\u202e\x1b[2J"


def test_a_failure_in_the_store_adds_no_line_and_nothing_that_a_terminal_obeys() -> None:
    read = sent(dataclasses.replace(FAILURE, summary=FORGED, log_file=FORGED, log_tail=(FORGED,)))
    assert {text.rstrip() for text in (read.summary, read.log_file or "", *read.log_tail)} == {"n fake"}
    several = sent(dataclasses.replace(FAILURE, exception=FORGED, traceback=FORGED))
    assert {several.exception, several.traceback} == {"n\nfake "}
    assert not [line for line in summarize(read, [read], "").split("\n") if line.startswith("fake")]


def test_the_summary_names_all_that_a_person_needs_and_repeats_nothing() -> None:
    other = dataclasses.replace(FAILURE, rank=0, node="n1", summary="killed by SIGABRT (signal 6)")
    assert summarize(FAILURE, [other], "see the traceback").split("\n")[1:-1] == [
        "Worker failure in generation 7: rank 3 (local rank 1 on node n2) failed first",
        "  cause:    exit code 1: RuntimeError: boom",
        "  known as: exception: see the traceback",
        "  log file: /logs/gen7/rank3/stderr.log",
        "  traceback:",
        "    Traceback (most recent call last):",
        '      File "t.py", line 1, in <module>',
        "    RuntimeError: boom",
        "  last lines of its output:",
        "    epoch 1",
        "  failed after it, usually because of it:",
        "    rank 0 (local rank 1 on node n1): killed by SIGABRT (signal 6)",
    ]


def failed_with(tmp_path: Path, exception: str, master_port: int = 41213) -> Failure:
    log = ("Traceback (most recent call last):", '  File "train.py", line 1, in <module>', exception)
    return examined(tmp_path, 1, log, master_port=master_port)


def of_torchs_server(port: int) -> str:
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    return f"torch.distributed.DistNetworkError: {caught.value}".partition("\n")[0]


def of_create_server(port: int) -> str:
    with pytest.raises(OSError, match="in use") as caught:
        socket.create_server(("127.0.0.1", port))
    return f"OSError: {caught.value}"


def of_older_torch(port: int) -> str:
    said = "The server socket has failed to bind to [::]:{} (errno: 98 - Address already in use)."
    return f"RuntimeError: {said.format(port)}"


def of_zeromq(port: int) -> str:
    return f"zmq.error.ZMQError: Address already in use (addr='tcp://*:{port}')"


@pytest.mark.parametrize("said_by", [of_torchs_server, of_create_server, of_older_torch, of_zeromq])
def test_a_port_that_is_taken_is_a_reason_of_its_own_with_its_owner(
    tmp_path: Path, said_by: Callable[[int], str]
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_PORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        failure = failed_with(tmp_path, said_by(port))
        assert owner.stdin is not None
        owner.stdin.close()
    assert failure.cause == "port"
    assert f"; port {port}: pid {owner.pid}, python" in failure.summary
    assert failure.action is Action.FREE


GLOO = "RuntimeError: [enforce fail at /build/gloo/transport/tcp/listener.cc:48] bind: Address already in use"


@pytest.mark.parametrize(
    ("exception", "reason"),
    [
        ("OSError: [Errno 98] Address already in use", "port"),
        (
            "OSError: [Errno 98] error while attempting to bind on address ('::', 8, 0, 0): address already in use",
            "port",
        ),
        (GLOO, "port"),
        ("RuntimeError: Address already in use", "port"),
        ("OSError: [Errno 98] Address '/run/x.sock' is already in use", "exception"),
        ("zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/x')", "exception"),
    ],
)
def test_only_who_wanted_a_port_found_one_taken(tmp_path: Path, exception: str, reason: str) -> None:
    assert failed_with(tmp_path, exception).cause == reason


HOLD_A_PORT = """
import socket, sys
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


UVICORN = (
    "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 9): address already in use"
)


@pytest.mark.parametrize(
    ("returncode", "lines", "reason"),
    [
        (1, ("INFO: started", UVICORN, "INFO: bye"), "port"),
        (1, (UVICORN, "trying another", "port 10 it is", "step 1", "step 2"), "unknown"),
        (1, ("unix socket /run/x.sock: address already in use",), "unknown"),
        (-9, (UVICORN,), "killed"),
        (1, (UVICORN, *TRACEBACK), "exception"),
    ],
)
def test_a_program_without_a_traceback_has_a_port_taken_by_its_last_words(
    tmp_path: Path, returncode: int, lines: tuple[str, ...], reason: str
) -> None:
    failure = examined(tmp_path, returncode, lines)
    assert failure.cause == reason
    assert ("address already in use; port 9: owner unknown" in failure.summary) == (reason == "port")
