"""Who wins when several have something to say about one variable."""

from __future__ import annotations

import pytest

from elastic_agent.agent.common.variables import USER, Variable, compose, settle

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


RENAMED = Variable("NEW", "1", "the name since 2.8", aliases=("OLD",))


@pytest.mark.parametrize(
    ("inherited", "seen"),
    [
        ({}, {"NEW": "1"}),
        ({"OLD": "7"}, {"OLD": "7"}),  # both at once would contradict each other
        ({"NEW": "7"}, {"NEW": "7"}),
        ({"OLD": "7", "NEW": "8"}, {"OLD": "7", "NEW": "8"}),
    ],
)
def test_a_setting_of_two_names_yields_to_either(inherited: dict[str, str], seen: dict[str, str]) -> None:
    assert compose(inherited, [RENAMED]) == seen


def test_it_is_known_who_chose_each_and_what_the_user_has_overruled() -> None:
    settled = settle({"OLD": "7", "THREADS": "8", "HOME": "/root"}, [RENAMED, DEFAULT, DECREE])
    assert [(variable.name, variable.value, variable.by) for variable in settled] == [
        ("OLD", "7", USER),
        ("THREADS", "3", DECREE.by),
    ]
    assert settled[0].reason == "your own; ours would be NEW=1: the name since 2.8"
    [same] = settle({"OLD": "1"}, [RENAMED])
    assert same.reason == "your own", "there is no other value to tell of"
