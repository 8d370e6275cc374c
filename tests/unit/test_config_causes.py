"""The rows `[[cause]]` of the configuration file: read, printed, and refused with all that is wrong at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.configuration.config import Config, ConfigError, UserCause
from elastic_agent.agent.configuration.derive import Resolved, resolve
from elastic_agent.agent.configuration.load import read_argv
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
contains = "x"
[[cause]]
name = "mine"
contains = "("
action = "retry"
[[cause]]
contains = "x"
[[cause]]
name = "mine"
[[cause]]
name = "port"
"""
    found = problems(file, text)
    assert len(found) == 6
    for part in (
        "min-nodes '0'",
        "cause 1 \"{'name': 'Xid', 'contains': 'x'}\": expected a name of at most 40 small letters",
        "expected as action one of restart, stop, end, free",
        "cause 3 \"{'contains': 'x'}\": expected a name",
        "cause 4 \"{'name': 'mine'}\": expected contains and action, or one of them",
        "cause 5 \"{'name': 'port'}\": expected contains and action, or one of them",
    ):
        assert any(part in problem for problem in found), (part, found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cause = 1", "cause: expected tables"),
        ('cause = ["x"]', "expected a table"),
        ('[cause]\nname = "x"', "expected tables"),
        ('[[cause]]\nname = "ok"\naction = "stop"\ncontains = "x"', "none of join, leave, lost, ok"),
        ('[[cause]]\nname = "a b"\naction = "stop"\ncontains = "x"', "a name of at most 40"),
        ('[[cause]]\nname = 7\naction = "stop"\ncontains = "x"', "a name of at most 40"),
        ('[[cause]]\nname = "mine"\ncontains = "x"', "expected contains and action"),
        ('[[cause]]\nname = "mine"\naction = "stop"', "expected contains and action"),
        ('[[cause]]\nname = "port"\naction = []', "action one of restart"),
        ('[[cause]]\nname = "port"\naction = 1', "action one of restart"),
        ('[[cause]]\nname = "port"\naction = "exclude-node"', "action one of restart, stop, end, free"),
        ('[[cause]]\nname = "port"\ncontains = ""', "a part of a line"),
        ('[[cause]]\nname = "port"\ncontains = 1', "a part of a line"),
        ('[[cause]]\nname = "port"\ncontains = " "', "a part of a line"),
        (f'[[cause]]\nname = "port"\ncontains = "{"x" * 501}"', "at most 500 characters"),
        ('[[cause]]\nname = "port"\ncontains = "a\\nb"', "a part of a line"),
        ('[[cause]]\nname = "port"\npattern = "x"', "a table with name, contains and action"),
        (
            '[[cause]]\nname = "mine"\ncontains = "x"\naction = "stop"\n'
            '[[cause]]\nname = "mine"\ncontains = "y"\naction = "free"',
            "expected the action of the row before with this name, stop",
        ),
        ('[[cause]]\nname = "port"\naction = "stop"\n' * 33, "at most 32 rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(file: Path, text: str, problem: str) -> None:
    found = problems(file, text)
    assert len(found) == 1
    assert problem in found[0]
