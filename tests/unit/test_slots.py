"""The slots of a node's memory as files: what can be believed after whatever happened to them."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.worker.storage.memory import slots as module
from elastic_agent.worker.storage.memory.copy_header import Header
from elastic_agent.worker.storage.memory.random_states import RandomState
from elastic_agent.worker.storage.memory.slots import Slots, SlotsBusy, room_for, sums_of


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    slots = Slots(str(tmp_path), "/runs/x")
    yield slots
    slots.close()


def write(slots: Slots, step: int, generation: int = 1, content: bytes = b"state") -> str:
    opened = slots.begin(len(content))
    opened.trim()
    os.pwrite(opened.fd, content, 0)
    slots.seal(opened, Header(step, generation, 0, 1, len(content)))
    return opened.name


def newest(slots: Slots) -> Header:
    return slots.headers()[slots.newest_first()[0]]


def test_states_go_to_the_two_slots_in_turn(slots: Slots) -> None:
    assert [write(slots, step) for step in range(1, 6)] == ["a", "b", "a", "b", "a"]
    assert [slots.headers()[name].step for name in slots.newest_first()] == [5, 4]


def test_a_newer_generation_is_newer_though_its_step_is_lower(slots: Slots) -> None:
    write(slots, 12, generation=1)
    write(slots, 11, generation=2)
    assert newest(slots).step == 11
    write(slots, 13, generation=2)
    assert [slots.headers()[name].step for name in slots.newest_first()] == [13, 11]


def test_a_writer_that_dies_in_the_middle_costs_the_older_state_only(slots: Slots) -> None:
    for step in (1, 2):
        write(slots, step)
    slots.begin(5).close()
    assert [slots.headers()[name].step for name in slots.newest_first()] == [2]
    write(slots, 3)
    assert [slots.headers()[name].step for name in slots.newest_first()] == [3, 2]


def test_a_slot_that_is_read_is_not_overwritten(slots: Slots) -> None:
    for step in (1, 2):
        write(slots, step)
    with slots.hold("a") as held:
        assert [write(slots, step) for step in (3, 4)] == ["b", "b"]
        assert held.stream.read() == b"state"
        with slots.hold("b"), pytest.raises(SlotsBusy):
            slots.begin(5)
    assert write(slots, 5) == "a"


def test_what_is_to_be_kept_is_not_overwritten_even_where_the_other_slot_is_read(slots: Slots) -> None:
    """Of a sharded state every rank must keep the version that all have."""
    for step in (1, 2):
        write(slots, step)
    with slots.hold("a"), pytest.raises(SlotsBusy):
        slots.begin(5, protected=(1, 2))
    opened = slots.begin(5, protected=(1, 1))
    assert opened.name == "b", "though it is the newer one"
    opened.close()


def test_a_copy_is_shown_while_its_header_tells_of_it(slots: Slots) -> None:
    name = write(slots, 1)
    with slots.hold(name) as held:
        assert slots.shows(held)
        slots.put_header(name, replace(held.header, sums=(1,)))
        assert slots.shows(held), "it got its checksums meanwhile"
        slots.put_header(name, replace(held.header, step=2))
        assert not slots.shows(held)
        slots.drop(lambda version: True)
        assert not slots.shows(held)


def test_processes_that_change_one_header_undo_nothing_of_each_other(slots: Slots, tmp_path: Path) -> None:
    """The disk writer adds checksums, a rank that failed makes the copy count without it."""
    other = Slots(str(tmp_path), "/runs/x")
    opened = slots.begin(8)
    opened.trim()
    remembered = Header(1, 1, 0, 1, 8, rng_holes=((0, 8),))
    slots.seal(opened, remembered)
    started = threading.Barrier(2)

    def add_sums() -> None:
        started.wait()
        with other.hold(opened.name) as held:
            for _ in range(5):
                other.add_sums(held, (1,))

    for _ in range(40):
        slots.put_header(opened.name, remembered)
        adding = threading.Thread(target=add_sums)
        adding.start()
        started.wait()
        assert slots.mark_partial(remembered.version)
        adding.join()
        assert slots.headers()[opened.name] == replace(remembered, partial=True, sums=(1,))
    other.close()


def test_a_copy_that_is_not_here_cannot_be_made_to_count(slots: Slots) -> None:
    write(slots, 1)
    assert slots.mark_partial((1, 1))
    assert not slots.headers()["a"].partial, "it needs no records"
    assert not slots.mark_partial((1, 2))
    slots.begin(5)
    opened = slots.begin(5)
    assert not slots.mark_partial((1, 1)), "its slot is being written"
    opened.close()


def test_a_copy_is_dropped_and_what_takes_its_place_is_not(slots: Slots, tmp_path: Path) -> None:
    name = write(slots, 1)
    opened = slots.begin(5)
    os.unlink(Path(slots.folder) / f"{name}.pt")
    slots.drop(lambda version: version == (1, 1))
    assert slots.headers() == {}, "also without its slot"
    slots.put_header(opened.name, Header(2, 1, 0, 1, 5))
    slots.drop(lambda version: True)
    assert slots.headers()[opened.name].step == 2, "it is being written"
    opened.close()
    shutil.rmtree(slots.folder)
    slots.drop(lambda version: True)


def test_a_slot_that_is_written_is_not_read(slots: Slots) -> None:
    write(slots, 1)
    write(slots, 2)
    opened = slots.begin(5)
    with pytest.raises(BlockingIOError):
        slots.hold(opened.name)
    opened.close()
    with pytest.raises(FileNotFoundError):
        slots.hold(opened.name)


def test_pages_are_kept_from_one_state_to_the_next(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(300_000)
    for step in (1, 2):
        write(slots, step, content=content)
    reserved = []
    really = os.posix_fallocate

    def reserve(fd: int, offset: int, length: int) -> None:
        reserved.append((offset, length))
        really(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    write(slots, 3, content=content + b"a little more")
    assert [offset for offset, _ in reserved] == [300_000]
    assert all(length < 2 * room_for(0) for _, length in reserved)


def test_a_hole_is_filled_before_it_is_written_to(slots: Slots) -> None:
    """Somebody died between making a slot long and reserving it: a write there could end the process by SIGBUS."""
    path = Path(slots.folder) / "a.pt"
    path.touch()
    os.truncate(path, 1 << 20)
    slots.begin(1 << 20).close()
    assert path.stat().st_blocks * 512 >= 1 << 20


def test_no_memory_is_an_error_and_gives_back_what_there_was(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(slots, step)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        slots.begin(1 << 20)
    assert newest(slots).step == 2
    assert (Path(slots.folder) / "a.pt").stat().st_size == 0
    monkeypatch.undo()
    assert write(slots, 3) == "a"


def test_another_folder_that_becomes_a_link_is_not_emptied(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Slots(str(tmp_path), "/runs/y")
    write(other, 1)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    taken = module._taken

    def replacing(folder: str, names: Iterable[str]) -> int:
        found = taken(folder, names)
        os.rename(folder, elsewhere)
        os.symlink(elsewhere, folder)
        return found

    monkeypatch.setattr(module, "_taken", replacing)
    assert not slots.empty_unused([slots.folder])
    assert (elsewhere / "a.pt").stat().st_size == len(b"state")
    other.close()


def spoil_by_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def replace_by_link(path: Path) -> None:
    content = path.with_suffix(".other")
    path.rename(content)
    path.symlink_to(content)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_by_bit,
        replace_by_link,
        replace_by_pipe,
        lambda path: os.truncate(path, 20),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(os.urandom(300)),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"schema": 3', b'"schema": 4')),
        lambda path: path.write_bytes(bytes(5 << 20)),
    ],
    ids=["bit", "link", "pipe", "cut", "empty", "noise", "deep", "version", "huge"],
)
def test_a_header_that_is_not_ours_is_not_believed(slots: Slots, spoil: object) -> None:
    for step in (1, 2):
        write(slots, step)
    spoil(Path(slots.folder) / "b.json")  # type: ignore[operator]
    assert newest(slots).step == 1
    (problem,) = slots.problems()
    assert "b.json" in problem
    assert write(slots, 3) == "b"
    assert slots.problems() == []


@pytest.mark.parametrize(
    "spoil", [lambda path: os.truncate(path, 3), replace_by_link, replace_by_pipe, os.unlink]
)
def test_a_slot_that_does_not_fit_its_header_is_not_opened(slots: Slots, spoil: object) -> None:
    write(slots, 1)
    spoil(Path(slots.folder) / "a.pt")  # type: ignore[operator]
    with pytest.raises((OSError, ValueError)):
        slots.hold("a")


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1}, {"step": True}, {"step": 1.0}, {"generation": None}, {"size": 0}, {"world_size": 0},
        {"rng_holes": ((0, 5), (3, 1))}, {"rng_holes": ((0, 6),)}, {"rng_holes": ((0, -1),)}, {"rng_holes": ((0,),)},
        {"sums": ("1",)}, {"partial": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_impossible_header_cannot_exist(wrong: dict[str, object]) -> None:
    good = Header(1, 1, 0, 1, 5, ((0, 5),), sums=(7,))
    assert Header.from_json(good.to_json()) == good
    with pytest.raises(ValueError, match="header"):
        replace(good, **wrong)  # type: ignore[arg-type]


def test_checksums_find_one_bit(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agent.worker.storage.memory.slots.PIECE_BYTES", 1000)
    content = os.urandom(4500)
    write(slots, 1, content=content)
    with slots.hold("a") as held:
        sums = sums_of(held.stream, 4500)
        assert len(sums) == 5
        spoil_by_bit(Path(slots.folder) / "a.pt")
        assert [one == other for one, other in zip(sums, sums_of(held.stream, 4500), strict=True)].count(
            False
        ) == 1


def test_each_rank_has_the_random_states_of_its_last_two_steps(slots: Slots) -> None:
    for step in (1, 2, 3):
        for rank in (0, 1):
            slots.random_states.put(rank, RandomState((1, step), 2, f"{rank} after {step}".encode()))
    assert slots.random_states.of((1, 1), 2) == {}
    assert slots.random_states.of((1, 2), 2) == {0: b"0 after 2", 1: b"1 after 2"}
    assert slots.random_states.of((1, 3), 2) == {0: b"0 after 3", 1: b"1 after 3"}
    assert slots.random_states.of((1, 3), 3) == slots.random_states.of((2, 3), 2) == {}
    slots.random_states.put(1, RandomState((1, 3), 2, b"again"))
    assert slots.random_states.of((1, 2), 2)[1] == b"1 after 2"
    assert slots.random_states.of((1, 3), 2)[1] == b"again"


def test_a_spoilt_random_state_is_left_aside(slots: Slots) -> None:
    slots.random_states.put(0, RandomState((1, 1), 1, b"state"))
    slots.random_states.put(0, RandomState((1, 2), 1, b"state"))
    spoil_by_bit(Path(slots.folder) / "rng-0-1")
    (Path(slots.folder) / "rng-0-0").write_bytes(b"short")
    assert slots.random_states.of((1, 1), 1) == slots.random_states.of((1, 2), 1) == {}
    slots.random_states.put(0, RandomState((1, 3), 1, b"state"))
    assert slots.random_states.of((1, 3), 1) == {0: b"state"}


def test_only_its_owner_may_enter(slots: Slots, tmp_path: Path) -> None:
    assert os.stat(slots.folder).st_mode & 0o777 == 0o700
    write(slots, 1)
    assert os.stat(Path(slots.folder) / "a.pt").st_mode & 0o777 == 0o600
    other = Slots(str(tmp_path), "/runs/y")
    assert other.folder != slots.folder
    other.close()


def test_a_lock_ends_with_the_writing_though_the_slot_stays_mapped(slots: Slots) -> None:
    import mmap

    opened = slots.begin(5)
    mapping = mmap.mmap(opened.fd, 5)
    slots.seal(opened, Header(1, 1, 0, 1, 5))
    with open(Path(slots.folder) / "a.pt", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    mapping.close()


def test_a_process_that_stands_still_while_it_changes_a_header_holds_no_other_up_for_ever(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHANGING_S", 0.05)
    write(slots, 1)
    with slots._changing_headers():
        with pytest.raises(TimeoutError, match=r"another process of this node keeps .* locked"):
            slots.drop(lambda _: True)
        assert not slots.mark_partial((1, 1))
    assert newest(slots).step == 1


def test_what_was_loaded_outlives_the_first_copy_made_of_it(slots: Slots) -> None:
    """Step 10 of generation 1 was not loaded, since some rank had not come to it: then it is no newer than step 9."""
    write(slots, 10)
    write(slots, 9)
    slots.drop(lambda version: version > (1, 9))
    slots.begin(5).close()
    assert newest(slots).step == 9


def test_of_a_step_that_was_remembered_and_saved_the_copy_with_gaps_is_overwritten(slots: Slots) -> None:
    for holes in ((), ((0, 5),)):
        opened = slots.begin(5)
        slots.seal(opened, Header(9, 1, 0, 1, 5, holes))
    slots.begin(5).close()
    assert newest(slots).rng_holes == ()
