"""`torch.distributed.checkpoint` with the writer and the reader of `elastic_agent.worker.dcp`, under real agents."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

from elastic_agent.worker.storage.memory.slot_folders import folders_of
from elastic_agent.worker.storage.memory.slots import Slots

from .harness import TORCH_PRELOADED, Generation, Job

SCRIPT = Path(__file__).with_name("dcp_sharding.py")


def replicas(memory: str, directory: Path) -> list[int]:
    """The steps of other nodes' parts that a node has."""
    found = []
    for folder in folders_of(memory, str(directory)):
        if folder.origin:
            with contextlib.closing(Slots(memory, folder)) as slots:
                found += [header.step for header in slots.headers().values()]
    return found


def is_removed(folder: Path) -> bool:
    """It is now, unless the disk writer tidies up there at this instant."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def expect_to_go_on(job: Job, before: Generation, after: Generation) -> int:
    """With the state that all had after the step that is returned."""
    steps = set[int]()
    for rank in after.starts:
        (loaded,) = job.history(what="loaded", generation=after.number, rank=rank)
        was = job.history(what="step", generation=before.number, step=loaded["step"])
        assert {one["whole"] for one in was} == {loaded["whole"]}
        steps.add(loaded["step"])
    (step,) = steps
    return step


def test_a_save_outlives_a_node_without_the_disk_and_a_leave_is_saved_by_the_script(
    job: Job, in_etcd: None
) -> None:
    """Two ranks take what three have saved out of memory, a replica among it; one takes the last step of two."""
    disk = job.folder / "disk"
    for name in ("a", "b", "c"):
        job.join(name, TORCH_PRELOADED, "--nnodes=1:3", "--lease-ttl=60", script=(SCRIPT, job.folder))
    three = job.wait_for_training(world=3)
    memories = [start["env"]["ELASTIC_AGENT_MEMORY"] for start in three.starts.values()]
    (job.folder / "save").touch()
    job.wait_for(lambda: len(job.history(what="saved", generation=three.number)) == 3, "the save")
    saved = job.history(what="saved", generation=three.number)[0]["step"]
    job.wait_for(lambda: all(saved in replicas(memory, disk) for memory in memories), "the replicas")
    job.wait_for(lambda: list(disk.glob(f"step-{saved:012}.json")), "the save to be on disk")
    job.wait_for(lambda: is_removed(disk), "nobody to write to the disk any more")
    agents = {agent.name: agent for agent in job.agents}
    agents[three.nodes[1]].kill()
    two = job.wait_for_training(world=2, after=three.number)
    assert expect_to_go_on(job, three, two) == saved
    assert not list(disk.glob("step-*.json"))

    agents[two.nodes[1]].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    last = max(step["step"] for step in job.history(what="step", generation=two.number))
    assert expect_to_go_on(job, two, one) == last
