"""The settings in force: every option's value with its origin, also written as a configuration file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar, cast

from ..options import OPTIONS
from ..rendezvous import ETCD_PASSWORD
from ..types.option import Option, Source
from ..types.values import Secret
from .sources import Setting

T = TypeVar("T")


class Settings:
    """The settings in force, by option; an option that is not set has its default."""

    def __init__(self, merged: Mapping[str, Setting[object]]) -> None:
        self._merged = dict(merged)

    def __getitem__(self, option: Option[T]) -> Setting[T]:
        default = Setting(option.default_value, "default", option.default or "")
        return cast("Setting[T]", self._merged.get(option.name, default))

    def __contains__(self, option: Option[object]) -> bool:
        return option.name in self._merged

    def put(self, option: Option[T], value: T, origin: str) -> None:
        self._merged[option.name] = Setting(value, origin, "" if value is None else str(value))

    def lines(self) -> list[str]:
        """Every setting as a TOML line with its origin; the lines are a file that means the same."""
        rows = []
        for option in OPTIONS:
            if option.shorthand or (Source.FILE not in option.sources and option is not ETCD_PASSWORD):
                continue
            setting = self[option]
            if setting.value is None:
                written = f"# {option.name}: not set"
            elif isinstance(setting.value, Secret):
                written = f"# {option.name}: {setting.value}"
            else:
                written = f"{option.name} = {_toml(setting.value)}"
            rows.append((written, setting.origin))
        width = max(len(written) for written, _ in rows if len(written) <= 40)
        return [f"{written:<{width}}  # {_quoted(origin)[1:-1]}" for written, origin in rows]


# --- Words ---


def _toml(value: object) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(str(word)) for word in value)}]"
    return _quoted(str(value))


def comment(text: str) -> str:
    """A TOML comment of ASCII characters, which stays one whatever the text is."""
    return f"# {_plain(text)}"


def _quoted(text: str) -> str:
    """A TOML string."""
    return '"' + _plain(text, escaped='"\\') + '"'


def _plain(text: str, escaped: str = "") -> str:
    """In ASCII characters, which every terminal can show; those in `escaped` are written by number, too."""
    return "".join(c if " " <= c <= "~" and c not in escaped else f"\\U{ord(c):08x}" for c in text)
