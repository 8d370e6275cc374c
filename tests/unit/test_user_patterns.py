"""The patterns of the user's rows: they mean what they mean to `re`, and no search for them freezes the agent."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.agent.configuration.types.user_patterns import (
    MOST_S,
    PatternInvalid,
    PatternSearch,
    compile_pattern,
)
from elastic_agent.agent.configuration.types.values import UserCause
from elastic_agent.agent.workers.failures.causes import CauseTable
from elastic_agent.agent.workers.failures.facts import Facts
from elastic_agent.rendezvous.records import Action

LATE_S = 4 * MOST_S  # on a machine that does other things
NEARLY = tuple(["a" * 2048] * 40)
"""Lines that `SLOW` almost matches: it takes without end to see that it does not."""
SLOW = "(a+)+b"
REPORTED = ["(?i).*error.*failed.*node", ".*.*.*.*.*.*.*Q"]


@pytest.mark.parametrize(
    "pattern", [*REPORTED, SLOW, "(?:a|aa|error )+X", "(?=(.*)*Q)a", r"(.*)(.*)(.*)\1\2\3Q"]
)
def test_a_failure_is_judged_in_time_whatever_the_pattern(pattern: str) -> None:
    table = CauseTable([UserCause("mine", pattern, Action.FREE)])
    lines = (*NEARLY[20:], *["error failed " * 150] * 20)
    began = time.monotonic()
    assert table.classify(Facts(1, "ValueError: no", lines)).name == "exception"
    assert time.monotonic() - began < LATE_S


def test_all_patterns_of_a_failure_have_one_bound() -> None:
    table = CauseTable([UserCause("mine", f"{SLOW}{number}", Action.FREE) for number in range(32)])
    began = time.monotonic()
    assert table.classify(Facts(1, output=NEARLY)).name == "unknown"
    assert time.monotonic() - began < LATE_S


def test_a_slow_pattern_is_named_once_in_a_generation_and_the_others_are_decided(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = CauseTable([UserCause("slow", SLOW, Action.STOP), UserCause("mine", "weka", Action.FREE)])
    facts = Facts(1, output=(*NEARLY, "weka client has gone"))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert [table.classify(facts).name for _ in range(16)] == ["mine"] * 16
    assert time.monotonic() - began < LATE_S, "the next failures of the generation do not wait for it"
    [line] = caplog.messages
    assert f"'{SLOW}'" in line
    assert "write it with fewer repeats" in line
    table.generation_begins()
    table.classify(facts)
    assert len(caplog.messages) == 2


def test_what_was_found_of_a_failure_stays_found() -> None:
    """A failure is judged twice if NVML has news, and once for each exception in a group."""
    search = PatternSearch(set())
    assert search.finds("weka", ("no", "weka"))
    search.finds(SLOW, NEARLY)
    assert search.finds("weka", ("no", "weka"))
    assert not search.finds(SLOW, NEARLY)


def test_an_agent_without_patterns_does_not_import_the_library() -> None:
    code = (
        "import sys, elastic_agent.agent.main.run, elastic_agent.agent.configuration.reading.causes as reading\n"
        "from elastic_agent.agent.workers.failures.causes import CauseTable\n"
        "from elastic_agent.agent.workers.failures.facts import Facts\n"
        "rows, _ = reading.read_causes([{'name': 'port', 'action': 'stop'}], 'x')\n"
        "CauseTable(rows).classify(Facts(1, 'ValueError: no', ('line',)))\n"
        "sys.exit('regex' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


AS_RE_HAS_IT = [
    ("a{e}", "b", "regex would allow errors"),
    ("a{e}", "a{e}", ""),
    ("{e}", "{e}", "regex would miss what may have errors"),
    ("a{1,2}{e}", "aa{e}", ""),
    ("a{}", "a{}", ""),
    ("a{\u0663}", "a{\u0663}", "a digit, but no count"),
    ("a{,}b", "aab", ""),
    ("^a{2,3}$", "aaa", ""),
    (r"a\{2}", "a{2}", ""),
    (r"[[:alpha:]]", "b", "regex would take a class of POSIX"),
    (r"[[:alpha:]]", "a]", ""),
    (r"[]{e}[]x", "[x", ""),
    (r"[^]{]x", "]x", ""),
    (r"[\]{]{2}$", "{]", ""),
    (r"[a||b]", "|", "no union"),
    (r"[a&&b]", "&", "no intersection"),
    (r"\N{LATIN SMALL LETTER A}{2}", "aa", ""),
    (r"[\N{LEFT CURLY BRACKET}]", "{", ""),
    (r"(?i)straße", "STRASSE", "no full case-folding"),
    (r"(?#{e})a", "a", ""),
    (r"(?P<q>['\"]).*?(?P=q)", "say 'x'", ""),
    ("^b", "a\nb", ""),
]


@pytest.mark.parametrize(("pattern", "text", "why"), AS_RE_HAS_IT)
def test_a_pattern_means_what_it_means_to_re(pattern: str, text: str, why: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = re.search(pattern, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compile_pattern(pattern).search(text)
    assert (found and found[0]) == (expected and expected[0]), why


PIECES = [
    "a",
    "b",
    "{",
    "}",
    "{e}",
    "{2}",
    "{1,}",
    "[",
    "]",
    "^",
    "-",
    ":",
    "(",
    ")",
    "(?:",
    "|",
    "*",
    "?",
    "\\",
    "x",
]


@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join), st.text("ab{}e[]:-x^", max_size=12))
def test_whatever_re_takes_is_searched_for_as_re_does(pattern: str, text: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = re.search(pattern, text)
    except re.error:
        with pytest.raises(PatternInvalid):
            compile_pattern(pattern)
        return
    found = compile_pattern(pattern).search(text)
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "missing )"),
        ("a**", "multiple repeat"),
        (r"\p{L}", "bad escape"),
        ("a{99999999}", "more than 10000 parts"),
        ("((a{100}){100}b){100}", "more than 10000 parts"),
        ("(" * 21 + "a?" + "){2}" * 21, "more than 10000 parts"),
        ("(?:" * 400 + "a" + ")" * 400, "nested too deeply"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_before_it_costs(pattern: str, why: str) -> None:
    with pytest.raises(PatternInvalid, match=re.escape(why)):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["[0-9a-f]{64}", r"(\d{1,3}\.){3}\d{1,3}", "(a{100}b){90}", "[{]{3}", "x{0,99999}"]
)
def test_usual_counts_are_taken(pattern: str) -> None:
    compile_pattern(pattern)


def test_a_comment_of_a_verbose_pattern_is_no_part_of_it() -> None:
    pattern = compile_pattern("(?x) foo  # bracket [ here\n [ab]")
    assert pattern.search("fooa")
    assert not pattern.search("foo[ab]")
