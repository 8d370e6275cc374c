"""Sharded state under real agents: killed workers and nodes, and planned changes, cost no step that all have copied."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.etcd_servers import etcd_is_installed

from .harness import Agent, Generation, Job

SCRIPT = Path(__file__).with_name("sharding.py")
KINDS = ("fsdp", "hsdp", "fsdp-tp", "fsdp1")
SEED = 15

PRELOADED = (
    "--preload=torch.distributed.fsdp,torch.distributed.tensor.parallel,torch.distributed.optim,"
    "elastic_agent.worker"
)
"""What the script imports: less than what workers with DistributedDataParallel do."""


def newest(job: Job, training: Generation) -> int:
    """The step that all its ranks have finished, of all kinds."""
    last: dict[tuple[int, str], int] = {}
    for one in job.history(what="loaded", generation=training.number):
        last[one["rank"], one["kind"]] = one["step"]
    for one in job.history(what="step", generation=training.number):
        last[one["rank"], one["kind"]] = one["step"]
    return min(last.values(), default=0)


def least(job: Job, training: Generation, what: str) -> int:
    """The newest step that all ranks had "copied", or partners had "acknowledged", of all kinds."""
    found: dict[tuple[int, str], int] = {}
    for one in job.history(what="step", generation=training.number):
        found[one["rank"], one["kind"]] = one[what]
    return min(found.values(), default=0)


def reach(job: Job, training: Generation, step: int) -> int:
    """Wait until all ranks have finished this step; which one they have finished then."""
    job.wait_for(lambda: newest(job, training) >= step, f"step {step}")
    return newest(job, training)


def some_steps(job: Job, training: Generation) -> None:
    reach(job, training, 6 + job.history(what="loaded", generation=training.number)[0]["step"])


def hold(job: Job, step: int) -> None:
    """Let training wait after this step."""
    (job.folder / "next").write_text(str(step))
    (job.folder / "next").replace(job.folder / "hold")


def expect_to_go_on(job: Job, before: Generation, after: Generation, least: int) -> None:
    """The whole state is what it was after that step, and so are the random numbers where the world is as large."""
    for loaded in job.history(what="loaded", generation=after.number):
        assert loaded["step"] >= least, "a step was lost that all had copied"
        of_step = {name: loaded[name] for name in ("kind", "step")}
        was = job.history(what="step", generation=before.number, **of_step) or job.history(
            what="loaded", generation=before.number, **of_step
        )
        assert {one["whole"] for one in was} == {loaded["whole"]}
        if len(before.starts) == len(after.starts):
            assert loaded["randomness"] in {one["randomness"] for one in was if one["rank"] == loaded["rank"]}


def agents_of(job: Job) -> dict[str, Agent]:
    return {agent.name: agent for agent in job.agents}


# --- Of every kind


def on_disk(folder: Path, kind: str) -> int:
    """The newest step that a manifest vouches for."""
    manifests = (folder / "disk" / kind).glob("step-*.json")
    return max((int(path.stem.split("-")[1]) for path in manifests), default=0)


def is_saving(folder: Path) -> bool:
    """Some kind's save has begun to write, and has no manifest yet."""
    for attempt in folder.glob("disk/*/step-*-*"):
        number = attempt.name.split("-")[1]
        if not (attempt.parent / f"step-{number}.json").exists():
            return True
    return False


def cut_power(job: Job, least: int, delay_s: float) -> None:
    """When all have saved a step from `least` on, and so long after a save has begun to write: all processes end, and
    all nodes lose their memory."""
    job.wait_for(lambda: all(on_disk(job.folder, kind) >= least for kind in KINDS), f"step {least} on disk")
    deadline = time.monotonic() + 20
    while not is_saving(job.folder):
        assert time.monotonic() < deadline, "no save was under way for 20 s"
        time.sleep(0.001)
    time.sleep(delay_s)
    for process in job.processes():
        os.kill(process.pid, signal.SIGKILL)
    job.wait_for(lambda: not job.processes(), "all processes to end")
    for agent in job.agents:
        shutil.rmtree(re.findall(r"in (/dev/shm/elastic-agent-\S+)", agent.text)[0], ignore_errors=True)


@pytest.fixture
def second_job_in_etcd(second_job: Job, request: pytest.FixtureRequest) -> Job:
    if etcd_is_installed():
        second_job.use_etcd(request.getfixturevalue("etcd"), in_order=True)
    return second_job


def test_every_kind_lives_through_a_kill_a_power_cut_and_a_lost_node(
    job: Job, in_etcd: None, second_job_in_etcd: Job
) -> None:
    """Meshes of 2 x 2 ranks on two nodes, and of 1 x 2 on the one that is left."""
    rng, restarted = random.Random(SEED), second_job_in_etcd
    options = (PRELOADED, "--nnodes=1:2", "--nproc-per-node=2", "--lease-ttl=60")
    script = (SCRIPT, job.folder, "--kinds", *KINDS)
    hold(job, 7)
    for name in ("a", "b"):
        saving = ("--quiet", "7", "--save-from", "8")
        job.join(name, *options, "--last-call=60s", script=(*script, *saving))

    training = job.wait_for_training(world=4)
    reach(job, training, rng.randint(2, 4))
    copied = job.wait_for(lambda: least(job, training, "copied"), "copies")
    os.kill(training.pid(rng.randrange(4)), signal.SIGKILL)
    again = job.wait_for_training(world=4, after=training.number)
    expect_to_go_on(job, training, again, copied)
    reach(job, again, 7)
    for end in job.history(what="step", generation=again.number, step=7):
        (quiet,) = job.history(what="quiet", step=7, rank=end["rank"], kind=end["kind"])
        assert [end[name] for name in ("whole", "randomness")] == [
            quiet[name] for name in ("whole", "randomness")
        ], f"{end['kind']}: a run with a kill has come to something else than one without"

    (job.folder / "hold").unlink()
    cut_power(job, 8, rng.uniform(0, 0.01))
    saved = {kind: on_disk(job.folder, kind) for kind in KINDS}
    for name in ("a", "b"):
        restarted.join(name, *options, "--last-call=60s", script=script)
    training = restarted.wait_for_training(world=4)
    for loaded in restarted.history(what="loaded"):
        (was,) = job.history(
            what="step", **{name: loaded[name] for name in ("kind", "step", "rank")}, generation=again.number
        )
        assert loaded["step"] == saved[loaded["kind"]]
        assert [loaded[name] for name in ("whole", "randomness")] == [
            was[name] for name in ("whole", "randomness")
        ]

    restarted.wait_for(lambda: least(restarted, training, "acknowledged"), "replicas")
    acknowledged = least(restarted, training, "acknowledged")
    agents_of(restarted)[rng.choice("ab")].kill()
    half = restarted.wait_for_training(world=2, after=training.number)
    expect_to_go_on(restarted, training, half, acknowledged)
    assert saved == {kind: on_disk(job.folder, kind) for kind in KINDS}


# --- Of FSDP2


def test_nodes_that_leave_come_and_are_lost_cost_no_step(job: Job, in_etcd: None) -> None:
    options, script = (PRELOADED, "--nnodes=1:3", "--lease-ttl=60"), (SCRIPT, job.folder)
    for name in ("a", "b", "c"):
        job.join(name, *options, "--last-call=60s", script=script)
    three = job.wait_for_training(world=3)
    some_steps(job, three)
    agents_of(job)[three.nodes[2]].signal(signal.SIGTERM)
    two = job.wait_for_training(world=2, after=three.number)
    expect_to_go_on(job, three, two, newest(job, three))
    some_steps(job, two)
    job.join("d", *options, script=script)
    three = job.wait_for_training(world=3, after=two.number)
    expect_to_go_on(job, two, three, newest(job, two))

    # Two ranks take what three had out of their memory, and the replica of the lost one's.
    job.wait_for(lambda: least(job, three, "acknowledged"), "replicas")
    acknowledged = least(job, three, "acknowledged")
    agents_of(job)[three.nodes[1]].kill()
    two = job.wait_for_training(world=2, after=three.number)
    expect_to_go_on(job, three, two, acknowledged)


def test_what_only_a_node_that_stands_by_has_is_not_lost(job: Job, in_etcd: None) -> None:
    """Of 2 x 2 ranks on four nodes the second is lost: the two that go on have the same half, and a third the other."""
    script = (SCRIPT, job.folder, "--kinds", "hsdp")
    options = (PRELOADED, "--nnodes=2:4", "--nodes-multiple-of=2", "--lease-ttl=60")
    for name in ("a", "b", "c", "d"):
        job.join(name, *options, "--last-call=60s", script=script)
    four = job.wait_for_training(world=4)
    some_steps(job, four)
    agents_of(job)[four.nodes[1]].kill()
    two = job.wait_for_training(world=2, after=four.number)
    assert two.nodes == [four.nodes[0], four.nodes[2]]
    expect_to_go_on(job, four, two, newest(job, four) - 1)


def test_a_save_is_found_by_another_world(job: Job, second_job: Job) -> None:
    """All agents are gone, and their memory with them: a world of another size goes on from what is on disk."""
    saving = (SCRIPT, job.folder, "--save-at", "5")
    first = job.start("a", PRELOADED, "--nproc-per-node=3", script=saving)
    job.wait_for_training(world=3)
    job.wait_for(lambda: on_disk(job.folder, "fsdp"), "the save to be on disk")
    first.kill()
    job.wait_for(lambda: not job.processes(), "the workers to end")
    second_job.start("a", PRELOADED, "--nproc-per-node=2", script=(SCRIPT, job.folder))
    second_job.wait_for_training(world=2)
    (loaded,) = second_job.history(what="loaded", rank=0)
    was = job.history(what="step", step=5)
    assert loaded["step"] == 5
    assert {one["whole"] for one in was} == {loaded["whole"]}


def test_a_leave_without_replicas_brings_the_last_step_to_disk(job: Job, in_etcd: None) -> None:
    options = (
        *(PRELOADED, "--nnodes=1:2", "--lease-ttl=60", "--memory-replicas=0"),
        "--last-call=60s",
    )
    agents = [job.join(name, *options, script=(SCRIPT, job.folder)) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    some_steps(job, two)
    agents[1].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    last = newest(job, two)
    expect_to_go_on(job, two, one, last)
    (ended,) = job.history(what="drained", generation=two.number, rank=0)  # which commits
    assert ended["on_disk"] == ended["step"] == last
