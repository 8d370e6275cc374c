"""A script in a fork of a preloaded process does what it does under a fresh `python -u`: the table of `fresh_cases`.

Each case is run both ways in the same folder, and exit code, output and files are compared. What is random, or an
address, is not printed by the cases or made equal here. One preloaded process, which has imported torch, serves all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from elastic_agent.agent.workers.preloader.fidelity.import_cache import DEFAULT_PRELOAD
from elastic_agent.agent.workers.preloader.wire import BecomeWorker
from elastic_agent.agent.workers.processes.workers import tied
from tests.installed import Installed

from .fresh_cases import IMPORTS, LIGHT, TORCH, Case, script

PACKAGE = Path(__file__).resolve().parents[2] / "elastic_agent"
PRELOADED = Path(__file__).with_name("preloaded.py")
PATIENCE_S = 60.0

ITS_OWN = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LEFT": "behind"}
"""What the preloaded process has in its environment; the first two, so that it has one thread."""


OF_PYTHON = """
argparse ast asyncio base64 collections.abc concurrent.futures.process configparser contextlib copy csv ctypes.util
dataclasses datetime decimal email.message encodings.idna enum functools getpass glob gzip hashlib http.server
importlib.abc importlib.machinery importlib.metadata importlib.resources importlib.util inspect json.tool logging.config
logging.handlers multiprocessing.pool multiprocessing.shared_memory ntpath os.path pathlib pdb pickle pkgutil platform
random re runpy shelve shutil socketserver sqlite3 ssl statistics subprocess tarfile tempfile threading traceback typing
unittest.mock urllib.request uuid xml.dom.minidom xml.etree.ElementTree zipfile
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    stdout: str
    stderr: str
    files: Mapping[str, str]


class Preloaded:
    """Runs scripts, one after the other, in forks of a process that has torch."""

    def __init__(
        self, installed: Installed, names: Sequence[str], more: Mapping[str, str] | None = None
    ) -> None:
        self.python = installed.python
        self.environment = {**_environment(), **ITS_OWN, **(more or {})}
        self._process = subprocess.Popen(
            [self.python, "-u", str(PRELOADED), str(PACKAGE), *names],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def start(self, start: BecomeWorker, stdout: Path, stderr: Path, reported: Path) -> int:
        asked = {
            "start": asdict(start),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "reported": str(reported),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def wait(self) -> int:
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def preloaded(installed: Installed) -> Iterator[Preloaded]:
    preloaded = Preloaded(installed, DEFAULT_PRELOAD)
    yield preloaded
    preloaded.close()


@pytest.fixture(scope="module")
def lightly_preloaded(installed: Installed) -> Iterator[Preloaded]:
    preloaded = Preloaded(
        installed,
        (
            "numpy",
            "asyncio",
            "concurrent.futures.thread",
            "multiprocessing.pool",
            "logging.handlers",
            "runpy",
        ),
    )
    yield preloaded
    preloaded.close()


class Bench:
    """Where one case is run, both ways."""

    def __init__(self, folder: Path, preloaded: Preloaded) -> None:
        folder.mkdir(exist_ok=True)
        self.work = folder / "work"
        self._folder = folder
        self._preloaded = preloaded

    @property
    def reported(self) -> str:
        """What the last warm run had to say against itself."""
        path = self._folder / "reported"
        return path.read_text() if path.exists() else ""

    def cold(self, case: Case) -> Outcome:
        self._lay_out(case)
        stdout, stderr = self._folder / "stdout", self._folder / "stderr"
        with open(stdout, "wb") as out, open(stderr, "wb") as err:
            process = subprocess.Popen(
                # As agents start it: who runs the tests may have us ignore signals.
                tied([self._preloaded.python, *self._start(case).command]),
                env=self._environment(case),
                cwd=self.work,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            self._signal(case, process.pid, stdout)
            return self._outcome(process.wait(PATIENCE_S), stdout, stderr)

    def warm(self, case: Case) -> Outcome:
        self._lay_out(case)
        stdout, stderr = self._folder / "stdout", self._folder / "stderr"
        pid = self._preloaded.start(self._start(case), stdout, stderr, self._folder / "reported")
        self._signal(case, pid, stdout)
        return self._outcome(self._preloaded.wait(), stdout, stderr)

    def _start(self, case: Case) -> BecomeWorker:
        return BecomeWorker(case.kind, case.target, case.args, self._environment(case), str(self.work))

    def _environment(self, case: Case) -> dict[str, str]:
        wanted = {**self._preloaded.environment, **case.environment}
        return {name: value for name, value in wanted.items() if value is not None}

    def _lay_out(self, case: Case) -> None:
        for path in (self.work, *(self._folder / name for name in ("stdout", "stderr", "reported"))):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        self.work.mkdir()
        for name, text in case.files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
        for name, target in case.links.items():
            (self.work / name).symlink_to(target)

    def _signal(self, case: Case, pid: int, stdout: Path) -> None:
        if case.signal is None:
            return
        deadline = time.monotonic() + PATIENCE_S
        while not (stdout.exists() and b"ready\n" in stdout.read_bytes() and _sleeps(pid)):
            assert time.monotonic() < deadline, "the script never said that it is ready for the signal"
            time.sleep(0.005)
        os.kill(pid, case.signal)

    def _outcome(self, code: int, stdout: Path, stderr: Path) -> Outcome:
        files = {
            str(path.relative_to(self.work)): _same_everywhere(path.read_text(errors="surrogateescape"))
            for path in sorted(self.work.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        out, err = (_same_everywhere(path.read_text(errors="surrogateescape")) for path in (stdout, stderr))
        return Outcome(code, out, err, files)


def _sleeps(pid: int) -> bool:
    """Where it will be when a signal comes must be the same each time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}


def _same_everywhere(text: str) -> str:
    text = re.sub(r"0x[0-9a-f]+", "0x..", text)
    text = re.sub(r"\[([IWE])\d+ [\d:.]+ ", r"[\1.. ", text)  # of torch's log
    return re.sub(r'("timestamp": )"?\d+"?', r"\1..", text)


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_a_fork_behaves_as_a_fresh_process(tmp_path: Path, lightly_preloaded: Preloaded, case: Case) -> None:
    compare(Bench(tmp_path, lightly_preloaded), case)


@pytest.mark.parametrize("case", [*IMPORTS, *TORCH], ids=lambda case: case.name)
def test_a_fork_that_has_torch_behaves_so_too(tmp_path: Path, preloaded: Preloaded, case: Case) -> None:
    compare(Bench(tmp_path, preloaded), case)


def compare(bench: Bench, case: Case) -> None:
    cold, warm = bench.cold(case), bench.warm(case)
    assert warm == cold
    assert bool(bench.reported) == case.starts_cold, bench.reported
    assert case.proof in cold.stdout + cold.stderr + json.dumps(dict(cold.files)), (
        "the case has not shown its point"
    )


EACH_ALONE = """
import os, sys
for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        known = set(sys.modules)
        __import__(name)
        for new in sorted(set(sys.modules) - known):
            parent, _, child = new.rpartition(".")
            print(name, new, not parent or hasattr(sys.modules[parent], child))
        sys.exit()
    os.wait()
"""


def test_each_module_of_python_brings_what_it_brings_to_a_fresh_process(
    tmp_path: Path, installed: Installed
) -> None:
    """Also those that are frozen into Python: `runpy` without `importlib.util` would be of no use."""
    names = tuple(OF_PYTHON.split())
    known = Preloaded(installed, names)
    bench = Bench(tmp_path, known)
    case = Case("each alone", {"train.py": EACH_ALONE}, args=names)
    cold, warm = (set(outcome.stdout.splitlines()) for outcome in (bench.cold(case), bench.warm(case)))
    known.close()
    assert "runpy importlib.util True" in cold
    assert sorted(warm ^ cold) == []


EACH_ITS_OWN = """
import json, random, numpy, torch, multiprocessing, tempfile, uuid, secrets
from numpy.random import default_rng
print(json.dumps([
    random.random(), numpy.random.rand(), default_rng().random(), torch.rand(1).item(), torch.initial_seed(),
    bytes(multiprocessing.current_process().authkey).hex(), uuid.uuid4().hex, secrets.token_hex(),
    tempfile.mktemp(), torch.randperm(1000).sum().item() and torch.randperm(1000).tolist(),
]))
"""


def test_what_is_drawn_by_lot_differs_between_two_forks(tmp_path: Path, preloaded: Preloaded) -> None:
    bench, case = Bench(tmp_path, preloaded), Case("lots", {"train.py": EACH_ITS_OWN})
    first, second = (json.loads(bench.warm(case).stdout) for _ in range(2))
    assert [
        number for number, (one, other) in enumerate(zip(first, second, strict=True)) if one == other
    ] == []


SET_TOO_LATE = """
import os
for name in ["GOMP_CPU_AFFINITY", "TORCHINDUCTOR_MAX_AUTOTUNE"]:
    os.environ[name] = "0"
import torch._inductor.config
print("went on")
"""


def test_what_was_set_too_late_is_reported_to_the_script_and_to_the_agent(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    bench = Bench(tmp_path, preloaded)
    outcome = bench.warm(Case("too late", {"train.py": SET_TOO_LATE}))
    assert outcome.stdout == "went on\n"
    for name in ("GOMP_CPU_AFFINITY", "TORCHINDUCTOR_MAX_AUTOTUNE"):
        assert name in bench.reported
        assert name in outcome.stderr


HOLDER = """
import shutil, tempfile, weakref
class TempDir:
    def __init__(self):
        self.name = tempfile.mkdtemp(dir={folder!r})
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.name)
CACHE = TempDir()
"""


def test_a_finalizer_comes_with_the_module_that_made_it(tmp_path: Path, installed: Installed) -> None:
    package, made = tmp_path / "site", tmp_path / "made"
    package.mkdir()
    made.mkdir()
    (package / "holder.py").write_text(HOLDER.format(folder=str(made)))
    holding = Preloaded(installed, ("holder",), {"PYTHONPATH": str(package)})
    try:
        bench = Bench(tmp_path / "bench", holding)
        (of_all,) = made.iterdir()
        compare(bench, script("its function alone", "import shutil\nprint('went on')", "went on"))
        compare(bench, script("its registry, too", "import weakref, shutil\nprint('went on')", "went on"))
        assert of_all.is_dir(), (
            "what belongs to all forks was removed by one that had not imported its module"
        )
        bench.warm(script("itself", "import holder"))
        assert not of_all.exists()
    finally:
        holding.close()


def test_a_script_that_sets_up_logging_first_does_not_disable_the_loggers_of_what_it_imports(
    tmp_path: Path, installed: Installed
) -> None:
    package = tmp_path / "site"
    package.mkdir()
    (package / "talker.py").write_text(
        "import logging\nlow, log = logging.getLogger('talker.low'), logging.getLogger('talker')\n"
        "log.setLevel(logging.INFO)\nlow.isEnabledFor(logging.DEBUG)  # the answer is kept\n"
    )
    case = script(
        "talker",
        """
        import logging, logging.config
        print(sorted(logging.root.manager.loggerDict))
        logging.config.dictConfig({"version": 1, "handlers": {"all": {"class": "logging.StreamHandler"}},
                                   "root": {"level": "DEBUG", "handlers": ["all"]}})
        import talker
        print(sorted(logging.root.manager.loggerDict), talker.log.disabled, talker.low.parent is talker.log)
        talker.log.info("a line of the package"); talker.low.info("another"); talker.log.debug("too low")
        """,
        "a line of the package",
    )
    talking = Preloaded(installed, ("talker",), {"PYTHONPATH": str(package)})
    try:
        compare(Bench(tmp_path / "bench", talking), case)
    finally:
        talking.close()


def test_a_filter_for_warnings_comes_with_the_module_that_set_it(
    tmp_path: Path, installed: Installed
) -> None:
    package = tmp_path / "site"
    package.mkdir()
    (package / "filterer.py").write_text(
        "import warnings\nwarnings.filterwarnings('ignore', 'not this')\n"
        "warnings.filterwarnings('error', 'nor that')\n"
    )
    case = script(
        "filterer",
        """
        import warnings
        print(warnings.filters); warnings.warn("not this, before")
        import filterer
        print(warnings.filters); warnings.warn("not this"); warnings.warn("shown")
        """,
        "shown",
    )
    filtering = Preloaded(installed, ("filterer",), {"PYTHONPATH": str(package)})
    try:
        compare(Bench(tmp_path / "bench", filtering), case)
    finally:
        filtering.close()


@pytest.mark.parametrize("profiled", [False, True])
def test_at_its_end_a_fork_does_not_unload_what_was_preloaded(
    tmp_path: Path, installed: Installed, profiled: bool
) -> None:
    package = tmp_path / "site"
    package.mkdir()
    (package / "rough.py").write_text(
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)\n"
    )
    rough = Preloaded(
        installed, ("rough",), {"PYTHONPATH": str(package), **({"LD_AUDIT": ""} if profiled else {})}
    )
    codes = (-6, -6, -6) if profiled else (0, 83, 1)
    try:
        bench = Bench(tmp_path / "bench", rough)
        for ending, code in zip(
            ("print('x')", "import sys\nsys.exit(83)", "raise OSError"), codes, strict=True
        ):
            assert bench.warm(script("ending", ending)).code == code
    finally:
        rough.close()


def test_a_file_that_has_changed_is_found(tmp_path: Path) -> None:
    ours = tmp_path / "ours.py"
    ours.write_text("x = 1")
    find = (
        "import sys; known = frozenset(sys.modules)\n"
        "from elastic_agent.agent.workers.preloader.fidelity import import_cache\n"
        "found = import_cache.preload(['ours', 'nowhere.to_be_found'], known)\n"
        "print(list(found.skipped), found.changed()); open(sys.argv[1], 'a').write(' '); print(found.changed())"
    )
    found = subprocess.run(
        [sys.executable, "-c", find, str(ours)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["['nowhere.to_be_found'] ()", f"('{ours}',)"]
