"""The rows `[[cause]]` of the configuration file: causes of failures of the user's own, and changes of built-in ones.

Each row has a `name`. A failure has this cause if a line of its exception, or one of its last lines, has the text
`contains` in it; such rows come before all built-in ones, in the order of the file. The row's `action` is the action
of the cause. A name that the agent does not know needs both.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....rendezvous.records import Action
from ....rendezvous.text import CAUSE
from ...workers.failures.causes import CAUSES
from ..config import Problem
from ..types.values import UserCause
from .settings import closest

KEY = "cause"
MOST_ROWS = 32
MOST_TEXT = 500

_NEEDED = {"contains": "a text that it contains", "action": "an action"}
_KEYS = ("name", "contains", "action")
_ACTIONS = {action.value: action for action in Action if action is not Action.EXCLUDE_NODE}
"""A script can print any text, so none of it excludes a node."""
_OF_METRICS = frozenset(("ok", "join", "leave", "lost"))
"""Other values of the metrics' label `reason`, which are no failures."""
_BUILT_IN = frozenset(cause.name for cause in CAUSES)


def read_causes(value: object, path: str) -> tuple[tuple[UserCause, ...], list[Problem]]:
    """The rows, and all problems in them. `value` is the file's value of `KEY`."""
    origin = f"{path}: {KEY}"
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        advice = "write each as [[cause]], with name, contains and action below it"
        return (), [Problem(origin, str(value), "tables", advice)]
    if len(value) > MOST_ROWS:
        return (), [
            Problem(
                origin,
                None,
                f"at most {MOST_ROWS} rows",
                "choose texts that several of these errors have in common",
            )
        ]
    problems: list[Problem] = []
    causes: dict[str, UserCause] = {}
    rows = []
    for number, row in enumerate(value, 1):
        found = list(_problems(row, f"{origin} {number}", causes))
        problems += found
        if not found:
            action = _ACTIONS[row["action"]] if "action" in row else None
            cause = UserCause(row["name"], row.get("contains", ""), action)
            causes.setdefault(cause.name, cause)
            rows.append(cause)
    return tuple(rows), problems


def _problems(row: dict[str, object], origin: str, before: dict[str, UserCause]) -> Iterator[Problem]:
    for key in row:
        if key == "pattern":
            advice = (
                "write contains = 'TEXT', with a part of the line as it is; for several texts one row each"
            )
            yield Problem(f"{origin}: pattern", _shown(row[key]), "no regular expression any more", advice)
        elif key not in _KEYS:
            guess = closest(key, _KEYS)
            advice = f"did you mean {guess}?" if guess else "leave it out"
            yield Problem(f"{origin}: {key}", None, "name, contains or action", advice)
    name = row.get("name")
    named = isinstance(name, str) and CAUSE.fullmatch(name) is not None and name not in _OF_METRICS
    if not named:
        expected = "a name of small letters, digits and _, which begins with a letter and has at most 40"
        yield Problem(
            f"{origin}: name",
            _shown(name),
            expected,
            "like flaky_storage; ok, join, leave and lost are taken",
        )
    text = row.get("contains", "x")
    if not isinstance(text, str) or not text.strip() or "\n" in text or len(text) > MOST_TEXT:
        expected = f"a text of one line, at most {MOST_TEXT} characters"
        yield Problem(
            f"{origin}: contains", _shown(text), expected, "write a part of the line that tells the cause"
        )
    action = row.get("action")
    if "action" in row and (not isinstance(action, str) or action not in _ACTIONS):
        guess = closest(str(action), _ACTIONS)
        advice = f"did you mean {guess}?" if guess else "docs/configuration.md says what each does"
        yield Problem(f"{origin}: action", _shown(action), f"one of {', '.join(_ACTIONS)}", advice)
    if not named or set(row) - set(_KEYS):
        return
    missing = [key for key in ("contains", "action") if key not in row]
    first = before.get(str(name))
    if name in _BUILT_IN or first is not None:
        if len(missing) == 2:
            yield Problem(
                origin,
                None,
                "a text that it contains, or an action",
                f"{name} is known already: say what is to change",
            )
    elif missing:
        advice = f"add it, or use the name of a built-in cause: {name} is none"
        yield Problem(origin, None, " and ".join(map(_NEEDED.__getitem__, missing)), advice)
    if (
        first is not None
        and "action" in row
        and first.action is not None
        and row["action"] != first.action.value
    ):
        advice = f"an earlier row of {name} has {first.action.value}: one cause has one action"
        yield Problem(f"{origin}: action", _shown(action), first.action.value, advice)


def _shown(value: object) -> str | None:
    return None if value is None else str(value)
