"""Forks all ranks of all kinds of hangs from one process that has imported torch, as an agent's spares are. Not a test.

Reads one line of JSON, a list of [kind, rank, variables, path of the stacks' file], and writes the pids, in this order.
It never waits for one: who ends stays to be seen. It ends, and they with it, at the end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys

import hanging

from elastic_agent.worker.wire.shared_progress import register_stacks


def run(kind: str, variables: dict[str, str], stacks: str) -> None:
    hanging.die_with_parent()
    os.environ.update(variables)
    register_stacks(stacks)
    hanging.main(kind)


def main() -> None:
    pids = []
    for kind, variables, stacks in json.loads(sys.stdin.readline()):
        if (pid := os.fork()) == 0:
            run(kind, variables, stacks)
            sys.exit()
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
