"""What a worker is to run: the message that makes a spare one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCRIPT = "script"
MODULE = "module"


class BadStart(ValueError):
    """The message says nothing that can be started: its sender and this file are not of one version."""


@dataclass(frozen=True, slots=True)
class Start:
    """`python -u TARGET ARGS...` or `python -u -m TARGET ARGS...`, with this environment and no other."""

    kind: str
    target: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str

    @property
    def command(self) -> tuple[str, ...]:
        """As it stands on the command line, after the interpreter."""
        module = ("-m",) if self.kind == MODULE else ()
        return ("-u", *module, self.target, *self.args)

    @staticmethod
    def of(found: Any) -> Start:
        """From what JSON has given. Raises BadStart."""
        if not isinstance(found, dict) or set(found) != {"kind", "target", "args", "environment", "cwd"}:
            raise BadStart(f"not the fields of a start: {repr(found)[:200]}")
        kind, target, args, environment, cwd = (
            found[name] for name in ("kind", "target", "args", "environment", "cwd")
        )
        if kind not in (SCRIPT, MODULE):
            raise BadStart(f"kind is {kind!r}, not {SCRIPT!r} or {MODULE!r}")
        if not isinstance(args, list) or not isinstance(environment, dict):
            raise BadStart("args is no list, or environment no object")
        words = [target, cwd, *args, *environment, *environment.values()]
        if not all(isinstance(word, str) and "\0" not in word for word in words):
            raise BadStart("a word is no text, or has a NUL in it")
        if not target or any(not name or "=" in name for name in environment):
            raise BadStart("the target or a variable has no name that a process can be given")
        return Start(kind, target, tuple(args), environment, cwd)
