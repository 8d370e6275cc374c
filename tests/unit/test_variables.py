"""Who wins when several have something to say about one variable."""

from __future__ import annotations

import pytest

from elastic_agent.agent.variables import Variable, compose

DEFAULT = Variable("THREADS", "1", "one is enough")
OTHER_DEFAULT = Variable("THREADS", "2", "two are better")
DECREE = Variable("THREADS", "3", "only we know", yielding=False)


@pytest.mark.parametrize(
    ("inherited", "chosen", "value"),
    [
        ({}, [], None),
        ({}, [DEFAULT], "1"),
        ({"THREADS": "8"}, [DEFAULT], "8"),
        ({"THREADS": ""}, [DEFAULT], ""),  # set to nothing is set
        ({"THREADS": "8"}, [DECREE], "3"),
        ({}, [DEFAULT, OTHER_DEFAULT], "2"),
        ({}, [DEFAULT, DECREE], "3"),
        ({"THREADS": "8"}, [DECREE, DEFAULT], "3"),
    ],
)
def test_who_wins(inherited: dict[str, str], chosen: list[Variable], value: str | None) -> None:
    assert compose(inherited, chosen).get("THREADS") == value


def test_what_nobody_chose_is_inherited() -> None:
    assert compose({"HOME": "/root"}, [DECREE]) == {"HOME": "/root", "THREADS": "3"}
