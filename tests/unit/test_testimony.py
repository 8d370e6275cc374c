"""What one worker is said to do, of facts: a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.workers.hangs.facts import (
    Frame,
    ProcessFacts,
    ThreadFacts,
    ThreadStack,
    Wait,
    WorkerFacts,
    wait_of,
)
from elastic_agent.agent.workers.hangs.testimony import rank_state
from elastic_agent.rendezvous.statements.inquiry import MAX_WHERE, Doing

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
GATHER = Frame(f"{TORCH}/distributed/distributed_c10d.py", 2600, "gather_object")
LOADER = Frame(f"{TORCH}/utils/data/dataloader.py", 700, "__next__")
FETCH = Frame(f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch")
SAVING = Frame(f"{TORCH}/serialization.py", 900, "save")
DCP = Frame(f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 90, "save")
INIT = Frame(f"{TORCH}/distributed/distributed_c10d.py", 1700, "init_process_group")
MAIN = ThreadFacts(100, "python", "S", "S", channel="futex_do_wait", call="futex")
GLOO = ThreadFacts(101, "gloo_tcp_loop", "S", "S", channel="do_epoll_wait", call="epoll_wait", wakes=96.0)


def worker(
    *frames: Frame, main: ThreadFacts = MAIN, others: tuple[ThreadFacts, ...] = (GLOO,)
) -> WorkerFacts:
    """Twice at the same place."""
    stacks = (ThreadStack("main", frames),) if frames else ()
    process = ProcessFacts(100, "python", 1, (main, *others), stacks=stacks, later=stacks)
    return WorkerFacts(1, 1, process, window_s=0.5, step=7)


def debugged(facts: WorkerFacts) -> WorkerFacts:
    return replace(facts, process=replace(facts.process, debugger="process 7 (gdb)"))


def at(call: str, **changes: object) -> ThreadFacts:
    return replace(MAIN, call=call, channel="", **changes)  # type: ignore[arg-type]


RUNS = replace(MAIN, state="R", channel="", call="", cpu_s=0.49)


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        (worker(main=replace(MAIN, state="Z"), others=()), Doing.GONE),
        (worker(STEP, MODULE, main=replace(MAIN, state="T", channel="do_signal_stop")), Doing.STOPPED),
        (debugged(worker(STEP, MODULE, main=replace(MAIN, state="t"))), Doing.DEBUGGED),
        (debugged(worker(STEP, MODULE)), Doing.DEBUGGED),
        (debugged(worker(main=replace(MAIN, state="Z"), others=())), Doing.GONE),
        (worker(main=replace(MAIN, channel="do_freezer_trap")), Doing.STOPPED),
        (
            worker(main=replace(MAIN, state="D", state_before="D", channel="io_schedule")),
            Doing.UNINTERRUPTIBLE,
        ),
        (
            worker(main=replace(MAIN, state="D", state_before="S", channel="request_wait_answer")),
            Doing.UNINTERRUPTIBLE,
        ),
        (worker(STEP, others=(replace(GLOO, state="D", state_before="D"),)), Doing.UNINTERRUPTIBLE),
        (worker(STEP, MODULE, others=(replace(GLOO, state="D", state_before="R"),)), Doing.LOCKED),
        (worker(REDUCE, WRAPPER, STEP, MODULE), Doing.IN_COLLECTIVE),
        (worker(BACKWARD, STEP, MODULE), Doing.IN_COLLECTIVE),
        (worker(BACKWARD, STEP, MODULE, main=RUNS), Doing.BUSY),
        # what a module does in the forward of DDP or FSDP, and in a backward of the script's own
        (worker(FORWARD, CALL, DDP, CALL, MODULE, main=RUNS), Doing.BUSY),
        (worker(FORWARD, CALL, FSDP, CALL, MODULE, main=at("clock_nanosleep")), Doing.ASLEEP),
        (worker(LINEAR, CALL, CALL, DDP, CALL, MODULE), Doing.LOCKED),
        (worker(COMPILES, FORWARD, CALL, DDP, CALL, MODULE, main=at("wait4")), Doing.READING),
        (worker(FORWARD, CALL, BACKWARD, STEP, MODULE), Doing.LOCKED),
        (worker(DDP, CALL, MODULE), Doing.IN_COLLECTIVE),
        (worker(REDUCE, WRAPPER, FORWARD, CALL, DDP, CALL, MODULE), Doing.IN_COLLECTIVE),
        # objects that it unpickles, bytes that still come
        (worker(GATHER, WRAPPER, MODULE, main=RUNS), Doing.BUSY),
        (worker(GATHER, WRAPPER, MODULE, others=(replace(GLOO, cpu_s=0.1),)), Doing.MOVES),
        (worker(replace(STEP, source="work.wait()"), MODULE), Doing.IN_COLLECTIVE),
        (worker(replace(STEP, source="lock.acquire()"), MODULE), Doing.LOCKED),
        (worker(INIT, WRAPPER, MODULE), Doing.AT_STORE),
        (worker(SAVING, STEP, MODULE, main=at("write")), Doing.IN_SAVE),
        (worker(DCP, MODULE, main=at("write")), Doing.IN_SAVE),
        (worker(REDUCE, DCP, MODULE), Doing.IN_COLLECTIVE),
        (worker(LOADER, MODULE, main=at("poll")), Doing.IN_DATA_LOADER),
        (worker(STEP, FETCH, LOADER, MODULE, main=at("read")), Doing.IN_DATA_LOADER),
        (worker(STEP, MODULE, main=at("read", on="pipe:[7]")), Doing.READING),
        (worker(STEP, MODULE, main=at("wait4")), Doing.READING),
        (worker(STEP, MODULE, main=at("clock_nanosleep")), Doing.ASLEEP),
        (worker(STEP, MODULE, main=RUNS), Doing.BUSY),
        (worker(STEP, MODULE, main=at("mlock")), Doing.OTHER),
        # without stacks
        (worker(), Doing.IN_COLLECTIVE),
        (worker(others=(replace(GLOO, name="python"),)), Doing.OTHER),
        (worker(main=RUNS), Doing.MOVES),
        (worker(main=at("poll")), Doing.OTHER),
        (worker(main=at("clock_nanosleep")), Doing.ASLEEP),
        (worker(main=at("read")), Doing.READING),
    ],
)
def test_what_it_does(facts: WorkerFacts, doing: Doing) -> None:
    found = rank_state(facts)
    assert found.doing is doing, found
    assert (found.rank, found.step) == (1, 7)


def test_one_of_two_answers_is_enough() -> None:
    facts = worker(SAVING, STEP, MODULE, main=at("write"))
    assert rank_state(replace(facts, process=replace(facts.process, stacks=()))).doing is Doing.IN_SAVE
    assert rank_state(replace(facts, process=replace(facts.process, later=()))).doing is Doing.IN_SAVE


def test_the_collective_is_what_the_script_has_called() -> None:
    inner = replace(REDUCE, function="all_gather")
    objects = replace(REDUCE, function="all_gather_object")
    found = rank_state(worker(inner, WRAPPER, objects, WRAPPER, STEP, MODULE))
    assert found.collective == "all_gather_object"
    assert found.where == "train.py:9 in step"


def test_what_it_waits_for_is_said() -> None:
    found = rank_state(worker(STEP, MODULE, main=at("recvfrom", on="tcp 10.0.0.1:9 to 10.0.0.2:80")))
    assert found.where == "train.py:9 in step, waits for bytes from tcp 10.0.0.1:9 to 10.0.0.2:80"


def test_at_another_place_after_the_window_it_is_at_work_and_at_another_line_of_one_loop_it_is_not() -> None:
    facts = worker(STEP, MODULE, main=RUNS)

    def later(*frames: Frame) -> WorkerFacts:
        return replace(facts, process=replace(facts.process, later=(ThreadStack("main", frames),)))

    assert rank_state(later(REDUCE, WRAPPER, STEP, MODULE)).doing is Doing.MOVES
    assert rank_state(later(STEP, replace(MODULE, line=41))).doing is Doing.MOVES
    assert rank_state(later(replace(STEP, line=10), MODULE)).doing is Doing.BUSY


def test_in_a_collective_a_process_that_uses_a_gpu_may_run_to_wait() -> None:
    facts = worker(REDUCE, WRAPPER, STEP, MODULE, main=RUNS, others=(replace(GLOO, cpu_s=0.4),))
    assert (
        rank_state(replace(facts, process=replace(facts.process, devices=True))).doing is Doing.IN_COLLECTIVE
    )


def test_a_process_that_uses_a_gpu_may_wait_for_it_while_it_runs() -> None:
    facts = worker(STEP, MODULE, main=RUNS)
    assert rank_state(replace(facts, process=replace(facts.process, devices=True))).doing is Doing.OTHER


ASKS = replace(MAIN, tid=102, wakes=180.0, cpu_s=0.01)
GETS_IT = replace(ASKS, cpu_s=0.2)


@pytest.mark.parametrize(
    ("facts", "doing"),
    [
        (worker(STEP, MODULE, main=at("clock_nanosleep"), others=(GLOO, ASKS)), Doing.HOLDS_GIL),
        (worker(STEP, MODULE, main=at("mlock"), others=(replace(ASKS, wakes=30.0),)), Doing.HOLDS_GIL),
        (worker(STEP, MODULE, main=RUNS, others=(GLOO, ASKS)), Doing.BUSY),
        (worker(STEP, MODULE, main=replace(MAIN, wakes=180.0)), Doing.HOLDS_GIL),
        (worker(STEP, MODULE, main=replace(MAIN, wakes=180.0), others=(RUNS,)), Doing.BUSY),
        # Other threads get it in turn, and the main one waits without it.
        (worker(STEP, MODULE, main=at("clock_nanosleep"), others=(GETS_IT, GETS_IT)), Doing.ASLEEP),
        (worker(REDUCE, WRAPPER, STEP, MODULE, others=(GLOO, ASKS)), Doing.IN_COLLECTIVE),
        (worker(STEP, MODULE, main=at("read"), others=(GLOO, ASKS)), Doing.READING),
    ],
)
def test_who_asks_for_the_lock_of_python_and_gets_nowhere_shows_that_it_is_held(
    facts: WorkerFacts, doing: Doing
) -> None:
    """A call that computes meanwhile may come to its end, and one that waits in the kernel has no Python to wake it."""
    found = rank_state(facts)
    assert found.doing is doing, found
    assert ("Python's lock" in found.where) == (doing in (Doing.HOLDS_GIL, Doing.BUSY))


WAITS = Frame("/src/elastic_agent/worker/steps/own_time.py", 50, "waits", "return wait(*args, **more)")


@pytest.mark.parametrize(
    ("frames", "name"),
    [((WAITS, STEP, MODULE), "wait"), ((WAITS, REDUCE, WRAPPER, STEP, MODULE), "all_reduce")],
)
def test_the_place_is_the_scripts_own_line_also_where_waits_are_measured(
    frames: tuple[Frame, ...], name: str
) -> None:
    found = rank_state(worker(*frames))
    assert (found.doing, found.collective) == (Doing.IN_COLLECTIVE, name)
    assert found.where == "train.py:9 in step"


def test_neither_torch_nor_this_package_is_a_place_of_the_scripts_wherever_they_are_installed() -> None:
    of_torch = Frame("/opt/pytorch/torch/nn/modules/module.py", 1500, "_call_impl")
    own = Frame("/src/elastic_agent/worker/checkpointing/replicated/saving.py", 7, "save")
    for frame in (of_torch, own):
        found = rank_state(worker(frame, STEP, MODULE, main=at("clock_nanosleep")))
        assert found.where.startswith("train.py:9 in step")


def test_the_process_of_the_data_loader_that_stands_is_shown() -> None:
    facts = worker(LOADER, MODULE, main=at("poll"))
    idle = ProcessFacts(200, "python", 100, (at("read", tid=200),))
    stuck = replace(idle, pid=201, stacks=(ThreadStack("main", (STEP, FETCH, MODULE)),))
    stopped = replace(idle, pid=202, threads=(replace(MAIN, state="T"),))
    assert (
        "its process 201 stands at train.py:9 in step"
        in rank_state(replace(facts, children=(idle, stuck))).where
    )
    assert "its process 202 is in state T" in rank_state(replace(facts, children=(stuck, stopped))).where
    at_work = replace(idle, threads=(RUNS,))
    assert rank_state(replace(facts, children=(idle, at_work))).doing is Doing.MOVES


def test_what_is_said_is_bounded() -> None:
    facts = worker(replace(STEP, file="/" + "x" * 250, function="y" * 250), MODULE)
    assert len(rank_state(facts).where) == MAX_WHERE


@pytest.mark.parametrize(
    ("state", "channel", "call", "wait"),
    [
        ("S", "futex_wait_queue_me", "", Wait.FUTEX),
        ("S", "hrtimer_nanosleep", "", Wait.SLEEP),
        ("S", "unix_stream_read_generic", "", Wait.READ),
        ("S", "poll_schedule_timeout.constprop.0", "", Wait.POLL),
        ("S", "do_wait", "", Wait.CHILD),
        ("S", "", "", Wait.OTHER),
        ("R", "futex_wait", "futex", Wait.NOTHING),
        ("S", "do_wait", "read", Wait.READ),
    ],
)
def test_what_a_thread_waits_for(state: str, channel: str, call: str, wait: Wait) -> None:
    assert wait_of(state, channel, call) is wait
