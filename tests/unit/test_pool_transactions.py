"""What the coordinator of a pool writes at once."""

from __future__ import annotations

from elastic_agent.pool.records import Job, JobResult, Outcome, Plan, Pool, PoolNode
from elastic_agent.pool.schedule import MOST_AT_ONCE, Decision, decide
from elastic_agent.rendezvous.store.interface import MOST_OPERATIONS, Compare, Delete


def test_of_a_forgotten_job_nothing_is_left_in_the_store() -> None:
    writes = Decision(Plan(), forgotten=("j",)).writes
    deleted = {write.key for write in writes if isinstance(write, Delete)}
    assert deleted == {"jobs/j", "results/j", "runs/j/world", "runs/j/stop_at"}


def test_no_result_takes_the_place_of_another() -> None:
    result = JobResult("j", Outcome.FAILED, "", 1, 1, None, 0.0, ())
    assert Compare("results/j", 0) in Decision(Plan(), (result,)).compares


def test_a_job_begins_only_while_it_has_no_result() -> None:
    """Also where the store has not told of that yet."""
    job = Job("j", "j", (), ("t.py",), {}, "/", 1, 1, 0.0, "u@h")
    decision = decide(Pool((PoolNode("a", "a1"),), (job,)), 0.0)
    assert decision is not None
    assert Compare("results/j", 0) in decision.compares


def test_the_largest_step_is_one_transaction_for_etcd() -> None:
    jobs = [f"j{number}" for number in range(MOST_AT_ONCE)]
    results = tuple(JobResult(job, Outcome.FAILED, "", 1, 1, None, 0.0, ()) for job in jobs)
    decision = Decision(Plan(), results, tuple(jobs), tuple(jobs))
    assert len(decision.writes) + len(decision.compares) <= MOST_OPERATIONS
