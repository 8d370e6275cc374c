"""Masks secrets in texts that are shown to others: values with a telling name or form, and known values.

A pure function of the text and the known values. It only finds what looks like a secret: users must look through an
archive before they send it to others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache

MASK = "***"

LEAST_CHARS = 6
"""Shorter known values are not masked: they would match everywhere."""

# All patterns begin at a word's start and are bounded: a worker may print long lines, made to take long to match.
_WORD = (
    r"secret|passw|passphrase|[_-]pwd|token(?!s|iz|_ids|_type)|api[_-]?key|access[_-]?key|account[_-]?key|[_-]key(?![a-z])"
    r"|credential|x-amz-signature|cookie"
)
_NAME = re.compile(rf"(?i)(?!.*[_-](file|path|dir)$).*({_WORD}|authorization)")
_ASSIGNED = re.compile(
    rf"""(?ix)
    (?<! [\w.-] ) (?P<name> [\w.-]{{0,64}}? (?:{_WORD}) [\w.-]{{0,64}} )
    (?P<between> ["']? \s* (?: [=:] | , \s* (?=["']) ) \s* | ["']? \s* \] \s* = \s* )
    (?P<open> [bru]{{0,2}} (?P<quote> ["'] ) )?
    (?P<value> (?(quote) (?: \\. | (?! (?P=quote) ) [^\\\n] )* | [^\s"']+? (?= [,;)\]}}]{{0,8}} (?: [\s"'] | \Z ) ) ) )
    """
)
_OPTION = re.compile(
    rf"(?i)(?<![\w-])(--?[\w-]{{0,64}}?(?:{_WORD})[\w-]{{0,64}}\s+)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"-][^\s'\"]*)"
)
_HEADER = re.compile(
    r"(?i)((?:authorization|cookie)['\"]?\s*[:=]\s*['\"]?)([^\n'\"]+)|(\b(?:bearer|basic)\s+)([\w.~+/=-]{8,})"
)
_URL = re.compile(r"(?i)((?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,32}://[^\s:/@]{0,128}:)([^\s'\"]{1,256})(@)")
_QUERY = re.compile(r"(?i)([?&](?:sig|signature|code|key|auth|jwt)=)[^&\s'\"]+")
_DSN = re.compile(r"(?i)(://)[0-9a-f]{16,64}(@)")
_FORMS = re.compile(
    r"(?<![\w-])(?:hf_|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|sk-|nvapi-|npm_|dckr_pat_|pypi-|glsa_|r8_)"
    r"[A-Za-z0-9_-]{8,}|(?<![\w-])(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?<![\w-])(?:dapi[0-9a-f]{32}|AIza[\w-]{35}|ya29\.[\w-]{8,}|SG\.[\w-]{8,64}\.[\w-]{8,})"
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
    written = {spelling for value in known if len(value) >= LEAST_CHARS for spelling in _spellings(value)}
    for spelling in sorted(written, key=len, reverse=True):
        text = text.replace(spelling, MASK)
    text = _FORMS.sub(MASK, text)
    text = _URL.sub(rf"\g<1>{MASK}\g<3>", text)
    text = _DSN.sub(rf"\g<1>{MASK}\g<2>", text)
    text = _QUERY.sub(rf"\g<1>{MASK}", text)
    text = _HEADER.sub(lambda found: f"{found[1] or found[3]}{MASK}", text)
    text = _ASSIGNED.sub(rf"\g<name>\g<between>\g<open>{MASK}", text)
    return _OPTION.sub(rf"\g<1>{MASK}", text)


@lru_cache(maxsize=4096)
def _spellings(value: str) -> frozenset[str]:
    """The value as it is, and as it stands in a text that `repr` or JSON has made of it or of what it is in."""
    in_json = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    with_both_quotes = {repr(f'"{value}')[2:-1], ascii(f'"{value}')[2:-1]}
    return frozenset({value, repr(value)[1:-1], ascii(value)[1:-1], *in_json, *with_both_quotes})
