"""Jobs of trainers that are started by a file: the class, its arguments, and what is left of the files."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path, PosixPath
from typing import Any

import pytest

from elastic_agent import trainer_start
from elastic_agent.launcher import LaunchConfig
from elastic_agent.trainer_start import FOLDER, StartFile, _arguments, _class_at, absolute_entries

SCRIPT = """
import json, os, pathlib, signal, sys

class Trainer:
    assert len(sys.argv) == 3, "of the script that has written the start file"

    def __init__(self, cfg=None, overrides=None):
        self.overrides = overrides
        self.save_dir = overrides["save_dir"]

    def train(self):
        generation = os.environ["ELASTIC_AGENT_GENERATION"]
        if generation == "1" and self.overrides["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = {
            "name": __name__,
            "main": sys.modules["__main__"].Trainer is type(self),
            "argv": sys.argv,
            "types": {key: type(value).__name__ for key, value in self.overrides.items()},
            "overrides": {key: repr(value) for key, value in self.overrides.items()},
        }
        (self.save_dir / f"seen-{generation}.json").write_text(json.dumps(seen))

if __name__ == "__main__":
    from elastic_agent.launcher import LaunchConfig
    from elastic_agent.trainer_start import StartFile

    save_dir = pathlib.Path(sys.argv[1])
    overrides = {
        "save_dir": save_dir, "name": "it's \\"quoted\\"; $(touch no) {x}", "names": {0: "a", 1: "b"},
        "size": (640, 480.5), "freeze": None, "kill": True, "resume": False,
    }
    with StartFile(Trainer(overrides=overrides), {"overrides": overrides},
                   on_restart={"overrides": {"resume": True}}, if_exists=save_dir / sys.argv[2]) as start:
        start.run(LaunchConfig(options={"preload": "none"}))
"""


class OfThisModule:
    class Inner:
        pass

    def train(self) -> None:
        pass


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the start files of a test are, and of no other one."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place / f"{FOLDER}{os.getuid()}"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("start-*"))


def test_a_trainer_of_the_script_itself_after_a_kill(tmp_path: Path, folder: Path) -> None:
    """Its name and its folder need quoting; nothing of the folder is removed, and the second life resumes."""
    place = tmp_path / 'it\'s "a" folder; $HOME'
    place.mkdir()
    script, save_dir = place / "train me.py", place / "runs"
    save_dir.mkdir()
    (save_dir / "last.pt").touch()
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, save_dir, "last.pt"], check=True, cwd=place, timeout=60)
    seen = json.loads((save_dir / "seen-2.json").read_text())
    assert (seen["name"], seen["main"]) == ("__mp_main__", True)
    assert seen["argv"] == [str(script), str(save_dir), "last.pt"]
    assert seen["types"]["save_dir"] == PosixPath.__name__
    assert seen["overrides"] == {
        "save_dir": repr(save_dir),
        "name": repr('it\'s "quoted"; $(touch no) {x}'),
        "names": "{0: 'a', 1: 'b'}",
        "size": "(640, 480.5)",
        "freeze": "None",
        "kill": "True",
        "resume": "True",
    }
    assert {file.name for file in save_dir.iterdir()} == {"last.pt", "seen-2.json"}
    assert not files(folder)


def test_the_file_is_private_and_the_command_a_list(folder: Path) -> None:
    with StartFile(OfThisModule, {"lr": 0.1}) as start:
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, start.path)] == [0o700, 0o600]
        python, *words = start.command(LaunchConfig(nproc_per_node=2, run_id="it's mine"))
        assert (python, words[:2], words[-1]) == (sys.executable, ["-m", "elastic_agent"], str(start.path))
        assert "--rdzv-id=it's mine" in words
    assert not files(folder)


def test_two_at_once_and_what_others_have_put_there_stay(folder: Path) -> None:
    with StartFile(OfThisModule) as one, StartFile(OfThisModule) as two:
        (folder / "mine.py").touch()
        one.remove()
        one.remove()
        with StartFile(OfThisModule):
            assert two.path.exists()
    assert [path.name for path in sorted(folder.iterdir())] == ["lock", "mine.py"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_removes_nothing() -> None:
    with StartFile(OfThisModule) as start:
        if (child := os.fork()) == 0:
            start.remove()
            os._exit(0)
        os.waitpid(child, 0)
        assert start.path.exists()


KILLED = """
import sys, time
import argparse
from elastic_agent.trainer_start import StartFile
start = StartFile(argparse.ArgumentParser, method="parse_args")
print(start.path, flush=True)
time.sleep(600)
"""


def test_the_next_start_removes_what_a_killed_one_has_left(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with StartFile(OfThisModule):
            assert left.exists(), "its owner lives"
        owner.kill()
    # An agent that goes on without the owner would start workers with it.
    waiting = [sys.executable, "-c", "input('begun\\n')", left]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"begun\n"
        with StartFile(OfThisModule):
            assert left.exists(), "a process has it in its command"
        agent.kill()
    with StartFile(OfThisModule) as start:
        assert files(folder) == [start.path]


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="not a folder of this user's alone"):
        StartFile(OfThisModule)
    folder.rmdir()
    folder.symlink_to("/")
    with pytest.raises(PermissionError, match="name another place in TMPDIR"):
        StartFile(OfThisModule)


@pytest.mark.parametrize(
    ("trainer", "more", "told"),
    [
        (OfThisModule, {"arguments": {"model": object()}}, r"arguments\['model'\] is a object"),
        (OfThisModule, {"on_restart": {"a": b""}, "if_exists": "x"}, r"on_restart\['a'\] is a bytes"),
        (OfThisModule, {"on_restart": {"resume": True}}, "on_restart needs if_exists"),
        (OfThisModule, {"method": "fit"}, r"trainer is <class .*OfThisModule'>, which has no method 'fit'"),
        (OfThisModule.Inner, {}, "which has no method 'train'"),
        (5, {}, "trainer is 5, which has no method 'train'"),
    ],
)
def test_what_no_worker_could_start_is_named(
    trainer: Any, more: dict[str, Any], told: str, folder: Path
) -> None:
    with pytest.raises(TypeError, match=told):
        StartFile(trainer, **more)
    assert not folder.exists()


def test_a_class_that_no_worker_could_import_is_refused() -> None:
    class Local:
        def train(self) -> None:
            pass

    for kind in (Local, Local()):
        with pytest.raises(TypeError, match=r"<locals>.Local: define the class at the top of a module"):
            StartFile(kind)


def test_a_class_within_a_class_is_found() -> None:
    place = {"module": __name__, "name": "OfThisModule.Inner"}
    assert _class_at(place) is OfThisModule.Inner


def test_a_trainer_resumes_only_after_its_first_checkpoint(tmp_path: Path) -> None:
    last = tmp_path / "last.pt"
    more = {"overrides": {"resume": True}}
    with StartFile(OfThisModule, {"overrides": {"resume": False}}, on_restart=more, if_exists=last) as start:
        words = ast.literal_eval(re.search(r"json.loads\((.*)\)", start.path.read_text())[1])  # type: ignore[index]
        given = json.loads(words)
    seen = [_arguments(given, generation)["overrides"]["resume"] for generation in (1, 2)]
    last.touch()
    seen += [_arguments(given, generation)["overrides"]["resume"] for generation in (1, 2)]
    assert seen == [False, False, False, True]


def test_relative_entries_of_the_path_are_those_of_both_folders() -> None:
    """A script that has changed its folder: where it began, and where it is."""
    entries = absolute_entries(["", "lib", "/abs", Path("/not/looked/at"), "/abs"], ("/began", "/is"))
    assert entries == ["/began", "/is", "/began/lib", "/is/lib", "/abs"]
    assert absolute_entries(["lib"], (None, "/is")) == ["/is/lib"]


def test_a_file_that_a_cleaner_has_removed_is_written_again(folder: Path) -> None:
    with StartFile(OfThisModule) as start:
        text, now = start.path.read_text(), time.time()
        os.utime(start.path, (0, 0))
        start.keep(now)
        assert start.path.stat().st_mtime > now - 60, "else a cleaner would take it for old"
        shutil.rmtree(folder)
        start.keep(now)
        assert start.path.read_text() == text
        assert stat.S_IMODE(start.path.stat().st_mode) == 0o600
        with StartFile(OfThisModule) as other:
            assert files(folder) == sorted([start.path, other.path]), "it is locked, too"
    start.keep(now)
    assert not files(folder)


def test_a_thread_looks_whether_the_file_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_start, "KEEP_EVERY_S", 0.01)
    with StartFile(OfThisModule) as start:
        start.path.unlink()
        deadline = time.monotonic() + 10.0
        while not start.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert start.path.exists()


def test_what_is_no_file_is_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "start-folder.py").mkdir()
    os.mkfifo(folder / "start-fifo.py")
    with StartFile(OfThisModule):
        pass
    assert {path.name for path in files(folder)} == {"start-folder.py", "start-fifo.py"}


def test_a_class_of_a_module_that_python_runs_by_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trains.py").write_text(
        "import json\n"
        "class Trainer:\n"
        "    pass\n"
        "if __name__ == '__main__':\n"
        "    from elastic_agent.trainer_start import _place_of\n"
        "    print(json.dumps(_place_of(Trainer)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trains"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    place = json.loads(done.stdout)
    assert place == {"main_module": "trains", "name": "Trainer"}
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    found: Any = _class_at(place)
    assert (found.__module__, found is sys.modules["__main__"].Trainer) == ("__mp_main__", True)  # type: ignore[attr-defined]
