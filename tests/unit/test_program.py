"""What a node tells the others of what it runs: enough to compare, and no secret."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic_agent.agent.configuration.derive import resolve
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.agent.main.assembly import SHOWN_CHARACTERS, program_of
from elastic_agent.rendezvous.statements.terms import MOST_WORDS, WORD_CHARACTERS, Program


def program(*words: str) -> Program:
    return program_of(resolve(read_argv(words), {}, lambda: "id").config, 0.0)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("import mine\n")
    return str(tmp_path / "train.py")


SECRET = "Zx9-s3cr3t"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--lr", "0.1", "-b", "-lr=1e-5", "--seed=-1"], ["--lr", "0.1", "-b", "-lr=1e-5", "--seed=-1"]),
        (["--amp=true", "--no-amp", "False", "--name="], ["--amp=true", "--no-amp", "False", "--name="]),
        (["--api-key", SECRET, "--lr", "0.1"], ["--api-key", "~", "--lr", "0.1"]),
        (["--api-keys", SECRET, SECRET], ["--api-keys", "~", "~"]),
        (["--pwd", SECRET], ["--pwd", "~"]),
        (["--pwd", f"-{SECRET}"], ["--pwd", "~"]),
        ([f"--token={SECRET}", f"key={SECRET}"], ["--token=~", "~"]),
        (["--header", f"Authorization: Bearer {SECRET}"], ["--header", "~"]),
        (["--conf", f'{{"password": "{SECRET}"}}'], ["--conf", "~"]),
        ([f"--data=https://host/x?sig={SECRET}"], ["--data=~"]),
        ([f"postgres://u:{SECRET}/w@host"], ["~"]),
        ([f"--header: {SECRET}", f"--{SECRET} x", ""], ["~", "~", "~"]),
        (["--account", "1" * 30, "--" + "x" * 100], ["--account", "~", "~"]),
    ],
)
def test_of_the_values_only_numbers_and_booleans_are_shown_to_other_nodes(
    script: str, words: list[str], shown: list[str]
) -> None:
    published = program(script, *words).words
    assert SECRET not in " ".join(published)
    assert [re.sub("~[0-9a-f]{6}$", "~", word) for word in published] == shown


def test_values_that_are_not_shown_are_compared_all_the_same(script: str) -> None:
    one, other = program(script, "--key=a", "x"), program(script, "--key=b", "x")
    assert one.words[0] != other.words[0]
    assert one.words[1] == other.words[1]
    assert one.arguments != other.arguments


def test_a_value_that_is_not_shown_cannot_be_looked_up(script: str) -> None:
    one, other = program(script, "--key=a"), program("--rdzv-id", "other", script, "--key=a")
    assert one.words != other.words
    assert one.arguments != other.arguments


@pytest.mark.parametrize("words", [["--" + "x" * 40] * 30, ["x" * 1000] * 100, ["1"] * 1000])
def test_long_arguments_are_cut_to_what_a_record_holds(script: str, words: list[str]) -> None:
    shown = program(script, "caf\udce9", "--" + "o" * 60 + "=" + "1" * 60, *words).words
    assert len(shown) <= MOST_WORDS
    assert sum(map(len, shown)) <= SHOWN_CHARACTERS + 3
    assert max(map(len, shown)) <= WORD_CHARACTERS
    assert shown[0].isprintable()
    assert shown[-1] == "..."


def test_a_script_is_known_by_its_own_file_alone(script: str, tmp_path: Path) -> None:
    before = program(script).digest
    (tmp_path / "mine.py").write_text("changed = True\n")
    assert program(script).digest == before
    Path(script).write_text("import mine  # changed\n")
    assert program(script).digest != before


def test_what_is_no_script_is_known_by_its_name(tmp_path: Path) -> None:
    assert program("-m", "json.tool").digest != program("-m", "json").digest
    assert program("--no-python", "/bin/true").digest == program("--no-python", "/usr/bin/true").digest
