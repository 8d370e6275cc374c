"""Makes a checkpoint of the parts that all ranks write: by the disk writer of rank 0's node, or by rank 0.

    1 wait until all parts are there, and see that they fit together
    2 write DCP's index under a temporary name, fsync it, rename it
    3 fsync the directory of the attempt, and the one above it, which has its name
    4 publish the manifest, and drop older checkpoints: as `CheckpointFiles` does for all

The fsync of 3 comes after all names were seen: file systems commit changes of one directory in their order, so it makes
durable what other nodes have renamed there, too.

The end of the generation ends the wait. What was not published stays for another try, and is removed by a later save.
No torch here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ...errors import DirectoryNotShared, Fenced, OtherRun, SaveFailed
from ...wire.environment import Run
from ...wire.files import open_directory, open_for_reading, open_own_directory, remove
from ...wire.messages import MAX_REASON_CHARS, CommitOrder
from .checkpoint_files import CheckpointFiles
from .durable import make_directory, write_durably
from .manifests import ATTEMPT_NAME, FileSum, Manifest, digest_of
from .shard_files import LOOKING_THREADS, METADATA_NAME, Footer, data_name, read_footer

FIRST_LOOK_S = 0.02
LAST_LOOK_S = 1.0
"""Between two looks for the parts of others: longer each time."""
TOKEN_BYTES = 4
_SHOWN_RANKS = 8


def new_attempt(files: CheckpointFiles, step: int, generation: int, token: bytes = b"") -> str:
    """A name for the directory of one save, which no other has: rank 0 gives all ranks its `new_token`."""
    return f"step-{step:012d}-{files.run.id}-{generation:08d}-{(token or new_token()).hex()}"


def make_attempt(files: CheckpointFiles, attempt: str) -> set[str]:
    """Make its directory. The other attempts of this run and generation to save that step; raises OSError.

    Of two that are made at once at least one is named to the other.
    """
    make_directory(files.directory)
    with open_directory(files.directory) as root:
        os.mkdir(attempt, dir_fd=root)
        names = os.listdir(root)
    without_token = attempt[: -2 * TOKEN_BYTES]
    return {name for name in names if name.startswith(without_token) and name != attempt}


def new_token() -> bytes:
    return os.urandom(TOKEN_BYTES)


def commit(
    files: CheckpointFiles,
    save: CommitOrder,
    metadata: bytes,
    may_change: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Manifest:
    """`metadata` are the bytes of DCP's index. The parts of all ranks come within `save.within_s`, or too late.

    Raises SaveFailed when a part is missing or does not fit, OSError, OtherRun, and what `may_change` raises."""
    with files.prepared(save.step, save.generation, may_change) as root, files.claim.blaming(root):
        with suppress(FileExistsError):
            os.mkdir(save.attempt, dir_fd=root)
        try:
            parts = _await_parts(root, save, may_change, clock, sleep)
        except SaveFailed:
            files.claim.check(root, save.step)  # a run that has taken over may have removed some
            raise
        with open_own_directory(save.attempt, root) as there:
            for name in os.listdir(there):
                if name.startswith("tmp-"):  # of those who have died, or tried again
                    remove(there, name)
            temporary = f"tmp-{files.claim.mark}-{METADATA_NAME}"
            sha256, size = write_durably(there, temporary, lambda sink: sink.write(metadata))
            os.rename(temporary, METADATA_NAME, src_dir_fd=there, dst_dir_fd=there)
            os.fsync(there)
        os.fsync(root)
    listed = {METADATA_NAME: FileSum(size, sha256)}
    listed |= {data_name(rank): parts[rank][1] for rank in range(save.parts)}
    manifest = Manifest(
        save.step,
        save.generation,
        save.world_size,
        save.attempt,
        sum(footer.size for footer, _ in parts.values()),
        digest_of(listed),
        files.run.id,
        save.parts,
    )
    try:
        files.publish(manifest, may_change, listed)
    except (Fenced, OtherRun):
        files.discard(manifest)
        raise
    return manifest


def _await_parts(
    root: int,
    save: CommitOrder,
    may_change: Callable[[], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> dict[int, tuple[Footer, FileSum]]:
    """By rank. Raises SaveFailed when one does not come, or they are not of one state."""
    found: dict[int, tuple[Footer, FileSum]] = {}
    deadline, pause_s = clock() + save.within_s, FIRST_LOOK_S
    while True:
        with open_own_directory(save.attempt, root) as there:  # opened anew: NFS then asks its server
            names = set(os.listdir(there))
            missing = [rank for rank in range(save.parts) if data_name(rank) not in names]
            new = sorted(set(range(save.parts)) - found.keys() - set(missing))
            with ThreadPoolExecutor(LOOKING_THREADS) as threads:
                read = threads.map(lambda rank: _part(there, rank, save.step), new)
                found |= zip(new, read, strict=True)
        if not missing:
            break
        may_change()
        if clock() >= deadline:
            more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
            raise SaveFailed(
                f"step {save.step}: no part has come of rank {', '.join(map(str, missing[:_SHOWN_RANKS]))}{more} "
                f"within {save.within_s:g} s. Look at the log of their nodes: is this directory there, too, and are "
                "their disk writers alive?"
            )
        sleep(min(pause_s, max(0.0, deadline - clock())))
        pause_s = min(pause_s * 1.5, LAST_LOOK_S)
    if problem := _problem([found[rank][0] for rank in range(save.parts)], save):
        raise SaveFailed(f"step {save.step}: {problem}")
    return found


def _part(there: int, rank: int, step: int) -> tuple[Footer, FileSum]:
    """Raises OSError, and SaveFailed where that rank could not write its part."""
    with open_for_reading(there, data_name(rank)) as stream:
        try:
            return read_footer(stream)
        except ValueError:
            stream.seek(0)
            reason = stream.read(MAX_REASON_CHARS).decode(errors="replace") or "no room is left for a reason"
    raise SaveFailed(
        f"step {step}: rank {rank} cannot write its part: {reason}. The log of its node says more"
    )


def _problem(parts: list[Footer], save: CommitOrder) -> str:
    """Why these are not the parts of one checkpoint; empty: they are."""
    for rank, part in enumerate(parts):
        if (part.rank, part.step, part.world_size) != (rank, save.step, save.world_size):
            return f"the part of rank {rank} is of rank {part.rank}, step {part.step}"
        if (part.generation, part.copied_by) != (save.generation, parts[0].copied_by):
            what = f"the parts of rank 0 and {rank} are of copies that different generations have made"
            return f"{what}: the next save takes new ones"
        if part.twin_of is not None:
            other = parts[part.twin_of]
            if other.twin_of is not None or other.digest != part.digest:
                return f"rank {rank} does not have the shards of rank {part.twin_of}"
    if not any(part.common for part in parts):
        return "no rank has written what is the same on all: a version of elastic-agent that differs between nodes?"
    return ""


# ---------------------------------------------------------------- one directory for all nodes
#
#     if rank == 0: token = write_mark(directory, run)
#     ...                                   # all ranks get the token, and gather `sees_mark(directory, token)`
#     if rank == 0: remove_mark(directory, token)
#
# A mark that its writer has died over is a temporary file like any other, and removed with those. The directory of an
# attempt, which one rank has made, serves as a mark, too: its name is the token.

SEEN_WITHIN_S = 3.0
"""How long a rank looks: a file system over the network may show a new name a moment later."""
_PAUSE_S = 0.1
_MARK = re.compile(r"tmp-00000000-000000000000-[A-Za-z0-9._-]{1,128}-[0-9a-f]{8}\.json")


def write_mark(directory: str, run: Run) -> str:
    """Its name, which is the token. Raises OSError."""
    token = f"tmp-{0:08d}-{0:012d}-{run.id}-{os.urandom(4).hex()}.json"
    make_directory(directory)
    with open_directory(directory) as dir_fd:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(token, flags, 0o666, dir_fd=dir_fd))
    return token


def sees_mark(
    directory: str,
    token: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this node has the directory in which the token was written; waits `SEEN_WITHIN_S` before it says no."""
    if not (_MARK.fullmatch(token) or ATTEMPT_NAME.fullmatch(token)):
        return False
    deadline = clock() + SEEN_WITHIN_S
    while True:
        with suppress(OSError), open_directory(directory) as dir_fd:
            os.stat(token, dir_fd=dir_fd, follow_symlinks=False)
            return True
        if clock() >= deadline:
            return False
        sleep(_PAUSE_S)


def remove_mark(directory: str, token: str) -> None:
    with suppress(OSError), open_directory(directory) as dir_fd:
        remove(dir_fd, token)


def not_shared(directory: str, rank: int, node: str) -> DirectoryNotShared:
    return DirectoryNotShared(
        f"the state is not saved in {directory}: rank {rank} on node {node or 'unknown'} does not see there what "
        "rank 0 has written. Every node writes its own shards, so use a directory on a file system that all nodes share"
    )
