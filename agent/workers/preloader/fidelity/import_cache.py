"""The modules that the preloaded process has imported, kept for the scripts of the processes forked from it.

A fresh process knows only what Python needs to start, so a worker's `sys.modules` is emptied down to that (`hide`).
When the script imports something that lies in the cache, it gets the very module, and with it all that a fresh import
of it would have brought (`import_tracer`): nothing less, since modules rely on each other's imports, and no more, since
scripts ask `"torch" in sys.modules`. Only then does what else the import leaves behind come into effect: variables,
filters for warnings, loggers, functions for the end of the process; and what the modules read from the environment when
they were loaded is compared with what they would read now (`env_rules`).

A module is given only if the script's own import would have found the same file: a `numpy.py` beside the script is the
script's `numpy`. It is given once: who deletes it from `sys.modules` or reloads it gets it loaded again, as ever.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import env_rules, global_registries
from .import_tracer import PATCHED, Effects, ImportTracer, found_by_others

DEFAULT_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data.distributed",
    # What DistributedDataParallel(...), the first backward pass, and torch.save import when they are first called.
    "torch._dynamo",
    "torch._dynamo.polyfills.loader",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "torch.distributed.elastic.multiprocessing.errors",
    "elastic_agent.worker",
    "elastic_agent.worker.checkpointing.checkpointer",
)
"""What makes the construction of DDP, its first steps and checkpoints import nothing."""

NOT_IN_EVERY_TORCH = frozenset({"torch.profiler._cupti_monitor"})  # in 2.13, and gone in 2.14
"""Of the modules above: the absence of one is no news."""

NOT_DOUBLED = ("__main__", *PATCHED)


@dataclass(slots=True)
class ImportCache:
    """The imported modules and what is known of their imports. Made by `preload`."""

    fresh: frozenset[str]
    """The names in sys.modules of a process that has just started."""
    tracer: ImportTracer
    base: dict[str, str]
    """The environment that the modules have read."""
    asked: tuple[str, ...] = ()
    """The names that it was asked to import."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Names that could not be imported, and why."""
    path: tuple[str, ...] = ()
    """sys.path, while they were."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of change of each file of source, as they were loaded; not of Python's own."""
    reads: frozenset[str] = frozenset()
    """The variables of the environment that any module has read while it was loaded."""
    hidden: dict[str, ModuleType] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    """Those of the hidden modules that are attributes of their packages: not of all is this so."""
    _tops: frozenset[str] = frozenset()
    """The names of the hidden modules that are in no package."""
    _order: Mapping[str, int] = field(default_factory=dict)
    """The place of each hidden module in a fresh sys.modules."""
    _brought: dict[str, Sequence[str]] = field(default_factory=dict)
    """`_brought_by` of the modules that were asked for, computed once for all forks."""
    _doers: Mapping[str, Effects] = field(default_factory=dict)
    """Of the modules that have done more than import others."""
    report: Callable[[str], None] = lambda problem: None
    """Called with each difference to a fresh process that is found too late to be avoided."""

    # --- In the preloaded process

    def changed(self) -> tuple[str, ...]:
        """The files that are no longer what was loaded."""
        return tuple(path for path, known in self.files.items() if version(path) != known)

    def hide(self) -> None:
        """From now on sys.modules is that of a fresh process. Those who still need others must hold them already.

        Once, and not in each fork: whatever is touched there is copied there, and this touches every module.
        """
        for name in [name for name in sys.modules if name not in self.fresh]:
            del sys.modules[name]
        # Copies of the names, made one after the other, lie together: forks touch them all, but few pages.
        self.hidden = {f"{name} "[:-1]: module for name, module in self.tracer.modules.items()}
        for name, module in self.hidden.items():
            parent, _, child = name.rpartition(".")
            holder = self.hidden.get(parent) or sys.modules.get(parent)
            if holder is not None and holder.__dict__.get(child) is module:
                delattr(holder, child)
                self.bound.add(name)
        global_registries.take_out(
            {**sys.modules, **self.hidden}, (doer.entered for doer in self.tracer.effects.values())
        )
        self._order = {name: place for place, name in enumerate(self.hidden)}
        for name in self.hidden.keys() & self.asked:
            brought = frozenset(self._brought_by(name))
            self._brought[name] = [each for each in self.hidden if each in brought]
        self._doers = {
            name: doer
            for name, doer in self.tracer.effects.items()
            if doer.reads or doer.set or doer.endings or doer.entered or doer.filters
        }
        self._tops = frozenset(name for name in self.hidden if "." not in name)
        sys.meta_path.insert(0, _Giver(self))

    # --- In a forked one

    def shadowed(self, folders: Sequence[str]) -> tuple[str, ...]:
        """The cached modules in whose place something is imported, when these folders come first on sys.path."""
        lying_there = set()
        for folder in folders:
            try:
                lying_there |= {entry.partition(".")[0] for entry in os.listdir(folder or ".")}
            except OSError:
                continue
        found = []
        for name in self._tops & lying_there:
            spec = importlib.machinery.PathFinder.find_spec(name, list(folders))
            # A folder without __init__.py gives way to any module further down the path, and the built-in come first.
            if spec is None or spec.loader is None or name in sys.builtin_module_names:
                continue
            known = self.hidden[name].__spec__
            if known is None or spec.origin != known.origin:
                found.append(name)
        return tuple(sorted(found))

    def given_with(self, name: str) -> list[str]:
        """What is still hidden of all that a fresh import of `name` brings, in the order of a fresh sys.modules."""
        brought = self._brought.get(name)
        hidden = self.hidden
        return [each for each in (self._brought_by(name) if brought is None else brought) if each in hidden]

    def _brought_by(self, name: str) -> list[str]:
        effects, hidden = self.tracer.effects, self.hidden
        found, ahead = {name}, [name]
        while ahead:
            doer = effects.get(ahead.pop())
            for imported in doer.imports if doer is not None else ():
                while imported in hidden and imported not in found:
                    found.add(imported)
                    ahead.append(imported)
                    imported = imported.rpartition(".")[0]  # a package comes with each of its modules
        return sorted(found, key=self._order.__getitem__)

    def give(self, name: str) -> None:
        names = self.given_with(name)
        effects = [self._doers[each] for each in names if each in self._doers]
        given = {each: self.hidden.pop(each) for each in names}
        sys.modules.update({each: module for each, module in given.items() if each not in sys.modules})
        for each, module in given.items():
            parent, _, child = each.rpartition(".")
            if each in self.bound and sys.modules[each] is module:
                setattr(sys.modules[parent], child, module)
        for doer in effects:
            for variable, value in doer.set.items():
                if os.environ.get(variable) == self.base.get(variable):
                    os.environ[variable] = self.base[variable] = value
            warnings.filters[:0] = [entry for entry in doer.filters if entry not in warnings.filters]  # type: ignore[index]
            global_registries.enter(doer.entered)
            for function, args, kwargs in doer.endings:
                atexit.register(function, *args, **kwargs)
        for problem in env_rules.at_import(
            given, {n: None for doer in effects for n in doer.reads}, self.base
        ):
            self.report(problem)
            warnings.warn(f"elastic-agent: {problem}", RuntimeWarning, stacklevel=3)


class _Giver:
    """Finds what lies in the cache, when it is the file that all others find, too."""

    def __init__(self, cache: ImportCache) -> None:
        self._cache = cache

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        cache = self._cache
        module = cache.hidden.get(name)
        if module is None or target is not None:
            return None
        known = module.__spec__
        spec = found_by_others(self, name, path, target)
        if known is None:
            return spec
        if spec is None or spec.origin != known.origin:
            return spec
        loader: Any = spec.loader
        if isinstance(loader, type) or not hasattr(loader, "__dict__"):
            loader = _Loader()
            spec.loader = loader

        def create(spec: ModuleSpec) -> ModuleType:
            return module

        def execute(module: ModuleType) -> None:
            module.__spec__ = known  # the import system has put its own there
            cache.give(name)

        loader.create_module, loader.exec_module = create, execute
        return spec


class _Loader:
    """In place of one that is a class, and so can have no functions of its own: for modules built into Python."""


def preload(names: Sequence[str], fresh: Collection[str]) -> ImportCache:
    """Imports these modules. `fresh` are the names in sys.modules before this process had imported anything."""
    base = dict(os.environ)
    skipped = {}
    # Ours stay ours: what scripts are given was loaded for them, and the tracer saw all of it.
    ours = {
        name: module for name, module in sys.modules.items() if name not in fresh and name not in NOT_DOUBLED
    }
    for name in ours:
        del sys.modules[name]
    with ImportTracer() as tracer:
        for name in names:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                absent = isinstance(error, ModuleNotFoundError) and error.name == name
                if not absent or name not in NOT_IN_EVERY_TORCH:
                    skipped[name] = f"{type(error).__name__}: {error}"
        importlib.invalidate_caches()  # scripts find out themselves what lies where; Python 3.13 imports a lot for it
    for name, module in ours.items():
        sys.modules.setdefault(name, module)
    return ImportCache(
        frozenset(fresh),
        tracer,
        base,
        tuple(names),
        skipped,
        path=tuple(sys.path),
        files=_sources(tracer.modules.values()),
        reads=frozenset(name for effects in tracer.effects.values() for name in effects.reads),
    )


def _sources(modules: Iterable[ModuleType]) -> dict[str, tuple[int, int]]:
    python = os.path.dirname(os.__file__)
    found = {}
    for module in modules:
        path = getattr(module, "__file__", None)
        if not path or (path.startswith(python) and "-packages" not in path):
            continue
        if (loaded := version(path)) is not None:
            found[path] = loaded
    return found


def version(path: str) -> tuple[int, int] | None:
    """Of the file that lies there: it was changed if this has."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
