"""How an option is shown in `--help`, of the agent and of its sub-commands."""

from __future__ import annotations

import textwrap

from .options import Option


def option_help(option: Option[object]) -> str:
    """The names of an option, with what it does and its default."""
    names = ", ".join(filter(None, [option.short, *(f"--{name}" for name in option.names)]))
    shown = "" if option.flag or not option.default else f" (default: {option.default})"
    body = textwrap.fill(
        option.help + shown, 100, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
    )
    return f"  {names} {option.metavar}".rstrip() + "\n" + body
