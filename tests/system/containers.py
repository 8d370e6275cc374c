"""A machine of its own with a real systemd, on this one: for what only a service manager can do to an agent.

Its disk is this machine's, with whatever is written to it kept in memory (an overlay on a tmpfs). Its processes,
network and tree of cgroups are its own. It boots to a target that holds next to nothing, in about a second. The agent
lies where `docs/deploy.md` installs it, with this interpreter, its packages and this very tree mounted in place.

`run` enters it with a command, and `write` leaves files there. Everything is gone after `close`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import skip_without
from tests.waiting import wait_for

from .harness import PATIENCE_S
from .processes import family

REPOSITORY = Path(__file__).parents[2]
HOME = "/opt/elastic-agent"
TARGET = "agent-test.target"

UNIT = """
[Unit]
Requires=sysinit.target systemd-journald.service
After=sysinit.target systemd-journald.service
"""

PROGRAM = f"""#!{HOME}/bin/python
import sys
sys.path.insert(0, "{HOME}/src")
from elastic_agent.__main__ import start
start()
"""


class CannotBoot(Exception):
    """This machine lacks what a container needs."""


class Container:
    """See the module's docstring."""

    def __init__(self, folder: Path) -> None:
        """`folder` is empty, and is mounted on. Raises CannotBoot."""
        self._folder = folder
        self._root = folder / "root"
        self._cgroups: list[Path] = []
        self._nspawn: subprocess.Popen[bytes] | None = None
        try:
            self._make_disk()
            self._boot()
        except BaseException:
            self.close()
            raise

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", f"--target={self._init}", "--all", "--", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
        assert not check or done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(mode)

    def path(self, inside: str) -> Path:
        """The same file, seen from here."""
        return self._root / inside.lstrip("/")

    def processes(self, user: str) -> dict[int, str]:
        """The start times, by pid here, of all that live there and are that user's."""
        uid = self.run("id", "-u", user).stdout.strip()
        found = {}
        for pid in family(self._init):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if f"\nUid:\t{uid}\t" in status and "State:\tZ" not in status:
                    found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return found

    def close(self) -> None:
        if self._nspawn is not None:
            for pid in reversed(family(self._nspawn.pid)[:2]):  # its init takes all others with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._nspawn.wait(PATIENCE_S)
        for mount in (self._root, self._folder):
            subprocess.run(["umount", "--recursive", mount], capture_output=True)
        wait_for(lambda: not any(map(_is_left, self._cgroups)), "its cgroups to be empty", PATIENCE_S)

    # --- making it

    def _make_disk(self) -> None:
        mount(self._folder, "tmpfs", "mode=755")
        upper, work = self._folder / "upper", self._folder / "work"
        for folder in (upper, work, self._root):
            folder.mkdir()
        mount(self._root, "overlay", f"lowerdir=/,upperdir={upper},workdir={work}")
        self.write("/etc/fstab", "")
        self.write("/etc/machine-id", f"{uuid.uuid4().hex}\n")
        self.write(f"/etc/systemd/system/{TARGET}", UNIT)
        # What the machine around has enabled is none of ours: no unit of its own but those that boot it.
        for wants in self.path("/etc/systemd/system").glob("*.wants"):
            shutil.rmtree(wants)
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.write(f"{HOME}/pyvenv.cfg", "home = /opt/python/bin\ninclude-system-site-packages = false\n")
        self.write(f"{HOME}/bin/elastic-agent", PROGRAM, mode=0o755)
        self.path(f"{HOME}/bin/python").symlink_to(f"/opt/python/bin/{python}")
        self._mounted = {
            "/opt/python": sys.base_prefix,
            f"{HOME}/lib/{python}/site-packages": sysconfig.get_path("purelib"),
            f"{HOME}/src": str(REPOSITORY),
        }

    def _boot(self) -> None:
        # Its systemd takes the cgroup in which it starts for the root of the tree.
        cgroup = _a_cgroup()
        enter = f'echo $$ > "{cgroup}/cgroup.procs"; exec "$@"'
        binds = [f"--bind-ro={source}:{inside}" for inside, source in self._mounted.items()]
        quiet = ("--register=no", "--keep-unit", "--console=pipe", "--private-network", "--link-journal=no")
        words = (
            "systemd-nspawn",
            f"--directory={self._root}",
            *quiet,
            *binds,
            "--boot",
            f"systemd.unit={TARGET}",
        )
        console = self._folder.with_suffix(".console")
        with open(console, "wb") as output:
            self._nspawn = subprocess.Popen(
                ["sh", "-c", enter, "sh", *words],
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        # Where cgroups are of both versions, it makes itself one in systemd's old tree, too.
        self._cgroups = [cgroup, Path("/sys/fs/cgroup/systemd", cgroup.name)]

        def said() -> str:
            return console.read_text(errors="replace")[-500:]

        nspawn = self._nspawn
        wait_for(lambda: nspawn.poll() is not None or self._is_up(), "a boot", PATIENCE_S, seen=said)
        if nspawn.poll() is not None:
            raise CannotBoot(f"systemd-nspawn ended: {said()}")
        # An interpreter that is linked with its library looks for it where it was built, and then here.
        self.write("/etc/ld.so.conf.d/000-python.conf", "/opt/python/lib\n")
        self.run("ldconfig")

    def _is_up(self) -> bool:
        assert self._nspawn is not None
        pids = family(self._nspawn.pid)[1:]
        if not pids:
            return False
        self._init = pids[0]
        return self.run("systemctl", "is-active", TARGET, check=False).stdout == "active\n"


def mount(folder: Path, kind: str, options: str) -> None:
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, folder], capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotBoot(f"cannot mount: {done.stderr.strip()}")


def _is_left(cgroup: Path) -> bool:
    for folder, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return cgroup.exists()


def _a_cgroup() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            cgroup = Path(fields[4], f"container-{os.getpid()}-{random.SystemRandom().randrange(16**6):06x}")
            try:
                cgroup.mkdir()
            except OSError as error:
                raise CannotBoot(f"{cgroup}: {error.strerror}") from error
            return cgroup
    raise CannotBoot("no cgroup version 2 is mounted")


@contextlib.contextmanager
def container(folder: Path) -> Iterator[Container]:
    """A booted one, gone at the end. Skips the test where there can be none."""
    skip_without(("systemd-nspawn", "nsenter"), "systemd", "only root may start a container")
    try:
        made = Container(folder)
    except CannotBoot as reason:
        pytest.skip(f"no container here: {reason}")
    try:
        yield made
    finally:
        made.close()
