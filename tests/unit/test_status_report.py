"""The report of a job, made of the answers of its source and its nodes; and how it looks, to the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_agent.agent.commands.status import lines, span
from elastic_agent.agent.observability.job_report import JobReport, as_json, report
from elastic_agent.agent.observability.sources import FoundJob, NodeAnswer, Unreachable
from elastic_agent.agent.observability.status import Checkpoint, JobStatus, NodeStatus
from elastic_agent.health.checks.finding import Finding, Outcome
from elastic_agent.health.stragglers import PaceComparison, Straggler
from elastic_agent.rendezvous.messages import Exclusion
from elastic_agent.rendezvous.records import (
    Cause,
    CauseKind,
    Endpoint,
    Limits,
    NodeRecord,
    Phase,
    Restarts,
    Result,
    World,
    assign_ranks,
)

from .test_status_pages import STATUS, WORLD


def record(name: str, **more: Any) -> NodeRecord:
    return NodeRecord(name, f"{name}-1", f"10.0.0.{ord(name) - 96}", 4711, 2, **more)


def http(name: str) -> Endpoint:
    return Endpoint(f"10.0.0.{ord(name) - 96}", 9100)


A, B, C, D = (record(name, http=http(name)) for name in "abcd")
THREE = replace(WORLD, members=assign_ranks((A, B, C)), restarts=Restarts(2, 1))


def status(name: str, **more: Any) -> NodeStatus:
    return replace(STATUS, node=name, incarnation=f"{name}-1", **more)


def found(world: World | None = THREE, nodes: tuple[NodeRecord, ...] = (A, B, C), **more: Any) -> FoundJob:
    return FoundJob(
        "agent 10.0.0.1:9100", JobStatus("digits", world, nodes, "a", **{"complete": True, **more})
    )


ALL = {f"{name}-1": status(name) for name in "abc"}


def made(one: FoundJob | None = None, answers: Mapping[str, NodeAnswer] = ALL) -> JobReport:
    return report(one or found(), answers)


def states(job: JobReport) -> list[tuple[str, str, str]]:
    return [(node.node, node.ranks, node.state) for node in job.nodes]


def ended(result: Result) -> World:
    return replace(
        THREE, phase=Phase.ENDED, result=result, cause=Cause(CauseKind.SUCCESS, detail="it is over")
    )


STOPPING = replace(THREE, phase=Phase.STOPPING)


@pytest.mark.parametrize(
    ("world", "workers", "state"),
    [
        (None, 0, "waiting"),
        (THREE, 2, "running"),
        (STOPPING, 2, "stopping"),
        (STOPPING, 0, "waiting"),
        (ended(Result.SUCCEEDED), 0, "succeeded"),
        (ended(Result.CRASH_LOOP), 0, "failed"),
        (ended(Result.RESTARTS_EXHAUSTED), 0, "failed"),
        (ended(Result.STORE_HOST_LEFT), 0, "failed"),
    ],
)
def test_the_state_of_a_job(world: World | None, workers: int, state: str) -> None:
    answers = {"a-1": status("a", workers=workers), "b-1": status("b", workers=0)}
    assert made(found(world), answers).state == state


def test_a_job_whose_nodes_are_all_silent_is_only_known_to_be_stopping() -> None:
    silent = dict.fromkeys(ALL, Unreachable.SILENT)
    job = made(found(STOPPING), silent)
    assert (job.state, job.phase_age_s) == ("stopping", None)


STORELESS = {"workers": 0, "state": "joining", "waiting_for": "the store: start it again", "lease_age_s": 8.0}


@pytest.mark.parametrize(
    ("host", "others", "state", "waiting_for"),
    [
        (Unreachable.REFUSED, STORELESS, "stopped", "the store: start it again"),
        (Unreachable.SILENT, STORELESS, "running", ""),  # it may train where this command does not reach
        (status("a"), STORELESS, "running", ""),
        (Unreachable.REFUSED, STORELESS | {"lease_age_s": 0.25}, "waiting", "the store: start it again"),
        (Unreachable.REFUSED, STORELESS | {"lease_age_s": None}, "stopped", "the store: start it again"),
    ],
)
def test_a_job_without_a_living_worker_does_not_run(
    host: NodeAnswer, others: dict[str, Any], state: str, waiting_for: str
) -> None:
    answers = {"a-1": host, "b-1": status("b", **others), "c-1": status("c", **others)}
    job = made(found(complete=False), answers)
    assert (job.state, job.waiting_for) == (state, waiting_for)


@pytest.mark.parametrize(
    ("state", "step", "title", "hints"),
    [
        ("starting", 0, "running (no steps reported), generation 3", 0),
        ("running", 0, "running (no steps reported), generation 3", 1),
        ("running", 1, "running, generation 3", 0),
    ],
)
def test_a_job_whose_script_reports_no_steps_says_so_and_how_to_get_them(
    state: str, step: int, title: str, hints: int
) -> None:
    job = made(answers={name: replace(one, state=state, step=step) for name, one in ALL.items()})
    first, *rest = lines(job)
    assert title in first
    assert sum("call elastic_agent.worker.step()" in line for line in rest) == hints
    assert (job.state, len(job.notes)) == ("running", hints)


def test_members_are_listed_by_rank_before_nodes_that_stand_by() -> None:
    world = replace(THREE, members=assign_ranks((C, A)))
    answers = {**ALL, "b-1": status("b", state="joining"), "d-1": status("d", state="joining")}
    assert states(made(found(world, (A, B, C, D)), answers)) == [
        ("c", "0-1", "running"),
        ("a", "2-3", "running"),
        ("b", "", "standby"),
        ("d", "", "standby"),
    ]


@pytest.mark.parametrize(
    ("answer", "nodes", "complete", "expected"),
    [
        (Unreachable.REFUSED, (A, B, C), True, "gone"),
        (Unreachable.SILENT, (A, B, C), True, "no answer"),
        (Unreachable.STRANGE, (A, B, C), True, "no answer"),
        (Unreachable.HIDDEN, (A, B, C), True, "hidden"),
        (Unreachable.SILENT, (A, B), True, "lost"),
        (Unreachable.SILENT, (A, B), False, "no answer"),
        (status("c", state="stopping"), (A, B), True, "stopping"),
    ],
)
def test_the_state_of_a_node(
    answer: NodeAnswer, nodes: tuple[NodeRecord, ...], complete: bool, expected: str
) -> None:
    job = made(found(nodes=nodes, complete=complete), {**ALL, "c-1": answer})
    assert states(job)[2] == ("c", "4-5", expected)


def test_a_node_that_was_not_asked_is_hidden() -> None:
    assert states(made(answers={}))[0] == ("a", "0-1", "hidden")


def test_an_agent_that_was_asked_and_is_not_in_any_record_yet_is_listed() -> None:
    asked = status("d", state="init", waiting_for="the rendezvous store")
    job = made(FoundJob("agent", JobStatus("digits", None, (), None, complete=False, agent=asked)), {})
    assert states(job) == [("d", "", "init")]
    assert (job.state, job.waiting_for) == ("waiting", "the rendezvous store")


def test_the_first_answer_of_the_asked_agent_stands_in_only_when_it_falls_silent() -> None:
    asked = status("b", step=1)
    one = found(agent=asked)
    assert made(one).nodes[1].status == ALL["b-1"]
    assert made(one, {**ALL, "b-1": Unreachable.SILENT}).nodes[1].status == asked


def test_the_age_of_the_phase_is_that_which_the_coordinator_counts() -> None:
    answers = {"a-1": status("a", phase_s=1.0), "b-1": status("b", phase_s=8.0)}
    assert made(answers=answers).phase_age_s == 1.0
    assert made(found(None), answers).phase_age_s is None


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([None, None, None], None),
        ([Checkpoint(5, 2.0), None, Checkpoint(4, 1.0)], Checkpoint(5, 2.0)),
        ([Checkpoint(5, None), Checkpoint(5, 2.0), Checkpoint(5, 3.0)], Checkpoint(5, 2.0)),
        ([Checkpoint(5, None), None, Checkpoint(4, 1.0)], Checkpoint(5, None)),
    ],
)
def test_the_checkpoint_of_the_job(checkpoints: list[Checkpoint | None], expected: Checkpoint | None) -> None:
    answers = {
        f"{name}-1": status(name, checkpoint=checkpoint)
        for name, checkpoint in zip("abc", checkpoints, strict=True)
    }
    assert made(answers=answers).checkpoint == expected


def test_without_an_answer_the_step_is_the_one_in_the_store() -> None:
    one = found(replace(THREE, step=40), (A, replace(B, step=41)))
    assert made(one, {}).step == 41
    assert made(one).step == 17


@pytest.mark.parametrize(
    ("limit", "left", "fruitless_left"), [(None, None, 2), (5, 3, None), (2, 0, None), (1, 0, None)]
)
def test_restarts_left(limit: int | None, left: int | None, fruitless_left: int | None) -> None:
    restarts = made(found(replace(THREE, limits=Limits(1, 4, 0.0, limit)))).restarts
    assert (restarts.failures, restarts.left, restarts.fruitless_left) == (2, left, fruitless_left)


def test_the_coordinator_speaks_for_the_job() -> None:
    answers = {
        "a-1": status("a", workers=0, waiting_for="2 more nodes", backoff_s=1.5),
        "b-1": status("b", workers=0, waiting_for="a coordinates"),
    }
    job = made(found(STOPPING), answers)
    assert (job.waiting_for, job.restarts.backoff_s) == ("2 more nodes", 1.5)


def test_the_json_form_has_only_plain_values_and_is_complete() -> None:
    answers = {**ALL, "c-1": Unreachable.REFUSED}
    document = as_json(made(answers=answers))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["cause"] == {
        "kind": "failure",
        "node": "b",
        "rank": 3,
        "text": "rank 3 on node b failed in generation 2: exit code 1: ValueError: lr < 0",
        "known_as": "exception",
    }
    assert document["checkpoint"] == {"step": 12, "age_s": 3.25}
    first, _, last = document["nodes"]
    assert first.keys() == last.keys()
    assert (first["state"], first["coordinates"], first["lease_age_s"]) == ("running", True, 0.25)
    assert (last["state"], last["silence"], last["step"]) == ("gone", "refused", None)


# ---------------------------------------------------------------- as lines


def test_a_job_in_trouble_to_the_line() -> None:
    answers = {
        **ALL,
        "b-1": status("b", checkpoint=Checkpoint(12, None), step=16),
        "c-1": Unreachable.REFUSED,
    }
    answers["d-1"] = status("d", state="joining", step=0, checkpoint=None, lease_age_s=1.04)
    job = made(found(nodes=(A, B, C, D)), answers)
    assert (
        "\n".join(lines(job))
        == """\
job digits: running, generation 3 for 4.5 s
  world        3 nodes, 6 workers, master 10.0.0.1:4711
  last change  rank 3 on node b failed in generation 2: exit code 1: ValueError: lr < 0 (exception)
  restarts     2 failures so far, 1 in a row without progress; gives up after 2 more without progress
  step         17
  checkpoint   step 12, saved 3.2 s ago
  source       agent 10.0.0.1:9100

NODE  RANKS  STATE    STEP  CHECKPOINT  LEASE  AGENT
a *   0-1    running  17    12, 3.2 s   0.2 s  10.0.0.1:9100
b     2-3    running  16    12          0.2 s  10.0.0.2:9100
c     4-5    gone     -     -           -      10.0.0.3:9100
d     -      standby  -     -           1.0 s  10.0.0.4:9100

! node c: no process of it listens at 10.0.0.3:9100: its agent has ended; the store still has its record
* coordinates: decides on the next world"""
    )


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            made(answers={**ALL, "b-1": status("b", lease_age_s=6.0)}),
            "! node b: its lease was last confirmed 6.0 s ago",
        ),
        (
            made(answers={**ALL, "b-1": status("b", **STORELESS)}),
            "! node b has no workers, waiting: the store: start it again",
        ),
        (
            made(answers={**ALL, "b-1": status("b", notice="the cloud ends it", notice_s=29.4)}),
            "! node b: the cloud ends it; 29 s are left",
        ),
        (
            made(
                answers={
                    **ALL,
                    "b-1": status("b", checks=(Finding("gpu-ecc", Outcome.FAIL, "3 errors", "reset"),)),
                }
            ),
            "! node b: check gpu-ecc fails: 3 errors",
        ),
        (
            made(answers={**ALL, "b-1": status("b", notice="the cloud may end it")}),
            "! node b: the cloud may end it; no deadline is known",
        ),
        (
            made(answers={**ALL, "b-1": status("b", partners_unreachable=("c",))}),
            "! node b: its shards have no replica on c:",
        ),
        (made(found(nodes=(A, B)), {**ALL, "c-1": Unreachable.SILENT}), "its lease has ended"),
        (made(found(complete=False)), "! the coordinator does not answer"),
        (made(replace(found(), notes=("the store's 'nodes/x' cannot be read",))), "! the store's 'nodes/x'"),
        (
            made(found(replace(THREE, exclusions=(Exclusion("c", "c", "gpu_fault", "GPU 3 is lost"),)))),
            "! node c is excluded: GPU 3 is lost. It checks itself after a cool-down",
        ),
        (
            made(
                found(
                    nodes=(
                        replace(A, comparison=PaceComparison(3, 50_000, (Straggler("b", 3, 75_000),))),
                        B,
                        C,
                    )
                )
            ),
            "! rank 3 on node b is slower than the others, which wait for it: it works 0.075 s for a step, 0.05 s "
            "are usual (50% more)",
        ),
        (made(found(replace(THREE, limits=Limits(1, 4, 0.0, 5)))), "2 failures so far, 3 left of 5"),
        (made(answers={"a-1": status("a", backoff_s=2.0)}), "the next start waits 2.0 s"),
        (made(found(nodes=(A, replace(B, leaving=True), C))), "running, leaving"),
    ],
)
def test_the_notes_name_each_problem(job: JobReport, words: str) -> None:
    assert words in "\n".join(lines(job))


def test_no_text_of_another_program_moves_the_cursor() -> None:
    evil = "\x1b[2J\r\n\x07\u202e\x9b"
    world = replace(THREE, cause=Cause(CauseKind.LOST, "b", f"gone{evil}"))
    answers = {**ALL, "a-1": status("a", state="running", waiting_for=evil)}
    one = replace(found(world), asked=f"agent {evil}", notes=(evil,))
    text = "\n".join(lines(made(one, answers)))
    assert all(character.isprintable() for line in text.split("\n") for character in line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (312, "5 min 12 s"),
        (3599.9, "1 h 00 min"),
        (11_220, "3 h 07 min"),
        (187_200, "2 d 04 h"),
        (8.64e6, "100 d 00 h"),
    ],
)
def test_a_span_has_the_two_units_that_matter(seconds: float, text: str) -> None:
    assert span(seconds) == text
