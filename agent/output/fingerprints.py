"""Finds secrets in a text without their values: a run's folder is read where its agent's environment is not known.

An agent writes `.fingerprints-<node>.json` into the folder: of each word of a value its length and two bytes of a
salted digest. These are enough to find it among the words of a text, and too few to find it out by trying. One word in
65,536 of the same length is taken for it, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

from ...codec import AtMost, Document, Text, Within
from .masking import LEAST_CHARS

SCHEMA = 1
MOST_WORDS = 256
MOST_WORD_CHARS = 8192
NAME = re.compile(r"\.fingerprints-.+\.json")
"""Of the files in the folder of a run."""

_DIGEST_BYTES = 2
_EDGE = re.compile(r"(?![^\W_])|(?<![^\W_])")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    chars: Annotated[int, Within(LEAST_CHARS, MOST_WORD_CHARS)]
    digest: Annotated[str, Text(2 * _DIGEST_BYTES)]


@dataclass(frozen=True, slots=True)
class Fingerprints:
    salt: Annotated[str, Text(128)]
    values: Annotated[tuple[Fingerprint, ...], AtMost(MOST_WORDS)]


FINGERPRINTS = Document(Fingerprints, SCHEMA, 64 * 1024, version_key="schema")


def file_name(node: str) -> str:
    return f".fingerprints-{node}.json"


def fingerprints(values: Collection[str], salt: str) -> Fingerprints:
    """`salt`: another one for each run."""
    words = sorted({word for value in values for word in value.split()})
    fit = [word for word in words if LEAST_CHARS <= len(word) <= MOST_WORD_CHARS]
    return Fingerprints(salt, tuple(Fingerprint(len(one), _digest(one, salt)) for one in fit[:MOST_WORDS]))


def without(prints: Fingerprints, known: Collection[str]) -> Fingerprints:
    """Those of other values."""
    found = fingerprints(known, prints.salt).values
    return Fingerprints(prints.salt, tuple(one for one in prints.values if one not in found))


def find(text: str, prints: Fingerprints) -> frozenset[str]:
    """The words of the text, and parts between their signs, that have one of these fingerprints."""
    digests = dict[int, set[str]]()
    for one in prints.values:
        digests.setdefault(one.chars, set()).add(one.digest)
    least = min(digests, default=MOST_WORD_CHARS)
    parts = {part for word in set(text.split()) if len(word) >= least for part in _parts(word, digests)}
    return frozenset(part for part in parts if _digest(part, prints.salt) in digests[len(part)])


def _parts(word: str, lengths: Collection[int]) -> Iterator[str]:
    """Those of these lengths that begin and end where letters and digits do, or at a sign."""
    edges = [place.start() for place in _EDGE.finditer(word)]
    ends = frozenset(edges)
    for start in edges:
        for chars in lengths:
            if start + chars in ends:
                yield word[start : start + chars]


def _digest(value: str, salt: str) -> str:
    data = value.encode(errors="backslashreplace")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=salt.encode()[:64]).hexdigest()
