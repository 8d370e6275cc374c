"""A preloaded process for tests: `python -u preloaded.py FOLDER NAMES...`, where FOLDER has our package.

It prints `ready` and, for each line of its standard input, forks a child that runs the start in it; the pid and then
the exit code are its answers. What a real one takes care of (ties, cgroups, many at once) is not here.
"""

import sys

FRESH = frozenset(sys.modules)  # not even __future__ more than any process has

import atexit  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import types  # noqa: E402


def main(folder: str, names: list[str]) -> None:
    del sys.path[0]
    package = sys.modules["under_test"] = types.ModuleType("under_test")
    package.__path__ = [folder]
    fresh_process, import_cache, wire = (
        importlib.import_module(f"under_test.agent.workers.preloader.{name}")
        for name in ("fresh_process", "fidelity.import_cache", "wire")
    )
    gc.disable()
    known = import_cache.preload(names, FRESH)
    known.hide()
    gc.freeze()
    assert not known.skipped, known.skipped
    assert len(os.listdir("/proc/self/task")) == 1
    # A real one has its own ways, too, which must not be seen in its children.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    atexit.register(print, "the end of the preloaded process")
    faulthandler.enable()
    print("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            for number, path in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
            os.closerange(3, 64)

            def report(problem: str, path: str = asked["reported"]) -> None:
                with open(path, "a") as file:
                    file.write(problem + "\n")

            fresh_process.run(wire.BecomeWorker(**asked["start"]), known, report)
        print(child)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
