"""Takes the picture `docs/page.png` of the agent's page: `make page-picture`, in four minutes, with Chromium.

Three agents on this machine train `examples/digits.py`. One node leaves by plan and comes back, then a rank fails, and
a headless browser opens the page of the node that has seen all of it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.browser import LACKING, browsing, find_chromium

WIDTH, HEIGHT = 1180, 690
BETWEEN_S = 30.0
"""From one event to the next."""
AFTER_S = 100.0
"""From the last event to the picture."""
PATIENCE_S = 120.0

SCRIPT = Path(__file__).parents[1] / "examples" / "digits.py"
STEPPED = "        step(done)\n"
FAILS = """        if rank == 3 and os.path.exists({marker!r}):
            os.unlink({marker!r})
            raise FloatingPointError(f"the loss of step {{done}} is not a number")
"""
ENDPOINT = re.compile(r"--rdzv-endpoint=(\S+)")
PAGE = re.compile(r"/node at (http://\S+)")
FIRST_STEP = "first step is"


class Node:
    """One agent and its log."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self._log = folder / f"{name}.log"
        script = (str(folder / "train.py"), "--steps=1000000", "--step-seconds=0.08", "--save-every=20")
        common = (
            "--nproc-per-node=2",
            "--min-nodes=2",
            "--max-nodes=3",
            "--rdzv-id=digits",
            f"--log-dir={folder}/logs",
        )
        command = (sys.executable, "-m", "elastic_agent", f"--node-id={name}", *common, *options, *script)
        with self._log.open("ab") as log:
            self._said_before = log.tell()
            self.process = subprocess.Popen(
                (*command, f"--checkpoints={folder}/checkpoints"),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def says(self) -> str:
        return self._log.read_bytes()[self._said_before :].decode(errors="replace")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE_S:g} s for this: {what}")
        time.sleep(0.1)


def take(target: Path, program: str, folder: Path, nodes: list[Node]) -> None:
    marker = folder / "fail"
    text = SCRIPT.read_text()
    assert text.count(STEPPED) == 1, f"{SCRIPT} has changed"
    (folder / "train.py").write_text(text.replace(STEPPED, STEPPED + FAILS.format(marker=str(marker))))

    host = Node("node-b", folder, "--rdzv-backend=c10d")
    nodes.append(host)
    wait_for(lambda: ENDPOINT.search(host.says), "the first agent serves the store")
    found = ENDPOINT.search(host.says)
    assert found is not None
    joins = f"--rdzv-endpoint={found[1]}"
    nodes += [Node("node-a", folder, joins), Node("node-c", folder, joins)]
    wait_for(lambda: "3 nodes" in host.says and FIRST_STEP in host.says, "three nodes train")
    time.sleep(BETWEEN_S)
    nodes.pop().end()
    time.sleep(BETWEEN_S)
    nodes.append(Node("node-c", folder, joins))
    wait_for(lambda: FIRST_STEP in nodes[-1].says, "the node has come back")
    time.sleep(BETWEEN_S)
    marker.touch()
    wait_for(lambda: not marker.exists(), "a rank fails")
    time.sleep(AFTER_S)

    page = PAGE.search(host.says)
    assert page is not None
    with browsing(program) as browser:
        browser.look(WIDTH, HEIGHT)
        browser.open(f"{page[1]}/")
        browser.wait_for("document.querySelector('#failure').innerText.includes('Traceback')")
        browser.wait_for("document.querySelectorAll('#nodes tbody tr').length === 3")
        browser.picture(target)


def main() -> None:
    program = find_chromium()
    if program is None:
        raise SystemExit(LACKING)
    nodes: list[Node] = []
    with tempfile.TemporaryDirectory(prefix="page-picture-") as folder:
        try:
            take(Path(sys.argv[1]), program, Path(folder), nodes)
        finally:
            for node in nodes:
                node.end()


if __name__ == "__main__":
    main()
