"""Notices that this machine goes away: what each source's answers mean, and what the main loop learns of them."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastic_agent.agent.common.http_client import Reply
from elastic_agent.agent.configuration.values import NoticeSource
from elastic_agent.agent.machine import notices
from elastic_agent.agent.machine.notices import (
    ACTION_PATH,
    COMMAND_S,
    DEFAULT_S,
    EVENTS_PATH,
    FILE_INTERVAL_S,
    MAINTENANCE_PATH,
    MAX_CONTENTS,
    MIN_LEFT_S,
    NAME_PATH,
    PREEMPTED_PATH,
    REBALANCE_PATH,
    SETTLED_S,
    TOKEN_PATH,
    TOKEN_TTL_S,
    Aws,
    Azure,
    Gcp,
    MetadataServer,
    Notice,
    NoticeWatch,
    SourceFailed,
    WatchedCommand,
    WatchedFile,
    WrongAnswer,
    detect_cloud,
    read_contents,
    read_http_date,
    read_rfc3339,
    source_for,
)
from elastic_agent.agent.workers.processes.workers import tied

AT = "2026-01-02T03:04:05Z"
AT_UNIX = 1767323045.0
HTTP_AT = "Fri, 02 Jan 2026 03:04:05 GMT"
GOOGLE = {"metadata-flavor": "Google"}
HOSTILE = (
    b"",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"7",
    b"[" * 100_000,
    b"<html>not found</html>",
    b'{"a": ' + b"9" * 5000 + b"}",
)
"""What no source says, and any program that listens in its place may."""


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


# --- Instants


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (AT, AT_UNIX),
        ("2026-01-02t03:04:05z", AT_UNIX),
        ("2026-01-02 03:04:05+00:00", AT_UNIX),
        ("2026-01-02T04:04:05.999999999+01:00", AT_UNIX),
        ("2026-01-02T03:04:05.9Z", AT_UNIX),
        ("0001-01-01T00:00:00Z", -62135596800.0),
    ],
)
def test_an_instant_of_rfc_3339(text: str, at: float) -> None:
    assert read_rfc3339(text) == at


@pytest.mark.parametrize(
    "text",
    ["", "now", "2026-01-02", "2026-01-02T03:04:05", "2026-13-02T03:04:05Z", "2026-01-02T25:04:05Z", AT * 2],
)
def test_what_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_rfc3339(text)


@pytest.mark.parametrize("text", ["", "soon", AT, "Fri, 02 Jan", "Fri, 99 Jan 2026 03:04:05 GMT"])
def test_what_is_no_date_of_http_is_refused(text: str) -> None:
    assert read_http_date(HTTP_AT) == AT_UNIX
    assert read_http_date(text) is None


class Server(MetadataServer):
    """Answers by path, and knows what it was asked."""

    def __init__(self, answers: dict[str, Reply]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], str]] = []

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> Reply:
        self.asked.append((path, dict(headers), method))
        if path not in self.answers:
            raise SourceFailed(path)
        return self.answers[path]

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]


# --- AWS


def aws(*, leaves_on_rebalance: bool = False, **answers: Reply) -> Aws:
    """An instance of EC2 with these answers at `action`, `rebalance` and `token`."""
    paths = {"action": ACTION_PATH, "rebalance": REBALANCE_PATH, "token": TOKEN_PATH}
    server = Server(NOTHING_OF_AWS | {paths[name]: reply for name, reply in answers.items()})
    return Aws(server, lambda: 100.0, leaves_on_rebalance=leaves_on_rebalance)


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_the_interruption_of_a_spot_instance(action: str) -> None:
    notice = aws(action=Reply(200, body(action=action, time=AT))).poll()
    assert notice == Notice(f"AWS interrupts this spot instance ({action}) at {AT}", AT_UNIX)


def test_without_an_interruption_the_path_is_not_there() -> None:
    assert aws(action=Reply(404, b"<html>"), rebalance=Reply(404)).poll() is None


@pytest.mark.parametrize(
    "reply",
    [
        *(Reply(200, raw) for raw in HOSTILE),
        Reply(500, body(action="stop", time=AT)),
        Reply(200, body(action="dance", time=AT)),
        Reply(200, body(action="stop", time="soon")),
        Reply(200, body(action="stop", time=7)),
        Reply(200, body(action=["stop"], time=AT)),
        Reply(200, body(action="stop", time=AT)[:-4]),
    ],
)
def test_what_aws_never_says_is_not_understood(reply: Reply) -> None:
    for source in (aws(action=reply), aws(rebalance=reply, leaves_on_rebalance=True)):
        with pytest.raises(WrongAnswer) as refused:
            source.poll()
        assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "reply", [Reply(403), Reply(200), Reply(200, b"a b"), Reply(200, b"a\r\nHost: x"), Reply(200, b"x" * 513)]
)
def test_what_is_no_token_is_not_understood_and_not_shown(reply: Reply) -> None:
    with pytest.raises(WrongAnswer) as refused:
        aws(token=reply).poll()
    assert "'" not in str(refused.value)


NOTHING_OF_AWS = {
    TOKEN_PATH: Reply(200, b"secret"),
    ACTION_PATH: Reply(404),
    REBALANCE_PATH: Reply(404),
}


def test_a_token_is_asked_for_once_and_renewed_before_it_ends() -> None:
    server, now = Server(dict(NOTHING_OF_AWS)), [100.0]
    source = Aws(server, lambda: now[0])
    for at in (100.0, 101.0, 100.0 + TOKEN_TTL_S / 2):
        now[0] = at
        assert source.poll() is None
    tokens = [question for question in server.asked if question[0] == TOKEN_PATH]
    assert tokens == [(TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, "PUT")] * 2
    others = [question[1:] for question in server.asked if question[0] != TOKEN_PATH]
    assert all(other == ({"X-aws-ec2-metadata-token": "secret"}, "GET") for other in others)


def test_a_token_that_is_refused_is_replaced() -> None:
    server = Server({**NOTHING_OF_AWS, ACTION_PATH: Reply(401)})
    with pytest.raises(SourceFailed):
        Aws(server, lambda: 100.0).poll()
    assert server.paths == [TOKEN_PATH, ACTION_PATH] * 2


def test_a_recommendation_counts_only_where_the_user_wants_to_leave_for_it() -> None:
    recommended = {**NOTHING_OF_AWS, REBALANCE_PATH: Reply(200, body(noticeTime=AT))}
    assert Aws(Server(recommended), lambda: 0.0).poll() is None
    leaves = Aws(Server(recommended), lambda: 0.0, leaves_on_rebalance=True).poll()
    assert leaves is not None
    assert AT in leaves.text
    assert (leaves.ends_at, leaves.within_s) == (None, None), "the instance may live on for days"
    both = {**recommended, ACTION_PATH: Reply(200, body(action="terminate", time=AT))}
    found = Aws(Server(both), lambda: 0.0, leaves_on_rebalance=True).poll()
    assert isinstance(found, Notice)
    assert found.ends_at == AT_UNIX


# --- GCP


@pytest.mark.parametrize(
    ("preempted", "maintenance", "news"),
    [
        (b"FALSE", b"NONE", None),
        (b"FALSE\n", b"NONE\n", None),
        (b"TRUE", b"NONE", Notice("Google preempts this machine", None, 30.0)),
        (b"TRUE", b"rubbish", Notice("Google preempts this machine", None, 30.0)),
        (b"FALSE", b"MIGRATE_ON_HOST_MAINTENANCE", None),
        (b"FALSE", b"TERMINATE_ON_HOST_MAINTENANCE", Notice("Google ends this machine", None, 60.0)),
    ],
)
def test_what_google_says(preempted: bytes, maintenance: bytes, news: Notice | None) -> None:
    server = Server(
        {
            PREEMPTED_PATH: Reply(200, preempted, GOOGLE),
            MAINTENANCE_PATH: Reply(200, maintenance, GOOGLE),
        }
    )
    found = Gcp(server).poll()
    assert type(found) is type(news)
    if isinstance(news, Notice) and isinstance(found, Notice):
        assert (found.ends_at, found.within_s) == (news.ends_at, news.within_s)
    if news is not None and found is not None:
        assert found.text.startswith(news.text)
    assert server.asked[0][1] == {"Host": "metadata.google.internal", "Metadata-Flavor": "Google"}


@pytest.mark.parametrize(
    "reply",
    [
        *(Reply(200, raw, GOOGLE) for raw in HOSTILE),
        Reply(503, b"FALSE", GOOGLE),
        Reply(200, b"FALSE"),
        Reply(200, b"NONE", {"metadata-flavor": "other"}),
        Reply(200, b"TRU", GOOGLE),
    ],
)
def test_what_google_never_says_is_not_understood(reply: Reply) -> None:
    well = Reply(200, b"FALSE", GOOGLE)
    for answers in ({PREEMPTED_PATH: reply}, {PREEMPTED_PATH: well, MAINTENANCE_PATH: reply}):
        with pytest.raises(WrongAnswer):
            Gcp(Server(answers)).poll()


# --- Azure


def event(
    kind: object = "Preempt", at: object = HTTP_AT, machine: str = "vm-7", **more: object
) -> dict[str, object]:
    return {
        "EventId": "1",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "EventStatus": "Scheduled",
        "NotBefore": at,
        **more,
    }


def events(*all_of_them: object) -> Reply:
    return Reply(200, body(DocumentIncarnation=3, Events=list(all_of_them)))


def said_by_azure(reply: Reply) -> Notice | None:
    """Of the machine vm-7."""
    return Azure(Server({NAME_PATH: Reply(200, b"vm-7"), EVENTS_PATH: reply})).poll()


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_an_event_that_ends_this_machine(kind: str) -> None:
    found = said_by_azure(events(event(kind)))
    assert isinstance(found, Notice)
    assert (found.text, found.ends_at) == (f"{notices.ENDS[kind]}, not before '{HTTP_AT}'", AT_UNIX)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (events(), None),
        (events(event(machine="vm-8")), None),
        (events(event(EventStatus="Completed")), None),
        (events(event("Dance")), None),
        (events(event("Freeze")), None),
        (events(event("Freeze"), event("Reboot")), Notice),
        (events({}, 7, None, [], event(7), event(Resources="vm-7"), event("Redeploy")), Notice),
    ],
)
def test_only_events_of_this_machine_that_end_it_are_notices(
    reply: Reply, expected: type[Notice] | None
) -> None:
    found = said_by_azure(reply)
    assert type(found) is (expected or type(None))


@pytest.mark.parametrize("at", ["", None, "soon", 7])
def test_an_event_that_has_begun_has_no_instant_and_is_the_first(at: object) -> None:
    later = event("Reboot", HTTP_AT)
    found = said_by_azure(events(later, event("Preempt", at, EventStatus="Started")))
    assert isinstance(found, Notice)
    assert (found.text[:10], found.ends_at, found.within_s) == ("Azure take", None, notices.BEGUN_S)


@pytest.mark.parametrize(
    "reply", [*(Reply(200, raw) for raw in HOSTILE), Reply(400, body(Events=[])), Reply(200, body(Events={}))]
)
def test_what_azure_never_says_is_not_understood(reply: Reply) -> None:
    with pytest.raises(WrongAnswer):
        said_by_azure(reply)


def test_this_machines_name_is_asked_for_once() -> None:
    server = Server({NAME_PATH: Reply(200, b"vm-7"), EVENTS_PATH: events(event())})
    source = Azure(server)
    assert isinstance(source.poll(), Notice)
    assert isinstance(source.poll(), Notice)
    assert server.paths == [NAME_PATH, EVENTS_PATH, EVENTS_PATH]
    assert all(headers == {"Metadata": "true"} for _, headers, _ in server.asked)


@pytest.mark.parametrize(
    "at", ["x" * 5000, "\x1b[2J\nERROR all is lost", f"{HTTP_AT} (\r\n{'x' * 5000})", ["x" * 5000]]
)
def test_what_azure_names_as_the_instant_is_quoted_and_shortened(at: object) -> None:
    found = said_by_azure(events(event("Preempt", at)))
    assert isinstance(found, Notice)
    assert found.text.isprintable()
    assert len(found.text) < 300


# --- A file, a command


@pytest.mark.parametrize(
    ("raw", "ends_at", "within_s"),
    [
        (b"", 1000.0 + DEFAULT_S, DEFAULT_S),
        (b" \n", 1000.0 + DEFAULT_S, DEFAULT_S),
        (b"10\n", 1010.0, 10.0),
        (b"0.5", 1000.5, 0.5),
        (AT.encode(), AT_UNIX, DEFAULT_S),
        (b"1767323045\n", AT_UNIX, DEFAULT_S),
        (b"999999999", 1000.0 + 999999999, 999999999.0),
        (b"soon", 1000.0 + DEFAULT_S, DEFAULT_S),
        (b"-5", 1000.0 + DEFAULT_S, DEFAULT_S),
        (b"9" * 4096, 1000.0 + DEFAULT_S, DEFAULT_S),
        *((raw, None, None) for raw in HOSTILE),
    ],
)
def test_any_contents_are_a_notice(raw: bytes, ends_at: float | None, within_s: float | None) -> None:
    found = read_contents(raw[:4096], "the file /run/leave", 1000.0)
    assert found.text.startswith("the file /run/leave says that this machine goes away")
    assert len(found.text) < 300
    assert found.text.isprintable()
    if ends_at is not None:
        assert (found.ends_at, found.within_s) == (ends_at, within_s)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"999999999", "away within 999999999 s"),
        (b"1767323045", f"away at {AT}"),
        (b"45 s", "away within 30 s, as '45 s' is neither seconds nor an instant"),
        (b"1e9", "away within 30 s, as '1e9' is neither seconds nor an instant"),
        (b"1767323045000", "away within 30 s, as '1767323045000' is neither seconds nor an instant"),
        (b"", "away within 30 s"),
    ],
)
def test_what_is_not_understood_is_named(raw: bytes, words: str) -> None:
    assert read_contents(raw, "it", 1000.0).text == f"it says that this machine goes {words}"


def test_seconds_in_a_file_count_since_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    source = WatchedFile(str(path))
    assert source.poll() is None
    path.write_text("45")
    os.utime(path, (5000.0, 5000.0))
    found = source.poll()
    assert isinstance(found, Notice)
    assert found.ends_at == 5045.0


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # without a writer
    os.mkfifo(tmp_path / "written")
    writer = os.open(tmp_path / "written", os.O_RDWR | os.O_NONBLOCK)
    try:
        for path in (tmp_path, tmp_path / "pipe", tmp_path / "written", "/dev/null", "/dev/tty"):
            with pytest.raises(SourceFailed, match="no regular file"):
                WatchedFile(str(path)).poll()
    finally:
        os.close(writer)


@pytest.mark.parametrize("half", ["", "2026-01-02T03:", "soon"])
def test_a_file_that_may_be_half_written_is_no_notice_yet(tmp_path: Path, half: str) -> None:
    path = tmp_path / "leave"

    def end(text: str, now: float) -> float | None:
        """Of a file that was written at 5000 s."""
        path.write_text(text)
        os.utime(path, (5000.0, 5000.0))
        found = WatchedFile(str(path), lambda: now).poll()
        return found.ends_at if found is not None else None

    assert [end(half, now) for now in (5000.0, 5000.9)] == [None, None]
    assert end(half, 5000.0 + SETTLED_S) == 5000.0 + DEFAULT_S
    assert end(half, 4999.0) == 5000.0 + DEFAULT_S, "by a clock that is behind the disk's"
    assert end(AT, 5000.0) == AT_UNIX


def command(tmp_path: Path, script: str) -> WatchedCommand:
    path = tmp_path / "ask"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return WatchedCommand(str(path), {**os.environ, "WHO": "me"}, tied)


@pytest.mark.parametrize(
    ("script", "within_s"), [("exit 1", None), ("echo 12", 12.0), ("true", DEFAULT_S), ("kill -9 $$", None)]
)
def test_a_command_gives_notice_by_its_exit_code(tmp_path: Path, script: str, within_s: float | None) -> None:
    found = command(tmp_path, script).poll()
    assert (found.within_s if isinstance(found, Notice) else None) == within_s
    assert not isinstance(found, Notice) or found.ends_at is None


def test_a_command_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agent.agent.machine.notices.COMMAND_S", 0.1)
    with pytest.raises(SourceFailed, match="has not ended"):
        command(tmp_path, "sleep 100").poll()


def test_a_command_that_is_not_there_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="cannot be started"):
        WatchedCommand(str(tmp_path / "none"), {}, tied).poll()


def test_a_command_that_prints_without_end_is_ended_and_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_agent.agent.machine.notices.COMMAND_S", 1.0)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(SourceFailed, match="has not ended within 1 s"):
        command(tmp_path, "exec yes 0123456789012345678901234567890123456789").poll()
    assert time.monotonic() - began < 5.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024  # KiB


def test_of_what_a_command_prints_only_the_beginning_is_read(tmp_path: Path) -> None:
    found = command(tmp_path, f"printf %{4 * MAX_CONTENTS}d 7").poll()
    assert isinstance(found, Notice)
    assert found.text.endswith("within 30 s")


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def await_true(answer: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not answer():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_that_holds_the_output_hides_no_notice_and_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    found = command(tmp_path, f"sleep 100 & echo $! > {tmp_path}/child; echo 12").poll()
    assert isinstance(found, Notice)
    assert found.within_s == 12.0
    assert time.monotonic() - began < COMMAND_S
    child = int((tmp_path / "child").read_text())
    await_true(lambda: not alive(child))


def test_a_command_that_may_not_be_killed_gives_notice_and_is_not_started_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under sudo."""

    def refuse(group: int, number: int) -> None:
        raise PermissionError

    def pids() -> list[int]:
        return [int(line) for line in (tmp_path / "pids").read_text().split()]

    module = "elastic_agent.agent.machine.notices"
    kill = os.killpg
    monkeypatch.setattr(f"{module}.os.killpg", refuse)
    found = command(tmp_path, "echo 12").poll()
    assert isinstance(found, Notice)
    monkeypatch.setattr(f"{module}.COMMAND_S", 0.2)
    monkeypatch.setattr(f"{module}.KILLED_S", 0.1)
    source = command(tmp_path, f"echo $$ >> {tmp_path}/pids; exec sleep 100")
    (tmp_path / "pids").touch()
    with pytest.raises(SourceFailed, match="has not ended within"):
        source.poll()
    with pytest.raises(SourceFailed, match="cannot be killed"):
        source.poll()
    await_true(lambda: len(pids()) == 1)
    [pid] = pids()
    kill(pid, signal.SIGKILL)
    await_true(lambda: not alive(pid))
    with pytest.raises(SourceFailed, match="has not ended within"):
        source.poll()
    await_true(lambda: len(pids()) == 2)
    kill(pids()[-1], signal.SIGKILL)


def test_a_command_dies_with_its_agent(tmp_path: Path) -> None:
    source = command(tmp_path, f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 100")
    agent = f"""
from elastic_agent.agent.machine.notices import WatchedCommand
from elastic_agent.agent.workers.processes.workers import tied
WatchedCommand({source.program!r}, {{"PATH": {os.environ["PATH"]!r}}}, tied).poll()
"""
    with subprocess.Popen([sys.executable, "-c", agent]) as process:
        await_true((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
        process.kill()
    await_true(lambda: not alive(pid))


# --- Which source


@pytest.mark.parametrize(
    ("fields", "cloud"),
    [
        ({}, ""),
        ({"sys_vendor": "Amazon EC2", "product_name": "g5.xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Google", "product_name": "Pixelbook"}, ""),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783"}, ""),
        ({"sys_vendor": "QEMU"}, ""),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path: Path, fields: dict[str, str], cloud: str) -> None:
    for name, value in fields.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert detect_cloud(tmp_path) == cloud
    chosen = {"": type(None), "aws": Aws, "gcp": Gcp, "azure": Azure}[cloud]
    assert type(source_for(NoticeSource("auto"), {}, tied, dmi=tmp_path)) is chosen
    assert source_for(NoticeSource("off"), {}, tied, dmi=tmp_path) is None
    wanted = NoticeSource("file", "/run/leave")
    assert source_for(wanted, {}, tied) == WatchedFile("/run/leave")


# --- The watch


class Scene:
    """A watch over a source that says what the test wants, at 1000 s Unix time and 10 s of the monotonic clock."""

    def __init__(self, *, expected: bool = False) -> None:
        self.news: Notice | Exception | None = None
        self.told: list[tuple[str | None, float | None]] = []
        self.watch = NoticeWatch(
            self, self.hear, lambda call: call(), lambda: 10.0, lambda: 1000.0, expected=expected
        )

    def hear(self, text: str | None, deadline: float | None) -> None:
        self.told.append((text, deadline))

    interval_s = 0.5

    def poll(self) -> Notice | None:
        if isinstance(self.news, Exception):
            raise self.news
        return self.news

    def turns(self, *news: Notice | Exception | None) -> list[tuple[str | None, float | None]]:
        self.told.clear()
        for one in news:
            self.news = one
            self.watch.turn()
        return self.told


def test_a_notice_is_given_once_with_a_monotonic_deadline() -> None:
    scene, notice = Scene(), Notice("x", 1030.0)
    assert scene.turns(None, notice, notice, SourceFailed("gone"), notice) == [("x", 40.0)]
    assert scene.turns(Notice("x", 1030.9)) == []
    assert scene.turns(Notice("x", 1005.0)) == [("x", 15.0)]
    assert scene.turns(None, None) == [(None, None)]
    assert scene.turns(Notice("x", None, 30.0), Notice("x", None, 30.0)) == [("x", 40.0)]
    assert scene.turns(*[Notice("x", within_s=None)] * 2, notice) == [
        ("x", None),
        ("x", 40.0),
    ]


@pytest.mark.parametrize("ends_at", [-62135596800.0, 0.0, 999.0, 1001.9])
def test_an_instant_that_has_passed_leaves_some_time(ends_at: float) -> None:
    assert Scene().turns(Notice("x", ends_at)) == [("x", 10.0 + MIN_LEFT_S)]


@pytest.mark.parametrize(("expected", "level"), [(True, logging.WARNING), (False, logging.DEBUG)])
def test_a_silent_source_is_one_line(expected: bool, level: int, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("elastic_agent").propagate = True
    caplog.set_level(logging.DEBUG)
    scene = Scene(expected=expected)
    scene.turns(*[SourceFailed("no route")] * 5)
    assert [(record.levelno, "no route" in record.message) for record in caplog.records] == [(level, True)]
    assert scene.watch.turn() == scene.interval_s
    scene.turns(None, SourceFailed("again"))
    assert len(caplog.records) == 2


def test_a_defect_of_a_source_is_one_warning_and_withdraws_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("elastic_agent").propagate = True
    scene = Scene()
    given = scene.turns(Notice("x", 1030.0), *[AttributeError("of None")] * 3, Notice("x", 1005.0))
    assert given == [("x", 40.0), ("x", 15.0)]
    [record] = caplog.records
    assert (record.levelname, "AttributeError('of None')" in record.message) == ("WARNING", True)


def test_a_file_that_cannot_be_read_is_looked_at_again_as_soon_as_another(tmp_path: Path) -> None:
    source = WatchedFile(str(tmp_path))
    watch = NoticeWatch(source, lambda *_: None, lambda call: None, lambda: 0.0, lambda: 0.0, expected=True)
    assert watch.turn() == source.interval_s == FILE_INTERVAL_S


def test_what_is_not_understood_is_one_warning_and_withdraws_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("elastic_agent").propagate = True
    scene = Scene(expected=True)
    given = scene.turns(Notice("x", 1030.0), *[SourceFailed("rubbish")] * 3)
    assert given == [("x", 40.0)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("error", [WrongAnswer("status 403"), AttributeError("of None")])
def test_a_silent_source_that_then_answers_wrongly_is_a_warning(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("elastic_agent").propagate = True
    caplog.set_level(logging.DEBUG)
    silent = SourceFailed("no route")
    Scene().turns(silent, error, silent, error)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "WARNING"]
