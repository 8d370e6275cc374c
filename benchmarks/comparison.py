"""What becomes of a job under torchrun and under elastic-agent, with the same words on the command line.

    python benchmarks/comparison.py             all rows of docs/migrating.md
    python benchmarks/comparison.py lost-node   one of them

Every agent is a node of its own by name, on this machine. The commands are printed as they are run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from local_run import LAUNCHERS, Run, alive

JOB = Path(__file__).with_name("comparison_job.py")


# ---------------------------------------------------------------- rows


def killed_worker(run: Run) -> str:
    """A worker is killed on one node of two, three times."""
    for node in "ab":
        run.join(node, "2", "--max-restarts=3")
    workers = run.wait_for(lambda: run.whole(2), "first world")
    took = []
    for _ in range(3):
        victim = next(one for one in workers if one["NODE"] == "b")
        killed_at = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        workers = run.wait_for(lambda at=killed_at: run.whole(2, at), "new world", 60.0)
        if workers is None:
            return f"no new world after {len(took)} restarts"
        took.append(max(one["at"] for one in workers) - killed_at)
    counts = {one["NODE"]: one["TORCHELASTIC_RESTART_COUNT"] for one in workers}
    times = ", ".join(f"{one:.2f}" for one in took)
    return f"new workers after {times} s; TORCHELASTIC_RESTART_COUNT at the end: {counts}"


def lost_node(run: Run) -> str:
    """One node of three is lost with its worker; 1 to 3 nodes may train."""
    for node in "abc":
        run.join(node, "1:3")
    workers = run.wait_for(lambda: run.whole(3), "first world")
    lost_at = time.monotonic()
    run.lose("c", workers)
    found = run.wait_for(lambda: run.whole(2, lost_at), "world of two", 60.0)
    return f"a world of two after {time.monotonic() - lost_at:.2f} s" if found else "the others wait"


def planned_leave(run: Run) -> str:
    """One node of two gets SIGTERM; a checkpoint is made each 50 steps."""
    for node in "ab":
        run.join(node, "1:2", "--max-restarts=3", mode="train")
    run.wait_for(lambda: len(run.history("step", WORLD_SIZE="2")) >= 2 * 80, "steps")
    asked_at = time.monotonic()
    run.agents["b"].terminate()
    if not run.wait_for(lambda: run.history("load", asked_at), "new world"):
        return "no new world"
    load = run.history("load", asked_at)[0]
    before = max(one["step"] for one in run.history("step") if one["at"] < load["at"])
    stood_s = load["at"] - max(one["at"] for one in run.history("step") if one["at"] < load["at"])
    return f"{before - load['step']} steps done again, training stood still for {stood_s:.1f} s"


def orphans(run: Run) -> str:
    """The agent is killed with SIGKILL."""
    run.start("a", "--nproc-per-node=2")
    workers = run.wait_for(lambda: run.whole(2), "world")
    run.agents["a"].kill()
    time.sleep(5.0)
    return f"{sum(alive(one['pid']) for one in workers)} of 2 workers live 5 s later"


def crash_loop(run: Run) -> str:
    """The script fails at once, each time, and 10 restarts are allowed."""
    return _crashes(run, "--max-restarts=10")


def crash_loop_by_default(run: Run) -> str:
    """The same with the launcher's own default."""
    return _crashes(run)


def _crashes(run: Run, *options: str) -> str:
    run.start("a", *options, mode="crash")
    run.wait_for(lambda: run.agents["a"].poll() is not None, "end")
    starts = [one["at"] for one in run.history()]
    return f"{len(starts)} starts in {starts[-1] - starts[0]:.1f} s, exit code {run.agents['a'].poll()}"


def joining_node(run: Run) -> str:
    """A second node joins a job of 1 to 2 nodes that trains."""
    run.join("a", "1:2")
    run.wait_for(lambda: run.whole(1), "world of one")
    asked_at = time.monotonic()
    run.join("b", "1:2")
    if not run.wait_for(lambda: run.whole(2), "world of two"):
        return f"exit codes of the agents {run.exit_codes()}"
    return f"a world of two {time.monotonic() - asked_at:.1f} s after its agent began"


def logs(run: Run) -> str:
    """A second node joins; what the first node's worker had written to its log before."""
    run.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else no node can join under torchrun 2.13
    options = (f"--log-dir={run.folder / 'logs'}", "--redirects=3")
    run.join("a", "1:2", *options)
    first = run.wait_for(lambda: run.whole(1), "world of one")[0]["pid"]
    run.join("b", "1:2", *options)
    run.wait_for(lambda: run.whole(2), "world of two")
    kept = any(
        f"worker {first} " in file.read_text(errors="replace")
        for file in (run.folder / "logs").rglob("*")
        if file.is_file()
    )
    return "its lines are there" if kept else "its lines are gone"


def second_job(run: Run) -> str:
    """A second job is started on the same host with the same command, which names a port."""
    run.start("a", "--master-port=29500")
    run.wait_for(run.history, "worker")
    run.start("b", "--master-port=29500")
    run.wait_for(lambda: run.history(NODE="b") or run.agents["b"].poll() is not None, "second job")
    if run.history(NODE="b"):
        return "both train"
    said = next((line for line in run.log("b").splitlines() if "EADDRINUSE" in line), "")
    return f"the second one ends with exit code {run.agents['b'].poll()}: {said.strip()[:160]}"


def error_file(run: Run) -> str:
    """A worker of node b raises; what TORCHELASTIC_ERROR_FILE says of it on each node."""
    for node in "ab":
        run.join(node, "2", "--max-restarts=0", mode="crash-on-b")
    run.wait_for(lambda: run.agents["b"].poll() is not None, "end of b")
    run.wait_for(lambda: run.agents["a"].poll() is not None, "end of a", 60.0)
    said = {}
    for node in "ab":
        file = run.folder / f"error-{node}"
        text = file.read_text() if file.exists() else ""
        said[node] = "the ValueError" if "the data is not there" in text else (text[:100] or "nothing")
    return f"{said}, exit codes {run.exit_codes()}"


def replaced_node(run: Run) -> str:
    """One of two nodes is lost with its worker, and a new agent takes its place at once."""
    for node in "ab":
        run.join(node, "2", "--max-restarts=3")
    workers = run.wait_for(lambda: run.whole(2), "first world")
    lost_at = time.monotonic()
    run.lose("b", workers)
    run.join("c", "2", "--max-restarts=3")
    if not run.wait_for(lambda: run.whole(2, lost_at), "new world"):
        return f"no new world, exit codes {run.exit_codes()}"
    return f"new workers on both nodes after {time.monotonic() - lost_at:.1f} s"


def spare_at_the_end(run: Run) -> str:
    """A third node stands by while two train; then their workers end with success."""
    for node in "abc":
        run.join(node, "2")
        if node == "b":
            run.wait_for(lambda: run.whole(2), "world of two")
    time.sleep(20.0)  # for the third to come to the rendezvous
    (run.folder / "enough").touch()
    run.wait_for(lambda: None not in run.exit_codes().values(), "end of all")
    said = [line for line in run.log("c").splitlines() if "Error" in line]
    return f"exit codes {run.exit_codes()}; the last error of c: {said[-1].strip()[:160] if said else 'none'}"


def late_failure(run: Run) -> str:
    """The worker of node b has ended with success when that of node a fails; 3 restarts are allowed."""
    for node in "ab":
        run.join(node, "2", "--max-restarts=3", mode="crash-late")
    run.wait_for(lambda: run.history("fail"), "failure")
    failed_at = time.monotonic()
    if run.wait_for(lambda: run.whole(2, failed_at), "new world", 60.0):
        return f"new workers on both nodes after {time.monotonic() - failed_at:.1f} s"
    return f"60 s later: exit codes {run.exit_codes()}, {len(run.history(after=failed_at))} new workers"


def late_failure_at_last(run: Run) -> str:
    """The same without a restart."""
    for node in "ab":
        run.join(node, "2", "--max-restarts=0", mode="crash-late")
    run.wait_for(lambda: run.history("fail"), "failure")
    failed_at = time.monotonic()
    if run.wait_for(lambda: None not in run.exit_codes().values(), "end of both", 330.0):
        return f"ended {time.monotonic() - failed_at:.1f} s later, exit codes {run.exit_codes()}"
    return f"exit codes {run.exit_codes()}"


def strange_error_file(run: Run) -> str:
    """The first worker writes a text of its own to its TORCHELASTIC_ERROR_FILE and fails; 3 restarts are allowed."""
    run.start("a", "--max-restarts=3", mode="crash-strangely")
    run.wait_for(lambda: len(run.history()) > 1 or None not in run.exit_codes().values(), "restart or end")
    said = next((line for line in run.log("a").splitlines() if "JSONDecodeError" in line), "")
    return f"{len(run.history())} starts, exit codes {run.exit_codes()} {said.strip()[:160]}"


def uneven_nodes(run: Run) -> str:
    """Three nodes with 1, 2 and 3 workers."""
    for count, node in enumerate("abc", 1):
        run.join(node, "3", f"--nproc-per-node={count}")
    workers = run.wait_for(lambda: run.whole(6), "world of six")
    if not workers:
        return "no world of six"
    dense = [one["RANK"] for one in workers] == [one["ROLE_RANK"] for one in workers] == list("012345")
    return f"ranks and role ranks 0 to 5: {dense}"


ROWS = {
    "killed-worker": killed_worker,
    "lost-node": lost_node,
    "planned-leave": planned_leave,
    "orphans": orphans,
    "crash-loop": crash_loop,
    "crash-loop-by-default": crash_loop_by_default,
    "joining-node": joining_node,
    "logs": logs,
    "second-job": second_job,
    "error-file": error_file,
    "uneven-nodes": uneven_nodes,
    "replaced-node": replaced_node,
    "spare-at-the-end": spare_at_the_end,
    "late-failure": late_failure,
    "late-failure-at-last": late_failure_at_last,
    "strange-error-file": strange_error_file,
}


def main(names: list[str]) -> None:
    for name in names or ROWS:
        print(f"{name}: {ROWS[name].__doc__}")
        for launcher in LAUNCHERS:
            run = Run(launcher, JOB)
            try:
                print(f"  {launcher}: {ROWS[name](run)}", flush=True)
            finally:
                run.close()


if __name__ == "__main__":
    main(sys.argv[1:])
