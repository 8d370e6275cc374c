"""Secrets are found in texts where only their digests are known."""

from __future__ import annotations

import json
import time
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


PHRASE = "fish cake horse moon 7"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"phrase is {PHRASE}\n", PHRASE),
        (f"first\n{PHRASE}", PHRASE),
        (f"RuntimeError: login='{PHRASE}', more", PHRASE),
        ("phrase is fish  cake\thorse moon 7", "fish  cake\thorse moon 7"),
        (f"fish {PHRASE} 7 fish", PHRASE),
        ("fish cake horse\nmoon 7", None),
        ("fish cake horse moon 8", None),
        ("xfish cake horse moon 7", None),
        ("fish cake horse moon 77", None),
    ],
)
def test_a_phrase_of_short_words_is_found_as_a_whole_in_one_line(text: str, found: str | None) -> None:
    assert find_secrets(text, digests_of({PHRASE})) == ({found} if found else frozenset())


def test_of_a_value_with_spaces_each_word_that_is_in_no_dictionary_is_found_by_itself_too() -> None:
    digests = digests_of({"correct-horse battery a"})
    assert find_secrets("a correct-horse  battery", digests) == {"correct-horse"}
    assert find_secrets("is correct-horse battery a?", digests) == {
        "correct-horse",
        "correct-horse battery a",
    }


def test_each_line_of_a_value_is_found_by_itself() -> None:
    key = "-----BEGIN KEY-----\nc4n4ry+c4n4ry/c4n4ry\nline of words\n"
    assert find_secrets("c4n4ry+c4n4ry/c4n4ry", digests_of({key})) == {"c4n4ry+c4n4ry/c4n4ry"}
    assert find_secrets("a line of words", digests_of({key})) == {"line of words"}
    assert find_secrets(f"{key!r}", digests_of({key})) > {"c4n4ry+c4n4ry/c4n4ry", "line of words"}


ESCAPED = 'Ab"cd\\ef"gh12é$kk'


@pytest.mark.parametrize(
    "written",
    [
        ESCAPED,
        repr(ESCAPED),
        ascii(ESCAPED),
        repr({"it's": ESCAPED}),
        json.dumps(ESCAPED),
        json.dumps({"token": ESCAPED, "n": 1}, ensure_ascii=False),
    ],
)
def test_a_value_is_found_in_its_escaped_spellings_too(written: str) -> None:
    assert find_secrets(f"before {written} after", digests_of({ESCAPED})) == {ESCAPED}


def test_a_character_beyond_16_bits_is_found_as_json_writes_it() -> None:
    assert find_secrets(json.dumps("see-\U0001f511-key"), digests_of({"see-\U0001f511-key"})) == {
        "see-\U0001f511-key"
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


@pytest.mark.parametrize(
    ("value", "digits"),
    [
        ("horse battery", [2]),
        (PHRASE, [4]),
        ("correct horse battery staple", [4]),
        ("Bearer c4n4ry-Value9", [4, 4]),
        ("x c4n4ry-Value9", [4]),
        (ESCAPED, [4]),
        ("a b c", []),
    ],
)
def test_no_word_of_a_dictionary_is_in_two_digests_and_none_is_of_another_spelling(
    value: str, digits: list[int]
) -> None:
    """With a byte of each word and two of the whole, four words of a list of 7776 are found out in a second."""
    assert [len(one.digest) for one in digests_of({value}).values] == digits


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


@pytest.mark.parametrize("line", ["a " * 2**17, "ab." * 2**16 + " b", "x=" * 2**17, "fish cake " * 25_000])
def test_a_phrase_costs_little_on_a_long_line(line: str) -> None:
    digests = digests_of({PHRASE, "a " * 500, "a " * 4000, f"{'x' * 1000} {'y' * 11}"})
    began_at = time.process_time()
    find_secrets(line, digests)
    assert time.process_time() - began_at < 20.0, "a look at each pair of words takes hours"
    tracemalloc.start()
    find_secrets(line, digests)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * len(line)


def test_other_words_are_hardly_ever_taken_for_one() -> None:
    text = " ".join(f"step-{number:08d}" for number in range(50_000))
    assert len(find_secrets(text, DIGESTS)) < 10


def test_other_phrases_are_hardly_ever_taken_for_one() -> None:
    text = "\n".join(f"loss is {number:08d} now {number % 10}" for number in range(50_000))
    assert len(find_secrets(text, digests_of({PHRASE}))) < 10


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
