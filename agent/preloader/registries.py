"""Lists in Python's own modules in which the modules that are loaded enter something, and by which that is found again.

`weakref.finalize` keeps what is to be called at the end, `logging` its loggers. A fresh process has there what its own
modules have entered. So what a module has entered is taken out with it (`empty`), and comes back with it (`enter`).
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

Entries = Mapping[str, Mapping[Any, Any]]
"""By the module that keeps the list."""


def _finalizers(weakref: Any) -> dict[Any, Any]:
    registry: dict[Any, Any] = weakref.finalize._registry
    return registry


def _loggers(logging: Any) -> dict[Any, Any]:
    loggers: dict[Any, Any] = logging.Logger.manager.loggerDict
    return loggers


LISTS = {"weakref": _finalizers, "logging": _loggers}


class Growth:
    """Tells what has been entered since it was last asked. What was taken out is not told."""

    def __init__(self) -> None:
        self._known = dict.fromkeys(LISTS, 0)
        self._places: set[str] = set()
        """Names in logging's list that stand only for the loggers below them, until they are asked for by name."""

    def new(self) -> dict[str, dict[Any, Any]]:
        found = {}
        for keeper, entries_of in LISTS.items():
            module = sys.modules.get(keeper)
            if module is None or getattr(module.__spec__, "_initializing", False):
                continue
            entries = entries_of(module)
            if len(entries) > self._known[keeper]:
                found[keeper] = dict(islice(entries.items(), self._known[keeper], None))
            self._known[keeper] = len(entries)
            if keeper == "logging":
                taken = {name for name in self._places if isinstance(entries[name], module.Logger)}
                if taken:
                    found[keeper] = {**{name: entries[name] for name in taken}, **found.get(keeper, {})}
                new = found.get(keeper, {})
                self._places = (self._places - taken) | {
                    name for name, logger in new.items() if not isinstance(logger, module.Logger)
                }
        return found


def empty(modules: Mapping[str, Any]) -> None:
    for keeper, entries_of in LISTS.items():
        if keeper in modules:
            entries_of(modules[keeper]).clear()
    if "weakref" in modules:
        modules["weakref"].finalize._registered_with_atexit = False


def enter(new: Entries) -> None:
    """Whoever keeps the lists must have been imported."""
    if finalizers := new.get("weakref"):
        finalize: Any = sys.modules["weakref"].finalize
        finalize._registry.update(finalizers)
        if not finalize._registered_with_atexit:
            finalize._registered_with_atexit = True
            atexit.register(finalize._exitfunc)
    for name, logger in new.get("logging", {}).items():
        _enter_logger(name, logger)


def _enter_logger(name: str, logger: Any) -> None:
    """As logging.getLogger does. Who has asked for a logger of this name before has set it up, and got another."""
    import logging

    if not isinstance(logger, logging.Logger):  # a place where one may come
        return
    manager: Any = logging.Logger.manager
    known = manager.loggerDict.get(name)
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
