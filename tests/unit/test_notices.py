"""Notices that this machine goes away: what each source's answers mean, and what the main loop learns of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from elastic_agent.agent.common.http_client import HttpReply
from elastic_agent.agent.configuration.parse import NoticeSource
from elastic_agent.agent.machine import notices
from elastic_agent.agent.machine.notices import (
    ACTION_PATH,
    DEFAULT_S,
    EVENTS_PATH,
    MAINTENANCE_PATH,
    MIN_LEFT_S,
    NAME_PATH,
    PREEMPTED_PATH,
    TOKEN_PATH,
    Aws,
    Azure,
    Gcp,
    Notice,
    NoticeReader,
    NoticeWatch,
    SourceFailed,
    WatchedFile,
    detect_cloud,
    read_contents,
    read_instant,
    source_for,
)

AT = "2026-01-02T03:04:05Z"
AT_UNIX = 1767323045.0
HTTP_AT = "Fri, 02 Jan 2026 03:04:05 GMT"
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
    assert read_instant(text) == at


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "now",
            "2026-01-02",
            "2026-01-02T03:04:05",
            "2026-13-02T03:04:05Z",
            "2026-01-02T25:04:05Z",
            AT * 2,
        ),
        *("Fri, 02 Jan", "Fri, 99 Jan 2026 03:04:05 GMT", None, 7),
    ],
)
def test_what_is_no_instant_is_none(text: object) -> None:
    assert read_instant(HTTP_AT) == AT_UNIX
    assert read_instant(text) is None


class Answers:
    """Answers by path, and knows what it was asked."""

    def __init__(self, answers: dict[str, HttpReply]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], str]] = []

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> HttpReply:
        self.asked.append((path, dict(headers), method))
        if path not in self.answers:
            raise SourceFailed(path)
        return self.answers[path]

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]


CloudT = TypeVar("CloudT", Aws, Gcp, Azure)


def asking(cloud: type[CloudT], answers: Answers) -> CloudT:
    source = cloud()
    source.ask = answers.ask  # type: ignore[method-assign]
    return source


# --- AWS


def aws(**answers: HttpReply) -> Aws:
    """An instance of EC2 with these answers at `action` and `token`."""
    paths = {"action": ACTION_PATH, "token": TOKEN_PATH}
    return asking(Aws, Answers(NOTHING_OF_AWS | {paths[name]: reply for name, reply in answers.items()}))


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_the_interruption_of_a_spot_instance(action: str) -> None:
    notice = aws(action=HttpReply(200, body(action=action, time=AT))).poll()
    assert notice == Notice(f"AWS interrupts this spot instance ('{action}') at '{AT}'", AT_UNIX)


def test_without_an_interruption_the_path_is_not_there() -> None:
    assert aws(action=HttpReply(404, b"<html>")).poll() is None


@pytest.mark.parametrize(
    "reply",
    [
        *(HttpReply(200, raw) for raw in HOSTILE),
        HttpReply(500, body(action="stop", time=AT)),
        HttpReply(200, body(time=AT)),
        HttpReply(200, body(action="stop", time=AT)[:-4]),
    ],
)
def test_what_aws_never_says_is_not_understood(reply: HttpReply) -> None:
    with pytest.raises(SourceFailed) as refused:
        aws(action=reply).poll()
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("at", ["soon", 7, None])
def test_an_interruption_at_no_instant_is_one_of_30_s(at: object) -> None:
    found = aws(action=HttpReply(200, body(action="stop", time=at))).poll()
    assert found is not None
    assert (found.ends_at, found.within_s) == (None, DEFAULT_S)


@pytest.mark.parametrize("reply", [HttpReply(403), HttpReply(200), HttpReply(200, b"<p>secret\nX: 1</p>")])
def test_what_is_no_token_is_not_understood_and_not_shown(reply: HttpReply) -> None:
    with pytest.raises(SourceFailed, match=f"token: status {reply.status}, no token in") as error:
        aws(token=reply).poll()
    assert "secret" not in str(error.value)


NOTHING_OF_AWS = {
    TOKEN_PATH: HttpReply(200, b"secret"),
    ACTION_PATH: HttpReply(404),
}


def test_a_token_is_asked_for_once() -> None:
    server = Answers(dict(NOTHING_OF_AWS))
    source = asking(Aws, server)
    assert source.poll() is None
    assert source.poll() is None
    wants, has = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, {"X-aws-ec2-metadata-token": "secret"}
    question = (ACTION_PATH, has, "GET")
    assert server.asked == [(TOKEN_PATH, wants, "PUT"), question, question]


def test_a_token_that_is_refused_is_replaced() -> None:
    server = Answers(dict(NOTHING_OF_AWS))
    source = asking(Aws, server)
    source.poll()
    server.answers[ACTION_PATH] = HttpReply(401)
    with pytest.raises(SourceFailed):
        source.poll()
    assert server.paths == [TOKEN_PATH, ACTION_PATH, ACTION_PATH, TOKEN_PATH, ACTION_PATH]


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
    server = Answers(
        {
            PREEMPTED_PATH: HttpReply(200, preempted),
            MAINTENANCE_PATH: HttpReply(200, maintenance),
        }
    )
    found = asking(Gcp, server).poll()
    assert type(found) is type(news)
    if isinstance(news, Notice) and isinstance(found, Notice):
        assert (found.ends_at, found.within_s) == (news.ends_at, news.within_s)
    if news is not None and found is not None:
        assert found.text.startswith(news.text)
    assert server.asked[0][1] == {"Host": "metadata.google.internal", "Metadata-Flavor": "Google"}


@pytest.mark.parametrize(
    "reply",
    [
        *(HttpReply(200, raw) for raw in HOSTILE),
        HttpReply(503, b"FALSE"),
        HttpReply(200, b"TRU"),
    ],
)
def test_what_google_never_says_is_not_understood(reply: HttpReply) -> None:
    well = HttpReply(200, b"FALSE")
    for answers in ({PREEMPTED_PATH: reply}, {PREEMPTED_PATH: well, MAINTENANCE_PATH: reply}):
        with pytest.raises(SourceFailed):
            asking(Gcp, Answers(answers)).poll()


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


def events(*all_of_them: object) -> HttpReply:
    return HttpReply(200, body(DocumentIncarnation=3, Events=list(all_of_them)))


def said_by_azure(reply: HttpReply) -> Notice | None:
    """Of the machine vm-7."""
    return asking(Azure, Answers({NAME_PATH: HttpReply(200, b"vm-7"), EVENTS_PATH: reply})).poll()


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
    reply: HttpReply, expected: type[Notice] | None
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
    "reply",
    [
        *(HttpReply(200, raw) for raw in HOSTILE),
        HttpReply(400, body(Events=[])),
        HttpReply(200, body(Events={})),
    ],
)
def test_what_azure_never_says_is_not_understood(reply: HttpReply) -> None:
    with pytest.raises(SourceFailed):
        said_by_azure(reply)


def test_this_machines_name_is_asked_for_once() -> None:
    server = Answers({NAME_PATH: HttpReply(200, b"vm-7"), EVENTS_PATH: events(event())})
    source = asking(Azure, server)
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


# --- A file


@pytest.mark.parametrize(
    ("raw", "ends_at"),
    [
        (b"", 1000.0 + DEFAULT_S),
        (b" \n", 1000.0 + DEFAULT_S),
        (b"10\n", 1010.0),
        (b"0.5", 1000.5),
        (AT.encode(), AT_UNIX),
        *((raw, 1000.0 + DEFAULT_S) for raw in (b"soon", b"-5", b"1e9", b"1767323045", b"9" * 4096)),
        *((raw, None) for raw in HOSTILE),
    ],
)
def test_any_contents_are_a_notice(raw: bytes, ends_at: float | None) -> None:
    found = read_contents(raw[:4096], "/run/leave", 1000.0)
    assert found.text.startswith("the file /run/leave ")
    assert len(found.text) < 400
    assert found.text.isprintable()
    assert found.ends_at == (ends_at or found.ends_at)


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
    assert type(source_for(NoticeSource("auto"), dmi=tmp_path)) is chosen
    assert source_for(NoticeSource("off"), dmi=tmp_path) is None
    wanted = NoticeSource("file", "/run/leave")
    assert source_for(wanted) == WatchedFile("/run/leave")


# --- The watch


class Scene(NoticeReader):
    """A watch over a source that says what the test wants, at 1000 s Unix time and 10 s of the monotonic clock."""

    def __init__(self) -> None:
        self.news: Notice | Exception | None = None
        self.told: list[tuple[str, float | None]] = []
        self.watch = NoticeWatch(self, self.hear, lambda call: call(), lambda: 10.0, lambda: 1000.0)

    def hear(self, text: str, deadline: float | None) -> None:
        self.told.append((text, deadline))

    def poll(self) -> Notice | None:
        if isinstance(self.news, Exception):
            raise self.news
        return self.news

    def polls(self, *news: Notice | Exception | None) -> list[tuple[str, float | None]]:
        self.told.clear()
        for one in news:
            self.news = one
            self.watch.poll()
        return self.told


def test_a_notice_is_given_once_with_a_monotonic_deadline() -> None:
    scene, notice = Scene(), Notice("x", 1030.0)
    assert scene.polls(None, notice, notice, SourceFailed("gone"), notice) == [("x", 40.0)]
    assert scene.polls(Notice("x", 1005.0)) == [("x", 15.0)]
    assert scene.polls(None, None) == [("", None)]
    assert scene.polls(Notice("x", None, 30.0), Notice("x", None, 30.0)) == [("x", 40.0)]


@pytest.mark.parametrize("ends_at", [-62135596800.0, 0.0, 999.0, 1001.9])
def test_an_instant_that_has_passed_leaves_some_time(ends_at: float) -> None:
    assert Scene().polls(Notice("x", ends_at)) == [("x", 10.0 + MIN_LEFT_S)]


@pytest.mark.parametrize("error", [SourceFailed("no route"), AttributeError("no route")])
def test_a_source_that_fails_is_one_warning_and_withdraws_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scene = Scene()
    given = scene.polls(Notice("x", 1030.0), *[error] * 3, Notice("x", 1005.0))
    assert given == [("x", 40.0), ("x", 15.0)]
    [record] = caplog.records
    assert (record.levelname, "no route" in record.message) == ("WARNING", True)
    scene.polls(error)
    assert len(caplog.records) == 2
