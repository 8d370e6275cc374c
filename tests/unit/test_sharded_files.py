"""Sharded checkpoints on disk: what is committed and believed, and what is left of others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.codec import plain
from elastic_agent.worker.errors import BadCheckpoint, Fenced, OtherRun, SaveFailed, Unconfirmed
from elastic_agent.worker.state.sharding.table import Table
from elastic_agent.worker.storage.disk import parts, shard_files
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.commit import (
    commit,
    new_attempt,
    not_shared,
    remove_mark,
    sees_mark,
    write_mark,
)
from elastic_agent.worker.storage.disk.manifests import FileSum, Manifest, digest_of
from elastic_agent.worker.storage.disk.parts import Part, own_rows, refuse_part, write_held, write_part
from elastic_agent.worker.storage.disk.shard_files import METADATA_NAME, Footer, data_name
from elastic_agent.worker.wire.environment import Run
from elastic_agent.worker.wire.files import seal_fields
from tests.shards import (
    METADATA,
    RUN,
    check,
    commit_of,
    copy_of,
    in_slot,
    nodes,
    permitted,
    save_all,
    save_part,
    save_whole,
)

PIECE = 1000
"""Bytes of a piece in the tests of `DiskCopy`."""


def found(reader: CheckpointFiles) -> tuple[int | None, list[BadCheckpoint]]:
    checkpoint, bad = reader.find()
    if checkpoint is None:
        return None, bad
    checkpoint.stream.close()
    check(reader, checkpoint.manifest)
    return checkpoint.manifest.step, bad


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_what_all_ranks_have_written_is_found(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path / "runs" / "x")
    manifest = save_all(all_nodes, 10)
    assert found(CheckpointFiles(tmp_path / "runs" / "x", keep=2, run=RUN)) == (10, [])
    raw = (tmp_path / "runs" / "x" / "step-000000000010.json").read_bytes()
    assert Manifest.from_json(raw) == manifest
    assert manifest.parts == 3
    attempt = tmp_path / "runs" / "x" / manifest.file
    assert {path.name for path in attempt.iterdir()} == {
        ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"
    }  # fmt: skip
    assert (attempt / ".metadata").read_bytes() == METADATA
    assert len(raw) < 1000


def test_the_newest_good_ones_are_kept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the user's own file")
    all_nodes = nodes(tmp_path)
    kept = [save_all(all_nodes, step) for step in (10, 20, 30, 40)][-2:]
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt", "step-000000000030.json", "step-000000000040.json", *(manifest.file for manifest in kept)
    }  # fmt: skip
    for manifest in kept:
        check(all_nodes[0], manifest)


def test_a_commit_without_all_parts_names_who_is_missing(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path)
    attempt = new_attempt(all_nodes[0], 10, 1)
    save_part(all_nodes[0], attempt, 0, 10, 3)
    save_part(all_nodes[2], attempt, 2, 10, 3)
    with pytest.raises(SaveFailed, match=r"step 10: no part has come of rank 1 within 0 s"):
        commit(all_nodes[0], *commit_of(attempt, 10, 3), permitted)
    assert found(all_nodes[1]) == (None, [])
    save_part(all_nodes[1], attempt, 1, 10, 3)
    commit(all_nodes[0], *commit_of(attempt, 10, 3), permitted)
    assert found(all_nodes[1]) == (10, [])


@pytest.mark.parametrize("lost", ["__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_a_checkpoint_that_lacks_a_file_gives_way_before_anything_is_read(
    tmp_path: Path, lost: str, how: str
) -> None:
    all_nodes = nodes(tmp_path)
    save_all(all_nodes, 10)
    path = tmp_path / save_all(all_nodes, 20).file / lost
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    step, (bad,) = found(CheckpointFiles(tmp_path, keep=2, run=RUN))
    assert (step, bad.step) == (10, 20)
    assert lost in str(bad)


def test_damaged_bytes_are_named_and_the_next_older_one_is_found(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path)
    save_all(all_nodes, 10)
    manifest = save_all(all_nodes, 20)
    path = tmp_path / manifest.file / "__2_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    reader = CheckpointFiles(tmp_path, keep=2, run=RUN)
    with (
        reader.open_rank(manifest, 2) as copy,
        pytest.raises(BadCheckpoint, match=r"__2_0\.distcp.*piece 0") as bad,
    ):
        copy.read(300, bytearray(10))
    reader.reject(manifest, bad.value)
    assert found(reader) == (10, [bad.value])
    newest = reader.newest_manifest()
    assert newest is not None
    assert newest.step == 10


@pytest.mark.parametrize("offset", [0, 1, 700, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE - 5])
@pytest.mark.parametrize("length", [0, 1, 100, PIECE, PIECE + 3, 2 * PIECE + 9])
def test_any_range_of_a_copy_is_read_and_each_piece_is_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, length: int
) -> None:
    with copy_of_pieces(tmp_path, monkeypatch) as (copy, raw, verified):
        length = min(length, len(raw) - offset)
        for _ in range(2):
            into = bytearray(length)
            copy.read(offset, into)
            assert into == raw[offset : offset + length]
        pieces = range(offset // PIECE, -(-(offset + length) // PIECE)) if length else range(0)
        assert verified == [min(PIECE, len(raw) - piece * PIECE) for piece in pieces]


def test_what_lies_behind_a_copy_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        copy_of_pieces(tmp_path, monkeypatch) as (copy, raw, _),
        pytest.raises(BadCheckpoint, match=f"the copy has {3 * PIECE + 100} bytes"),
    ):
        copy.read(len(raw) - 1, bytearray(2))


@contextlib.contextmanager
def copy_of_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[shard_files.DiskCopy, bytes, list[int]]]:
    """Of three whole pieces and a part of one; and the lengths that were verified."""
    raw = bytes(number * 7 % 251 for number in range(3 * PIECE + 100))
    (folder / "data").write_bytes(raw)
    sums = tuple(zlib.crc32(raw[at : at + PIECE]) for at in range(0, len(raw), PIECE))
    monkeypatch.setattr(shard_files, "PIECE_BYTES", PIECE)
    footer = Footer(0, 1, 1, 1, 1, len(raw), (0, 1), "0" * 16, True, None, sums)
    verified: list[int] = []

    def crc32(content: memoryview) -> int:
        verified.append(len(content))
        return zlib.crc32(content)

    monkeypatch.setattr(shard_files, "zlib", SimpleNamespace(crc32=crc32))
    with (folder / "data").open("rb") as stream:
        yield (
            shard_files.DiskCopy(1, "data", stream, footer),
            raw,
            verified,
        )


def test_a_twin_writes_only_what_it_has_for_itself(tmp_path: Path) -> None:
    """Ranks 0 and 1 have the same shard, and rank 1 its own random state."""
    all_nodes = nodes(tmp_path / "disk", 2)
    attempt = new_attempt(all_nodes[0], 10, 1)
    for rank, node in enumerate(all_nodes):
        raw, header = copy_of(rank, 10, 2, group=0)
        slots = in_slot(tmp_path, str(tmp_path / "disk"), rank, raw, header)
        with slots.hold("a") as held:
            write_held(node, Part(attempt, 1, 0 if rank else None), slots, held, permitted)
    manifest = commit(all_nodes[0], *commit_of(attempt, 10, 2), permitted)
    with all_nodes[0].open_rank(manifest, 1) as copy, all_nodes[0].open_rank(manifest, 0) as first:
        assert (copy.twin_of, first.twin_of) == (0, None)
        assert copy.footer.digest == first.footer.digest
        (row,) = copy.table.shards
        assert row.key == "ranks.1.rng"
        into = bytearray(row.length)
        copy.read(row.data, into)
        assert into.startswith(b"rng 1 ")
        assert copy.footer.size < first.footer.size
    raw, header = copy_of(1, 10, 2, group=0)
    assert header.shards is not None
    offset, length = header.table
    assert own_rows(Table.from_bytes(raw[offset : offset + length]), 1)[0] == copy.table


def test_a_rank_that_is_no_twin_is_not_taken_for_one(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path / "disk", 2)
    attempt = new_attempt(all_nodes[0], 10, 1)
    save_part(all_nodes[0], attempt, 0, 10, 2)
    raw, header = copy_of(1, 10, 2)
    slots = in_slot(tmp_path, "x", 1, raw, header)
    with slots.hold("a") as held:
        write_held(all_nodes[1], Part(attempt, 1, 0), slots, held, permitted)
    with pytest.raises(SaveFailed, match="rank 1 does not have the shards of rank 0"):
        commit(all_nodes[0], *commit_of(attempt, 10, 2), permitted)


@pytest.mark.parametrize("change", ["step", "world size", "version", "writer"])
def test_parts_that_are_not_of_one_state_are_no_checkpoint(tmp_path: Path, change: str) -> None:
    all_nodes = nodes(tmp_path, 2)
    attempt = new_attempt(all_nodes[0], 10, 2)
    save_part(all_nodes[0], attempt, 0, 10, 2, generation=2)
    raw, header = copy_of(
        1,
        11 if change == "step" else 10,
        3 if change == "world size" else 2,
        generation=1 if change == "version" else 2,
    )
    part = Part(attempt, 1 if change == "writer" else 2)
    write_part(all_nodes[1], part, header, lambda sink: sink.write(raw), permitted)
    with pytest.raises(SaveFailed, match="step 10: the part"):
        commit(all_nodes[0], *commit_of(attempt, 10, 2, generation=2), permitted)
    assert found(all_nodes[0]) == (None, [])


def test_a_copy_whose_memory_was_damaged_is_not_written(tmp_path: Path) -> None:
    (files,) = nodes(tmp_path, 1)
    raw, header = copy_of(0, 10, 1)
    header = replace(header, sums=(zlib.crc32(raw),))
    attempt = new_attempt(files, 10, 1)
    with pytest.raises(SaveFailed, match="rank 0: the copy of step 10 is not what its header says"):
        write_part(files, Part(attempt, 1), header, lambda sink: sink.write(raw[:-1] + b"x"), permitted)
    assert os.listdir(tmp_path / attempt) == []


def test_a_rank_that_cannot_write_says_why_and_may_try_again(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path, 2)
    attempt = new_attempt(all_nodes[0], 10, 1)
    save_part(all_nodes[0], attempt, 0, 10, 2)
    refuse_part(all_nodes[1], attempt, 1, OSError("No space left on device"))
    refused = pytest.raises(SaveFailed, match="rank 1 cannot write its part: No space left on device")
    with refused:
        commit(all_nodes[0], *commit_of(attempt, 10, 2, within_s=60.0), permitted)
    save_part(all_nodes[1], attempt, 1, 10, 2)
    manifest = commit(all_nodes[0], *commit_of(attempt, 10, 2), permitted)
    check(all_nodes[0], manifest)


def test_a_disk_without_room_for_a_reason_spares_the_wait_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_nodes = nodes(tmp_path, 2)
    attempt = new_attempt(all_nodes[0], 10, 1)
    save_part(all_nodes[0], attempt, 0, 10, 2)
    full = OSError(errno.ENOSPC, "No space left on device")

    def is_full(*_: object) -> None:
        raise full

    monkeypatch.setattr(parts, "replace_file", is_full)
    refuse_part(all_nodes[1], attempt, 1, full)
    with pytest.raises(SaveFailed, match=r"rank 1 cannot write its part: .*The log of its node says more"):
        commit(all_nodes[0], *commit_of(attempt, 10, 2, within_s=60.0), permitted, sleep=pytest.fail)
    save_part(all_nodes[1], attempt, 1, 10, 2)
    check(all_nodes[0], commit(all_nodes[0], *commit_of(attempt, 10, 2), permitted))


def test_a_refusal_that_comes_late_leaves_a_part_that_is_there(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path, 1)
    attempt = new_attempt(all_nodes[0], 10, 1)
    save_part(all_nodes[0], attempt, 0, 10, 1)
    refuse_part(all_nodes[0], attempt, 0, OSError("too late"))
    check(all_nodes[0], commit(all_nodes[0], *commit_of(attempt, 10, 1), permitted))


def test_a_wait_grows_and_ends_with_the_generation(tmp_path: Path) -> None:
    (files,) = nodes(tmp_path, 1)
    now, looks = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        looks.append(seconds)

    def fenced() -> None:
        if now > 20.0:
            raise Fenced("generation 1 is over")

    attempt = new_attempt(files, 10, 1)
    with pytest.raises(Fenced):
        commit(files, *commit_of(attempt, 10, 2, within_s=600.0), fenced, lambda: now, sleep)
    assert looks == sorted(looks)
    assert looks[-1] == 1.0
    assert len(looks) < 40


# --- What is left of others


def test_a_commit_that_is_refused_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_nodes = nodes(tmp_path)
    save_all(all_nodes, 10)
    before = names(tmp_path)
    answers: list[Exception] = []

    def until_the_last() -> None:
        if len(answers) == 1:
            raise answers[0]

    attempt = new_attempt(all_nodes[0], 20, 1)
    for rank, node in enumerate(all_nodes):
        save_part(node, attempt, rank, 20, 3)
    publish = CheckpointFiles.publish
    monkeypatch.setattr(
        CheckpointFiles, "publish", lambda *args: (answers.append(Fenced("it is over")), publish(*args))
    )
    with pytest.raises(Fenced):
        commit(all_nodes[0], *commit_of(attempt, 20, 3), until_the_last)
    assert names(tmp_path) == before
    assert found(all_nodes[1]) == (10, [])


def test_a_commit_that_is_not_confirmed_may_be_tried_again(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path)
    attempt = new_attempt(all_nodes[0], 20, 1)
    for rank, node in enumerate(all_nodes):
        save_part(node, attempt, rank, 20, 3)
    asked = 0

    def away() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise Unconfirmed("the store is away")

    with pytest.raises(Unconfirmed):
        commit(all_nodes[0], *commit_of(attempt, 20, 3), away)
    assert found(all_nodes[0]) == (None, [])
    commit(all_nodes[0], *commit_of(attempt, 20, 3), permitted)
    assert found(all_nodes[0]) == (20, [])


def attempts(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir()}


def test_what_dead_writers_left_goes_and_what_others_may_still_fill_stays(tmp_path: Path) -> None:
    """Of this run: older steps, and older generations, are nothing that anyone goes on with."""
    files, *_ = all_nodes = nodes(tmp_path, 1)
    older = new_attempt(files, 10, 2)
    of_the_past = new_attempt(files, 50, 1)
    next_one = new_attempt(files, 30, 2)
    of_the_future = new_attempt(files, 5, 3)
    another = new_attempt(CheckpointFiles(tmp_path, keep=1, run=Run("run-b")), 5, 1)
    for name in (older, of_the_past, next_one, of_the_future, another):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / older / "mine").mkdir()
    manifest = save_all(all_nodes, 20, generation=2)
    assert attempts(tmp_path) == {older, next_one, of_the_future, another, manifest.file}
    assert names(tmp_path / older) == set(), "what somebody has put there is left, and nothing else"
    assert found(files) == (20, [])


def test_a_link_in_the_place_of_a_directory_is_removed_and_not_followed(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path / "disk", 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "disk").mkdir()
    link = tmp_path / "disk" / new_attempt(all_nodes[0], 5, 1)
    link.symlink_to(elsewhere)
    save_all(all_nodes, 10)
    assert not link.is_symlink()
    assert (elsewhere / "file").exists()


def test_a_writer_of_the_past_harms_nothing_and_its_attempt_goes(tmp_path: Path) -> None:
    past, present = nodes(tmp_path, 2), nodes(tmp_path, 2)
    save_all(past, 10)
    attempt = new_attempt(past[0], 20, 1)
    save_part(past[0], attempt, 0, 20, 2)
    manifest = save_all(present, 20, generation=2)
    save_part(past[1], attempt, 1, 20, 2)
    check(present[0], manifest)
    save_all(present, 30, generation=2)
    assert attempt not in attempts(tmp_path)
    assert found(present[0]) == (30, [])


def test_the_same_step_may_be_committed_again(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path)
    save_all(all_nodes, 10)
    first = save_all(all_nodes, 20)
    (tmp_path / first.file / "__1_0.distcp").unlink()
    resumed = nodes(tmp_path)
    assert found(resumed[0])[0] == 10
    second = save_all(resumed, 20, generation=2)
    assert found(resumed[0]) == (20, [])
    assert first.file not in attempts(tmp_path)
    assert second.file in attempts(tmp_path)


def test_replicated_and_sharded_checkpoints_lie_in_one_directory(tmp_path: Path) -> None:
    """A job that changes from DDP to FSDP, and back: the newest counts, and `keep` are kept."""
    files, *_ = all_nodes = nodes(tmp_path, 1)

    save_whole(files, 10)
    save_all(all_nodes, 20)
    assert files.steps() == [20, 10]
    save_all(all_nodes, 30)
    assert attempts(tmp_path) == {path.name for path in tmp_path.glob("step-*-run-a-*")}
    kept = {save_whole(files, step).file for step in (40, 50)}
    assert attempts(tmp_path) == kept
    checkpoint, _ = files.find()
    assert checkpoint is not None
    checkpoint.stream.close()
    assert (checkpoint.manifest.step, checkpoint.manifest.parts) == (50, 1)


# --- Of other runs


def take(run: Run, directory: Path) -> list[CheckpointFiles]:
    """A run that comes to the directory, and goes on from the newest there."""
    all_nodes = nodes(directory, 2, run=run)
    claim = all_nodes[0].claim
    claim.await_former_run(wait_s=0)
    newest = all_nodes[0].newest_manifest()
    claim.take(newest.step if newest else 0, newest.run if newest else None)
    return all_nodes


def test_a_run_that_goes_on_from_another_has_its_directories_and_deletes_them_in_time(tmp_path: Path) -> None:
    first = take(RUN, tmp_path)
    save_all(first, 10)
    left = new_attempt(first[0], 20, 9)
    save_part(first[1], left, 1, 20, 2)
    first[0].claim._lock.forget()
    second = take(Run("run-b"), tmp_path)
    for step in (11, 12):
        save_all(second, step)
    assert len(attempts(tmp_path)) == 2
    assert all("-run-b-" in name for name in attempts(tmp_path))
    with pytest.raises(OtherRun):
        save_part(first[1], new_attempt(first[1], 13, 1), 1, 13, 2)


def test_a_run_that_was_replaced_writes_no_part_and_commits_nothing(tmp_path: Path) -> None:
    first = take(RUN, tmp_path)
    save_all(first, 10)
    attempt = new_attempt(first[0], 20, 1)
    for rank, node in enumerate(first):
        save_part(node, attempt, rank, 20, 2)
    first[0].claim._lock.forget()
    second = take(Run("run-b"), tmp_path)
    with pytest.raises(OtherRun, match="taken over by run run-b"):
        commit(first[0], *commit_of(attempt, 20, 2), permitted)
    save_all(second, 11)
    assert found(second[0]) == (11, [])


# --- A directory that is not shared


def test_a_mark_is_seen_where_the_directory_is_the_same(tmp_path: Path) -> None:
    here, there = str(tmp_path / "here" / "x"), str(tmp_path / "there")
    token = write_mark(here, RUN)
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    assert sees_mark(here, token, lambda: now, sleep)
    assert now == 0.0
    assert not sees_mark(there, token, lambda: now, sleep)
    assert now >= 3.0
    assert not sees_mark(here, "../here/x/" + token, lambda: now, sleep)
    error = not_shared(there, 3, "b")
    assert "rank 3 on node b" in str(error)
    remove_mark(here, token)
    assert os.listdir(here) == []


def test_a_mark_that_its_writer_died_over_is_removed(tmp_path: Path) -> None:
    write_mark(str(tmp_path), RUN)
    save_all(nodes(tmp_path, 1), 10)
    assert not list(tmp_path.glob("tmp-*"))


# --- The values


def test_a_manifest_of_a_thousand_ranks_is_bounded_and_a_line_for_each_file() -> None:
    files = {METADATA_NAME: FileSum(1, "a" * 64)} | {
        data_name(rank): FileSum(10**11, "b" * 64) for rank in range(1000)
    }
    name = "step-000000000010-run-a-00000001-00000000"
    manifest = Manifest(10, 1, 1000, name, 10**14, digest_of(files), RUN.id, 1000)
    raw = manifest.to_json(files)
    assert Manifest.from_json(raw) == manifest
    assert len(raw) < 125_000
    assert raw.decode().count("\n") < 1020
    assert len(json.dumps(plain(manifest))) < 500, "what ranks tell each other"


@pytest.mark.parametrize(
    "files", [None, {}, {".metadata": "1 " + "a" * 64}, {".metadata": "1 " + "a" * 63}, {".metadata": 1}, []]
)
def test_a_manifest_with_another_list_of_files_cannot_exist(tmp_path: Path, files: Any) -> None:
    save_all(nodes(tmp_path, 1), 10)
    body = json.loads((tmp_path / "step-000000000010.json").read_bytes())
    del body["check"]
    body["files"] = files
    with pytest.raises(ValueError, match=r"manifest|sha256"):
        Manifest.from_json(seal_fields(body))


@pytest.mark.parametrize(
    "change",
    [{"generation": -1}, {"twin_of": 1}, {"twin_of": 2}, {"table": (0, 9)}, {"sums": ()}, {"sums": (0, 0)}],
)
def test_a_footer_with_a_wrong_field_cannot_exist(change: dict[str, Any]) -> None:
    good = Footer(1, 10, 2, 1, 1, 8, (4, 4), "0" * 16, False, 0, (5,))
    with pytest.raises(ValueError, match="footer"):
        replace(good, **change)


@pytest.mark.parametrize("at", [-1, -9, -100])
def test_a_footer_that_is_damaged_is_found(tmp_path: Path, at: int) -> None:
    all_nodes = nodes(tmp_path, 1)
    path = tmp_path / save_all(all_nodes, 10).file / data_name(0)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    manifest = all_nodes[0].newest_manifest()
    assert manifest is not None
    with pytest.raises(BadCheckpoint, match=data_name(0)):
        all_nodes[0].open_rank(manifest, 0)
