"""A trainer that is started by a file (`examples/trainer_start.py`): its arguments, a kill, what is left of files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = f"""
import json, os, pathlib, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})

class Trainer:
    assert len(sys.argv) == 3, "of the script that has written the start file"

    def __init__(self, cfg=None, overrides=None):
        self.overrides = overrides
        self.save_dir = overrides["save_dir"]

    def train(self):
        generation = os.environ["ELASTIC_AGENT_GENERATION"]
        if generation == "1" and self.overrides["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = {{
            "name": __name__,
            "main": sys.modules["__main__"].Trainer is type(self),
            "argv": sys.argv,
            "types": {{key: type(value).__name__ for key, value in self.overrides.items()}},
            "overrides": {{key: repr(value) for key, value in self.overrides.items()}},
        }}
        (self.save_dir / f"seen-{{generation}}.json").write_text(json.dumps(seen))

if __name__ == "__main__":
    from elastic_agent.launcher import LaunchConfig, run_agent, words_of
    from trainer_start import start_file

    save_dir = pathlib.Path(sys.argv[1])
    overrides = {{
        "save_dir": save_dir, "name": "it's \\"quoted\\"; $(touch no) {{x}}", "names": {{0: "a", 1: "b"}},
        "size": (640, 480.5), "freeze": None, "kill": True, "resume": False, "most": float("inf"),
    }}
    with start_file(Trainer(overrides=overrides), {{"overrides": overrides}},
                    on_restart={{"overrides": {{"resume": True}}}}, if_exists=save_dir / sys.argv[2]) as path:
        run_agent([*words_of(LaunchConfig(options={{"preload": "none"}})), str(path)])
"""


class OfThisModule:
    class Inner:
        pass

    def train(self) -> None:
        pass


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    import trainer_start

    yield trainer_start
    sys.modules.pop("trainer_start", None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the start files of a test are, and of no other one."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    return place


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("trainer-start-*"))


@pytest.mark.long
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
        "most": "inf",
    }
    assert {file.name for file in save_dir.iterdir()} == {"last.pt", "seen-2.json"}
    assert not files(folder)


@pytest.mark.long
def test_the_example_as_it_stands(tmp_path: Path, folder: Path) -> None:
    command = [sys.executable, EXAMPLES / "trainer_start.py", tmp_path / "run"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "epoch 5 of 5" in done.stdout + done.stderr
    assert (tmp_path / "run" / "last.txt").read_text() == "5"
    assert not files(folder)


def test_the_file_is_private_and_goes_and_what_others_have_put_there_stays(
    example: Any, folder: Path
) -> None:
    (folder / "mine.py").touch()
    with example.start_file(OfThisModule, {"lr": 0.1}) as one, example.start_file(OfThisModule, {}) as two:
        assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700
        assert one.exists()
        assert two.exists()
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


KILLED = f"""
import argparse, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
from trainer_start import start_file
with start_file(argparse.ArgumentParser, {{}}, method="parse_args") as path:
    print(path, flush=True)
    time.sleep(600)
"""


def test_the_next_start_removes_what_a_killed_one_has_left(
    example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "YOUNG_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            left = Path(owner.stdout.readline().strip())
            with example.start_file(OfThisModule, {}):
                assert left.exists(), "its owner lives"
        finally:
            owner.kill()
    with example.start_file(OfThisModule, {}) as path:
        assert files(folder) == [path.parent]


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "more", "told"),
    [
        (OfThisModule, {"arguments": {"model": object()}}, r"arguments\['model'\] is a object"),
        (OfThisModule, {"on_restart": {"a": b""}, "if_exists": "x"}, r"on_restart\['a'\] is a bytes"),
        (OfThisModule, {"on_restart": {"resume": True}}, "on_restart needs if_exists"),
        (OfThisModule, {"method": "fit"}, r"trainer is <class .*OfThisModule'>, which has no method 'fit'"),
        (OfThisModule.Inner, {}, "which has no method 'train'"),
        (type("Local", (OfThisModule,), {}), {}, "define the class at the top of a module"),
    ],
)
def test_what_no_worker_could_start_is_named(
    trainer: Any, more: dict[str, Any], told: str, example: Any, folder: Path
) -> None:
    with pytest.raises(TypeError, match=told), example.start_file(trainer, **{"arguments": {}, **more}):
        pass
    assert not files(folder)


def test_a_trainer_resumes_only_after_its_first_checkpoint(example: Any, tmp_path: Path) -> None:
    last = tmp_path / "last.pt"
    start = {
        "arguments": {"overrides": {"resume": False, "lr": 0.1}},
        "on_restart": {"overrides": {"resume": True}},
        "if_exists": os.fspath(last),
    }
    seen = [example.arguments_of(start, generation)["overrides"] for generation in (1, 2)]
    last.touch()
    seen += [example.arguments_of(start, generation)["overrides"] for generation in (1, 2)]
    assert [each["resume"] for each in seen] == [False, False, False, True]
    assert {each["lr"] for each in seen} == {0.1}


@pytest.mark.long
def test_a_class_within_a_class_is_found(example: Any) -> None:
    assert example.class_at({"module": __name__, "name": "OfThisModule.Inner"}) is OfThisModule.Inner
