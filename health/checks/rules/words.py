"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
MIB = 1 << 20
GIB = 1 << 30


def size(number: float) -> str:
    """64 MiB, 1.5 GiB."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.1f}".removesuffix(".0") + f" {_UNITS[power]}"


def span(seconds: float) -> str:
    """In seconds or milliseconds."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def listed(names: list[str], most: int = 4) -> str:
    """The first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
