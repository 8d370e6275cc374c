"""A recovery as spans: the instants of its phases, and one trace for all nodes of one recovery."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.observability.goodput import Activity, Recovery, Stage
from elastic_agent.agent.observability.otel import Span, spans_of, trace_id
from elastic_agent.agent.observability.training_account import Recovered

EPOCH = 1000.0
RECOVERY = Recovery(
    {Activity.DETECT: 0.5, Activity.STOP: 1.0, Activity.START: 0.25, Activity.FIRST_STEP: 0.25},
    (
        Stage(Activity.DETECT, 10.0, 10.5),
        Stage(Activity.STOP, 10.5, 11.5),
        Stage(Activity.START, 11.5, 11.75),
        Stage(Activity.FIRST_STEP, 11.75, 12.0),
    ),
)
RECOVERED = Recovered(RECOVERY, "run", 2, "failure", "rank 1 failed")


def test_each_phase_has_a_span_within_that_of_the_whole() -> None:
    spans = spans_of(RECOVERED, EPOCH, ())
    assert spans is not None
    assert spans.spans == (
        Span("recovery", 1010.0, 1012.0),
        Span("detect", 1010.0, 1010.5),
        Span("stop", 1010.5, 1011.5),
        Span("start", 1011.5, 1011.75),
        Span("first step", 1011.75, 1012.0),
    )
    assert spans.attributes == {
        "elastic_agent.run": "run",
        "elastic_agent.generation": 2,
        "elastic_agent.cause": "failure",
        "elastic_agent.because": "rank 1 failed",
    }


def test_a_recovery_of_more_stages_than_are_kept_begins_where_it_began() -> None:
    recovery = Recovery({Activity.STOP: 50.0, Activity.START: 0.25}, (Stage(Activity.START, 60.0, 60.25),))
    spans = spans_of(Recovered(recovery, "run", 2, "failure", ""), EPOCH, ())
    assert spans is not None
    assert spans.spans[0] == Span("recovery", 1010.0, 1060.25)


def test_a_recovery_that_took_no_time_has_no_spans() -> None:
    assert spans_of(Recovered(Recovery({}), "run", 2, "join", ""), EPOCH, ()) is None


def test_what_a_worker_printed_leaves_the_node_without_secrets() -> None:
    because = "rank 1 failed: ValueError: --api-key abc123 and canary-71"
    spans = spans_of(Recovered(RECOVERY, "run", 2, "failure", because), EPOCH, ("canary-71",))
    assert spans is not None
    said = str(spans.attributes["elastic_agent.because"])
    assert said.startswith("rank 1 failed: ValueError: --api-key ")
    assert "abc123" not in said
    assert "canary" not in said


@given(st.text(), st.text(), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_trace_is_of_one_run_and_one_generation(run: str, other: str, first: int, second: int) -> None:
    same = (run, first) == (other, second)
    assert (trace_id(run, first) == trace_id(other, second)) == same
    assert 0 < trace_id(run, first) < 2**128
