"""Finds secrets in a text without their values: a run's folder is read where its agent's environment is not known.

An agent writes `.digests-<node>.json` into the folder: of each word of a value its length and two bytes of a digest,
one byte of a word that may be in a dictionary. These are enough to find it among the words of a text, and too few to
find it out by trying: one word in 65,536 of the same length, or in 256, is taken for it, too. There is no salt: all
nodes and runs with this secret show the same bytes. If each showed others, a few would give it away.
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
FILE_NAME = re.compile(r"\.digests-.+\.json")
"""Of the files in the folder of a run."""

_DIGEST_BYTES = 2
_LONG = 12
"""Characters of a word that has a digest of so many bytes."""
_EDGE = re.compile(r"(?![^\W_])|(?<![^\W_])")


@dataclass(frozen=True, slots=True)
class SecretDigest:
    chars: Annotated[int, Within(LEAST_CHARS, MOST_WORD_CHARS)]
    digest: Annotated[str, Text(2 * _DIGEST_BYTES)]


@dataclass(frozen=True, slots=True)
class SecretDigests:
    values: Annotated[tuple[SecretDigest, ...], AtMost(MOST_WORDS)]


SECRET_DIGESTS = Document(SecretDigests, SCHEMA, 64 * 1024, version_key="schema")


def file_name(node: str) -> str:
    return f".digests-{node}.json"


def digests_of(values: Collection[str]) -> SecretDigests:
    words = sorted({word for value in values for word in value.split()})
    fit = [word for word in words if LEAST_CHARS <= len(word) <= MOST_WORD_CHARS]
    return SecretDigests(tuple(SecretDigest(len(one), _digest(one)) for one in fit[:MOST_WORDS]))


def without(digests: SecretDigests, known: Collection[str]) -> SecretDigests:
    """Those of other values."""
    found = digests_of(known).values
    return SecretDigests(tuple(one for one in digests.values if one not in found))


def find_secrets(text: str, digests: SecretDigests) -> frozenset[str]:
    """The words of the text, and parts between their signs, that have one of these digests."""
    by_length = dict[int, set[str]]()
    for one in digests.values:
        by_length.setdefault(one.chars, set()).add(one.digest)
    least = min(by_length, default=MOST_WORD_CHARS)
    # No list of the parts: a worker's line of megabytes without a space has as many, each of some thousand characters.
    parts = (part for word in set(text.split()) if len(word) >= least for part in _parts(word, by_length))
    return frozenset(part for part in parts if _digest(part) in by_length[len(part)])


def _parts(word: str, lengths: Collection[int]) -> Iterator[str]:
    """Those of these lengths that begin and end where letters and digits do, or at a sign."""
    edges = [place.start() for place in _EDGE.finditer(word)]
    ends = frozenset(edges)
    for start in edges:
        for chars in lengths:
            if start + chars in ends:
                yield word[start : start + chars]


def _digest(value: str) -> str:
    size = _DIGEST_BYTES if len(value) >= _LONG else 1
    return hashlib.blake2b(value.encode(errors="backslashreplace"), digest_size=size).hexdigest()
