"""Real agents in a real cgroup that was given to them: not even a process that left everything behind escapes.

The escapee has forked twice, has a session and an environment of its own, and no living ancestor: neither its marks
nor its session nor its descent tell whose it was.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.workers.processes.proc import remove_cgroup
from tests.waiting import wait_for

from .harness import ORPHANS_S, RECORDER, Agent, Job
from .pools import Pool
from .processes import alive

MOUNTS = Path("/proc/self/mountinfo")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """An empty one, not yet used. Gone at the end, with all that lives in it."""
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    hierarchies = [fields[4] for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    if os.geteuid() != 0 or not hierarchies:
        pytest.skip("needs root and a mounted cgroup version 2")
    cgroup = Path(hierarchies[0], f"test-{os.getpid()}-{random.SystemRandom().randrange(16**6):06x}")
    try:
        cgroup.mkdir()
    except OSError as error:
        pytest.skip(f"{cgroup} cannot be made: {error.strerror}")
    yield cgroup
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.kill").write_text("1")

    def is_gone() -> bool:
        remove_cgroup(cgroup)
        return not cgroup.exists()

    wait_for(is_gone, f"{cgroup} to be empty", ORPHANS_S)


@pytest.fixture
def delegated(cgroup: Path) -> Path:
    """As systemd hands it over."""
    os.setxattr(cgroup, "user.delegate", b"1")
    return cgroup


def start_in(cgroup: Path, job: Job, *options: str, **more: object) -> Agent:
    return job.start("a", *options, enter=entering(cgroup), **more)  # type: ignore[arg-type]


def entering(cgroup: Path) -> tuple[str, ...]:
    return "sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup)


def escape(folder: Path) -> str:
    """A shell command that leaves a process behind, whose pid is then in `escaped`."""
    script = folder / "escape.sh"
    script.write_text(
        f"echo $$ > {folder}/escaped.new; mv {folder}/escaped.new {folder}/escaped; exec sleep 600\n"
    )
    return f"(env -i setsid /bin/sh -c '(env -i setsid /bin/sh {script} &)' &)"


def escaped(job: Job) -> int:
    path = job.folder / "escaped"
    job.wait_for(path.exists, "the escape")
    pid = int(path.read_text())
    job.wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "it to sleep")
    return pid


def below(cgroup: Path) -> list[str]:
    """Some may be removed meanwhile, which `os.walk` does not mind."""
    folders = (Path(folder) for folder, _, _ in os.walk(cgroup))
    return sorted(str(folder.relative_to(cgroup)) for folder in folders if folder != cgroup)


def test_no_process_escapes_into_the_next_generation(job: Job, delegated: Path) -> None:
    """The second generation's child looks at once whether the first one's escapee lives."""
    seen, pid_file = job.folder / "seen", job.folder / "escaped"
    look = f"cut -d' ' -f3 /proc/$(cat {pid_file})/stat > {seen}.new; mv {seen}.new {seen}"
    child = f"--child=if [ -e {pid_file} ]; then {look}; fi; {escape(job.folder)}"
    agent = start_in(delegated, job, script=(RECORDER, child))
    old = job.wait_for_training(world=1)
    first = escaped(job)
    (folder,) = [name for name in below(delegated) if name.endswith("/generation-1")]
    assert str(first) in (delegated / folder / "cgroup.procs").read_text().split()

    os.kill(old.pid(0), signal.SIGKILL)
    job.wait_for_training(world=1, after=1)
    job.wait_for((job.folder / "seen").exists, "the witness")
    assert (job.folder / "seen").read_text().strip() in ("", "Z", "Zs"), (
        "it lived when the next generation started"
    )
    assert not alive(first)
    assert agent.says("generation 1 left 1 process behind")
    assert [name.partition("/")[2] for name in below(delegated)] == ["", "generation-2"]


def test_no_process_escapes_the_guard_of_a_killed_agent(job: Job, delegated: Path) -> None:
    agent = start_in(delegated, job, script=(RECORDER, f"--child={escape(job.folder)}"))
    job.wait_for_training(world=1)
    pid = escaped(job)
    assert alive(pid)
    agent.kill()
    job.wait_for(lambda: not alive(pid), "the end of the escapee", ORPHANS_S)
    job.wait_for(lambda: not below(delegated), "the cgroups to be removed", ORPHANS_S)
    logged = job.wait_for_text(agent, "killed what its workers left: (.*)")
    assert str(pid) in logged[1].split()


@pytest.mark.long
def test_an_agent_that_ends_takes_everything_along_and_removes_its_cgroups(job: Job, delegated: Path) -> None:
    agent = start_in(delegated, job, script=(RECORDER, f"--child={escape(job.folder)}"))
    job.wait_for_training(world=1)
    pid = escaped(job)
    agent.signal(signal.SIGTERM)
    assert agent.exit_code() == 143
    assert not alive(pid)
    assert below(delegated) == []


@pytest.mark.long
def test_a_cgroup_that_was_not_delegated_to_the_agent_is_left_alone(job: Job, cgroup: Path) -> None:
    """Root can write there, too, which does not make it root's agent's."""
    start_in(cgroup, job)
    training = job.wait_for_training(world=1)
    assert below(cgroup) == []
    assert str(training.pid(0)) in (cgroup / "cgroup.procs").read_text().split()


@pytest.mark.long
def test_a_cgroup_that_cannot_be_divided_is_said_and_training_goes_on(job: Job, delegated: Path) -> None:
    (delegated / "cgroup.max.descendants").write_text("0")
    agent = start_in(delegated, job)
    job.wait_for_training(world=1)
    assert agent.says(f"the cgroup {delegated} is delegated to this agent, but cannot be used")


def test_a_worker_that_cannot_be_held_is_not_started(tmp_path: Path) -> None:
    from elastic_agent.agent.workers.processes.helper import tied

    command = tied(["touch", str(tmp_path / "started")], cgroup=tmp_path / "none")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ran.returncode == 1
    assert f"cannot enter the cgroup {tmp_path}/none: No such file or directory" in ran.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.long
def test_a_job_is_held_in_a_cgroup_of_its_own_below_the_daemons(pool: Pool, delegated: Path) -> None:
    pool.job.wait_for_text(pool.daemon("a", enter=entering(delegated)), "idle: waiting for a job")
    """Which ends with the job's agent, while the daemon lives on."""
    for _ in range(2):
        job = pool.submit()
        (start,) = pool.starts(job, 1)
        held = Path(f"/proc/{start['pid']}/cgroup").read_text()
        assert f"/{delegated.name}/elastic-agent-" in held
        escaped = subprocess.Popen(["sleep", "600"], start_new_session=True)
        own = delegated.parent / held.splitlines()[-1].partition("::/")[2]
        (own / "cgroup.procs").write_text(str(escaped.pid))
        pool.end_job(job)
        assert pool.wait(job) == ExitCode.SUCCESS
        assert escaped.wait(10) == -signal.SIGKILL
        pool.job.wait_for(lambda: below(delegated) == [], "the job's cgroup to be gone")
