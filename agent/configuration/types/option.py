"""What an option is: one row of the table of settings.

An option `min-nodes` is written `--min-nodes` or `--min_nodes`, `ELASTIC_AGENT_MIN_NODES`, and `min-nodes = 1` or
`min_nodes = 1`. The command line, the environment, the TOML file, `--help`, `--check-config` and the table in
`docs/configuration.md` follow the rows. A new option is a row in `config`, `stopping`, `logs` or `rendezvous`, with
the field of `Config` beside it that has its value.

Words: a *parser* turns a text into a value (`parsers`). A *shorthand* has no setting of its own, it stands for others
(`--nnodes 1:4`). An option with a *torchrun* name is also read under that name, and from torchrun's own variable
(`PET_NNODES`).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from enum import Flag
from typing import Any, Generic, TypeVar, cast

from .parsers import YES_OR_NO, Parser

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Flag):
    """Where an option may be written."""

    CLI = 1
    ENV = 2
    FILE = 4
    ALL = 7


@dataclass(frozen=True, slots=True)
class Option(Generic[T_co]):
    """One row of the table. `default` is a text for `parser`; `help` explains None."""

    name: str
    parser: Parser[T_co]
    help: str
    metavar: str = ""  # else the parser's
    default: str | None = None
    short: str = ""  # "-m"
    torchrun: str = ""  # torchrun's name for the same thing
    flag: bool = False  # on the command line it stands alone and means true
    shorthand: bool = False
    conf: tuple[str, ...] = ()  # keys of torchrun's --rdzv-conf, the one to recommend first
    sources: Source = Source.ALL

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.torchrun in ("", self.name) else (self.name, self.torchrun)

    @property
    def default_value(self) -> T_co | None:
        return None if self.default is None else self.parser.parse(self.default)

    def field(self) -> T_co:
        """A field of `Config`, or of a part of it, that has the value of this option."""
        return cast(T_co, field(default=self.default_value, metadata={"option": self}))

    def help_text(self) -> str:
        """Its names, what it does and its default."""
        names = ", ".join(filter(None, [self.short, *(f"--{name}" for name in self.names)]))
        shown = "" if self.flag or not self.default else f" (default: {self.default})"
        body = textwrap.fill(
            self.help + shown, 100, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
        )
        metavar = "" if self.flag and not self.metavar else self.metavar or self.parser.metavar
        return f"  {names} {metavar}".rstrip() + "\n" + body


class Group(list[Option[object]]):
    """Options that stand together in `--help` and in the documentation."""

    def __init__(self, title: str) -> None:
        self.title = title

    def option(self, name: str, parser: Parser[T], help: str, **more: Any) -> Option[T]:
        """Declare one; `more` are the other fields of `Option`."""
        option = Option(name, parser, help, **more)
        self.append(option)
        return option

    def flag(self, name: str, help: str, **more: Any) -> Option[bool]:
        """Declare one that is off unless it is given, on the command line without a value."""
        return self.option(name, YES_OR_NO, help, default="false", flag=True, **more)
