"""The rows `[[cause]]` of the configuration file: read, printed, and refused with all that is wrong at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.configuration.config import Config, ConfigError
from elastic_agent.agent.configuration.derive import Resolved, resolve
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.agent.configuration.values import UserCause
from elastic_agent.rendezvous.records import Action


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agent.toml"


def read(file: Path, text: str) -> Resolved:
    script = file.with_name("train.py")
    script.touch()
    file.write_text(text)
    return resolve(read_argv(["--config", str(file), str(script)]), {}, lambda: "fresh")


def problems(file: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(file, text)
    assert caught.value.code == 78
    return [str(problem).replace(f"{file}: ", "") for problem in caught.value.problems]


ROWS = r"""
min-nodes = 1
[[cause]]
name = "flaky_storage"
contains = 'weka "client"|\bé\n'
action = "free"
[[cause]]
name = "import_error"
action = "restart"
[[cause]]
name = "disk_full"
contains = "lustre"
[[cause]]
name = "flaky_storage"
contains = "another"
"""
CAUSES = (
    UserCause("flaky_storage", 'weka "client"|\\bé\\n', Action.FREE),
    UserCause("import_error", action=Action.RESTART),
    UserCause("disk_full", "lustre"),
    UserCause("flaky_storage", "another"),
)


def test_the_rows_of_the_file_are_read_in_their_order(file: Path) -> None:
    assert read(file, ROWS).config.causes == CAUSES
    assert read(file, "").config.causes == Config.__dataclass_fields__["causes"].default == ()


def test_the_printed_settings_have_the_rows_and_mean_the_same(file: Path) -> None:
    resolved = read(file, ROWS)
    [line] = [line for line in resolved.settings.lines() if line.startswith("cause = ")]
    assert line.endswith(f"# {file}: cause")
    assert read(file.with_name("again.toml"), "\n".join(resolved.settings.lines())).config == resolved.config
    assert not any(line.startswith("cause") for line in read(file, "").settings.lines())


def test_all_that_is_wrong_is_said_at_once(file: Path) -> None:
    text = """
min-nodes = 0
[[cause]]
name = "Xid"
contain = "x"
[[cause]]
name = "mine"
pattern = "("
action = "retry"
[[cause]]
contains = "x"
[[cause]]
name = "mine"
[[cause]]
name = "port"
"""
    found = problems(file, text)
    assert len(found) == 8
    for part in (
        "min-nodes '0'",
        "cause 1: contain 'x': expected name, contains or action; contains = 'TEXT'",
        "cause 1: name 'Xid': expected a name of small letters",
        "cause 2: pattern '(': expected name, contains or action; contains = 'TEXT'",
        "cause 2: action 'retry': expected one of restart, stop, end, free",
        "cause 3: name: expected a name",
        "cause 4: expected a text that it contains and an action",
        "cause 5: expected a text that it contains and an action; add it",
    ):
        assert any(part in problem for problem in found), (part, found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cause = 1", "cause: expected tables"),
        ('cause = ["x"]', "expected tables"),
        ('[cause]\nname = "x"', "expected tables"),
        ('[[cause]]\nname = "ok"\naction = "stop"\ncontains = "x"', "ok, join, leave and lost are taken"),
        ('[[cause]]\nname = "a b"\naction = "stop"\ncontains = "x"', "a name of small letters"),
        ('[[cause]]\nname = 7\naction = "stop"\ncontains = "x"', "a name of small letters"),
        ('[[cause]]\nname = "mine"\ncontains = "x"', "cause 1: expected an action"),
        ('[[cause]]\nname = "mine"\naction = "stop"', "cause 1: expected a text that it contains"),
        ('[[cause]]\nname = "port"\naction = []', "expected one of restart"),
        ('[[cause]]\nname = "port"\naction = 1', "expected one of restart"),
        ('[[cause]]\nname = "port"\naction = "exclude-node"', "expected one of restart, stop, end, free"),
        ('[[cause]]\nname = "port"\ncontains = ""', "a part of the line"),
        ('[[cause]]\nname = "port"\ncontains = 1', "a part of the line"),
        ('[[cause]]\nname = "port"\ncontains = " "', "a part of the line"),
        (f'[[cause]]\nname = "port"\ncontains = "{"x" * 501}"', "at most 500 characters"),
        ('[[cause]]\nname = "port"\ncontains = "a\\nb"', "a text of one line"),
        ('[[cause]]\nname = "port"\npattern = "x"', "contains = 'TEXT' is"),
        (
            '[[cause]]\nname = "mine"\ncontains = "x"\naction = "stop"\n'
            '[[cause]]\nname = "mine"\ncontains = "y"\naction = "free"',
            "cause 2: action 'free': expected stop; one cause has one action",
        ),
        ('[[cause]]\nname = "port"\naction = "stop"\n' * 33, "at most 32 rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(file: Path, text: str, problem: str) -> None:
    found = problems(file, text)
    assert len(found) == 1
    assert problem in found[0]
