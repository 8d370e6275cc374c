"""What the dumps of torch's flight recorder show of a rank, and how they come to the agent.

`dump` makes them by the fields that torch documents, as NCCL's would be: no NCCL runs here. That torch's own dumps are
read is shown by those of gloo, in `test_torch_internals.py`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.output.log_files import FLIGHT_RECORDS
from elastic_agent.agent.workers.evidence import (
    COMES_WITHIN_S,
    MOST_BYTES,
    NEWEST_S,
    FlightRecords,
    groups_of,
    read_pickle,
)
from elastic_agent.codec import Invalid
from elastic_agent.health.hang_report import MAX_GROUPS, InGroup, Recorded

WORLD = "0", "default_pg"
TENSOR_PARALLEL = "1", "undefined"


def entry(number: int, group: tuple[str, str] = WORLD, **differs: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "state": "completed",
        "retired": True,
        "is_p2p": False,
        "frames": [],
        **differs,
    }


def waits(number: int, group: tuple[str, str] = WORLD, **differs: Any) -> dict[str, Any]:
    return entry(number, group, **{"state": "scheduled", "retired": False, **differs})


def dump(*entries: dict[str, Any], **differs: Any) -> dict[str, Any]:
    config = {"1": {"name": "1", "desc": "undefined", "ranks": "[0, 3]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries), **differs}


SEND = {"is_p2p": True, "collective_seq_id": 0, "profiling_name": "nccl:send 0->1"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], None),
        ([entry(1), entry(2)], InGroup("default_pg", None, 2, None, "all_reduce")),
        ([entry(1), waits(2)], InGroup("default_pg", None, 2, 2, "all_reduce")),
        ([waits(2, state="started")], InGroup("default_pg", None, 2, 2, "all_reduce")),
        # gloo never says that one is completed
        ([waits(2, retired=True)], InGroup("default_pg", None, 2, None, "all_reduce")),
        # the script has run ahead of its GPU
        (
            [waits(7, profiling_name="nccl:broadcast"), waits(8), waits(9)],
            InGroup("default_pg", None, 9, 7, "broadcast"),
        ),
        # one that has ended ends those before it
        ([waits(7), entry(8), waits(9)], InGroup("default_pg", None, 9, 9, "all_reduce")),
        ([waits(7), entry(8)], InGroup("default_pg", None, 8, None, "all_reduce")),
        ([entry(3, TENSOR_PARALLEL)], InGroup("1 #e2c0e434", 2, 3, None, "all_reduce")),
        # of such a group it is not known who is in it
        ([entry(3, ("2", "undefined"))], None),
        ([waits(3, ("2", "undefined"))], InGroup("2 (ranks not known)", 0, 3, 3, "all_reduce")),
        ([waits(0, p2p_seq_id=4, **SEND)], InGroup("0 (send, recv)", 0, 4, 4, "send 0->1")),
        (
            [waits(1, profiling_name='nccl:"\\ü\n' + "x" * 99)],
            InGroup("default_pg", None, 1, 1, "????" + "x" * 44),
        ),
    ],
)
def test_the_collective_in_which_a_rank_stands_is_found(
    entries: list[dict[str, Any]], expected: InGroup | None
) -> None:
    assert groups_of(dump(*entries)) == ((expected,) if expected is not None else ())


def test_groups_of_one_name_and_other_ranks_are_others() -> None:
    """As those of `split_group` are."""
    configs = [{"1": {"ranks": ranks}} for ranks in ("[0, 3]", "[0,3]", "[1, 3]")]
    [first, same, other] = [groups_of(dump(entry(3, TENSOR_PARALLEL), pg_config=one)) for one in configs]
    assert first == same != other


def test_of_many_groups_those_with_a_wait_and_those_used_last_are_told() -> None:
    config = {str(number): {"ranks": "[0, 1]"} for number in range(20)}
    entries = [waits(1, ("3", "undefined")), *(entry(1, (str(n), "undefined")) for n in range(20) if n != 3)]
    told = [one.group.partition(" ")[0] for one in groups_of(dump(*entries, pg_config=config))]
    assert told == ["3", "19", "18", "17", "16", "15"][:MAX_GROUPS]


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        dump(version="3.0"),
        dump(version=2),
        dump(pg_config=[]),
        dump(entries={}),
        dump(None),  # type: ignore[arg-type]
        dump({}),
        dump(entry(-1)),
        dump(entry(2**63)),
        dump(entry(1, collective_seq_id="1")),
        dump(entry(1, collective_seq_id=True)),
        dump(entry(1, process_group="default_pg")),
        dump(entry(1, process_group=("0", 1))),
        dump(entry(1, process_group=("0",))),
        dump(entry(1, state=None)),
        dump(entry(1, is_p2p=0)),
        dump(entry(1, profiling_name=None)),
    ],
)
def test_what_torch_does_not_write_is_refused(wrong: Any) -> None:
    with pytest.raises(Invalid):
        groups_of(wrong)


@pytest.mark.parametrize("ranks", [None, 1, "", "[]", "0, 1", "[0, x]", "[0 for _ in x]", ["0"]])
def test_a_group_without_known_ranks_is_not_told(ranks: Any) -> None:
    assert groups_of(dump(entry(3, TENSOR_PARALLEL), pg_config={"1": {"ranks": ranks}})) == ()
    assert groups_of(dump(entry(3, TENSOR_PARALLEL), pg_config={"1": ranks})) == ()


# --- From the order to the dump


class Torch:
    """Writes the dump of rank 3 when it is ordered; `says` are the bytes of the next ones."""

    def __init__(self, generation: Path) -> None:
        folder = generation / FLIGHT_RECORDS
        folder.mkdir(parents=True)
        os.mkfifo(folder / "pipe_3.pipe")
        self.file = folder / "rank_3"
        self._pipe = os.open(folder / "pipe_3.pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.says: list[bytes] = []
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time passes only here."""
        self.now += seconds
        try:
            ordered = os.read(self._pipe, 1)
        except BlockingIOError:
            ordered = b""
        if ordered or (self.file.exists() and len(self.says) > 1):
            self.file.write_bytes(self.says.pop(0))

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def torch(tmp_path: Path) -> Iterator[Torch]:
    torch = Torch(tmp_path)
    yield torch
    torch.close()


@pytest.fixture
def records(torch: Torch, tmp_path: Path) -> FlightRecords:
    return FlightRecords(tmp_path, torch.clock, torch.sleep)


def ordered(records: FlightRecords) -> None:
    records.order((3,))


def bytes_of(*entries: dict[str, Any]) -> bytes:
    return pickle.dumps(dump(*entries), protocol=2)


HERE = (InGroup("default_pg", None, 2, 2, "all_reduce"),)


def test_it_is_known_for_how_long_nothing_has_changed(torch: Torch, records: FlightRecords) -> None:
    torch.says = [bytes_of(waits(2))]
    ordered(records)
    first = records.recorded(100.0)
    assert first == {3: Recorded(0.0, True, HERE)}, "it may have come there just before"
    noticed_at, torch.now = torch.now, torch.now + 20.0
    asked_at, torch.says = torch.now, [bytes_of(entry(1), waits(2))]
    ordered(records)
    still_s = pytest.approx(asked_at - noticed_at, abs=0.2)
    assert records.recorded(asked_at) == {3: Recorded(still_s, True, HERE)}
    assert records.recorded(asked_at + 1) == {3: Recorded(still_s, False, HERE)}, "of an order before"
    torch.now += 20.0
    torch.says = [bytes_of(waits(3))]
    ordered(records)
    assert records.recorded(0.0)[3].still_s == 0.0, "it has moved"


def test_an_old_dump_says_nothing(torch: Torch) -> None:
    def sleep(seconds: float) -> None:
        torch.now += seconds

    torch.file.write_bytes(bytes_of(waits(1)))
    records = FlightRecords(torch.file.parents[1], torch.clock, sleep)
    began_at = torch.now
    ordered(records)
    assert torch.now - began_at == pytest.approx(COMES_WITHIN_S, abs=0.2)
    assert records.recorded(0.0) == {}


def test_what_is_long_past_is_not_told(torch: Torch, records: FlightRecords) -> None:
    torch.says = [bytes_of(waits(2))]
    ordered(records)
    torch.now += NEWEST_S + 1
    assert records.recorded(0.0) == {}


def test_a_dump_that_torch_is_still_writing_is_read_when_it_is_whole(
    torch: Torch, records: FlightRecords
) -> None:
    whole = bytes_of(waits(2))
    torch.says = [whole[:50], whole, whole]
    ordered(records)
    assert records.recorded(0.0)[3].groups == HERE


@pytest.mark.parametrize("what", ["garbage", "folder", "link", "pipe"])
def test_what_is_no_dump_is_refused_and_holds_nobody_up(what: str, torch: Torch, tmp_path: Path) -> None:
    def write(seconds: float) -> None:
        torch.now += seconds
        if torch.file.exists():
            return
        if what == "folder":
            torch.file.mkdir()
        elif what == "link":
            (tmp_path / "elsewhere").write_bytes(bytes_of(waits(2)))
            torch.file.symlink_to(tmp_path / "elsewhere")
        elif what == "pipe":
            os.mkfifo(torch.file)
        else:
            torch.file.write_bytes(b"cposix\nsystem\n(S'true'\ntR.")

    records = FlightRecords(tmp_path, torch.clock, write)
    ordered(records)
    assert records.recorded(0.0) == {}


def test_no_order_goes_through_a_link(torch: Torch, records: FlightRecords, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (torch.file.parent / "pipe_4.pipe").symlink_to(tmp_path / "elsewhere")
    records.order([4])
    assert (tmp_path / "elsewhere").read_bytes() == b""


# --- The pickle


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_code_of_a_worker_runs(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps({"entries": [Evil(mark)]}, protocol)
    with pytest.raises(Invalid, match=r"names (posix|os)\.mkdir, which is no plain value"):
        read_pickle(data)
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists(), "it would have"


def test_a_part_of_a_dump_is_none() -> None:
    data = pickle.dumps(dump(waits(3), waits(4)), protocol=2)
    assert read_pickle(data) == dump(waits(3), waits(4))
    for size in range(len(data)):
        with pytest.raises(Invalid):
            read_pickle(data[:size])


def test_no_dump_is_read_that_is_too_large() -> None:
    with pytest.raises(Invalid, match="at most"):
        read_pickle(bytes(MOST_BYTES + 1))
