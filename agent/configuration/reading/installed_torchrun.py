"""The flags of the torchrun that is installed here, as its source has them: nothing of torch is imported or run.

One that `options` and `torchrun_spellings` do not have is of a torch that came later than this version of the agent. A
word that neither of us has is a mistake.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

_WITHOUT_VALUE = frozenset(
    {"check_env", "store_true", "store_false", "store_const", "append_const", "count", "help", "version"}
    | {"BooleanOptionalAction"}
)
_MAYBE_VALUE = ("?", "*")
"""`nargs` of a flag that may stand alone: a word behind it is taken for what to run, which can never be lost."""


def installed_flags() -> Mapping[str, bool]:
    """By their spelling with dashes, whether each has a value; empty where torch or its source is not found."""
    try:
        torch = importlib.util.find_spec("torch")
        folders = torch.submodule_search_locations if torch is not None else None
        source = Path(next(iter(folders or ())), "distributed", "run.py").read_text(encoding="utf-8")
        return dict(flags_in(source))
    except (ImportError, ValueError, OSError, SyntaxError, StopIteration):
        return {}


def flags_in(source: str) -> Iterator[tuple[str, bool]]:
    """Of each call of argparse's `add_argument`. Raises SyntaxError."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
            continue
        action = next((word.value for word in node.keywords if word.arg == "action"), None)
        kind = action.value if isinstance(action, ast.Constant) else _name(action)
        alone = any(
            word.arg == "nargs" and getattr(word.value, "value", "") in _MAYBE_VALUE for word in node.keywords
        )
        for name in node.args:
            if isinstance(name, ast.Constant) and str(name.value).startswith("-"):
                flag = str(name.value).replace("_", "-")
                yield flag, kind not in _WITHOUT_VALUE and not alone
                if kind == "BooleanOptionalAction" and flag.startswith("--"):
                    yield f"--no-{flag[2:]}", False


def _name(action: ast.expr | None) -> str:
    """Of a class, by itself or in its module."""
    return str(getattr(action, "id", getattr(action, "attr", "")))
