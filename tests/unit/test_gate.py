"""What `make test` shows with real processes: each promise, each row of the README's table, each command.

A test that is named here may get another name, or a better one may take its place, but none is marked `long`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SHOWN = {
    "I1 never two generations of workers on one node": "agent_death::what_a_worker_leaves_behind",
    "I2 to I4 one world, dense ranks, each started once": "worker_failures::a_failure_on_one_node_restarts_all_nodes",
    "I5 only the current generation commits": "fence::a_node_that_wakes_when_others_went_on",
    "I6 a committed checkpoint is never lost or torn": "checkpointer::five_kills_change_not_one_bit",
    "I7 committed steps grow": "memory_tier::a_save_is_durable_though_rank_0_is_killed",
    "I8 a planned change loses no step": "drain::a_join_and_two_leaves_lose_no_step",
    "I9 no orphan": "agent_death::after_sigkill_of_the_agent",
    "I10 who lost the store stops in time": "etcd_members::without_a_quorum_for_five_seconds",
    "I11 one generation soon after the last fault": "c10d_host::a_host_that_is_started_again",
    "I12 crash loops end": "worker_failures::a_crash_loop_ends_soon",
    "I13 bad configuration starts nothing": "environment::bad_configuration_lists_every_problem",
    "I14 exported numbers are true": "observed::metrics_log_and_workers_name_the_same_generation",
    "I15 no secret shows up": "etcd_options::a_password_shows_up_nowhere",
    "I16 what cannot be carried right is refused": "unequal_states::a_sharded_state_is_refused_by_name",
    "I17 nothing holds the job": "agent_failures::a_main_loop_that_stands_still",
    "I18 a run changes only its own checkpoints": "two_runs::a_job_that_waits_for_the_directory",
    "a worker is killed": "ddp::plain_ddp_survives_kills",
    "a node is killed": "nodes::a_lost_node_shrinks_the_world",
    "a node is cut off": "partitions::a_node_that_is_cut_off_stops",
    "a node joins; an agent gets SIGTERM": "drain::a_join_and_two_leaves_lose_no_step",
    "start of 8 workers": "spares::eight_workers_come_from_spares",
    "a hang is named": "training_timeouts::a_hang_on_one_node_is_ended_named_and_restarted",
    "a script, status, events, report": "users::a_plain_script_is_killed",
    "several nodes": "users::two_nodes_meet_by_the_same_line",
    "a daemon, submit, wait, logs, jobs": "users::a_daemon_runs_what_is_submitted",
    "cancel": "daemon::jobs_are_cancelled_where_they_are",
    "torchrun --rdzv-backend=etcd-v3": "torchrun_plugin::workers_in_no_collective_start_again",
    "the library": "worker_example::the_example_survives_a_kill",
    "check --nodes": "check_nodes::a_filter_and_a_node_that_is_killed",
    "exclude, readmit": "exclusion::an_operator_excludes_a_node",
    "diagnose": "evidence::an_archive_of_a_run_has_no_secret",
    "--check-config": "environment::a_worker_s_devices_are_shown_before_a_run",
    "--slurm": "slurm_environment::two_tasks_of_srun_meet",
    "systemd's unit": "systemd::a_start_is_done_when_the_agent_is_up",
    "a pod of the chart": "pod::two_pods_meet",
}


@pytest.mark.parametrize("what", SHOWN)
def test_it_is_shown_in_each_run(what: str) -> None:
    file, _, begin = SHOWN[what].partition("::")
    functions = ast.parse((TESTS / "system" / f"test_{file}.py").read_text()).body
    (test,) = (
        one for one in functions if isinstance(one, ast.FunctionDef) and one.name.startswith(f"test_{begin}")
    )
    assert "pytest.mark.long" not in map(ast.unparse, test.decorator_list)


def test_each_promise_of_the_design_is_there() -> None:
    named = " ".join(SHOWN)
    for first, last in re.findall(r"I(\d+) to I(\d+)", named):
        named += "".join(f" I{number}" for number in range(int(first), int(last) + 1))
    assert {int(number) for number in re.findall(r"\bI(\d+)", named)} == set(range(1, 19))
