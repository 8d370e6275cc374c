"""A script in a fork of the fork server does what it does under `python -u`, as far as its user can tell.

Each case is run both ways in the same folder, and exit code and output are compared; what the case is about must be in
that output. What a fork cannot be starts cold.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import select
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest

from elastic_agent.agent.workers.processes.helper import tied
from elastic_agent.agent.workers.processes.spare_wire import BecomeWorker
from tests.spare_keeper import SpareKeeper, adopting
from tests.waiting import wait_for

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    text: str
    proof: str = ""
    """What has to be in the output, so that equal outputs mean something."""
    args: tuple[str, ...] = ()
    module: str = ""
    """To be run with -m, in place of the text."""
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    signal: signal.Signals | None = None
    """Sent when the script has said `ready`."""
    starts_cold: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


class Bench:
    """Where cases are run, both ways."""

    def __init__(self, folder: Path, keeper: SpareKeeper) -> None:
        self.folder = folder
        self._keeper = keeper

    def cold(self, case: Case) -> Outcome:
        start = self._start(case)
        with open("/dev/null") as nothing, open("out", "wb") as out, open("err", "wb") as err:
            process = subprocess.Popen(
                start.cold,
                env=start.environment,
                stdin=nothing,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            self._signal(case, process.pid)
            return self._outcome(process.wait(PATIENCE_S))

    def warm(self, case: Case) -> Outcome:
        self._keeper.run_until_prepared(1)
        with open("/dev/null") as nothing, open("out", "wb") as out, open("err", "wb") as err:
            spare = self._keeper.hand_out(self._start(case), [each.fileno() for each in (nothing, out, err)])
            self._signal(case, spare.pid)
            code = spare.wait()
        self._keeper.run_until(lambda: spare.channel.fileno() == -1)  # all that it reported is logged
        return self._outcome(code)

    def _start(self, case: Case) -> BecomeWorker:
        for name, text in {"train.py": case.text, **case.files}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text:
                path.write_text(dedent(text))
        wanted = {**os.environ, **self._keeper.variables, **case.variables}
        environment = {name: value for name, value in wanted.items() if value is not None}
        words = ["-m", case.module] if case.module else ["train.py"]
        cold = tuple(tied([sys.executable, "-u", *words, *case.args]))
        kind, target = ("module", case.module) if case.module else ("script", "train.py")
        return BecomeWorker(kind, target, case.args, environment, str(self.folder), "", cold)  # type: ignore[arg-type]

    def _signal(self, case: Case, pid: int) -> None:
        if case.signal is None:
            return
        wait_for(
            lambda: "ready\n" in Path("out").read_text(), "the script to be ready for the signal", PATIENCE_S
        )
        with open(os.pidfd_open(pid), "rb", buffering=0) as ended:
            os.kill(pid, case.signal)
            # Python that was about to sleep just then heeds it when another one wakes it, or after that.
            while not select.select([ended], [], [], 3.0)[0]:
                os.kill(pid, case.signal)

    def _outcome(self, code: int) -> Outcome:
        out, err = (re.sub(r"0x[0-9a-f]+", "0x..", Path(name).read_text()) for name in ("out", "err"))
        return Outcome(code, out, err)


class Keeper(SpareKeeper):
    def __init__(self, *names: str, **variables: str) -> None:
        super().__init__(*names, **variables)
        self.variables = variables


@pytest.fixture(scope="module")
def keeper() -> Iterator[Callable[..., Keeper]]:
    """One for each set of modules and variables; all end with these tests."""
    made: dict[object, Keeper] = {}

    def keeper(*names: str, **variables: str) -> Keeper:
        key = names, *variables.items()
        if key not in made:
            made[key] = Keeper(*names, **variables)
            made[key].start()
        return made[key]

    with adopting():
        yield keeper
        for each in made.values():
            each.spares.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


LIGHT = (
    Case(
        "main module",
        """
        '''A docstring.'''
        import __main__, sys
        print(__name__, __file__, __doc__, __package__, __spec__, __main__.__dict__ is globals(), type(__builtins__))
        print(__loader__.get_filename(), sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable)
        """,
        "A docstring.",
        args=("--lr", "0.1", "a b", ""),
    ),
    Case(
        "what proc tells, and the environment",
        """
        import ctypes, os, time
        def words(name): return open(f"/proc/self/{name}").read().rstrip(chr(0)).split(chr(0))
        print([words("cmdline"), sorted(words("environ")), words("comm")], sorted(os.environ.items()))
        libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p
        print(libc.getenv(b"A_MARK"), time.tzname, os.getcwd(), os.getpgrp() == os.getsid(0) == os.getpid())
        """,
        "of this worker",
        variables={"A_MARK": "of this worker", "TZ": "Asia/Kolkata"},
    ),
    Case(
        "descriptors and signals",
        """
        import os, signal
        print(sorted(os.listdir("/proc/self/fd"), key=int))
        print([(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), [s for s in open("/proc/self/status") if s[:4] == "SigB"])
        """,
        "default_int_handler",
    ),
    Case(
        "streams",
        """
        import ctypes, os, sys
        print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], repr(sys.stdin.read()))
        ctypes.CDLL(None).puts(b"from C")
        print("no newline, and yet there", end=""); print("error, too", end="", file=sys.stderr)
        ctypes.CDLL(None).fflush(None); os.kill(os.getpid(), 9)
        """,
        "and yet there",
    ),
    Case("exception", "def f(n):\n    return 1 / n\nf(0)\n", 'train.py", line 3, in <module>'),
    Case(
        "error from another", "try:\n    open('nowhere')\nexcept OSError:\n    undefined\n", "During handling"
    ),
    Case("exit with a code", "raise SystemExit(7)"),
    Case("exit with words", "import sys\nsys.exit('no data')", "no data"),
    Case(
        "interrupt", "import time\nprint('ready')\ntime.sleep(60)", "KeyboardInterrupt", signal=signal.SIGINT
    ),
    Case("termination", "import time\nprint('ready')\ntime.sleep(60)", "ready", signal=signal.SIGTERM),
    Case(
        "hook",
        "import sys\nsys.excepthook = lambda *e: print('mine', e, e[2].tb_next)\nraise OSError(2)",
        "mine",
    ),
    Case("syntax error", "x = 1\nif x\n    print(x)\n", "SyntaxError", starts_cold=True),
    Case("missing", "", "No such file", starts_cold=True),
    Case(
        "at exit",
        """
        import atexit, threading, time, weakref
        class Kept: pass
        kept = Kept(); weakref.finalize(kept, print, "finalized")
        class Last:
            def __del__(self): print("deleted")
        last = Last()
        atexit.register(lambda: print("registered", "kept" in globals()))
        def later(): time.sleep(0.05); print("thread", threading.main_thread().is_alive())
        threading.Thread(target=later).start()
        print("end", threading.active_count())
        """,
        "deleted",
    ),
    Case(
        "module",
        "",
        "'--lr'",
        ("--lr", "1"),
        "job",
        {
            "job.py": "import sys\nprint(__name__, __spec__.name, __file__, __package__, sys.argv, sys.path[:2])\n1 / 1"
        },
    ),
    Case(
        "package",
        "",
        "job 3",
        module="job",
        files={
            "job/__init__.py": "import sys\nprint('package', sys.argv)",
            "job/__main__.py": "from .part import value\nprint(__name__, __package__, value)",
            "job/part.py": "value = 3",
        },
    ),
    Case(
        "run-path",
        "",
        "__main__ ['lib/job.py', 'x']",
        ("--run-path", "lib/job.py", "x"),
        "elastic_agent.launcher",
        {"lib/job.py": "import sys\nprint(__name__, sys.argv)\nclass A: pass\nprint(A.__module__)"},
    ),
    Case(
        "own module of a known name",
        "import numpy\nprint(numpy.__file__)",
        "numpy.py",
        files={"numpy.py": "print('my own numpy')"},
        starts_cold=True,
    ),
    Case(
        "own module of another name",
        "import helper\nprint(helper.__file__)",
        "helper.py",
        files={"helper.py": "import json", "data/x.txt": "x", "json.txt": "x"},
    ),
    Case("hash seed", "print(hash('a'))", "", variables={"PYTHONHASHSEED": "3"}, starts_cold=True),
    Case(
        "language",
        "import locale\nprint(locale.getlocale())",
        "",
        variables={"LC_ALL": "C"},
        starts_cold=True,
    ),
    Case("threads", "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nprint('x')", "x", starts_cold=True),
    Case(
        "warnings",
        """
        import warnings
        warnings.warn("plain"); warnings.warn("deprecated", DeprecationWarning); warnings.warn("high", stacklevel=1)
        def f(): warnings.warn("from below", stacklevel=2)
        f(); f()
        """,
        "train.py:3: DeprecationWarning: deprecated",
    ),
    Case(
        "pickles of main",
        """
        import inspect, pickle
        class Model:
            def __init__(self, x): self.x = x
        def loss(model):
            return model.x  # a comment to find
        print(pickle.dumps(Model(1)), pickle.loads(pickle.dumps(Model(2))).x, pickle.loads(pickle.dumps(loss)) is loss)
        print(inspect.getsource(loss), inspect.getfile(Model), Model.__module__)
        """,
        "a comment to find",
    ),
    Case(
        "multiprocessing",
        """
        import multiprocessing as mp, os, sys
        class Item:
            def __init__(self, x): self.x = x
        def work(item):
            return item.x * 2, mp.current_process().name, sys.argv[1:], os.environ["A_MARK"]
        if __name__ == "__main__":
            for method in "fork", "spawn", "forkserver":
                context = mp.get_context(method)
                with context.Pool(1) as pool:
                    print(method, pool.map(work, [Item(1), Item(2)]))
                process = context.Process(target=sys.exit, args=(3,), name="P"); process.start(); process.join()
                print(process.exitcode, mp.active_children(), mp.current_process().name, mp.parent_process())
        """,
        "forkserver [(2, ",
        args=("x",),
        variables={"A_MARK": "of this worker"},
    ),
    Case(
        "threads and loops",
        """
        import asyncio, concurrent.futures, signal, threading, time
        print(threading.main_thread() is threading.current_thread(), [thread.name for thread in threading.enumerate()])
        print("the main one's own number", threading.main_thread().native_id == threading.get_native_id())
        with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(abs, [-1, -2])))
        async def wait(): await asyncio.sleep(0.01); return "waited"
        print(asyncio.run(wait()))
        def ring(*_): raise TimeoutError("rung")
        signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.02)
        try: time.sleep(60)
        except TimeoutError as error: print(error)
        """,
        "rung",
    ),
)

SELDOM = (
    *("what proc tells, and the environment", "exit with a code", "at exit", "hash seed", "pickles of main"),
    *("streams", "error from another", "exit with words", "termination", "hook", "syntax error", "missing"),
    *(
        "package",
        "run-path",
        "own module of another name",
        "language",
        "threads",
        "warnings",
        "threads and loops",
    ),
)
"""Other cases of what the rest shows."""

TRAINING = Case(
    "training",
    """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset
    class Numbers(Dataset):
        def __len__(self): return 8
        def __getitem__(self, i): return torch.full((4,), float(i)), torch.utils.data.get_worker_info().id
    if __name__ == "__main__":
        print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized())
        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        torch.manual_seed(3)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for method in "fork", "spawn":
            for data, worker in DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method):
                loss = model(data + torch.rand(4, 4)).sum(); loss.backward()
                optimizer.step(); optimizer.zero_grad()
                print(method, worker.tolist(), loss.item().hex())
        dist.destroy_process_group()
    """,
    "spawn [0, 0, 0, 0]",
    variables={"OMP_NUM_THREADS": None, "OPENBLAS_NUM_THREADS": None},
)


def compare(bench: Bench, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    cold = bench.cold(case)
    caplog.clear()
    assert bench.warm(case) == cold
    assert case.proof in cold.stdout + cold.stderr, "the case has not shown its point"
    assert ("is no fork" in caplog.text) == case.starts_cold, caplog.text


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.long if case.name in SELDOM else ())
        for case in LIGHT
    ],
)
def test_a_fork_behaves_as_a_fresh_process(
    folder: Path, keeper: Callable[..., Keeper], case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    modules = (
        "numpy",
        "asyncio",
        "concurrent.futures.thread",
        "multiprocessing.pool",
        "logging.handlers",
        "runpy",
    )
    compare(Bench(folder, keeper(*modules)), case, caplog)


@pytest.mark.long
def test_a_fork_that_has_torch_trains_as_a_fresh_process(
    folder: Path, keeper: Callable[..., Keeper], caplog: pytest.LogCaptureFixture
) -> None:
    compare(Bench(folder, keeper("default")), TRAINING, caplog)


@pytest.mark.long
def test_a_crash_says_where_it_was(folder: Path, keeper: Callable[..., Keeper]) -> None:
    case = Case("crash", "import ctypes\nctypes.string_at(0)", variables={"PYTHONFAULTHANDLER": "1"})
    outcome = Bench(folder, keeper("numpy")).warm(case)
    assert outcome.code == -signal.SIGSEGV
    assert re.search(r'train.py", line 2 in <module>', outcome.stderr)


EACH_ITS_OWN = """
import json, random, numpy, torch, multiprocessing, tempfile, uuid, secrets
from numpy.random import default_rng
print(json.dumps([
    random.random(), numpy.random.rand(), default_rng().random(), torch.rand(1).item(), torch.initial_seed(),
    bytes(multiprocessing.current_process().authkey).hex(), uuid.uuid4().hex, secrets.token_hex(),
    tempfile.mktemp(), torch.randperm(1000).tolist(),
]))
"""


def test_what_is_drawn_by_lot_differs_between_two_forks(folder: Path, keeper: Callable[..., Keeper]) -> None:
    bench, case = Bench(folder, keeper("default")), Case("lots", EACH_ITS_OWN)
    first, second = (json.loads(bench.warm(case).stdout) for _ in range(2))
    assert [number for number, pair in enumerate(zip(first, second, strict=True)) if pair[0] == pair[1]] == []


@pytest.mark.long
def test_what_a_preloaded_library_does_at_the_end_is_done(
    folder: Path, keeper: Callable[..., Keeper]
) -> None:
    """A library such as h5py writes what it holds in a handler of Python's or of C's."""
    site = folder / "site"
    site.mkdir()
    (site / "library.py").write_text(
        "import atexit, ctypes, os\n"
        "atexit.register(lambda: os.write(1, b'by Python\\n'))\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.strdup.restype = ctypes.c_void_p\n"
        "text = ctypes.c_void_p(libc.strdup(b'by C'))\n"
        "libc.on_exit(ctypes.cast(libc.psignal, ctypes.c_void_p), text)\n"
    )
    bench = Bench(folder, keeper("library", PYTHONPATH=str(site)))
    for text, code in (("import library", 0), ("import sys\nsys.exit(3)", 3), ("raise OSError", 1)):
        outcome = bench.warm(Case("ending", text))
        assert outcome.code == code
        assert outcome.stdout == "by Python\n"
        assert outcome.stderr.splitlines()[-1].startswith("by C")


LEFT_OPEN = """
import gzip, sys, zipfile
file = gzip.open("left.gz", "wt"); file.write("the end")
archive = zipfile.ZipFile("left.zip", "w"); archive.writestr("file", "the end")
if sys.argv[1:]: sys.exit(int(sys.argv[1]))
"""


@pytest.mark.long
def test_what_a_script_leaves_open_is_written_whole(folder: Path, keeper: Callable[..., Keeper]) -> None:
    """Its globals go before those of the preloaded libraries, which finish these files."""
    bench, left = Bench(folder, keeper("gzip", "zipfile")), (folder / "left.gz", folder / "left.zip")
    for args, code in (((), 0), (("3",), 3)):
        for run in (bench.cold, bench.warm):
            assert run(Case("left open", LEFT_OPEN, args=args)) == Outcome(code, "", "")
            assert gzip.decompress(left[0].read_bytes()) == b"the end"
            with zipfile.ZipFile(left[1]) as archive:
                assert archive.read("file") == b"the end"
            for file in left:
                file.unlink()


def test_a_variable_that_a_module_has_read_and_that_is_another_one_for_a_worker_asks_for_a_cold_start(
    folder: Path, keeper: Callable[..., Keeper], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as RANK, in a package that asks for it when it is imported; what modules set themselves is there."""
    site = folder / "site"
    site.mkdir()
    (site / "asking.py").write_text(
        "import os\nrank = os.environ.get('ASKED_RANK')\nos.environ['SET_BY_IT'] = '1'\n"
    )
    bench = Bench(folder, keeper("asking", PYTHONPATH=str(site)))
    text = "import asking, os\nprint(asking.rank, os.environ['SET_BY_IT'])"
    compare(bench, Case("the same", text, "None 1"), caplog)
    compare(bench, Case("another", text, "3 1", variables={"ASKED_RANK": "3"}, starts_cold=True), caplog)
