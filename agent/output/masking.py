"""Masks secrets in texts that are shown to others: values with a telling name or form, and known values.

A pure function of the text and the known values. It only finds what looks like a secret: users must look through an
archive before they send it to others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MASK = "***"

LEAST_CHARS = 6
"""Shorter known values are not masked: they would match everywhere."""

# All patterns begin at a word's start and are bounded: a worker may print long lines, made to take long to match.
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
    """The values of variables with the names of secrets."""
    return frozenset(value for name, value in environ.items() if _NAME.match(name))


def masked(text: str, known: Collection[str] = ()) -> str:
    """The text with secrets masked.

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
