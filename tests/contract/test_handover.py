"""What a leaving node brings to others: real memory servers, several nodes' copies, and a store with their records."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_agent import threads
from elastic_agent.agent.checkpoints import handover
from elastic_agent.agent.checkpoints.handover import Handover
from elastic_agent.rendezvous.errors import StoreUnavailable
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Condition,
    Endpoint,
    NodeRecord,
    Phase,
    World,
    assign_ranks,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Put, Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore
from elastic_agent.worker.storage.memory.copy_header import Header
from elastic_agent.worker.storage.memory.random_states import RandomState
from elastic_agent.worker.storage.memory.slots import PIECE_BYTES, Slots
from elastic_agent.worker.storage.replication.messages import Replicate
from tests.memory_servers import DIRECTORY, Node, Proxy, header_of, wait_for

LONG_S = 30.0
LOST = (
    "the shards of rank 0 after step 7 of generation 1 are only in the memory of this node, as far as it knows, and "
    "are lost with it"
)


class Nodes:
    """A job whose first nodes were members of generation 1, which has ended; `leave` hands over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryStore()
        self.nodes: dict[str, Node] = {}
        self.world: World

    def make(self, members: str, newcomers: str = "", **more: int) -> list[Node]:
        for name in members + newcomers:
            self.nodes[name] = Node(self.folder, name, **more)
        self.world = World(
            "digits",
            1,
            Phase.LAST_STEP,
            assign_ranks(tuple(self.record(name) for name in members)),
            Endpoint("127.0.0.1", 1),
            Cause(CauseKind.LEAVE, members[0]),
        )
        for name in members:
            self.write(self.record(name, kept=True))
        for name in newcomers:
            self.write(replace(self.record(name), ready=True))
        return list(self.nodes.values())

    def record(self, name: str, *, kept: bool = False) -> NodeRecord:
        record = NodeRecord(name, f"{name}-1", "127.0.0.1", 1, 1, memory=self.nodes[name].port)
        return record.having(1, Condition.STATE_SAVED, Condition.STOPPED) if kept else record

    def write(self, record: NodeRecord) -> None:
        self.store.transact((), (Put(node_key(record.node), record.to_json()),))

    def asked_to_leave(self, names: str, *, kept: bool = True) -> None:
        for name in names:
            self.write(replace(self.record(name, kept=kept), leaving=True))

    def of(self, name: str) -> Handover:
        return Handover(self.nodes[name].memory, name, self.store)

    def leave(self, name: str, *, within_s: float = LONG_S, kept: bool = True) -> Handover:
        found = self.of(name)
        found.run(self.world, time.monotonic() + within_s, kept=kept)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path)
    yield job
    for node in job.nodes.values():
        node.close()


def shards(node: Node, step: int, rank: int, size: int = 3 << 20) -> bytes:
    data = random.Random(rank).randbytes(size)
    node.fill(header_of(step, size, rank=rank, digest=f"of rank {rank}"), data)
    return data


def state(node: Node, step: int, data: bytes, **more: object) -> None:
    """What `remember` leaves of a state that is the same on all ranks."""
    slots = Slots(node.memory, DIRECTORY)
    opened = slots.begin(len(data))
    opened.trim()
    os.pwrite(opened.fd, data, 0)
    slots.seal(opened, replace(Header(step, 1, 0, 2, len(data), run="run-a"), **more))  # type: ignore[arg-type]
    slots.close()


def found_in(node: Node) -> dict[int, bytes]:
    """The states that this node's own workers would find, by step."""
    with contextlib.closing(Slots(node.memory, DIRECTORY)) as slots:
        found = {}
        for name, header in slots.headers().items():
            with slots.hold(name) as held:
                found[header.step] = held.stream.read()
        return found


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


# ---------------------------------------------------------------- shards


def test_two_partners_that_leave_at_once_hand_over_what_only_they_have(
    job: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of three keeps the replica of the one before it: of a's shards nothing would be left."""
    a, b, c = job.make("abc")
    data = [shards(node, 7, rank) for rank, node in enumerate((a, b, c))]
    for giver, keeper in ((a, b), (b, c), (c, a)):
        giver.replicate_to(keeper.partner)
        wait_for(lambda giver=giver, keeper=keeper: giver.acks(7).nodes == (keeper.name,), "the replica")
    job.asked_to_leave("ab")
    leaving = [threading.Thread(target=job.leave, args=(name,)) for name in "ab"]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    assert c.replica("a", 7) == data[0]
    assert c.replica("b", 7) == data[1]
    assert errors(caplog) == []
    for node in (a, b):
        node.close()
        node.serve()  # for the fixture


def test_what_a_partner_that_stays_has_is_not_sent_again(job: Nodes) -> None:
    a, b, _c = job.make("abc")
    shards(a, 7, 0)
    a.replicate_to(b.partner)
    wait_for(lambda: a.acks(7).nodes == ("b",), "the replica")
    job.asked_to_leave("a")
    assert job.leave("a")._sent_bytes == 0


def test_a_node_that_comes_takes_what_all_that_leave_have(job: Nodes) -> None:
    """Also the replica of a node that is gone."""
    a, b, new = job.make("ab", "n")
    data = shards(a, 7, 0)
    lost = shards(b, 7, 1)
    b.replicate_to(a.partner)
    wait_for(lambda: b.acks(7).nodes == ("a",), "the replica")
    job.asked_to_leave("a")
    job.store.transact(
        (), (Put(node_key("b"), replace(job.record("b"), incarnation="b-2", memory=0).to_json()),)
    )
    job.leave("a")
    assert new.replica("a", 7) == data
    assert new.replica("b", 7) == lost


def test_a_handover_begins_anew_where_the_connection_broke(job: Nodes) -> None:
    a, b = job.make("ab")
    data = shards(a, 7, 0, 4 * PIECE_BYTES)
    proxy = Proxy(b.port, cut_after=(2 * PIECE_BYTES + 1000,))
    job.asked_to_leave("a")
    job.write(replace(job.record("b", kept=True), memory=int(proxy.address.rpartition(":")[2])))
    assert job.leave("a")._left == ()
    assert b.replica("a", 7) == data
    assert len(proxy.passed) == 2
    proxy.close()


def test_the_next_node_takes_what_the_first_has_no_room_for(
    job: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = job.make("abc", limit=5 << 20)
    c.limit = 1 << 30
    c.close()
    c.serve()
    data = shards(a, 7, 0)
    job.asked_to_leave("a")
    for name in "bc":
        job.write(job.record(name, kept=True))
    job.leave("a").report_lost()
    assert c.replica("a", 7) == data
    assert errors(caplog) == []
    job.asked_to_leave("ac")
    job.leave("a").report_lost()
    [line] = errors(caplog)
    assert LOST in line
    assert "lost with it: node b: two copies of a replica take" in line
    assert "raise --memory-checkpoints there" in line
    assert b.replica("a", 7) is None


# ---------------------------------------------------------------- a state that is on all nodes


def test_a_new_node_finds_the_state_of_those_that_leave(job: Nodes) -> None:
    a, b, new = job.make("ab", "n")
    for node in (a, b):
        state(node, 6, b"six")
        state(node, 7, b"seven" * 1000)
    job.asked_to_leave("ab")
    job.leave("a")
    job.leave("b")
    assert found_in(new) == {7: b"seven" * 1000}


def test_no_memory_server_is_asked_where_a_member_stays(job: Nodes) -> None:
    a, b = job.make("ab")
    state(a, 7, b"seven")
    job.asked_to_leave("a")
    job.leave("a")
    assert found_in(b) == {}


def test_a_member_that_stays_without_the_state_is_given_it(job: Nodes) -> None:
    """It had no room, and the ranks have kept the state each for itself."""
    a, b = job.make("ab")
    state(a, 7, b"seven")
    job.asked_to_leave("a")
    job.write(job.record("b"))
    thread = threading.Thread(target=job.leave, args=("a",))
    thread.start()
    time.sleep(0.1)
    assert found_in(b) == {}, "its workers have not ended"
    job.write(job.record("b").having(1, Condition.STOPPED))
    thread.join()
    assert found_in(b) == {7: b"seven"}


def test_shards_do_not_wait_until_it_is_known_who_keeps_a_state_of_all_ranks(job: Nodes) -> None:
    a, b = job.make("ab")
    data = shards(a, 7, 0)
    state(a, 7, b"seven")
    job.asked_to_leave("a")
    job.write(job.record("b"))
    job.leave("a", within_s=0.5)
    assert b.replica("a", 7) == data
    assert found_in(b) == {}


def test_without_a_common_last_step_it_waits_for_the_others_to_end(job: Nodes) -> None:
    """Their workers may be about to overwrite the very slot. Of what they have, newer ones stay."""
    a, b = job.make("ab")
    state(a, 7, b"seven")
    state(b, 6, b"six")
    job.asked_to_leave("a", kept=False)
    job.write(job.record("b"))
    thread = threading.Thread(target=job.leave, args=("a",), kwargs={"kept": False})
    thread.start()
    time.sleep(0.3)
    assert found_in(b) == {6: b"six"}
    job.write(job.record("b").having(1, Condition.STOPPED))
    thread.join()
    assert found_in(b) == {6: b"six", 7: b"seven"}
    state(b, 8, b"eight")
    assert job.leave("a", kept=False)._sent_bytes == 0
    assert found_in(b) == {7: b"seven", 8: b"eight"}


def test_random_states_go_with_it_where_one_node_has_all_of_them(job: Nodes) -> None:
    a, new = job.make("a", "n")
    state(a, 7, b"state" + bytes(8), rng_holes=((5, 4), (9, 4)))
    with contextlib.closing(Slots(a.memory, DIRECTORY)) as slots:
        for rank in range(2):
            slots.random_states.put(rank, RandomState((1, 7), 2, f"rng{rank}".encode()))
    job.asked_to_leave("a")
    job.leave("a")
    assert found_in(new) == {7: b"staterng0rng1"}


# ---------------------------------------------------------------- no time, no node


def lost(job: Nodes, found: Handover, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    found.report_lost()
    return errors(caplog)


def test_what_is_lost_is_said_before_it_is(job: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    a, b = job.make("ab")
    shards(a, 7, 0, 8 * PIECE_BYTES)
    job.asked_to_leave("a")
    slow = Proxy(b.port)
    began = time.monotonic()
    found = job.of("a")
    found.run(job.world, began + 0.05, kept=True)
    assert time.monotonic() - began < 3.0
    [line] = lost(job, found, caplog)
    assert line.startswith(f"{LOST}: the time for that was over, raise --stop-grace")
    slow.close()


def test_a_second_signal_ends_it(job: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    a, b = job.make("ab")
    shards(a, 7, 0)
    b.close()  # it is asked again and again
    job.asked_to_leave("a")
    found = job.of("a")
    done = threading.Event()
    found.begin(job.world, time.monotonic() + LONG_S, done.set, kept=True)
    found.cut()
    assert done.wait(3.0)
    assert len(lost(job, found, caplog)) == 1
    b.serve()


def test_a_notice_that_comes_meanwhile_leaves_less_time(job: Nodes) -> None:
    a, _b = job.make("ab")
    state(a, 7, b"seven")
    job.asked_to_leave("a", kept=False)
    job.write(job.record("b"))  # its workers do not end
    found = job.of("a")
    done = threading.Event()
    found.begin(job.world, time.monotonic() + LONG_S, done.set, kept=False)
    assert not done.wait(0.1)
    found.hurry(time.monotonic() + 0.1)
    assert done.wait(3.0)


def test_without_another_node_shards_are_lost_unless_they_are_on_disk(
    job: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = job.make("a")
    shards(a, 7, 0)
    state(a, 7, b"seven")  # the disk writer says what becomes of it
    a.order(Replicate(DIRECTORY, 1, (0, 0)))
    wait_for(
        lambda: os.path.exists(os.path.join(a.memory, f"{a.slots().folder[-18:-2]}.replicate")), "the order"
    )
    job.asked_to_leave("a")
    found = job.leave("a")
    [line] = lost(job, found, caplog)
    assert line.startswith(
        f"{LOST}: no other node stays or comes, let one stay until another has joined. Nodes"
    )
    assert DIRECTORY in line
    monkeypatch.setattr(handover, "_on_disk", lambda path, header: (path, header.step) == (DIRECTORY, 7))
    assert lost(job, found, caplog) == []


def test_a_disk_that_cannot_be_looked_at_has_nothing(job: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(threads, "_listener", lambda name, error: told.append(name))
    monkeypatch.setattr(handover, "CheckpointFiles", None)
    assert not handover._on_disk(DIRECTORY, header_of(7, 10))
    assert told == ["handover-disk"]


def test_nothing_in_memory_costs_nothing(job: Nodes) -> None:
    job.make("ab")
    job.store.close()
    assert job.leave("a")._left == ()


def test_a_store_that_does_not_answer_is_asked_again(
    job: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = job.make("ab")
    data = shards(a, 7, 0)
    job.asked_to_leave("a")
    answer, failures = job.store.read, iter([True, True, False])

    def read(*args: Any) -> Snapshot:
        if next(failures, True):
            raise StoreUnavailable("no answer")
        return answer(*args)

    monkeypatch.setattr(job.store, "read", read)
    found = job.leave("a")
    assert lost(job, found, caplog) == []
    assert b.replica("a", 7) == data
    [line] = lost(job, job.leave("a", within_s=0.2), caplog)
    assert line.startswith(f"{LOST}: the store gives no answer, no answer. Nodes that go on begin")


def test_without_an_answer_of_the_store_no_more_is_said_than_is_known(
    job: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a replica, whose own node has it, nor an error of a state that members that stay may have."""
    a, b = job.make("ab")
    shards(a, 7, 0)
    shards(b, 7, 1)
    b.replicate_to(a.partner)
    wait_for(lambda: b.acks(7).nodes == ("a",), "the replica")
    state(a, 7, b"seven")

    def read(*_: object) -> Snapshot:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(job.store, "read", read)
    [line] = lost(job, job.leave("a", within_s=0.05), caplog)
    assert line.startswith(LOST)
    assert warnings(caplog)[0].startswith(
        "the state after step 7 of generation 1 was handed over to no other node"
    )


def test_whether_a_state_of_all_ranks_is_on_disk_is_for_the_disk_writer_to_say(
    job: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    a, _new = job.make("a", "n")
    state(a, 7, b"seven")
    job.asked_to_leave("a")
    assert lost(job, job.leave("a", within_s=0.0), caplog) == []
    [line] = warnings(caplog)
    assert line.startswith(
        "the state after step 7 of generation 1 was handed over to no other node: the time for that was over, raise"
    )


@pytest.mark.parametrize("method", ["run", "start"])
def test_a_thread_that_fails_is_the_end_of_the_handover(
    job: Nodes, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(threads, "_listener", lambda name, error: told.append(name))
    job.make("ab")
    found, done = job.of("a"), threading.Event()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(*((found, "run") if method == "run" else (threading.Thread, "start")), fail)
    found.begin(job.world, time.monotonic() + LONG_S, done.set, kept=True)
    assert done.wait(3.0)
    # Without the thread the agent goes on: what it was to hand over stays where it is.
    assert told == (["handover"] if method == "run" else [])
