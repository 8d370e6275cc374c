"""Planned changes of real agents: no step is lost, nobody is signalled, and whatever goes wrong on the way ends."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.etcd_servers import EtcdCluster

from .harness import Job
from .lockstep_job import LockstepJob
from .test_just_in_time import SCRIPT, Run, undisturbed

STORE_LOST = 69


@pytest.fixture
def lockstep(job: Job, etcd: EtcdCluster) -> LockstepJob:
    job.use_etcd(etcd)
    return LockstepJob(job)


def test_a_join_and_two_leaves_lose_no_step(lockstep: LockstepJob) -> None:
    """The second leave comes while the first is under way."""
    job = lockstep.job
    agents = {name: lockstep.join(name) for name in ("a", "b")}
    two = job.wait_for_training(world=2)
    agents["c"] = lockstep.join("c")
    three = job.wait_for_training(world=3, after=two.number)
    lockstep.check_nothing_lost(two, three)
    for name in ("b", "c"):
        agents[name].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=three.number)
    assert one.nodes == ["a"]
    ends = [agents[name].exit_code() for name in ("b", "c")]
    assert ends == [143, 143]
    if one.number == three.number + 1:
        lockstep.check_nothing_lost(three, one)
    else:
        (between,) = (g for g in job.generations() if three.number < g.number < one.number)
        lockstep.check_nothing_lost(three, between)
    assert agents["a"].says(rf"generation {one.number} \(leave\): 1 node.* 0 failures so far")
    assert not agents["a"].says("failed: ")


@pytest.mark.parametrize("evaluates", [pytest.param("all", marks=pytest.mark.long), "rank 0"])
def test_a_change_does_not_wait_for_the_end_of_an_evaluation(lockstep: LockstepJob, evaluates: str) -> None:
    """Ranks that do not evaluate wait in the next step for rank 0: their agents end them."""
    job = lockstep.job
    agents = [lockstep.join(name, worker=("--evaluates", evaluates)) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    job.wait_for(lambda: job.history(what="evaluation"), "the evaluation to begin")
    agents[1].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    lockstep.check_nothing_lost(
        two, one, ended=2 if evaluates == "all" else 1
    ) if evaluates == "all" else None
    assert lockstep.last_step(two) % 20 == 0
    assert lockstep.ends(two) == {lockstep.last_step(two)}
    assert lockstep.first_step(one) == lockstep.last_step(two) + 1
    assert agents[1].exit_code() == 143
    assert agents[0].says(r"0 failures so far")


@pytest.mark.long
def test_the_host_of_the_store_lets_all_end_at_the_same_step(job: Job) -> None:
    """The job ends with its store; what has been done is kept."""
    lockstep = LockstepJob(job)
    agents = [lockstep.join(name) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    agents[0].signal(signal.SIGTERM)
    assert agents[0].exit_code() == 143
    assert agents[1].exit_code() == STORE_LOST
    assert lockstep.ends(two) == {lockstep.last_step(two)}
    assert not job.history(what="sigterm")


@pytest.mark.long
def test_workers_that_listen_to_nothing_are_signalled(lockstep: LockstepJob) -> None:
    job = lockstep.job
    agents = [lockstep.join(name, worker=("--deaf", "--own-handler")) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    agents[1].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    assert {record["rank"] for record in job.history(what="sigterm", generation=two.number)} == {0, 1}
    assert one.number == two.number + 1


@pytest.mark.long
def test_a_script_that_keeps_its_state_by_itself_does_so_at_the_same_step(lockstep: LockstepJob) -> None:
    """It calls `step`, has no Checkpointer, and a handler of SIGTERM: that is called at the agreed step."""
    job = lockstep.job
    agents = [lockstep.join(name, worker=("--own-handler",)) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    agents[1].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    asked = job.history(what="sigterm", generation=two.number)
    assert len(asked) == 2
    assert {record["step"] for record in asked} == {lockstep.last_step(two)}
    assert lockstep.first_step(one) == lockstep.last_step(two) + 1


@pytest.mark.long
def test_training_that_is_not_synchronous_is_stopped_as_before(lockstep: LockstepJob) -> None:
    job = lockstep.job
    agents = [lockstep.join(name, worker=("--astray",)) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    agents[1].signal(signal.SIGTERM)
    job.wait_for_training(world=1, after=two.number)
    assert agents[1].exit_code() == 143
    assert any(agent.says("this training is not synchronous") for agent in agents)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("step", "exit code 9", id="step"),
        pytest.param("keep", "exit code 9", id="keep", marks=pytest.mark.long),
        pytest.param(
            "own save", "exit code 1: OSError: the disk is full", id="own save", marks=pytest.mark.long
        ),
    ],
)
def test_a_crash_on_the_way_is_a_failure_at_once(lockstep: LockstepJob, fault: str, cause: str) -> None:
    job = lockstep.job
    agents = [lockstep.join(name, worker=("--fault", fault, "--keep-s=30")) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    agents[1].signal(signal.SIGTERM)
    one = job.wait_for_training(world=1, after=two.number)
    assert agents[1].exit_code() == 143
    assert one.number == two.number + 1
    assert any(agent.says(f"rank 1 failed: {cause}") for agent in agents)
    assert not agents[1].says("the state after their last step is kept in memory")
    ends = [record["at"] for record in job.history(what="step", generation=two.number)]
    assert one.starts[0]["at"] - max(ends) < 10, "nobody waits for the time of a drain"


@pytest.mark.long
def test_workers_that_do_not_come_to_an_end_are_signalled_in_time(lockstep: LockstepJob) -> None:
    job = lockstep.job
    options = ("--stop-grace=4s",)
    agents = [lockstep.join(name, *options, worker=("--keep-s=60",)) for name in ("a", "b")]
    two = job.wait_for_training(world=2)
    agents[1].signal(signal.SIGTERM)
    job.wait_for_training(world=1, after=two.number)
    assert agents[1].exit_code() == 143
    assert len(job.history(what="sigterm", generation=two.number)) == 2
    assert agents[0].says("the workers did not end by themselves in time")


@pytest.mark.long
def test_a_training_that_ends_on_the_way_has_succeeded(lockstep: LockstepJob) -> None:
    """Its last step is the agreed one, or comes before it."""
    job = lockstep.job
    agents = {name: lockstep.join(name, "--nnodes=2:2", worker=("--steps=60",)) for name in ("a", "b", "c")}
    two = job.wait_for_training(world=2)
    job.wait_for(lambda: job.history(what="step", step=57), "the training to be nearly over")
    agents[two.nodes[1]].signal(signal.SIGTERM)
    for name, agent in agents.items():
        assert agent.exit_code() in ((143, 0) if name == two.nodes[1] else (0,))
    assert max(record["step"] for record in job.history(what="step")) == 60


@pytest.mark.long
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_node_is_replaced_without_a_trace(job: Job, etcd: EtcdCluster, leaves: int) -> None:
    """DDP with dropout, BatchNorm and a sampler: the end is that of an undisturbed run, to the last bit."""
    steps = 150
    if steps not in undisturbed:
        undisturbed[steps] = Run(job, "undisturbed", 1, steps).ended()
    job.use_etcd(etcd)
    # Its workers start afresh, where those of other such tests are forked: it must not matter.
    run = Run(job, "replaced", 2, steps, preload="--preload=none", HOLD_EVERY="75")
    run.agents.append(run.join("replaced2"))
    job.wait_for(lambda: run.newest(1) > 2, "three steps")
    victim = next(agent for agent in run.agents if agent.says(f"generation 1 .*rank {leaves} here"))
    victim.signal(signal.SIGTERM)
    run.agents.remove(victim)
    assert run.ended() == undisturbed[steps]
    assert run.begun(2) == run.last(1)
    assert victim.exit_code() == 143


@pytest.mark.long
def test_who_leaves_alone_brings_its_state_to_disk_first(job: Job) -> None:
    """The next run of the job goes on after the last step of this one, and ends as if it had never stopped."""
    steps = 150
    if steps not in undisturbed:
        undisturbed[steps] = Run(job, "undisturbed", 1, steps).ended()
    run = Run(job, "stopped", 1, steps, HOLD_EVERY="75")
    job.wait_for(lambda: run.newest(1) > 2, "three steps")
    (first,) = run.agents
    first.signal(signal.SIGTERM)
    assert first.exit_code() == 143
    last = run.last(1)
    run.agents = [run.start("again")]
    assert run.ended() == undisturbed[steps]
    assert run.notes(what="begun")[-1]["step"] == last


@pytest.mark.long
def test_who_cannot_bring_its_last_state_to_disk_says_so(job: Job) -> None:
    """In time: its machine goes away, and takes the memory with it."""
    directory, steps, notice = (job.folder / name for name in ("checkpoints", "steps", "leaves"))
    steps.touch()
    agent = job.start(
        "a",
        "--nproc-per-node=1",
        f"--notice=file:{notice}",
        script=(SCRIPT, directory, "100000"),
        environment={"STEPS_FILE": str(steps)},
    )
    job.wait_for(lambda: steps.read_text().count("finished") > 2, "three steps")
    shutil.rmtree(directory, ignore_errors=True)
    directory.write_text("no directory")
    notice.write_text("8")
    job.wait_for(lambda: agent.says("is not on disk in .* yet, it is tried again"), "another try")
    name, labels = "elastic_agent_checkpoint_saves_total", {"tier": "local", "result": "error"}
    job.wait_for(lambda: agent.metric(name, **labels) == 1, "the failed save to be counted")
    assert agent.exit_code(8.0) == 143
    last = steps.read_text().count("finished") + 1
    error = agent.says(rf"step {last} is NOT on disk in {directory}: .*Not a directory")
    assert error, agent.text
