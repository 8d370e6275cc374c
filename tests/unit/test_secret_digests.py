"""Secrets are found in texts where only their digests are known."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from elastic_agent.agent.main.assembly import about_node
from elastic_agent.agent.output.log_folders import RunFolder, delete_run
from elastic_agent.agent.output.secret_digests import (
    SECRET_DIGESTS,
    SecretDigests,
    digests_of,
    file_name,
    find_secrets,
    without,
)

CANARY = "c4n4ry-Value9"
DIGESTS = digests_of({CANARY, "short"})


@pytest.mark.parametrize(
    "text",
    [
        CANARY,
        f"connect with {CANARY}\n",
        f"['{CANARY}', 1]",
        f"a={CANARY};b=2",
        f"it_is_{CANARY}_here",
    ],
)
def test_a_value_is_found_by_itself(text: str) -> None:
    assert find_secrets(text, DIGESTS) == {CANARY}


@pytest.mark.parametrize("value", ["$ecret!", "ünïcode", "_under_", "x" * 6, "\udcff-broken"])
def test_values_of_all_kinds_are_found(value: str) -> None:
    assert find_secrets(f"before {value} after", digests_of({value})) == {value}


def test_of_a_value_with_spaces_each_long_word_is_found() -> None:
    assert find_secrets("a correct-horse  battery", digests_of({"correct-horse battery a"})) == {
        "correct-horse",
        "battery",
    }


def test_no_value_is_in_them_and_little_of_its_digest() -> None:
    text = SECRET_DIGESTS.encode(DIGESTS)
    assert CANARY not in text
    assert [len(one.digest) for one in DIGESTS.values] == [4], "of the short one there is none"
    assert SECRET_DIGESTS.decode(text) == DIGESTS


def test_of_a_short_word_so_little_is_shown_that_thousands_of_words_show_the_same() -> None:
    """All of a dictionary can be tried at once."""
    shown = digests_of({"271828"})
    alike = sum(digests_of({f"{number:06d}"}) == shown for number in range(100_000))
    assert alike > 300


def test_all_nodes_and_runs_show_the_same_of_a_secret() -> None:
    """With other bytes in each of three files, all words of six characters were tried in hours, and one was left."""
    assert len({about_node(node, (), {CANARY})[file_name(node)] for node in ("a", "b")}) == 1


def test_a_long_line_without_a_space_needs_no_memory_for_its_parts() -> None:
    digests = digests_of({"x" * 4000})
    line = ",".join(map(str, range(10_000)))
    tracemalloc.start()
    find_secrets(line, digests)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * len(line), "each of its 10,000 parts has 4000 characters"


def test_other_words_are_hardly_ever_taken_for_one() -> None:
    text = " ".join(f"step-{number:08d}" for number in range(50_000))
    assert len(find_secrets(text, DIGESTS)) < 10


def test_those_of_known_values_can_be_left_out() -> None:
    digests = digests_of({CANARY, "another-one"})
    assert without(digests, {CANARY}) == digests_of({"another-one"})
    assert find_secrets(CANARY, SecretDigests(())) == frozenset()


def test_they_are_deleted_with_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "digits-3f2a")
    run.hold()
    (run.path / file_name("a")).write_text(SECRET_DIGESTS.encode(DIGESTS))
    run.release()
    delete_run(run.path)
    assert not run.path.exists()
