"""What one worker is said to do, of facts: a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.workers.rank_activity import (
    ANY,
    BYTES,
    CHILD,
    LOCK,
    TIME,
    Frame,
    Target,
    ThreadFacts,
    ThreadStack,
    WorkerFacts,
    rank_state,
)
from elastic_agent.health.hang_report import MAX_WHERE, RankActivity

TORCH = "/venv/lib/python3.11/site-packages/torch"
MODULE = Frame("/job/train.py", 40, "<module>")
STEP = Frame("/job/train.py", 9, "step", "dist.all_reduce(x)")
REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce")
WRAPPER = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
BACKWARD = Frame(f"{TORCH}/autograd/graph.py", 824, "_engine_run_backward")
CALL = Frame(f"{TORCH}/nn/modules/module.py", 1773, "_call_impl")
LINEAR = Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward")
FORWARD = Frame("/job/model.py", 20, "forward")
DDP = Frame(f"{TORCH}/nn/parallel/distributed.py", 1633, "forward")
FSDP = Frame(f"{TORCH}/distributed/fsdp/fully_sharded_data_parallel.py", 850, "forward")
COMPILES = Frame("/usr/lib/python3.11/subprocess.py", 1200, "wait")
LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 700, "__next__")
SAVING = Frame(f"{TORCH}/serialization.py", 900, "save")
DCP = Frame(f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 90, "save")
INIT = Frame(f"{TORCH}/distributed/distributed_c10d.py", 1700, "init_process_group")
MAIN = ThreadFacts(100, "python", "S", LOCK, "futex_do_wait")
GLOO = ThreadFacts(101, "gloo_tcp_loop", "S", ANY, "do_epoll_wait")


def worker(
    *frames: Frame, main: ThreadFacts = MAIN, others: tuple[ThreadFacts, ...] = (GLOO,), devices: bool = False
) -> WorkerFacts:
    stacks = (ThreadStack("main", frames),) if frames else ()
    return WorkerFacts(Target(1, 1, 100, step=7), (main, *others), stacks, window_s=0.5, devices=devices)


def at(waits_for: str, **changes: object) -> ThreadFacts:
    return replace(MAIN, waits_for=waits_for, channel="", **changes)  # type: ignore[arg-type]


RUNS = replace(MAIN, state="R", waits_for="", channel="")
DISK = replace(GLOO, state="D")


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        (worker(main=replace(MAIN, state="Z"), others=()), RankActivity.GONE),
        (worker(STEP, MODULE, main=replace(MAIN, state="T", channel="do_signal_stop")), RankActivity.STOPPED),
        (worker(main=replace(MAIN, channel="do_freezer_trap")), RankActivity.STOPPED),
        # a debugger lets go of it again
        (worker(STEP, MODULE, main=replace(MAIN, state="t")), RankActivity.WAITS),
        (worker(main=replace(MAIN, state="D", channel="io_schedule")), RankActivity.UNINTERRUPTIBLE),
        # it waits for a thread of its own, which waits for a disk; beside a collective one is at work
        (worker(STEP, others=(DISK,)), RankActivity.UNINTERRUPTIBLE),
        (worker(REDUCE, WRAPPER, STEP, MODULE, others=(DISK,)), RankActivity.IN_COLLECTIVE),
        (worker(REDUCE, WRAPPER, STEP, MODULE), RankActivity.IN_COLLECTIVE),
        (worker(BACKWARD, STEP, MODULE), RankActivity.IN_COLLECTIVE),
        (worker(BACKWARD, STEP, MODULE, main=RUNS), RankActivity.WORKS),
        # what a module does in the forward of DDP or FSDP, and in a backward of the script's own
        (worker(FORWARD, CALL, DDP, CALL, MODULE, main=RUNS), RankActivity.WORKS),
        (worker(FORWARD, CALL, FSDP, CALL, MODULE, main=at(TIME)), RankActivity.WAITS),
        (worker(LINEAR, CALL, CALL, DDP, CALL, MODULE), RankActivity.WAITS),
        (worker(COMPILES, FORWARD, CALL, DDP, CALL, MODULE, main=at(CHILD)), RankActivity.WAITS),
        (worker(FORWARD, CALL, BACKWARD, STEP, MODULE), RankActivity.WAITS),
        (worker(DDP, CALL, MODULE), RankActivity.IN_COLLECTIVE),
        (worker(REDUCE, WRAPPER, FORWARD, CALL, DDP, CALL, MODULE), RankActivity.IN_COLLECTIVE),
        # objects that it unpickles
        (worker(REDUCE, WRAPPER, MODULE, main=RUNS), RankActivity.WORKS),
        (worker(replace(STEP, source="work.wait()"), MODULE), RankActivity.IN_COLLECTIVE),
        (worker(replace(STEP, source="lock.acquire()"), MODULE), RankActivity.WAITS),
        (worker(INIT, WRAPPER, MODULE), RankActivity.IN_COLLECTIVE),
        (worker(SAVING, STEP, MODULE, main=at("system call 1")), RankActivity.IN_SAVE),
        (worker(DCP, MODULE, main=at("system call 1")), RankActivity.IN_SAVE),
        (worker(REDUCE, DCP, MODULE), RankActivity.IN_COLLECTIVE),
        (worker(LOADER, MODULE, main=at(ANY)), RankActivity.WAITS),
        (worker(STEP, MODULE, main=RUNS), RankActivity.WORKS),
        # it may compute on its GPU, or run only to wait for that
        (worker(STEP, MODULE, main=RUNS, devices=True), RankActivity.OTHER),
        (worker(REDUCE, WRAPPER, STEP, MODULE, main=RUNS, devices=True), RankActivity.IN_COLLECTIVE),
        # without stacks
        (worker(), RankActivity.IN_COLLECTIVE),
        (worker(others=(replace(GLOO, name="python"),)), RankActivity.OTHER),
        (worker(main=RUNS), RankActivity.WORKS),
        (worker(main=at(ANY)), RankActivity.OTHER),
        (worker(main=at(TIME)), RankActivity.WAITS),
        (worker(main=at(BYTES)), RankActivity.WAITS),
    ],
)
def test_what_it_does(facts: WorkerFacts, doing: RankActivity) -> None:
    found = rank_state(facts)
    assert found.doing is doing, found
    assert (found.rank, found.step) == (1, 7)


def test_one_that_uses_a_processor_most_of_the_time_runs_though_it_sleeps_at_the_look() -> None:
    assert rank_state(replace(worker(STEP, MODULE), main_cpu_s=0.4)).doing is RankActivity.WORKS


def test_the_collective_is_what_the_script_has_called() -> None:
    inner = replace(REDUCE, function="all_gather")
    objects = replace(REDUCE, function="all_gather_object")
    found = rank_state(worker(inner, WRAPPER, objects, WRAPPER, STEP, MODULE))
    assert found.collective == "all_gather_object"
    assert found.where == "train.py:9 in step"


WAITS = Frame(
    "/src/elastic_agent/worker/steps/torch_workarounds.py", 50, "waits", "return wait(*args, **more)"
)


@pytest.mark.parametrize(
    ("frames", "name"),
    [((WAITS, STEP, MODULE), "wait"), ((WAITS, REDUCE, WRAPPER, STEP, MODULE), "all_reduce")],
)
def test_the_place_is_the_scripts_own_line_also_where_waits_are_measured(
    frames: tuple[Frame, ...], name: str
) -> None:
    found = rank_state(worker(*frames))
    assert (found.doing, found.collective) == (RankActivity.IN_COLLECTIVE, name)
    assert found.where == "train.py:9 in step"


def test_what_is_said_is_bounded() -> None:
    facts = worker(replace(STEP, file="/" + "x" * 250, function="y" * 250), MODULE)
    assert len(rank_state(facts).where) == MAX_WHERE
