"""Secrets out of texts that are shown to others: what a name, a form or this process' environment tells of.

A pure function of the text and the known values. It finds what looks like a secret, which is not all that is one: who
sends a bundle to a stranger looks through it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MASK = "***"

LEAST_CHARS = 6
"""Of a known value: shorter ones are found everywhere."""

# All begin where a word does, and have bounds: lines of workers may be long, and have been made to be slow to look at.
_WORD = r"secret|passw|token(?!s|iz|_ids|_type)|api[_-]?key|access[_-]?key|credential|private[_-]?key"
_NAME = re.compile(rf"(?i)(?!.*[_-](file|path|dir)$).*({_WORD}|authorization)")
_ASSIGNED = re.compile(
    rf"""(?ix)
    (?<! [\w.-] ) (?P<name> [\w.-]{{0,64}}? (?:{_WORD}) [\w.-]{{0,64}} )
    (?P<between> ["']? \s* (?: [=:] | , \s* (?=["']) ) \s* | ["']? \s* \] \s* = \s* )
    (?P<quote> ["']? )
    (?P<value> (?: (?<=["']) [^"'\n]* | [^\s"',;)\]}}]+ ) )
    """
)
_OPTION = re.compile(rf"(?i)(?<![\w-])(--?[\w-]{{0,64}}?(?:{_WORD})[\w-]{{0,64}}\s+)([^\s'\"-][^\s'\"]*)")
_HEADER = re.compile(
    r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?)([^\n'\"]+)|(\b(?:bearer|basic)\s+)([\w.~+/=-]{8,})"
)
_URL = re.compile(r"(?i)((?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,32}://[^\s:/@]{0,128}:)([^\s/@]+)(@)")
_FORMS = re.compile(
    r"(?<![\w-])(?:hf_|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|sk-|nvapi-)[A-Za-z0-9_-]{8,}|(?<![\w-])(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)


def secrets_in(environ: Mapping[str, str]) -> frozenset[str]:
    """The values of variables whose names say that they are secret."""
    return frozenset(value for name, value in environ.items() if _NAME.match(name))


def masked(text: str, known: Collection[str] = ()) -> str:
    """The same text without them.

    >>> masked("--api-key abc123 lr=0.1 PASSWORD=hunter2 https://me:word@host/x")
    '--api-key *** lr=0.1 PASSWORD=*** https://me:***@host/x'
    """
    for value in sorted(known, key=len, reverse=True):
        if len(value) >= LEAST_CHARS:
            text = text.replace(value, MASK)
    text = _FORMS.sub(MASK, text)
    text = _URL.sub(rf"\g<1>{MASK}\g<3>", text)
    text = _HEADER.sub(lambda found: f"{found[1] or found[3]}{MASK}", text)
    text = _ASSIGNED.sub(rf"\g<name>\g<between>\g<quote>{MASK}", text)
    return _OPTION.sub(rf"\g<1>{MASK}", text)
