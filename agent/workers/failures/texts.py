"""Texts that the user's program has written: cleaned, cut, and never refused."""

from __future__ import annotations

from ....rendezvous.text import clean as clean_line


def clean(text: str) -> str:
    """One line without control characters, which can be encoded."""
    return clean_line(text.encode("utf-8", "backslashreplace").decode()).rstrip()


def clean_lines(text: str) -> str:
    return "\n".join(map(clean, text.split("\n")))


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def cut(text: str, most: int, *, keep_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return "..." + text[len(text) - most + 3 :] if keep_end else text[: most - 3] + "..."
