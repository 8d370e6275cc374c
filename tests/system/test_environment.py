"""What a worker sees: torchrun's whole contract, on one node and on two, and the ways to start a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic_agent.agent.machine.devices import probe_cpus, share
from elastic_agent.worker.wire.shared_progress import STACKS_DESCRIPTOR

from .harness import C_LIBRARY_SIGNALS, RECORDER, Job

ON_GPUS = (sys.executable, str(Path(__file__).with_name("fake_gpus.py")))
FAKE_NVML = Path(__file__).parents[1] / "fake_nvml"

ONE_NODE = {
    0: {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "NODE_RANK": "0"},
    1: {"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "ROLE_RANK": "1", "NODE_RANK": "0"},
}
ONE_NODE_SIZES = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2"}
TWO_NODES = {
    0: {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "NODE_RANK": "0"},
    1: {"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1", "ROLE_RANK": "1", "NODE_RANK": "1"},
}
TWO_NODES_SIZES = {
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "2",
}

SAME_EVERYWHERE = {
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "a-job",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "7",
    "TORCHELASTIC_USE_AGENT_STORE": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "ELASTIC_AGENT_GENERATION": "1",
}

LOOK = """
import glob, json, os, signal, sys
def holders(link):
    found = set()
    for file in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(file) == link:
                found.add(int(file.split("/")[2]))
        except OSError:  # it is closed meanwhile
            pass
    return sorted(found)
fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
seen = {
    "fds": sorted(map(int, fds)),
    "leader": os.getsid(0) == os.getpid(),
    "stdin": sys.stdin.read(),
    "from": os.readlink("/proc/self/fd/0"),
    "held by": holders(os.readlink("/proc/self/fd/0")),
    "me": [os.getppid(), os.getpid()],
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "cwd": os.getcwd(),
}
json.dump(seen, open(sys.argv[1], "w"))
"""


def environments(job: Job) -> dict[int, Mapping[str, str]]:
    generation = job.wait_for_training(world=2)
    return {rank: start["env"] for rank, start in generation.starts.items()}


def check(
    seen: Mapping[int, Mapping[str, str]], ranks: Mapping[int, Mapping[str, str]], sizes: Mapping[str, str]
) -> None:
    for rank, own in ranks.items():
        wanted = {**SAME_EVERYWHERE, **sizes, **own}
        assert {name: seen[rank].get(name) for name in wanted} == wanted
        assert Path(seen[rank]["TORCHELASTIC_ERROR_FILE"]).is_absolute()
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert seen[0]["TORCHELASTIC_ERROR_FILE"] != seen[1]["TORCHELASTIC_ERROR_FILE"]


def test_two_workers_on_one_node(job: Job) -> None:
    job.start("a", "--nproc-per-node=2", "--rdzv-id=a-job", "--max-restarts=7")
    seen = environments(job)
    check(seen, ONE_NODE, ONE_NODE_SIZES)
    assert {environment["OMP_NUM_THREADS"] for environment in seen.values()} == {"1"}


def test_one_worker_on_each_of_two_nodes(job: Job) -> None:
    for name in ("a", "b"):
        job.join(name, "--nnodes=2", "--rdzv-id=a-job", "--max-restarts=7")
    seen = environments(job)
    check(seen, TWO_NODES, TWO_NODES_SIZES)
    assert sorted(seen[rank]["ELASTIC_AGENT_NODE"] for rank in (0, 1)) == ["a", "b"]
    assert all("OMP_NUM_THREADS" not in environment for environment in seen.values()), (
        "one worker has the node"
    )


@pytest.mark.long
def test_what_the_user_has_set_is_kept(job: Job) -> None:
    mine = {
        "OMP_NUM_THREADS": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "MINE": "ä\n",
    }
    job.start("a", "--nproc-per-node=2", environment=mine)
    for environment in environments(job).values():
        assert {name: environment[name] for name in mine} == mine


def test_arguments_arrive_as_given_and_local_rank_is_filled_in(job: Job) -> None:
    words = ["--lr", "0.1", "--rank=${local_rank}", "--max-restarts", "two words", "$HOME", ""]
    job.start("a", "--nproc-per-node=2", script=(RECORDER, *words))
    generation = job.wait_for_training(world=2)
    for rank, start in generation.starts.items():
        assert start["argv"] == ["--lr", "0.1", f"--rank={rank}", "--max-restarts", "two words", "$HOME", ""]


WARM_AND_COLD = pytest.mark.parametrize("preload", ["--preload=json", "--preload=none"])


@WARM_AND_COLD
def test_a_worker_starts_like_from_a_shell(job: Job, preload: str) -> None:
    """Own session, the agent's standard input and no other descriptor of it, no blocked signal, its directory. One that
    is from a spare has a file for its stacks, far above those that a script gets."""
    out, script = job.folder / "seen.json", job.folder / "look.py"
    script.write_text(LOOK)
    read, write = os.pipe()
    agent = job.start("a", preload, script=(script, out), stdin=read)
    os.close(read)
    os.write(write, b"one\ntwo\n")
    os.close(write)
    assert agent.exit_code() == 0
    assert not agent.says("cold"), "with a fork server there was a spare"
    seen = json.loads(out.read_text())
    assert seen == {
        "fds": [0, 1, 2] if preload == "--preload=none" else [0, 1, 2, STACKS_DESCRIPTOR],
        "leader": True,
        "stdin": "one\ntwo\n",
        "from": seen["from"],
        "held by": sorted(seen["me"]),  # and by none of the agent's helper processes
        "me": [agent.pid, seen["me"][1]],
        "blocked": 0,
        "cwd": str(Path.cwd()),
    }


@pytest.mark.long
def test_the_agents_own_error_file_costs_no_warm_start(job: Job) -> None:
    """A scheduler such as TorchX names it; a library that copies the environment while it is loaded has read it."""
    (job.folder / "copying.py").write_text("import os\nseen = dict(os.environ)\n")
    error_file = job.folder / "error.json"
    environment = {"PYTHONPATH": str(job.folder), "TORCHELASTIC_ERROR_FILE": str(error_file)}
    script = (RECORDER, "--steps=3")
    agent = job.start("a", "--preload=copying", script=script, environment=environment)
    assert agent.exit_code() == 0
    assert not agent.says("is no fork")
    (start,) = job.history(what="start")
    assert start["env"]["TORCHELASTIC_ERROR_FILE"] != str(error_file), "the worker has one of its own"


@pytest.mark.long
@WARM_AND_COLD
def test_a_closed_standard_input_is_an_empty_one(job: Job, preload: str) -> None:
    """And none of the files that the agent opens takes its place."""
    out, script = job.folder / "seen.json", job.folder / "look.py"
    script.write_text(LOOK)
    agent = job.start("a", preload, script=(script, out), enter=("sh", "-c", 'exec "$@" <&-', "sh"))
    assert agent.exit_code() == 0
    seen = json.loads(out.read_text())
    assert (seen["stdin"], seen["from"], seen["fds"][:3]) == ("", os.devnull, [0, 1, 2])
    assert set(seen["fds"][3:]) <= {STACKS_DESCRIPTOR}


@pytest.mark.long
def test_a_program_ignores_no_signal_because_its_agent_does(job: Job) -> None:
    """Python ignores SIGPIPE: a shell pipeline started so would never end."""
    agent = job.start("a", "--no-python", script=("grep", "SigIgn", "/proc/self/status"))
    assert agent.exit_code() == 0
    ignored = agent.says(r"\[a/0\] SigIgn:\s+([0-9a-f]{16})$")
    assert ignored is not None
    assert int(ignored[1], 16) & ~C_LIBRARY_SIGNALS == 0


def test_one_worker_per_gpu_is_refused_where_there_is_none(job: Job) -> None:
    agent = job.start("a", "--nproc-per-node=gpu", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert agent.exit_code() == 73
    assert agent.says("this node has no CUDA device")
    assert not job.history()


@pytest.mark.long
def test_a_device_that_does_not_exist_is_refused(job: Job) -> None:
    agent = job.start("a", environment={"CUDA_VISIBLE_DEVICES": "0,999"})
    assert agent.exit_code() == 73
    assert agent.says("CUDA_VISIBLE_DEVICES '0,999': expected devices of this node")
    assert not job.history()


@pytest.mark.parametrize(
    ("pinning", "local_ranks", "visible"),
    [
        ("mask", ["0", "0"], ["0,1", "2,3"]),
        pytest.param("index", ["0", "1"], [None, None], marks=pytest.mark.long),
    ],
)
def test_each_worker_has_two_devices_before_and_after_a_kill(
    job: Job, monkeypatch: pytest.MonkeyPatch, pinning: str, local_ranks: list[str], visible: list[str | None]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = (
        "--nproc-per-node=gpu",
        "--devices-per-worker=2",
        f"--virtual-local-rank={str(pinning == 'mask').lower()}",
    )
    job.start("a", *options, enter=ON_GPUS, environment={"FAKE_GPUS": "4"})
    first = job.wait_for_training(world=2)
    os.kill(first.pid(1), signal.SIGKILL)
    for generation in (first, job.wait_for_training(world=2, after=first.number)):
        seen = [generation.starts[rank]["env"] for rank in range(2)]
        assert [each["LOCAL_RANK"] for each in seen] == local_ranks
        assert [each.get("CUDA_VISIBLE_DEVICES") for each in seen] == visible
        assert {each["ELASTIC_AGENT_DEVICES"] for each in seen} == {"2"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--nproc-per-node=gpu --devices-per-worker=3",
            "divides this node's CUDA devices: 4 (0,1,2,3)",
        ),
        pytest.param(
            "--nproc-per-node=3 --devices-per-worker=2",
            "lower it or --devices-per-worker",
            marks=pytest.mark.long,
        ),
        pytest.param("--devices-per-worker=5", "each with 5", marks=pytest.mark.long),
    ],
)
def test_devices_that_do_not_suffice_or_are_left_over_start_nothing(
    job: Job, words: str, expected: str
) -> None:
    agent = job.start("a", *words.split(), enter=ON_GPUS, environment={"FAKE_GPUS": "4"})
    assert agent.exit_code() == 73
    assert expected in agent.text
    assert not job.history()


def test_a_worker_s_devices_are_shown_before_a_run() -> None:
    words = [
        "--check-config",
        "--nproc-per-node=auto",
        "--devices-per-worker=2",
        "--virtual-local-rank",
        str(RECORDER),
    ]
    shown = subprocess.check_output(
        [*ON_GPUS, sys.executable, "-m", "elastic_agent", *words],
        env={**os.environ, "FAKE_GPUS": "4", "PYTHONPATH": str(FAKE_NVML)},
        text=True,
    )
    assert "worker 0 sees only CUDA devices 0,1, as cuda:0 to cuda:1 with LOCAL_RANK 0" in shown


def test_workers_keep_to_their_cores_and_their_threads_match(job: Job) -> None:
    shares = share("cores", [None, None], probe_cpus([]))
    job.start("a", "--nproc-per-node=2", "--affinity=cores")
    generation = job.wait_for_training(world=2)
    for rank, expected in enumerate(shares):
        assert os.sched_getaffinity(generation.pid(rank)) == set(expected.cpus)
        threads = generation.starts[rank]["env"]["OMP_NUM_THREADS"]
        assert threads == expected.variables[0].value


@pytest.mark.long
def test_masked_devices_leave_a_node_without_any_as_it_is(job: Job) -> None:
    options = ("--nproc-per-node=2", "--virtual-local-rank")
    job.start("a", *options, environment={"CUDA_VISIBLE_DEVICES": ""})
    for rank, environment in environments(job).items():
        assert (environment["LOCAL_RANK"], environment["CUDA_VISIBLE_DEVICES"]) == (str(rank), "")


def test_bad_configuration_lists_every_problem_and_starts_nothing(job: Job) -> None:
    agent = job.start("a", "--nnodes=0", "--lease-ttl=never", "--max-restarts=-1", "--what=ever")
    assert agent.exit_code() == 78
    for wrong in ("--nnodes", "--lease-ttl", "--max-restarts", "--what"):
        assert agent.says(wrong)
    assert not job.history()
