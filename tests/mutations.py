"""Takes out one mechanism after the other, and sees the tests of its promise turn red: `make mutate`.

    python -m tests.mutations [WORD...]     only the mechanisms with one of these words in their line: I5, lease

The table is `mutations.txt`: in one line the promise, the file of the product, and the files below tests/ of which one
must fail; then the text that the product's file has once, and what stands in its place. All is done in a copy of the
tree. First the tests must pass in it as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".txt")
WITHIN_S = 300.0
FAILED = 1
"""pytest's exit code: all could be collected, and some have failed."""


class Mutation(NamedTuple):
    promise: str
    file: str
    tests: tuple[str, ...]
    text: str
    instead: str

    def apply(self, source: str) -> str:
        if (count := source.count(self.text)) != 1:
            sys.exit(
                f"{self.promise}: {self.file} has {count} times:\n{self.text}\nMend this row of {TABLE.name}."
            )
        changed = source.replace(self.text, self.instead)
        compile(changed, self.file, "exec")
        return changed


def read_table(lines: Iterable[str]) -> Iterator[Mutation]:
    for row in re.findall(r"^([^-+].*)\n((?:-.*\n)+)((?:\+.*\n)+)", "".join(lines), re.MULTILINE):
        promise, file, tests = row[0].split(" | ")
        text, instead = ("\n".join(line[1:] for line in part.splitlines()) for part in row[1:])
        names = (re.sub(r"^[^:]+", r"tests/\g<0>.py", name) for name in tests.split())
        yield Mutation(promise, file, tuple(names), text, instead)


def copy_the_tree(to: Path) -> None:
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = os.fsdecode(subprocess.check_output(listing, cwd=ROOT)).split("\0")
    for name in names:
        if name and os.path.lexists(ROOT / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def run(tree: Path, tests: Iterable[str], *options: str) -> tuple[int, str]:
    """pytest's exit code, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {WITHIN_S:g} s"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", ended.stdout, re.MULTILINE)
    return ended.returncode, failed[1] if failed else (ended.stdout + ended.stderr)[-400:]


def main(words: set[str]) -> int:
    mutations = [
        one for one in read_table(TABLE.open()) if not words or words & {*re.findall(r"\w+", one.promise)}
    ]
    for one in mutations:
        one.apply((ROOT / one.file).read_text())
    alive = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder)
        copy_the_tree(tree)
        code, failed = run(tree, sorted({name for one in mutations for name in one.tests}))
        if code:
            print(f"not green before anything was changed: {failed}")
            return 1
        for one in mutations:
            file = tree / one.file
            source, begun = file.read_text(), time.monotonic()
            file.write_text(one.apply(source))
            code, failed = run(tree, one.tests, "-x", "--timeout=60")
            file.write_text(source)
            seen = (
                failed
                if code == FAILED
                else f"NO TEST FAILS ({' '.join(one.tests)}; pytest's exit code {code})"
            )
            alive += code != FAILED
            print(f"{one.promise:<60} {time.monotonic() - begun:4.0f} s  {seen}", flush=True)
    print(f"{len(mutations) - alive} of {len(mutations)} mechanisms: a test fails when they are taken out")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main({*sys.argv[1:]}))
