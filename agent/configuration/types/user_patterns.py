"""The patterns of the user's rows, `[[cause]]` in the configuration file: compiled, and searched for within a bound.

A search of `re` holds Python's lock until it ends, and may take without end: no signal would be heard, and no lease
kept. The library `regex` ends a search after a given time, and lets other threads run meanwhile. It is imported only
where there are such patterns. A pattern must be one of `re`, and means what it means there: the extensions of `regex`
are escaped or switched off. The patterns of the built-in rows stay with `re`.
"""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

MOST_S = 0.5
"""Processor time for all patterns in all lines of one failure."""

MOST_PARTS = 10_000
"""A count, like {2}, makes so many copies of what it repeats, each of which takes 300 bytes."""

_TOKEN = re.compile(
    r"""(?xs:
        \(\?\#[^)]*\)                                         # a comment
        | \\N\{[^}]*\} | \\.
        | \[ \^? \]? (?: \\N\{[^}]*\} | \\. | [^\]\\] )* \]   # a set
        | \{ (?! \} ) (?P<least>[0-9]*) (?: ,[0-9]* )? \}     # a count
        | .
    )"""
)
_VERBOSE_TOKEN = re.compile(r"\#[^\n]*|" + _TOKEN.pattern)
"""With (?x) there are comments, too."""
_IN_SET = re.compile(r"(?s:\\.|\[)")


class PatternInvalid(ValueError):
    """The text says what is wrong with the pattern."""


@cache
def compile_pattern(pattern: str) -> Any:
    """The `regex.Pattern` that finds what `re` would. Raises PatternInvalid if one of the two does not take it."""
    import regex

    if not _is_small(_TOKEN.finditer(pattern)):
        raise PatternInvalid(f"its counts, like {{2}}, repeat more than {MOST_PARTS} parts")
    with warnings.catch_warnings():  # of sets in sets, which neither of the two knows
        warnings.simplefilter("ignore")
        try:
            tokens = _VERBOSE_TOKEN if re.compile(pattern).flags & re.VERBOSE else _TOKEN
            return regex.compile(_without_extensions(tokens.finditer(pattern)), regex.VERSION0)
        except RecursionError as error:
            raise PatternInvalid("it is nested too deeply") from error
        except (re.error, regex.error, OverflowError) as error:
            raise PatternInvalid(str(error)) from error


class PatternSearch:
    """The search in what one failed worker has said, with one bound for all patterns and lines. A pattern gets half of
    the time that is left: if one takes it all, the others are decided all the same."""

    def __init__(self, slow: set[str]) -> None:
        """`slow`: patterns that count as not found. One that has not ended in its time is added."""
        self._slow = slow
        self._left_s = MOST_S
        self._known: dict[tuple[str, str], bool] = {}

    def finds(self, pattern: str, lines: Sequence[str]) -> bool:
        compiled = compile_pattern(pattern)
        began = time.thread_time()
        most_s = self._left_s / 2
        try:
            return any(self._in_line(compiled, pattern, line, began + most_s) for line in lines)
        except TimeoutError:
            self._slow.add(pattern)
            log.warning(
                "the search for the pattern %r of a [[cause]] was given up after %.2g s: it counts as not found for"
                " the workers that fail in this generation; write it with fewer repeats, above all without one in"
                " another, as in (a+)+, and without several .* before a text that is mostly absent",
                pattern,
                most_s,
            )
            return False
        finally:
            self._left_s -= min(time.thread_time() - began, most_s)

    def _in_line(self, compiled: Any, pattern: str, line: str, until_s: float) -> bool:
        key = pattern, line
        if key not in self._known:
            if pattern in self._slow:
                return False
            left_s = until_s - time.thread_time()
            if left_s <= 0:
                raise TimeoutError
            self._known[key] = compiled.search(line, timeout=left_s) is not None
        return self._known[key]


def _without_extensions(tokens: Iterator[re.Match[str]]) -> str:
    """The pattern for `regex`. What `re` takes has two of its extensions, and no others: {e}, which allows errors, and
    [[:alpha:]], a class of POSIX."""
    return "".join(map(_escaped, tokens))


def _escaped(token: re.Match[str]) -> str:
    text = token[0]
    if text == "{":
        return r"\{"
    if len(text) > 1 and text[0] == "[":
        return "[" + _IN_SET.sub(lambda part: r"\[" if part[0] == "[" else part[0], text[1:])
    return text


def _is_small(tokens: Iterator[re.Match[str]]) -> bool:
    """It has at most MOST_PARTS once the least counts have been written out, as `regex` does while it compiles."""
    groups = [0]
    last = 0
    for token in tokens:
        if token[0] == "(":
            groups.append(0)
        elif token["least"] is not None:
            least = max(int(token["least"] or 0), 1)
            groups[-1] += last * (least - 1)
            last *= least
        elif token[0] == ")" and len(groups) > 1:
            last = 1 + groups.pop()
            groups[-1] += last
        elif token[0] not in ("*", "+", "?"):
            last = 1
            groups[-1] += 1
    return sum(groups) <= MOST_PARTS
