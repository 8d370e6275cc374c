"""What texts and names of other nodes may be, and how many of them a sentence shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from ..codec import Text, Within

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Of a node, a job or an incarnation."""
Name = Annotated[str, Text(128, NAME)]
NameOrNone = Annotated[str, Text(128, re.compile(f"({NAME.pattern})?"))]
"""Empty: none."""
ROLE = re.compile(r"[ !#-\[\]-~]{1,128}")
"""Printable ASCII that takes as many bytes in JSON."""
Role = Annotated[str, Text(128, ROLE)]
CAUSE = re.compile(r"[a-z][a-z0-9_]{0,39}")
CauseName = Annotated[str, Text(40, CAUSE)]
"""The name of a cause of failures; it is a label of the metrics that count failures."""
Age = Annotated[float, Within(0, 2**63 - 1)]
"""Seconds."""

SHOWN = 8
"""Names in a sentence."""

_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, and movements of the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links, the clipboard
    r"|\x1b[ -/]*[0-~]",
    re.DOTALL,
)
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def clean(text: str) -> str:
    """One line without what a terminal obeys, fit for the logs of all nodes.

    >>> clean("killed\\n12:00:00 [a] all is well\\x1b]0;title\\x07 \\x1b[31mred")
    'killed 12:00:00 [a] all is well red'
    """
    if text.isprintable():
        return text
    return _HIDDEN.sub(" ", _TERMINAL.sub("", text))


def line(most_chars: int) -> Text:
    """The form of a peer's text: at most so long, and read as `clean` makes it."""
    return Text(most_chars, clean=clean)


def lines(most_chars: int) -> Text:
    """The form of a peer's text of several lines."""
    return Text(most_chars, clean=clean_lines)


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "node"), counted(2, "node"), counted(2, "process")
    ('1 node', '2 nodes', '2 processes')
    """
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def shortened(names: Iterable[str], separator: str = ", ") -> str:
    """The first few, and how many more there are.

    >>> shortened(map(str, range(10)))
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    known = list(names)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return separator.join(known[:SHOWN]) + more
