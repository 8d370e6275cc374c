"""Arguments as JSON: numbers, texts, paths, and lists, tuples, sets and dicts of these. Pure functions.

What JSON has no form for is an object with one key that names the type: `{"tuple": [640, 480]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

MOST_DEEP = 50
MOST_BITS = 2048
"""Of an int: Python reads no longer one than a few thousand digits."""

_AS_THEY_ARE = (type(None), bool, float, str)


def plain_arguments(arguments: Mapping[str, Any], called: str) -> Any:
    """Arguments by name. Raises TypeError, which says where in `called` something else is."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError(f"{called} is no dict of arguments by their names: {arguments!r:.200}")
    return _plain(dict(arguments), called, MOST_DEEP)


def value_of(plain: Any) -> Any:
    if isinstance(plain, list):
        return [value_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "path":
        return Path(content)
    if kind == "dict":
        return {value_of(key): value_of(one) for key, one in content}
    collection: Callable[[Any], Any] = {"tuple": tuple, "set": set}[kind]
    return collection(map(value_of, content))


def merged(arguments: Mapping[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    """`more` is put into `arguments`, dict by dict."""
    together = dict(arguments)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(together.get(key), dict)
        together[key] = merged(together[key], value) if both else value
    return together


def _plain(value: Any, where: str, levels: int) -> Any:
    if levels == 0:
        raise TypeError(f"{where:.200} is more than {MOST_DEEP} levels deep, or is inside itself")
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is int:
        if value.bit_length() > MOST_BITS:
            raise TypeError(f"{where} is an int of more than {MOST_BITS} bits: give it as a text")
        return value
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, dict):
        return {
            "dict": [
                [_plain(key, f"a key of {where}", levels - 1), _plain(one, f"{where}[{key!r}]", levels - 1)]
                for key, one in value.items()
            ]
        }
    for kind in (list, tuple, set):
        if type(value) is kind:
            found = [_plain(one, f"{where}[{number}]", levels - 1) for number, one in enumerate(value)]
            return found if kind is list else {kind.__name__: found}
    raise TypeError(
        f"{where} is a {type(value).__name__}, and a start file holds numbers, texts, paths, lists, tuples, sets and "
        "dicts: name a file instead, or make the object in the trainer"
    )
