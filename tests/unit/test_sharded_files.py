"""Sharded checkpoints on disk: what is committed and believed, and what a power cut may leave behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.worker.errors import BadCheckpoint, SaveFailed
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.disk.sharded.commit import commit, new_attempt
from elastic_agent.worker.wire.run import Run
from tests.shards import METADATA, commit_of, copy_of, permitted, save_all, save_part

RUN = Run("run-a")


def nodes(directory: Path, count: int = 3, *, keep: int = 2, run: Run = RUN) -> list[CheckpointFiles]:
    return [CheckpointFiles(directory, keep=keep, run=run) for _ in range(count)]


def found(files: CheckpointFiles) -> tuple[int | None, list[BadCheckpoint]]:
    checkpoint, bad = files.find()
    if checkpoint is None:
        return None, bad
    checkpoint.stream.close()
    check(files, checkpoint.manifest)
    return checkpoint.manifest.step, bad


def check(files: CheckpointFiles, manifest: Manifest) -> None:
    """Every rank's copy is there to the last byte. Raises BadCheckpoint."""
    for rank in range(manifest.world_size):
        raw, header = copy_of(rank, manifest.step, manifest.world_size, generation=manifest.generation)
        with files.open_rank(manifest, rank) as copy:
            into = bytearray(copy.header.size)
            copy.read(0, into)
            assert into == raw
            assert copy.header.is_same_copy(header)
            assert {row.key for row in copy.table.shards} == {"model.weight", f"ranks.{rank}.rng"}


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_what_all_ranks_have_written_is_found(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path / "runs" / "x")
    manifest = save_all(all_nodes, 10)
    assert found(CheckpointFiles(tmp_path / "runs" / "x", keep=2, run=RUN)) == (10, [])
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.is_sharded
    attempt = tmp_path / "runs" / "x" / manifest.file
    assert {path.name for path in attempt.iterdir()} == {
        ".metadata", "files.json", *(f"__{rank}_0.{kind}" for rank in range(3) for kind in ("distcp", "json"))
    }  # fmt: skip
    assert (attempt / ".metadata").read_bytes() == METADATA
    assert len(manifest.to_json()) < 1000


def test_the_newest_good_ones_are_kept_and_nothing_else(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path)
    kept = [save_all(all_nodes, step) for step in (10, 20, 30, 40)][-2:]
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-000000000030.json", "step-000000000040.json", *(manifest.file for manifest in kept)
    }  # fmt: skip
    for manifest in kept:
        check(all_nodes[0], manifest)


def test_a_commit_without_all_parts_names_who_is_missing(tmp_path: Path) -> None:
    all_nodes = nodes(tmp_path)
    attempt = new_attempt(all_nodes[0], 10, 1)
    save_part(all_nodes[0], attempt, 0, 10, 3)
    save_part(all_nodes[2], attempt, 2, 10, 3)
    with pytest.raises(SaveFailed, match=r"step 10: no part has come of rank 1 within 0 s"):
        commit(all_nodes[0], commit_of(attempt, 10, 3), permitted)
    assert found(all_nodes[1]) == (None, [])
    save_part(all_nodes[1], attempt, 1, 10, 3)
    commit(all_nodes[0], commit_of(attempt, 10, 3), permitted)
    assert found(all_nodes[1]) == (10, [])


@pytest.mark.parametrize("lost", ["__1_0.distcp", "__1_0.json", "files.json", ".metadata"])
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
    files = CheckpointFiles(tmp_path, keep=2, run=RUN)
    with (
        files.open_rank(manifest, 2) as copy,
        pytest.raises(BadCheckpoint, match=r"__2_0\.distcp.*piece 0") as bad,
    ):
        copy.read(300, bytearray(10))
    files.reject(manifest, bad.value)
    assert found(files) == (10, [bad.value])
    newest = files.newest_manifest()
    assert newest is not None
    assert newest.step == 10
