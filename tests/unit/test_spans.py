"""A recovery's trace: one for all nodes of one recovery."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.observability.otel import trace_id


@given(st.text(), st.text(), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_trace_is_of_one_run_and_one_generation(run: str, other: str, first: int, second: int) -> None:
    same = (run, first) == (other, second)
    assert (trace_id(run, first) == trace_id(other, second)) == same
    assert 0 < trace_id(run, first) < 2**128
