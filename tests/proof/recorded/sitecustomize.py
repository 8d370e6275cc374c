"""Writes down what happens to a checkpoint directory, as far as a power cut must know it: found on PYTHONPATH.

PROOF_DISK_LOG is the file that gets a line for each call of `os` that changes the directory PROOF_DISK or makes some of
it durable, in any process of the job: what was synced, and what is there then. What files hold is in the folder
PROOF_DISK_LOG.files. PROOF_CUT is `STEP CALLS`: all processes stand still so many calls after the training has begun to
save that step.

An agent starts its own processes isolated: this module puts itself before the programs that it gives them.
"""

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import time

LOG, ROOT = os.environ.get("PROOF_DISK_LOG", ""), os.environ.get("PROOF_DISK", "")
CHANGES = ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")


def entries(folder, tree):
    """Into `tree`: by the inode of each directory its names, with inode and digest, which directories lack."""
    own = tree[str(os.stat(folder).st_ino)] = {}
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            entries(entry.path, tree)
            own[entry.name] = [entry.inode(), None]
            continue
        with open(entry.path, "rb") as file:
            content = file.read()
        digest = hashlib.sha256(content).hexdigest()
        own[entry.name] = [entry.inode(), digest]
        if not os.path.exists(blob := f"{LOG}.files/{digest}"):
            with open(blob, "wb") as file:
                file.write(content)


def note(what, synced):
    tree = {}
    if os.path.isdir(ROOT):
        entries(ROOT, tree)
    line = {"what": what, "synced": synced, "root": next(iter(tree), None), "tree": tree}
    inodes = {entry[0] for entries in tree.values() for entry in entries.values()}
    there = json.dumps(tree)
    with open(f"{LOG}.last", "a+") as last:
        last.seek(0)
        if last.read() == there and synced not in inodes and str(synced) not in tree:
            return
        last.truncate(0)
        last.write(there)
    with open(LOG, "a+") as log:
        log.write(json.dumps(line) + "\n")
        log.flush()
        if cut := os.environ.get("PROOF_CUT"):
            step, calls = cut.split()
            log.seek(0)
            _, _, since = log.read().partition(f'"begun", "step": {step}}}\n')
            if since.count("\n") >= int(calls):
                log.write('{"what": "cut"}\n')
                log.flush()
                time.sleep(3600)


def recorded(name, call):
    @functools.wraps(call)
    def call_and_note(*args, **more):
        if name == "open" and not (args[1] if len(args) > 1 else more["flags"]) & os.O_CREAT:
            return call(*args, **more)
        with open(f"{LOG}.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            answer = call(*args, **more)
            note(name, os.fstat(args[0]).st_ino if "sync" in name else None)
        return answer

    return call_and_note


def start_recorded(start):
    def start_it(self, command, *args, **more):
        if isinstance(command, list) and "-c" in command:
            at = command.index("-c") + 1
            first = f"exec(compile(open({__file__!r}).read(), {__file__!r}, 'exec'), {{'__file__': {__file__!r}}}); "
            command = [*command[:at], first + command[at], *command[at + 1 :]]
        start(self, command, *args, **more)

    return start_it


if LOG:
    os.makedirs(f"{LOG}.files", exist_ok=True)
    for each in (*CHANGES, "open"):
        setattr(os, each, recorded(each, getattr(os, each)))
    subprocess.Popen.__init__ = start_recorded(subprocess.Popen.__init__)

here = os.path.dirname(__file__)
if here in sys.path:  # another of this name may come after it
    sys.path.remove(here)
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        pass
