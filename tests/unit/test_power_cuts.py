"""What a power cut may leave of checkpoints: at any moment, and with each fsync forgotten in turn."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.worker.errors import BadCheckpoint
from elastic_agent.worker.storage.disk import checkpoint_files, durable, ownership, parts, shard_files
from elastic_agent.worker.storage.disk import commit as commit_module
from elastic_agent.worker.storage.disk.checkpoint_files import CheckpointFiles
from elastic_agent.worker.wire import files
from tests.shards import RUN, check, content, nodes, save_all, save_whole


class Disk:
    """Records what is done to a directory and those below it, and says what a power cut at this moment may leave.

    The model is the harshest a file system may be: of a file, only what was fsynced is certain and the rest may be
    there or not; of a directory, each change since its last fsync may have survived, independent of the others. What no
    visible manifest names is left out: no reader sees it.
    """

    def __init__(self, after_each_call: Callable[[Disk], None], forget_fsync: int | None) -> None:
        self.fsyncs = 0
        self._after_each_call = after_each_call
        self._forget_fsync = forget_fsync
        self._fds: dict[int, int] = {}
        """Descriptor to inode."""
        self._written: dict[int, bytearray] = {}
        self._durable: dict[int, bytes] = {}
        self._directories = {0: Directory()}
        self._inodes = 1

    def overlay(self) -> Overlay:
        return Overlay(
            open=self._open, write=self._write, fsync=self._fsync, rename=self._rename, unlink=self._unlink,
            mkdir=self._mkdir, rmdir=self._rmdir,
        )  # fmt: skip

    def images(self) -> Iterator[Image]:
        for entries in self._directories[0].images():
            manifests = {
                name: entries[name] for name in entries if name.startswith("step-") and name.endswith(".json")
            }
            for whole in (True, False):
                root = {name: self._content(inode, whole) for name, inode in manifests.items()}
                named = sorted(
                    {
                        match[1]
                        for raw in root.values()
                        if (match := re.search(r'"file": "([^"]+)"', raw.decode()))
                    }
                )
                named = [name for name in named if name in entries]
                for chosen in product(*(self._images_of(name, entries[name]) for name in named)):
                    yield root | {
                        path: self._content(inode, whole) for files in chosen for path, inode in files.items()
                    }

    def _images_of(self, name: str, inode: int) -> list[dict[str, int]]:
        """By path, what may be there of a file, or of a directory."""
        if inode not in self._directories:
            return [{name: inode}]
        images = self._directories[inode].images()
        return [{f"{name}/{file}": one for file, one in image.items()} for image in images]

    def _content(self, inode: int, whole: bool) -> bytes:
        return bytes(self._written[inode]) if whole else self._durable[inode]

    def _new(self) -> int:
        self._inodes += 1
        return self._inodes

    def _change(self, directory: int, gone: str | None, new: str | None, inode: int) -> None:
        self._directories[directory].change(gone, new, inode)
        self._after_each_call(self)

    def _open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        self._fds.pop(fd, None)
        if dir_fd is None:
            self._fds[fd] = 0
        elif flags & os.O_DIRECTORY:
            self._fds[fd] = self._directories[self._fds[dir_fd]].entries[path]
        elif flags & os.O_CREAT:
            self._fds[fd] = inode = self._new()
            self._written[inode], self._durable[inode] = bytearray(), b""
            self._change(self._fds[dir_fd], None, path, inode)
        return fd

    def _write(self, fd: int, data: memoryview) -> int:
        count = os.write(fd, data)
        self._written[self._fds[fd]] += data[:count]
        self._after_each_call(self)
        return count

    def _fsync(self, fd: int) -> None:
        self.fsyncs += 1
        if self.fsyncs == self._forget_fsync:
            return
        inode = self._fds[fd]
        if inode in self._directories:
            self._directories[inode].sync()
        else:
            self._durable[inode] = bytes(self._written[inode])
        self._after_each_call(self)

    def _rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        directory = self._fds[src_dir_fd]
        self._change(directory, source, target, self._directories[directory].entries[source])

    def _unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)
        directory = self._fds[dir_fd]
        self._change(directory, name, None, self._directories[directory].entries[name])

    def _mkdir(self, name: str, *, dir_fd: int) -> None:
        os.mkdir(name, dir_fd=dir_fd)
        inode = self._new()
        self._directories[inode] = Directory()
        self._change(self._fds[dir_fd], None, name, inode)

    def _rmdir(self, name: str, *, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)
        directory = self._fds[dir_fd]
        self._change(directory, name, None, self._directories[directory].entries[name])


Image = dict[str, bytes]


class Directory:
    def __init__(self) -> None:
        self.entries: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        self._pending: list[tuple[str | None, str | None, int]] = []

    def change(self, gone: str | None, new: str | None, inode: int) -> None:
        if gone is not None:
            del self.entries[gone]
        if new is not None:
            self.entries[new] = inode
        self._pending.append((gone, new, inode))

    def sync(self) -> None:
        self._durable = dict(self.entries)
        self._pending.clear()

    def images(self) -> list[dict[str, int]]:
        """Each change may have survived or not. Of many it is tried with one or two that did, or did not."""
        count = len(self._pending)
        sizes = range(count + 1) if count <= 5 else (0, 1, 2, count - 2, count - 1, count)
        return [self._with(survived) for size in sizes for survived in combinations(self._pending, size)]

    def _with(self, survived: Iterable[tuple[str | None, str | None, int]]) -> dict[str, int]:
        entries = dict(self._durable)
        for gone, new, inode in survived:
            if gone is not None:
                entries.pop(gone, None)
            if new is not None:
                entries[new] = inode
        return entries


class Overlay:
    """The `os` module with some functions replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


SAVES = (10, 20, 30, 40)
KEEP = 2
RANKS = 2


def check_any(reader: CheckpointFiles, step: int) -> None:
    """Raises BadCheckpoint."""
    checkpoint = reader.open(step)
    with checkpoint.stream:
        if checkpoint.manifest.parts > 1:
            check(reader, checkpoint.manifest)
        else:
            assert checkpoint.stream.read().startswith(content(step))


@dataclass(frozen=True)
class Kind:
    save: Callable[[list[CheckpointFiles], int], object]
    fsyncs: int

    @property
    def fsync_of_a_prune(self) -> int:
        """The first of them."""
        return (KEEP + 1) * self.fsyncs + 1


WHOLE = Kind(lambda all_nodes, step: save_whole(all_nodes[0], step), 1 + 5)
PARTS = Kind(save_all, RANKS + 5)


def broken_promises(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, forget_fsync: int | None = None
) -> tuple[list[str], int]:
    """Cut the power after every call of four saves; returns what was wrong and how many disks were looked at."""
    promised: list[int] = []
    begun: list[int] = []
    broken: list[str] = []
    seen: set[tuple[int, tuple[tuple[str, bytes], ...]]] = set()

    def replace_os(overlay: Overlay) -> None:
        for module in (checkpoint_files, ownership, durable, files, shard_files, parts, commit_module):
            monkeypatch.setattr(module, "os", overlay)

    def cut(disk: Disk) -> None:
        monkeypatch.undo()
        for image in disk.images():
            key = (len(promised), tuple(sorted(image.items())))
            if key not in seen:
                seen.add(key)
                look(image)
        replace_os(disk.overlay())

    def look(image: Image) -> None:
        directory = tmp_path / f"after-cut-{len(seen)}"
        directory.mkdir()
        for name, raw in image.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(raw)
        reader = CheckpointFiles(directory, keep=KEEP, run=RUN)
        where = f"saved {promised}, begun {begun}, left {sorted(image)}"
        good = 0
        for step in reader.steps():
            try:
                check_any(reader, step)
                good += 1
            except BadCheckpoint as error:
                broken.append(f"a visible manifest names what is not whole: {error}: {where}")
        newest = max(reader.steps(), default=None)
        if newest not in (promised[-1] if promised else None, begun[-1]):
            broken.append(f"found {newest}: {where}")
        if good < min(KEEP, len(promised)):
            broken.append(f"a good checkpoint is lost: {where}")

    disk = Disk(cut, forget_fsync)
    (tmp_path / "live").mkdir()
    all_nodes = nodes(tmp_path / "live", RANKS, keep=KEEP)
    replace_os(disk.overlay())
    for step in SAVES:
        begun.append(step)
        kind.save(all_nodes, step)
        promised.append(step)
        cut(disk)
    monkeypatch.undo()
    prunes = len(SAVES) - KEEP
    assert disk.fsyncs == len(SAVES) * kind.fsyncs + prunes
    return broken, len(seen)


@pytest.mark.parametrize("kind", [WHOLE, PARTS], ids=["whole", "parts"])
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    broken, looked = broken_promises(kind, tmp_path, monkeypatch)
    assert broken == []
    assert looked > 10  # or the cuts did not happen


@pytest.mark.parametrize(
    ("kind", "forgotten"),
    [
        (kind, number)
        for kind in (WHOLE, PARTS)
        for number in (*range(1, kind.fsyncs + 1), kind.fsync_of_a_prune)
    ],
)
def test_each_fsync_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, forgotten: int
) -> None:
    broken, _ = broken_promises(kind, tmp_path, monkeypatch, forget_fsync=forgotten)
    assert broken
