"""The parts of the etcd store that need no etcd."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from elastic_agent.rendezvous.errors import StoreRefused, StoreUnavailable
from elastic_agent.rendezvous.etcd.access import Address, Addresses, following, root_of
from elastic_agent.rendezvous.etcd.channel import Session, Verdict, classify
from elastic_agent.rendezvous.store.store_kind import Login
from tests.etcd_servers import etcd_access

A, B, C = (Address("h", f"10.0.0.{number}", 2379) for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("prefix", "job", "root"),
    [
        ("/elastic-agent", "job", "/elastic-agent/job/"),
        ("/elastic-agent/", "job", "/elastic-agent/job/"),
        ("", "job", "/job/"),
        ("/a/b", "job-1.2_3", "/a/b/job-1.2_3/"),
        ("/a", "x/y", "/a/x%2Fy/"),
        ("/a", "größe", "/a/gr%C3%B6%C3%9Fe/"),
    ],
)
def test_a_job_has_one_part_of_the_path(prefix: str, job: str, root: str) -> None:
    assert root_of(etcd_access((), job, prefix=prefix)) == root


def test_no_password_is_shown() -> None:
    access = etcd_access((("h", 1), ("::1", 2)), login=Login("me", lambda: "secret"))
    assert "secret" not in repr(access)
    assert "lambda" not in repr(access)
    assert access.where == "h:1,[::1]:2"


@pytest.mark.parametrize(
    ("code", "detail", "verdict"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", Verdict.FAILOVER),
        ("UNAVAILABLE", "etcdserver: no leader", Verdict.FAILOVER),
        ("UNAVAILABLE", "etcdserver: request timed out", Verdict.FAILOVER),
        ("UNAVAILABLE", "etcdserver: leader changed", Verdict.FAILOVER),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Verdict.FAILOVER),
        ("CANCELLED", "", Verdict.FAILOVER),
        ("INTERNAL", "Received RST_STREAM with error code 2", Verdict.FAILOVER),
        ("UNKNOWN", "context deadline exceeded", Verdict.FAILOVER),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Verdict.STAY),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Verdict.STAY),
        ("NOT_FOUND", "etcdserver: requested lease not found", Verdict.LEASE_GONE),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Verdict.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Verdict.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", Verdict.TOKEN),
        (
            "INVALID_ARGUMENT",
            "etcdserver: authentication failed, invalid user ID or password",
            Verdict.REFUSED,
        ),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Verdict.REFUSED),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", Verdict.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", Verdict.INVALID),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Verdict.INVALID),
    ],
)
def test_errors_are_judged_by_what_the_caller_can_do(code: str, detail: str, verdict: Verdict) -> None:
    assert classify(code, detail) is verdict


def test_who_may_not_in_is_told_apart_but_may_be_handled_as_an_outage() -> None:
    assert issubclass(StoreRefused, StoreUnavailable)


@pytest.mark.parametrize(
    ("current", "ring", "wanted"),
    [
        (A, (A, B, C), B),
        (C, (A, B, C), A),
        (A, (A,), A),
        (B, (A, C), A),
        (None, (B, C), B),
    ],
)
def test_the_next_address_is_the_one_after_it_in_the_ring(
    current: Address | None, ring: tuple[Address, ...], wanted: Address
) -> None:
    assert following(current, ring) == wanted


@pytest.mark.parametrize(
    ("address", "target", "text"),
    [
        (Address("10.0.0.1", "10.0.0.1", 2379), "ipv4:10.0.0.1:2379", "10.0.0.1:2379"),
        (Address("fe80::1", "fe80::1", 1), "ipv6:[fe80::1]:1", "[fe80::1]:1"),
        (Address("etcd", "10.0.0.1", 1), "ipv4:10.0.0.1:1", "etcd:1 (10.0.0.1)"),
    ],
)
def test_an_address_is_written_for_grpc_and_for_people(address: Address, target: str, text: str) -> None:
    assert (address.target, str(address)) == (target, text)


def test_a_token_that_another_thread_has_renewed_already_is_not_given_up() -> None:
    session, made = Session(), iter(["first", "second", "third"])

    def token() -> str:
        return session.token(lambda: next(made), time.monotonic() + 20.0)

    assert [token(), token()] == ["first", "first"]
    for _ in range(2):  # two threads were refused with the first one
        session.forget("first")
        assert token() == "second"


class Names:
    """A name service that can be told what to answer, and how late; `now` is the clock."""

    def __init__(self) -> None:
        self.answer: tuple[str, ...] | OSError = ("10.0.0.1",)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = 0
        self.now = 0.0

    def resolve(self, host: str, port: int) -> tuple[str, ...]:
        self.asked += 1
        assert self.may_answer.wait(20.0)
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer

    def addresses(self, *endpoints: tuple[str, int]) -> Addresses:
        return Addresses(endpoints, self.resolve, lambda: self.now)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ips(addresses: Addresses) -> list[str]:
    return [address.ip for address in addresses.ring]


def test_ip_addresses_need_no_name_service() -> None:
    names = Names()
    addresses = names.addresses(("10.0.0.9", 1), ("::1", 2), ("10.0.0.9", 1))
    addresses.refresh(20.0)
    assert addresses.ring == (Address("10.0.0.9", "10.0.0.9", 1), Address("::1", "::1", 2))
    assert names.asked == 0


def test_a_name_may_have_several_addresses() -> None:
    names = Names()
    names.answer = ("10.0.0.1", "10.0.0.2")
    addresses = names.addresses(("etcd", 1), ("10.0.0.9", 1))
    assert ips(addresses) == ["10.0.0.9"]
    addresses.refresh(20.0)
    assert ips(addresses) == ["10.0.0.1", "10.0.0.2", "10.0.0.9"]


def test_the_last_good_answer_stays_in_use_while_names_cannot_be_resolved() -> None:
    names = Names()
    addresses = names.addresses(("etcd", 1))
    addresses.refresh(20.0)
    for answer, known in ((OSError("no name server"), ["10.0.0.1"]), (("10.0.0.2",), ["10.0.0.2"])):
        names.answer, names.now = answer, names.now + 10.0
        addresses.refresh(20.0)
        assert ips(addresses) == known
        assert ("no name server" in addresses.problem) == isinstance(answer, OSError)


def test_a_name_server_that_hangs_holds_up_nobody_and_is_asked_by_one_thread_only() -> None:
    names = Names()
    addresses = names.addresses(("etcd", 1))
    addresses.refresh(20.0)
    names.may_answer.clear()
    names.answer = ("10.0.0.2",)
    for _ in range(5):
        names.now += 10.0
        addresses.refresh()
    assert ips(addresses) == ["10.0.0.1"]
    eventually(lambda: names.asked == 2)
    names.may_answer.set()
    eventually(lambda: ips(addresses) == ["10.0.0.2"])


def test_in_a_burst_of_trouble_names_are_asked_once() -> None:
    names = Names()
    addresses = names.addresses(("etcd", 1))
    for _ in range(5):
        addresses.refresh(20.0)
    assert names.asked == 1
