"""What this node would run, in a form that other nodes can compare with theirs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence

from ...rendezvous.statements.terms import MOST_WORDS, Program
from ..configuration.config import Config
from ..configuration.values import Command

SHOWN_CHARACTERS = 512
"""Of all arguments together: thousands of nodes each have them in their records."""

_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9_-]{0,39}|-[A-Za-z][A-Za-z0-9_-]?")
_NUMBER = re.compile(r"(?=.{1,12}$)[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off"})


def program_of(config: Config, outage_grace_s: float) -> Program:
    """A script is known by its content: paths may differ from node to node. What is no script is known by its name.

    `outage_grace_s`: how long this node goes on without the store.
    """
    command, job_id = config.command, config.rendezvous.job_id
    return Program(
        name=_name(command)[:256],
        digest=_digest(command),
        arguments=_salted(command.args, job_id)[:16],
        words=tuple(_first_few(_shown(command.args, job_id))),
        lease_ttl_s=config.rendezvous.lease_ttl_s,
        outage_grace_s=outage_grace_s,
    )


def _shown(words: Sequence[str], job_id: str) -> Iterator[str]:
    """For other nodes and all who read the job's page: options by name, and values that are numbers or booleans.

    A digest stands for any other value, as it may be a secret.

    >>> list(_shown(["--lr", "0.1", "--amp=on", "--api-key", "abc", "--data=s3://me:abc@host/x"], "job"))
    ['--lr', '0.1', '--amp=on', '--api-key', '~06491d', '--data=~df0d5c']
    """
    for word in words:
        option, equals, value = word.partition("=")
        if not _OPTION.fullmatch(option):
            yield _shown_value(word, job_id)
        elif equals and value:
            yield option + equals + _shown_value(value, job_id)
        else:
            yield word


def _shown_value(value: str, job_id: str) -> str:
    if _NUMBER.fullmatch(value) or value.lower() in _BOOLEANS:
        return value
    return "~" + _salted([value], job_id)[:6]


def _salted(words: Sequence[str], job_id: str) -> str:
    """A digest that no table of digests holds: every job has another one of the same words."""
    return hashlib.sha256("\0".join((job_id, *words)).encode(errors="surrogateescape")).hexdigest()


def _first_few(words: Iterator[str]) -> Iterator[str]:
    """Three dots stand for the others, so that a word which is not shown is not taken for one that is not there."""
    room = SHOWN_CHARACTERS
    for place, word in enumerate(words, 1):
        room -= len(word)
        if room < 0 or place == MOST_WORDS:
            yield "..."
            return
        yield word


def _name(command: Command) -> str:
    if command.kind == "module":
        return f"-m {command.target}"
    return os.path.basename(command.target)


def _digest(command: Command) -> str:
    """Empty for a script that cannot be read: workers will say so."""
    if command.kind in ("module", "binary"):
        return hashlib.sha256(f"{command.kind} {_name(command)}".encode(errors="surrogateescape")).hexdigest()
    try:
        with open(command.target, "rb") as script:
            return hashlib.sha256(script.read()).hexdigest()
    except OSError:
        return ""
