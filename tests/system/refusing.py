"""A script that refuses the state of its checkpoint, which is whole: `refusing.py FOLDER`.

The first generation saves steps 4 and 5 and fails. Every later one takes a while to look at what it loads, so that its
agent sees which step that is, and then refuses it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from elastic_agent.worker import Checkpointer, step


class Particular:
    """Accepts what is given only in the first generation, which is given nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"width": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(1.0)
        raise ValueError(f"made for another width than {state['width']}")


def main(folder: Path) -> None:
    with open(folder / "started", "a") as told:
        print(os.environ.get("ELASTIC_AGENT_BAD_STATE", ""), file=told, flush=True)
    checkpoints = Checkpointer(folder / "checkpoints", {"part": Particular()}, keep=3)
    checkpoints.load()
    for done in (4, 5):
        step(done)
        checkpoints.save(done)
    checkpoints.wait()
    raise ValueError("the first generation fails")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
