"""What importing does to a process, written down while it happens, so that it can be undone and done again elsewhere.

An `ImportTracer` is made round the imports of the preloaded process. For each module that is loaded it knows, in order:

- which modules its body imports, those too that were there already: what a fresh process has in `sys.modules`
  after importing it is what can be reached from it;
- which variables of the environment it reads, and which it sets: those are not set when the tracing ends;
- which functions it registers for the end of the process: a fork of this process has to undo that
  (atexit._clear);
- what it enters in lists of Python's own modules (`global_registries`), and which filters for warnings it sets: those
  are not set when the tracing ends.

A module's doing is all that happens while its body runs, also in functions of others that it calls. C code that reads
the environment is not seen: `env_rules` knows those variables by name. What a module prints, logs or warns of is not
kept.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .global_registries import Entries, Growth

OTHERS = ""
"""The doer where no module is being loaded."""

PATCHED = ("atexit", "warnings")
"""Modules that a tracer changes: they are there from its begin, and imported when a module imports them."""


@dataclass(slots=True)
class Effects:
    """Of one module; see above."""

    imports: dict[str, None] = field(default_factory=dict)
    reads: dict[str, None] = field(default_factory=dict)
    set: dict[str, str] = field(default_factory=dict)
    endings: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    entered: Entries = field(default_factory=dict)
    filters: list[Any] = field(default_factory=list)
    """As they stand in warnings.filters: the first of them came last."""


class ImportTracer:
    """Everything that was imported `with` it."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        """All that came into sys.modules, in its order."""
        self.effects: dict[str, Effects] = {}
        self._loading: list[str] = []
        self._undo = contextlib.ExitStack()

    def of(self, name: str) -> Effects:
        return self.effects.setdefault(name, Effects())

    @property
    def current(self) -> Effects:
        return self.of(self._loading[-1] if self._loading else OTHERS)

    def __enter__(self) -> ImportTracer:
        self._undo.callback(self._take_modules, frozenset(sys.modules).difference(PATCHED))
        self._undo.enter_context(self._watching_imports())
        self._undo.enter_context(self._watching_environment())
        self._undo.enter_context(self._watching_endings())
        self._undo.callback(_remember_filters)
        self._undo.enter_context(warnings.catch_warnings())
        self._filters: list[Any] = list(warnings.filters)
        self._growth = Growth()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self._undo.close()

    def _take_modules(self, before: frozenset[str]) -> None:
        main = sys.modules["__main__"]  # multiprocessing gives it another name
        self.modules = {
            n: module for n, module in sys.modules.items() if n not in before and module is not main
        }
        # Some come without being loaded: made by their parent, or by another, which is put behind them once loaded.
        # Those built into Python are not seen being loaded, but their importers are known.
        loaded, behind = frozenset(self.effects), OTHERS
        imported = {name for doer in self.effects.values() for name in doer.imports}
        for name in reversed(self.modules):
            parent = name.rpartition(".")[0]
            if name in loaded:
                behind = name
            elif name not in PATCHED and not (name in sys.builtin_module_names and name in imported):
                self.of(parent if parent in self.modules else behind).imports[name] = None

    # --- Who does something

    @contextlib.contextmanager
    def loading(self, name: str) -> Iterator[None]:
        self._settle()
        self.current.imports[name] = None
        self.of(name)
        self._loading.append(name)
        try:
            yield
        finally:
            self._settle()
            self._loading.pop()

    def _settle(self) -> None:
        """What has come into the global lists since the last call is the doing of the module that is being loaded."""
        doer = self.current
        if warnings.filters != self._filters:
            known = {id(entry) for entry in self._filters}
            doer.filters[:0] = [entry for entry in warnings.filters if id(entry) not in known]
            self._filters = list(warnings.filters)
        for keeper, entries in self._growth.new().items():
            doer.entered.setdefault(keeper, {}).update(entries)

    # --- What is watched

    @contextlib.contextmanager
    def _watching_imports(self) -> Iterator[None]:
        true_import, true_gcd_import = builtins.__import__, importlib._bootstrap._gcd_import  # type: ignore[attr-defined]

        def note(name: str) -> None:
            if self._loading:
                imports = self.current.imports
                imports[name] = None

        def traced_import(
            name: str,
            globals: Any = None,
            locals: Any = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            module = true_import(name, globals, locals, fromlist or (), level)
            base = getattr(module, "__name__", name) if level else name
            note(base)
            for item in fromlist or ():
                if f"{base}.{item}" in sys.modules:
                    note(f"{base}.{item}")
            return module

        def traced_gcd_import(name: str, package: str | None = None, level: int = 0) -> ModuleType:
            module: ModuleType = true_gcd_import(name, package, level)
            note(getattr(module, "__name__", name))
            return module

        # The import system's own frames do not count as the cause of a warning: neither shall this one.
        for function in (traced_import, traced_gcd_import):
            function.__code__ = function.__code__.replace(co_filename="<tracing importlib._bootstrap>")
        frozen = (
            importlib.machinery.FrozenImporter
        )  # of `runpy` and others; a class, which `_Finder` leaves alone
        true_execute = frozen.exec_module

        def traced_execute(module: ModuleType) -> None:
            with self.loading(module.__name__):
                true_execute(module)

        finder = _Finder(self)
        sys.meta_path.insert(0, finder)
        frozen.exec_module = staticmethod(traced_execute)  # type: ignore[method-assign]
        builtins.__import__ = traced_import
        importlib._bootstrap._gcd_import = traced_gcd_import  # type: ignore[attr-defined]
        try:
            yield
        finally:
            builtins.__import__ = true_import
            importlib._bootstrap._gcd_import = true_gcd_import  # type: ignore[attr-defined]
            sys.meta_path.remove(finder)
            frozen.exec_module = staticmethod(true_execute)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _watching_environment(self) -> Iterator[None]:
        kind = type(os.environ)
        get, put, remove = kind.__getitem__, kind.__setitem__, kind.__delitem__
        before = dict(os.environ)

        def traced_get(environ: Any, key: Any) -> Any:
            self.current.reads[os.fsdecode(key)] = None
            return get(environ, key)

        def traced_put(environ: Any, key: Any, value: Any) -> None:
            put(environ, key, value)
            self.current.set[os.fsdecode(key)] = os.fsdecode(value)

        kind.__getitem__, kind.__setitem__ = traced_get, traced_put  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.__getitem__, kind.__setitem__ = get, put  # type: ignore[method-assign]
            for name in set(os.environ) - set(before):
                remove(os.environ, name)
            os.environ.update(before)

    @contextlib.contextmanager
    def _watching_endings(self) -> Iterator[None]:
        register = atexit.register

        def traced_register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
            if not tracing:  # a module may have kept us by name
                return register(function, *args, **kwargs)
            if getattr(function, "__qualname__", "") != "finalize._exitfunc":  # `global_registries` does that
                self.current.endings.append((function, args, kwargs))
            return function

        tracing = True
        atexit.register = traced_register  # type: ignore[assignment]
        try:
            yield
        finally:
            tracing = False
            atexit.register = register
            for doer in self.effects.values():
                for function, args, kwargs in doer.endings:
                    register(function, *args, **kwargs)


class _Finder:
    """Lets the others find, and has the tracer follow the loading of what they have found."""

    def __init__(self, tracer: ImportTracer) -> None:
        self._tracer = tracer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = found_by_others(self, name, path, target)
        if spec is not None and hasattr(spec.loader, "__dict__") and not isinstance(spec.loader, type):
            self._watch(name, spec.loader)
        return spec

    def _watch(self, name: str, loader: Any) -> None:
        create, execute = getattr(loader, "create_module", None), getattr(loader, "exec_module", None)
        if create is None or execute is None:
            return

        def traced_create(spec: ModuleSpec) -> Any:
            with self._tracer.loading(name):
                return create(spec)

        def traced_execute(module: ModuleType) -> Any:
            # The loader is the module's from now on, and no trace of us may stay.
            del loader.create_module, loader.exec_module
            with self._tracer.loading(name):
                return execute(module)

        loader.create_module, loader.exec_module = traced_create, traced_execute


def found_by_others(finder: object, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """What the import system would find without this finder."""
    for other in list(sys.meta_path):
        if other is not finder and hasattr(other, "find_spec"):
            spec: ModuleSpec | None = other.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


class _NotShown(Warning):
    """Passes the filters, and is not shown."""


def _remember_filters() -> None:
    """When `warnings` is gone, at the end of the process, C code goes by the filters that it used last: without this,
    those of the tracing."""
    warnings.simplefilter("ignore", _NotShown)
    warnings.warn_explicit("", _NotShown, "", 0)
    del warnings.filters[0]  # type: ignore[attr-defined]
