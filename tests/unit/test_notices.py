"""Notices that this machine goes away: what each source's answers mean, and what the main loop learns of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastic_agent.agent.common.http_client import HttpReply
from elastic_agent.agent.configuration.parse import NoticeSource
from elastic_agent.agent.machine.notices import (
    ACTION_PATH,
    BEGUN_S,
    DEFAULT_S,
    EVENTS_PATH,
    MAINTENANCE_PATH,
    MIN_LEFT_S,
    NAME_PATH,
    PREEMPTED_PATH,
    TOKEN_PATH,
    MetadataServer,
    Notice,
    NoticeWatch,
    WatchedFile,
    aws,
    azure,
    detect_cloud,
    gcp,
    read_instant,
    source_for,
)
from elastic_agent.codec import Invalid

AT, AT_UNIX, HTTP_AT = "2026-01-02T03:04:05Z", 1767323045.0, "Fri, 02 Jan 2026 03:04:05 GMT"
HOSTILE = (b"", b"\xff\xfe\x00", b"[" * 100_000, b"<html>not found</html>", b'{"a": ' + b"9" * 5000 + b"}")
"""What no source says, and any program that listens in its place may."""


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        *((text, AT_UNIX) for text in (AT, AT.lower(), "2026-01-02 03:04:05+00:00", HTTP_AT)),
        ("2026-01-02T04:04:05.999999999+01:00", AT_UNIX),
        ("0001-01-01T00:00:00Z", -62135596800.0),
        *((text, None) for text in ("", "now", "2026-01-02", "2026-01-02T03:04:05", AT * 2, None, 7)),
        *((text, None) for text in ("2026-13-02T03:04:05Z", "Fri, 02 Jan", "Fri, 99 Jan 2026 03:04:05 GMT")),
    ],
)
def test_an_instant(text: object, at: float | None) -> None:
    assert read_instant(text) == at


class Server(MetadataServer):
    """Answers by path, and knows what it was asked."""

    def __init__(self, cloud: Callable[[MetadataServer], Notice | None], **answers: HttpReply) -> None:
        super().__init__(cloud)
        self.answers = {PATHS[name]: reply for name, reply in answers.items()}
        self.asked: list[tuple[str, dict[str, str], str]] = []

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> HttpReply:
        self.asked.append((path, dict(headers), method))
        return self.answers[path]


PATHS = {
    "token": TOKEN_PATH,
    "action": ACTION_PATH,
    "preempted": PREEMPTED_PATH,
    "maintenance": MAINTENANCE_PATH,
    "name": NAME_PATH,
    "events": EVENTS_PATH,
}


def said_by_aws(reply: HttpReply) -> Notice | None:
    return Server(aws, token=HttpReply(200, b"secret"), action=reply).poll()


def said_by_google(preempted: HttpReply, maintenance: bytes = b"NONE") -> Notice | None:
    return Server(gcp, preempted=preempted, maintenance=HttpReply(200, maintenance)).poll()


def said_by_azure(reply: HttpReply) -> Notice | None:
    """Of the machine vm-7."""
    return Server(azure, name=HttpReply(200, b"vm-7"), events=reply).poll()


@pytest.mark.parametrize("says", [said_by_aws, said_by_google, said_by_azure])
@pytest.mark.parametrize(
    "reply",
    [*(HttpReply(200, raw) for raw in HOSTILE), HttpReply(500, b"FALSE"), HttpReply(403, body(Events=[]))],
)
def test_what_a_cloud_never_says_is_not_understood(
    says: Callable[[HttpReply], object], reply: HttpReply
) -> None:
    with pytest.raises(Invalid) as refused:
        says(reply)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("reply", [HttpReply(403), HttpReply(200), HttpReply(200, b"<p>secret\nX: 1</p>")])
def test_what_is_no_token_is_not_understood_and_not_shown(reply: HttpReply) -> None:
    with pytest.raises(Invalid, match=f"status {reply.status}, and no word in") as error:
        Server(aws, token=reply).poll()
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("reply", "notice"),
    [
        (HttpReply(404, b"<html>"), None),
        (
            HttpReply(200, body(action="stop", time=AT)),
            Notice(f"AWS interrupts this spot instance ('stop') at '{AT}'", AT_UNIX),
        ),
        (
            HttpReply(200, body(action="stop", time="soon")),
            Notice("AWS interrupts this spot instance ('stop') at 'soon'", None, DEFAULT_S),
        ),
    ],
)
def test_the_interruption_of_a_spot_instance(reply: HttpReply, notice: Notice | None) -> None:
    assert said_by_aws(reply) == notice


def test_a_token_is_asked_for_once_and_replaced_when_it_is_refused() -> None:
    server = Server(aws, token=HttpReply(200, b"secret"), action=HttpReply(404))
    assert server.poll() is None
    assert server.poll() is None
    wants, has = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, {"X-aws-ec2-metadata-token": "secret"}
    question = (ACTION_PATH, has, "GET")
    assert server.asked == [(TOKEN_PATH, wants, "PUT"), question, question]
    server.answers[ACTION_PATH] = HttpReply(401)
    with pytest.raises(Invalid):
        server.poll()
    assert [path for path, _, _ in server.asked[3:]] == [ACTION_PATH, TOKEN_PATH, ACTION_PATH]


@pytest.mark.parametrize(
    ("preempted", "maintenance", "within_s"),
    [
        (b"FALSE\n", b"NONE\n", None),
        (b"TRUE", b"rubbish", 30.0),
        (b"FALSE", b"MIGRATE_ON_HOST_MAINTENANCE", None),
        (b"FALSE", b"TERMINATE_ON_HOST_MAINTENANCE", 60.0),
    ],
)
def test_what_google_says(preempted: bytes, maintenance: bytes, within_s: float | None) -> None:
    notice = said_by_google(HttpReply(200, preempted), maintenance)
    assert (notice and notice.within_s) == within_s


def event(kind: object = "Preempt", at: object = HTTP_AT, machine: str = "vm-7", **more: object) -> object:
    scheduled = {"EventType": kind, "Resources": [machine], "EventStatus": "Scheduled", "NotBefore": at}
    return scheduled | more


def events(*all_of_them: object) -> HttpReply:
    return HttpReply(200, body(DocumentIncarnation=3, Events=list(all_of_them)))


@pytest.mark.parametrize(
    ("reply", "ends_at"),
    [
        (events(), ()),
        (events(event(machine="vm-8")), ()),
        (events(event(EventStatus="Completed")), ()),
        (events(event("Freeze"), event("Dance")), ()),
        *((events(event(kind)), AT_UNIX) for kind in ("Preempt", "Terminate", "Reboot", "Redeploy")),
        (events({}, 7, None, [], event(7), event([]), event(Resources="vm-7"), event("Redeploy")), AT_UNIX),
        *(
            (events(event("Reboot"), event(at=at, EventStatus="Started")), None)
            for at in ("", None, "soon", 7)
        ),
    ],
)
def test_events_that_end_this_machine_are_notices_and_one_that_has_begun_is_the_first(
    reply: HttpReply, ends_at: object
) -> None:
    notice = said_by_azure(reply)
    assert (notice.ends_at if notice is not None else ()) == ends_at
    assert notice is None or notice.ends_at is not None or notice.within_s == BEGUN_S


def test_this_machines_name_is_asked_for_once() -> None:
    server = Server(azure, name=HttpReply(200, b"vm-7"), events=events(event()))
    assert server.poll() == server.poll() is not None
    assert [path for path, _, _ in server.asked] == [NAME_PATH, EVENTS_PATH, EVENTS_PATH]
    assert all(headers == {"Metadata": "true"} for _, headers, _ in server.asked)


@pytest.mark.parametrize("at", ["x" * 5000, "\x1b[2J\nERROR all is lost", ["x" * 5000]])
def test_what_a_source_names_as_the_instant_is_quoted_and_shortened(at: object) -> None:
    for found in (said_by_azure(events(event(at=at))), said_by_aws(HttpReply(200, body(action=at, time=at)))):
        assert found is not None
        assert found.text.isprintable()
        assert len(found.text) < 400


@pytest.mark.parametrize(
    ("raw", "ends_at"),
    [
        *((raw, 1000.0 + DEFAULT_S) for raw in (b"", b" \n", b"soon", b"-5", b"1e9", b"9" * 4096, *HOSTILE)),
        *((b"10\n", 1010.0), (b"0.5", 1000.5), (AT.encode(), AT_UNIX)),
    ],
)
def test_any_file_is_a_notice_and_seconds_count_since_it_was_written(
    tmp_path: Path, raw: bytes, ends_at: float
) -> None:
    source = WatchedFile(str(path := tmp_path / "leave"))
    assert source.poll() is None
    path.write_bytes(raw)
    os.utime(path, (1000.0, 1000.0))
    found = source.poll()
    assert found is not None
    assert found.text.isprintable()
    assert len(found.text) < 600
    assert found.ends_at == ends_at


def test_what_is_no_file_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # without a writer
    for path in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(Invalid, match="no regular file"):
            WatchedFile(str(path)).poll()


@pytest.mark.parametrize(
    ("fields", "cloud"),
    [
        ({}, ""),
        ({"sys_vendor": "Amazon EC2", "product_name": "g5.xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Google", "product_name": "Pixelbook"}, ""),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783"}, ""),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path: Path, fields: dict[str, str], cloud: str) -> None:
    for name, value in fields.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert detect_cloud(tmp_path) == cloud
    source = source_for(NoticeSource("auto"), dmi=tmp_path)
    assert (source.says.__name__ if isinstance(source, MetadataServer) else "") == cloud
    assert source_for(NoticeSource("off"), dmi=tmp_path) is None
    assert source_for(NoticeSource("file", "/run/leave")) == WatchedFile("/run/leave")


class Scene(MetadataServer):
    """A watch over a source that says what the test wants, at 1000 s Unix time and 10 s of the monotonic clock."""

    def __init__(self) -> None:
        self.news: Notice | Exception | None = None
        self.told: list[tuple[str, float | None]] = []
        hear = lambda text, deadline: self.told.append((text, deadline))  # noqa: E731
        self.watch = NoticeWatch(self, hear, lambda call: call(), lambda: 10.0, lambda: 1000.0)

    def poll(self) -> Notice | None:
        if isinstance(self.news, Exception):
            raise self.news
        return self.news

    def polls(self, *news: Notice | Exception | None) -> list[tuple[str, float | None]]:
        self.told.clear()
        for self.news in news:
            self.watch.poll()
        return self.told


def test_a_notice_is_given_once_with_a_monotonic_deadline() -> None:
    scene, notice = Scene(), Notice("x", 1030.0)
    assert scene.polls(None, notice, notice, Invalid("gone"), notice) == [("x", 40.0)]
    assert scene.polls(Notice("x", 1005.0)) == [("x", 15.0)]
    assert scene.polls(None, None) == [("", None)]
    assert scene.polls(Notice("x", None, 30.0), Notice("x", None, 30.0)) == [("x", 40.0)]


@pytest.mark.parametrize("ends_at", [-62135596800.0, 0.0, 999.0, 1001.9])
def test_an_instant_that_has_passed_leaves_some_time(ends_at: float) -> None:
    assert Scene().polls(Notice("x", ends_at)) == [("x", 10.0 + MIN_LEFT_S)]


@pytest.mark.parametrize("error", [Invalid("no route"), AttributeError("no route")])
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
