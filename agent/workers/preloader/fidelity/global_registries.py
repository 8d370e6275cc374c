"""Lists in Python's own modules where the modules that are loaded enter something, and from which others take it.

`weakref.finalize` keeps what is to be called at the end of the process, `logging` its loggers. A fresh process has
there only what its own modules have entered. So what a module has entered is taken out with it (`take_out`), and comes
back with it (`enter`): `logging.config` disables each logger that it finds, and a finalizer needs its module.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Entries = dict[str, dict[Any, Any]]
"""By the module that keeps the list."""


LISTS: Mapping[str, Callable[[Any], dict[Any, Any]]] = {
    "weakref": lambda weakref: weakref.finalize._registry,
    "logging": lambda logging: logging.Logger.manager.loggerDict,
}


class Growth:
    """Entries made since the last call. Those at the beginning are not new."""

    def __init__(self) -> None:
        self._known: dict[str, set[Any]] = {keeper: set() for keeper in LISTS}
        self._places: set[str] = set()
        """Names in logging's list that stand only for the loggers below them, until they are asked for by name."""
        self.new()

    def new(self) -> Entries:
        found: Entries = {}
        for keeper, entries_of in LISTS.items():
            module = sys.modules.get(keeper)
            if module is None or getattr(module.__spec__, "_initializing", False):
                continue
            entries, known = entries_of(module), self._known[keeper]
            new = {}
            for key, entry in reversed(list(entries.items())):  # what came last is at the end
                if key in known:
                    break
                new[key] = entry
            if keeper == "logging":
                taken = {name for name in self._places if isinstance(entries.get(name), module.Logger)}
                self._places.difference_update(taken)
                self._places.update(
                    name for name, entry in new.items() if not isinstance(entry, module.Logger)
                )
                new.update((name, entries[name]) for name in taken)
            known.update(new)
            if new:
                found[keeper] = dict(reversed(new.items()))
        return found


def take_out(modules: Mapping[str, Any], entered: Iterable[Entries]) -> None:
    """Of `entered`, what the lists of these modules no longer have is forgotten: a finalizer that has been called."""
    for entries in entered:
        for keeper, new in entries.items():
            listed = LISTS[keeper](modules[keeper]) if keeper in modules else {}
            for key in [key for key in new if listed.pop(key, None) is None]:
                del new[key]
    if "weakref" in modules:
        modules["weakref"].finalize._registered_with_atexit = False


def enter(new: Entries) -> None:
    if finalizers := new.get("weakref"):
        import weakref

        finalize: Any = weakref.finalize
        finalize._registry.update(finalizers)
        if not finalize._registered_with_atexit:
            finalize._registered_with_atexit = True
            atexit.register(finalize._exitfunc)
    for name, logger in new.get("logging", {}).items():
        _enter_logger(name, logger)


def _enter_logger(name: str, logger: Any) -> None:
    """As logging.getLogger does. A script that has asked for a logger of this name before has set up another one."""
    import logging

    if not isinstance(logger, logging.Logger):  # a place where one may come
        return
    manager: Any = logging.Logger.manager
    known = manager.loggerDict.get(name)
    logger._cache.clear()  # type: ignore[attr-defined]  # levels may have been set while it was not in the list
    if isinstance(known, logging.Logger):
        _merge(known, logger)
        return
    manager.loggerDict[name] = logger
    if known is not None:
        manager._fixupChildren(known, logger)
    manager._fixupParents(logger)


def _merge(known: Any, logger: Any) -> None:
    """From now on both are one: what was set by hand, and over it what the modules set when they are imported."""
    logger.setLevel(logger.level or known.level)
    logger.handlers[:0] = known.handlers
    logger.filters[:0] = known.filters
    logger.propagate = logger.propagate and known.propagate
    logger.disabled = known.disabled
    logger.parent = known.parent
    known.__dict__ = logger.__dict__
