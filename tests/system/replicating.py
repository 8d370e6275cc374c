"""A worker without torch that keeps shards in memory by hand: it fills a slot and has it brought to the other nodes.

Each node writes the address of its memory server to a file in the folder of its first argument, and waits for those of
all. Not a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from elastic_agent.worker.storage.memory.copy_header import Header, RankShards
from elastic_agent.worker.storage.memory.slot_folders import SlotFolder
from elastic_agent.worker.storage.memory.slots import Slots
from elastic_agent.worker.storage.replication.acks import read_acks
from elastic_agent.worker.storage.replication.client import CopyGone, MemoryClient, order
from elastic_agent.worker.storage.replication.key_file import read_key
from elastic_agent.worker.storage.replication.messages import Partner, Replicate
from elastic_agent.worker.wire.environment import WorkerEnv
from elastic_agent.worker.wire.messages import SLOT_NAMES

DIRECTORY = "/checkpoints"
SIZE = 40 << 20


def main() -> None:
    folder = Path(sys.argv[1])
    env = WorkerEnv.of(os.environ)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    history = os.open(os.environ["SYSTEM_TEST_HISTORY"], os.O_WRONLY | os.O_APPEND)

    def record(what: str, **more: object) -> None:
        common = {"what": what, "generation": env.generation, "rank": rank, "world": world, "node": env.node}
        os.write(history, json.dumps({**common, "pid": os.getpid(), **more}).encode() + b"\n")

    record("start", env=dict(os.environ), argv=sys.argv[1:])
    (folder / "new").write_text(env.memory_address)
    os.rename(folder / "new", folder / f"{env.generation}-{env.node}.address")
    while len(found := list(folder.glob(f"{env.generation}-*.address"))) < world:
        time.sleep(0.02)
    others = {path.stem.partition("-")[2]: path.read_text() for path in found}
    del others[env.node]
    everyone = tuple(range(8))
    partners = tuple(Partner(node, address, everyone, everyone) for node, address in others.items())
    partners = partners[: env.memory_replicas]
    slots = Slots(env.memory, SlotFolder.of(DIRECTORY, env.local_rank))
    assert order(env.memory_server, Replicate(DIRECTORY, env.generation, (0, 0), partners))
    for step in range(1, 4):
        copy(slots, env, step, rank, world)
        version = env.generation, step
        while True:
            slot = next(name for name, header in slots.headers().items() if header.version == version)
            acks = read_acks(slots.folder, slot, version, env.generation)
            if len(acks.nodes) == len(partners):
                break
            time.sleep(0.01)
        record("acked", step=step, nodes=acks.nodes)
    key = read_key(env.memory, 10.0)
    for node, address in others.items():
        with MemoryClient(address, key, 10.0) as client:
            into = bytearray(SIZE)
            replica = SlotFolder.of(DIRECTORY, env.local_rank, env.node)
            for slot in SLOT_NAMES:
                with contextlib.suppress(CopyGone):  # its older slot
                    client.read(replica, slot, (env.generation, 3), 0, memoryview(into))
            record("read", of=node, same=into == data(rank, 3))
    while True:
        record("step", step=3)
        time.sleep(0.05)


def data(rank: int, step: int) -> bytes:
    block = f"{rank} {step} ".encode()
    return (block * (SIZE // len(block) + 1))[:SIZE]


def copy(slots: Slots, env: WorkerEnv, step: int, rank: int, world: int) -> None:
    opened = slots.begin(SIZE)
    opened.trim()
    os.pwrite(opened.fd, data(rank, step), 0)
    shards = RankShards(rank, f"{rank:016x}", common=True)
    slots.seal(opened, Header(step, env.generation, 0, world, SIZE, run=env.run, shards=shards))


if __name__ == "__main__":
    main()
