"""Sizes, rates, durations and lists of names as findings show them."""

from __future__ import annotations

from collections.abc import Sequence

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


def rate(bytes_per_s: float) -> str:
    """
    >>> rate(1.25e9), rate(117.4e6), rate(900.0)
    ('1.2 GB/s', '117 MB/s', '900 B/s')
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            number = bytes_per_s / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def latency(seconds: float) -> str:
    """
    >>> latency(0.000045), latency(0.0021), latency(3600.0)
    ('45 us', '2.1 ms', '3600.0 s')
    """
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
