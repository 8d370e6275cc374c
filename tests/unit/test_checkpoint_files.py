"""The checkpoint directory: what is believed, and what is refused. Power cuts: `test_power_cuts`."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.worker.errors import BadCheckpoint, Fenced
from elastic_agent.worker.storage.disk import (
    checkpoint_files,
    durable,
    ownership,
    parts,
    shard_files,
)
from elastic_agent.worker.storage.disk import commit as commit_module
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.wire import files
from elastic_agent.worker.wire.environment import Run
from elastic_agent.worker.wire.files import checksum
from tests.shards import RUN, commit_whole, content, data_of, write_whole
from tests.shards import save_whole as commit


def found(files: CheckpointFiles) -> tuple[int | None, list[BadCheckpoint]]:
    checkpoint, bad = files.find()
    if checkpoint is None:
        return None, bad
    with checkpoint.stream:
        assert checkpoint.stream.read().startswith(content(checkpoint.manifest.step))
    return checkpoint.manifest.step, bad


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_an_unwanted_checkpoint_is_taken_only_where_there_is_no_other(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=3, run=RUN)
    for step in (10, 20, 30):
        commit(files, step)

    def newest(unwanted_from: int) -> tuple[int, int]:
        claimed = files.newest_manifest(lambda manifest: manifest.step >= unwanted_from)
        checkpoint, _ = files.find(lambda manifest: manifest.step >= unwanted_from)
        assert claimed is not None
        assert checkpoint is not None
        checkpoint.stream.close()
        return claimed.step, checkpoint.manifest.step

    assert [newest(step) for step in (31, 30, 20, 10)] == [(30, 30), (20, 20), (10, 10), (30, 30)]


def test_data_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    write_whole(files, 10)
    assert found(files) == (None, [])


def truncate(manifest: Path, data: Path) -> None:
    os.truncate(data, 100)


def grow(manifest: Path, data: Path) -> None:
    data.write_bytes(data.read_bytes() + b"x")


def flip_a_bit(manifest: Path, data: Path) -> None:
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 4
    data.write_bytes(raw)


def lose_the_data(manifest: Path, data: Path) -> None:
    data.unlink()


def link_the_data(manifest: Path, data: Path) -> None:
    data.rename(data.with_name("elsewhere"))
    data.symlink_to("elsewhere")


def link_the_manifest(manifest: Path, data: Path) -> None:
    manifest.rename(manifest.with_name("elsewhere"))
    manifest.symlink_to("elsewhere")


def empty_manifest(manifest: Path, data: Path) -> None:
    manifest.write_bytes(b"")


def garbage_manifest(manifest: Path, data: Path) -> None:
    manifest.write_bytes(bytes(range(256)))


def nested_manifest(manifest: Path, data: Path) -> None:
    manifest.write_bytes(b"[" * 4000)


def huge_manifest(manifest: Path, data: Path) -> None:
    manifest.write_bytes(manifest.read_bytes() + b" " * 10_000_000)


def manifest_of_a_later_schema(manifest: Path, data: Path) -> None:
    body = json.loads(manifest.read_bytes())
    body["schema"] = 6
    del body["check"]
    body["check"] = checksum(body)
    manifest.write_text(json.dumps(body))


def manifest_of_another_step(manifest: Path, data: Path) -> None:
    manifest.write_bytes((manifest.parent / "step-000000000010.json").read_bytes())


def manifest_is_a_pipe(manifest: Path, data: Path) -> None:
    manifest.unlink()
    os.mkfifo(manifest)


DAMAGES: list[tuple[Callable[[Path, Path], None], str]] = [
    (truncate, "100 bytes long, the manifest says"),
    (grow, "bytes long, the manifest says"),
    (flip_a_bit, "do not match their checksum"),
    (lose_the_data, "No such file"),
    (link_the_data, "is no file"),
    (link_the_manifest, "Too many levels of symbolic links"),
    (empty_manifest, "not JSON"),
    (garbage_manifest, "not JSON"),
    (nested_manifest, "not JSON"),
    (huge_manifest, "longer than"),
    (manifest_of_a_later_schema, "schema 6, this version reads 2 and 3 and 4 and 5"),
    (manifest_of_another_step, "under the name of step 20"),
    (manifest_is_a_pipe, "not JSON"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, damage: Callable[[Path, Path], None], reason: str
) -> None:
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    commit(files, 10)
    manifest = commit(files, 20)
    damage(tmp_path / "step-000000000020.json", data_of(tmp_path, manifest))
    step, bad = found(files)
    assert step == 10
    assert [error.step for error in bad] == [20]
    assert reason in str(bad[0])
    assert "step-000000000020" in str(bad[0])


def raw_manifest(directory: Path) -> bytes:
    return (directory / "step-000000000010.json").read_bytes()


def test_no_bit_of_a_manifest_may_flip_unnoticed(tmp_path: Path) -> None:
    manifest = commit(CheckpointFiles(tmp_path, keep=1, run=RUN), 10)
    raw = raw_manifest(tmp_path)
    believed = set()
    for position in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << position % 8
        try:
            believed.add(Manifest.from_json(bytes(flipped)))
        except ValueError:
            continue
    # A flip may turn white space into other white space, but never into another manifest.
    assert believed <= {manifest}


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("step", True), ("step", 1.0), ("generation", "1"), ("world_size", 0), ("size", 0),
     ("sha256", "f" * 63), ("sha256", None), ("file", "../../etc/passwd"), ("file", "step-000000000010.pt"),
     ("run", "a/b"), ("run", None), ("file", f"step-{10:012d}-run-b-{1:08d}-00000000"),
     ("step", 2**63), ("size", 2**63), ("generation", -1), ("sha256", "F" * 64), ("sha256", 5), ("file", 5),
     ("file", f"step-{10:012d}-run-a-{2:08d}-00000000"), ("schema", 1), ("schema", 2), ("schema", 3), ("schema", 6),
     ("schema", True), ("schema", 2.0), ("schema", None), ("more", 1), ("parts", 0), ("parts", 3)],
)  # fmt: skip
def test_a_manifest_with_a_wrong_field_cannot_exist(tmp_path: Path, field: str, value: object) -> None:
    commit(CheckpointFiles(tmp_path, keep=1, run=RUN), 10)
    body = json.loads(raw_manifest(tmp_path))
    del body["check"]
    body[field] = value
    body["check"] = checksum(body)
    with pytest.raises(ValueError, match=field):
        Manifest.from_json(json.dumps(body).encode())


@pytest.mark.parametrize(
    "name", ["step", "generation", "world_size", "file", "files", "size", "sha256", "run", "check"]
)
def test_a_manifest_without_a_field_cannot_exist(tmp_path: Path, name: str) -> None:
    commit(CheckpointFiles(tmp_path, keep=1, run=RUN), 10)
    body = json.loads(raw_manifest(tmp_path))
    del body["check"]
    if name != "check":
        del body[name]
        body["check"] = checksum(body)
    with pytest.raises(ValueError, match=r"manifest"):
        Manifest.from_json(json.dumps(body).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[" * 100_000, b"[]", b"1", b"null", b"\xff"])
def test_what_is_no_object_is_no_manifest(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"manifest"):
        Manifest.from_json(raw)


@pytest.mark.parametrize("fault", ["renamed", "long"])
def test_a_manifest_that_is_whole_is_not_believed_under_another_name_or_at_any_length(
    tmp_path: Path, fault: str
) -> None:
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    commit(files, 10)
    path = tmp_path / "step-000000000010.json"
    if fault == "renamed":
        path = path.rename(tmp_path / "step-000000000020.json")
    else:
        path.write_bytes(path.read_bytes() + b" " * (4 << 20))
    checkpoint, bad = found(files)
    assert checkpoint is None
    assert len(bad) == 1
    assert ("of step 10 under the name of step 20" if fault == "renamed" else "longer than") in str(bad[0])


def test_data_whose_manifest_cannot_be_read_is_kept_and_without_one_it_is_not(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    damaged, lost = commit(files, 10), commit(files, 20)
    (tmp_path / "step-000000000010.json").write_bytes(b"half")
    (tmp_path / "step-000000000020.json").unlink()
    commit(CheckpointFiles(tmp_path, keep=2, run=RUN), 30)
    assert (tmp_path / damaged.file).exists()
    assert not (tmp_path / lost.file).exists()


def test_the_checkpoint_fallen_back_to_outlives_the_bad_one(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    commit(files, 10)
    flip_a_bit(tmp_path, data_of(tmp_path, commit(files, 20)))

    resumed = CheckpointFiles(tmp_path, keep=2, run=RUN)
    assert found(resumed)[0] == 10
    newest = commit(resumed, 30)
    assert resumed.steps() == [30, 10]  # not 30 and the bad 20
    truncate(tmp_path, data_of(tmp_path, newest))
    assert found(CheckpointFiles(tmp_path, keep=2, run=RUN))[0] == 10


def test_a_past_that_was_given_up_does_not_come_back(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=3, run=RUN)
    commit(files, 10)
    lost = tmp_path / commit(files, 20).file
    lost.rename(tmp_path / "the disk is away")

    resumed = CheckpointFiles(tmp_path, keep=3, run=RUN)
    assert found(resumed)[0] == 10
    commit(resumed, 15)
    (tmp_path / "the disk is away").rename(lost)
    assert found(CheckpointFiles(tmp_path, keep=3, run=RUN)) == (15, [])


@pytest.mark.parametrize("given_up", [False, True])
def test_a_newer_step_of_this_generation_goes_only_if_a_load_gave_it_up(
    tmp_path: Path, given_up: bool
) -> None:
    """Two processes of one rank save there at once, and the older save ends last."""
    commit(CheckpointFiles(tmp_path, keep=2, run=RUN), 20)
    late = CheckpointFiles(tmp_path, keep=2, run=RUN)
    late.claim.bad_steps.update({20} if given_up else ())
    commit(late, 10)
    assert late.steps() == ([10] if given_up else [20, 10])


def test_what_dead_writers_left_is_removed_and_a_newer_writer_is_left_alone(tmp_path: Path) -> None:
    newer = "tmp-00000003-000000000020-run-a-0a1b2c3d.pt"
    for name in (
        "tmp-00000001-000000000020-run-a-0a1b2c3d.pt",
        "tmp-00000002-000000000020-run-a-0a1b2c3d.json",
        newer,
        f"step-000000000005-run-a-0a1b2c3d-{'a' * 16}.pt",
    ):
        (tmp_path / name).write_bytes(b"half")
    manifest = commit(CheckpointFiles(tmp_path, keep=2, run=RUN), 10, generation=2)
    assert names(tmp_path) == {newer, "step-000000000010.json", manifest.file}


def overtaken(monkeypatch: pytest.MonkeyPatch, directory: Path, until: int) -> CheckpointFiles:
    """A reader; each time it has listed what is there, a saver beside it replaces that, up to step `until`."""
    saver = CheckpointFiles(directory, keep=1, run=RUN)
    commit(saver, 10)
    reader = CheckpointFiles(directory, keep=1, run=Run("run-b"))
    listed = reader._candidates

    def replaced(unwanted: Callable[[Manifest], bool]) -> list[tuple[int, Manifest | None]]:
        candidates = listed(unwanted)
        if (step := candidates[0][0]) < until:
            commit(saver, step + 10)
        return candidates

    monkeypatch.setattr(reader, "_candidates", replaced)
    return reader


def test_a_reader_beside_a_fast_saver_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(overtaken(monkeypatch, tmp_path, 40)) == (40, [])


def test_a_reader_that_is_always_overtaken_gives_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, bad = found(overtaken(monkeypatch, tmp_path, 10_000))
    assert step is None
    assert [type(one.__cause__) for one in bad] == [FileNotFoundError]


def test_an_unreadable_directory_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not a directory")
    with pytest.raises(NotADirectoryError):
        CheckpointFiles(tmp_path / "x", keep=1, run=RUN).find()


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointFiles(tmp_path, keep=0, run=RUN)


# --- A writer of the past


def refused() -> None:
    raise Fenced("generation 1 is over")


def after(questions: int, then: Callable[[], None]) -> Callable[[], None]:
    """Leave is given so often, and `then` is asked."""
    left = questions

    def may_change() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            then()

    return may_change


def writers(directory: Path) -> tuple[CheckpointFiles, CheckpointFiles]:
    """Of one run: one of the past, and one of the present."""
    return CheckpointFiles(directory, keep=2, run=RUN), CheckpointFiles(directory, keep=2, run=RUN)


def test_a_writer_of_the_past_leaves_nothing(tmp_path: Path) -> None:
    past, present = writers(tmp_path)
    commit(past, 10)
    before = names(tmp_path)
    attempt = write_whole(past, 20)
    with pytest.raises(Fenced):
        commit_whole(past, attempt, 20, may_change=after(1, refused))
    assert names(tmp_path) == before
    commit(present, 20, generation=2)
    assert found(present) == (20, [])


def test_a_writer_of_the_past_removes_no_data_of_the_present(tmp_path: Path) -> None:
    """The same step with the same bits: each writer's data has a name of its own."""
    past, present = writers(tmp_path)
    old = write_whole(past, 10)
    new: list[str] = []

    def overtaken() -> None:
        new.append(write_whole(present, 10, generation=2))
        refused()

    with pytest.raises(Fenced):
        commit_whole(past, old, 10, may_change=after(1, overtaken))
    commit_whole(present, new[0], 10, generation=2)
    assert found(present) == (10, [])


def test_a_rename_that_the_present_has_overtaken_fails(tmp_path: Path) -> None:
    """Leave was given, and the process stood still before it could use it."""
    past, present = writers(tmp_path)
    commit(past, 10)
    old = write_whole(past, 20)

    def overtaken() -> None:
        commit(present, 15, generation=2)

    with pytest.raises(FileNotFoundError):
        commit_whole(past, old, 20, may_change=after(1, overtaken))
    assert found(CheckpointFiles(tmp_path, keep=2, run=RUN)) == (15, [])


@pytest.mark.parametrize("already_published", [True, False])
def test_a_writer_that_stood_still_after_its_commit_deletes_nothing_of_those_who_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, already_published: bool
) -> None:
    """To a writer that fell back to step 10, data beyond step 30 looks like what was never published."""
    past, present = writers(tmp_path)
    commit(past, 10)
    old = write_whole(past, 30)
    new: list[str] = []

    def fsync(fd: int) -> None:
        os.fsync(fd)
        if not new and "step-000000000030.json" in names(tmp_path):
            monkeypatch.undo()
            assert found(present)[0] == 30
            new.append(write_whole(present, 40, generation=2))
            if already_published:
                commit_whole(present, new[0], 40, generation=2)

    replace_os(monkeypatch, _Overlay(fsync=fsync))
    commit_whole(past, old, 30, may_change=lambda: refused() if new else None)
    if not already_published:
        commit_whole(present, new[0], 40, generation=2)
    assert found(CheckpointFiles(tmp_path, keep=2, run=RUN)) == (40, [])


# --- A disk that refuses


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_costs_the_new_checkpoint_and_no_old_one(small_disk: Path) -> None:
    files = CheckpointFiles(small_disk, keep=2, run=RUN)
    commit(files, 10)
    before = names(small_disk)

    with pytest.raises(OSError, match="No space left") as refused:
        write_whole(files, 20, raw=b"x" * 2_000_000)
    assert refused.value.errno == errno.ENOSPC
    (left,) = names(small_disk) - before
    assert not os.listdir(small_disk / left)
    assert found(files) == (10, [])
    commit(files, 20)  # there is room again: nothing of the failed one is left


def test_a_read_only_disk_refuses_and_still_loads(small_disk: Path) -> None:
    files = CheckpointFiles(small_disk, keep=2, run=RUN)
    commit(files, 10)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="Read-only"):
        commit(files, 20)
    assert found(files) == (10, [])


@pytest.mark.parametrize("failing", range(6))
def test_a_file_whose_fsync_failed_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    commit(files, 10)
    calls = 0

    def fsync(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise OSError(errno.EIO, "Input/output error")

    replace_os(monkeypatch, _Overlay(fsync=fsync))
    with pytest.raises(OSError, match="Input/output"):
        commit(files, 20)
    monkeypatch.undo()
    assert calls == failing + 1  # asked again, the kernel would call it a success
    assert not list(tmp_path.rglob("tmp-*"))
    # The manifest is visible only if everything but its directory entry was known to be durable.
    assert found(CheckpointFiles(tmp_path, keep=2, run=RUN)) == (20 if failing == 5 else 10, [])


def replace_os(monkeypatch: pytest.MonkeyPatch, overlay: _Overlay) -> None:
    for module in (checkpoint_files, commit_module, ownership, durable, files, parts, shard_files):
        monkeypatch.setattr(module, "os", overlay)


class _Overlay:
    """The `os` module with some functions replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_a_new_directory_has_a_durable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    replace_os(monkeypatch, _Overlay(fsync=fsync))
    commit(CheckpointFiles(tmp_path / "runs" / "x", keep=1, run=RUN), 10)
    assert synced[:2] == [str(tmp_path), str(tmp_path / "runs")]
