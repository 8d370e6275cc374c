"""Finds secrets in a text without their values: a run's folder is read where its agent's environment is not known.

An agent writes `.digests-<node>.json` into the folder: of each line of a value its length, its number of words and two
bytes of a digest, one byte of what may be in a dictionary. These are enough to find it in the lines of a text, and too
few to find it out by trying: one part of a text in 65,536 of the same length, or in 256, is taken for it, too. There is
no salt: all nodes and runs with this secret show the same bytes. If each showed others, a few would give it away.

For the same reason there is one digest of a value, and none of its escaped spellings: the escapes of the text are
undone. Of a line with spaces only a long word has a digest of its own, too: digests of all words of a passphrase,
together with its own, would give it away.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

from ...codec import AtMost, Document, Text, Within
from .masking import LEAST_CHARS

SCHEMA = 1
MOST_DIGESTS = 256
MOST_CHARS = 8192
MOST_PHRASE_CHARS = 1024
FILE_NAME = re.compile(r"\.digests-.+\.json")
"""Of the files in the folder of a run."""

_DIGEST_BYTES = 2
_LONG = 12
"""Characters of a word that has a digest of so many bytes, also where it stands among others."""
_LONG_PHRASE = 20
"""Characters of several words, about three of a dictionary, that have a digest of so many bytes."""
_EDGE = re.compile(r"(?![^\W_])|(?<![^\W_])")
_WORD = re.compile(r"\S+")
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4}))|([\\'\"/nrtbf]))"
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


@dataclass(frozen=True, slots=True)
class SecretDigest:
    """Of a word, or of a phrase: several words of a line, with a space between each two."""

    chars: Annotated[int, Within(LEAST_CHARS, MOST_CHARS)]
    words: Annotated[int, Within(1, MOST_CHARS)]
    digest: Annotated[str, Text(2 * _DIGEST_BYTES)]


@dataclass(frozen=True, slots=True)
class SecretDigests:
    values: Annotated[tuple[SecretDigest, ...], AtMost(MOST_DIGESTS)]


SECRET_DIGESTS = Document(SecretDigests, SCHEMA, 64 * 1024, version_key="schema")


def file_name(node: str) -> str:
    return f".digests-{node}.json"


def digests_of(values: Collection[str]) -> SecretDigests:
    units = sorted({unit for value in values for line in value.splitlines() for unit in _units(line.split())})
    fit = [unit for unit in units if LEAST_CHARS <= len(unit) <= MOST_CHARS]
    return SecretDigests(
        tuple(SecretDigest(len(one), one.count(" ") + 1, _digest(one)) for one in fit[:MOST_DIGESTS])
    )


def _units(words: list[str]) -> Iterator[str]:
    """What has a digest: a word; of several the long ones, and all together if the others are as much as a secret."""
    if len(words) == 1:
        yield words[0]
        return
    long = [word for word in words if len(word) >= _LONG]
    yield from long
    phrase = " ".join(words)
    if sum(map(len, words)) - sum(map(len, long)) >= LEAST_CHARS and len(phrase) <= MOST_PHRASE_CHARS:
        yield phrase


def without(digests: SecretDigests, known: Collection[str]) -> SecretDigests:
    """Those of other values."""
    found = digests_of(known).values
    return SecretDigests(tuple(one for one in digests.values if one not in found))


def find_secrets(text: str, digests: SecretDigests) -> frozenset[str]:
    """The parts of the text's lines between signs and spaces that have one of these digests; of a part that is found
    where escapes are undone, what it stands for."""
    by_words = dict[int, dict[int, set[str]]]()
    for one in digests.values:
        by_words.setdefault(one.words, {}).setdefault(one.chars, set()).add(one.digest)
    phrases = [(words, by_length) for words, by_length in by_words.items() if words > 1]
    found = set[str]()
    for shown in (text, _without_escapes(text)):
        if single := by_words.get(1):
            least = min(single)
            # No list of the parts: a worker's line of megabytes without a space has as many, each of some thousand
            # characters.
            parts = (
                part for word in set(shown.split()) if len(word) >= least for part in _parts(word, single)
            )
            found |= {part for part in parts if _digest(part) in single[len(part)]}
        for line in set(shown.splitlines()) if phrases else ():
            for words, by_length in phrases:
                found |= {
                    part
                    for chars, part in _phrases(line, words, by_length)
                    if _digest(" ".join(part.split())) in by_length[chars]
                }
    return frozenset(found)


def _without_escapes(text: str) -> str:
    """The lines that have escapes of `repr` or JSON, and what these stand for in their place."""
    if "\\" not in text:
        return ""
    return _ESCAPE.sub(_stands_for, "\n".join({line for line in text.splitlines() if "\\" in line}))


def _stands_for(escape: re.Match[str]) -> str:
    high, low, *codes, sign = escape.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    return _ESCAPED.get(sign, sign) if sign else chr(int(next(filter(None, codes)), 16))


def _phrases(line: str, words: int, lengths: Collection[int]) -> Iterator[tuple[int, str]]:
    """The parts of so many words whose length, with one space between each two, is one of these, and this length.

    Only the first and the last word are cut: where the words between are known, few parts are left to look at.
    """
    window: deque[tuple[int, int, int]] = deque(maxlen=words)
    """Of each word where it begins and ends in the line, and where it begins with one space between each two."""
    at = 0
    for word in _WORD.finditer(line):
        begin, end = word.span()
        window.append((begin, end, at))
        at += end - begin + 1
        if len(window) == words:
            first, first_end, first_at = window[0]
            before_last, most = window[-1][2] - first_at, at - 1 - first_at
            for chars in lengths:
                if before_last - (first_end - first) + 1 < chars <= most:
                    yield from (
                        (chars, line[start : begin + over])
                        for start in _edges(line, first, first_end)
                        if 0 < (over := start - first + chars - before_last) <= end - begin
                        and _EDGE.match(line, begin + over)
                    )


def _edges(line: str, begin: int, end: int) -> Iterator[int]:
    """Where in this word of the line a part may begin."""
    return (place.start() for place in _EDGE.finditer(line, begin, end) if place.start() < end)


def _parts(word: str, lengths: Collection[int]) -> Iterator[str]:
    """Those of these lengths that begin and end where letters and digits do, or at a sign."""
    edges = [place.start() for place in _EDGE.finditer(word)]
    ends = frozenset(edges)
    for start in edges:
        for chars in lengths:
            if start + chars in ends:
                yield word[start : start + chars]


def _digest(value: str) -> str:
    long = _LONG_PHRASE if " " in value else _LONG
    size = _DIGEST_BYTES if len(value) >= long else 1
    return hashlib.blake2b(value.encode(errors="backslashreplace"), digest_size=size).hexdigest()
