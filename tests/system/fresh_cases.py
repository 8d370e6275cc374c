"""What scripts can see of the process that runs them: one small script for each thing (`test_fresh` runs them)."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent

SCRIPT = "train.py"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    files: Mapping[str, str]
    target: str = SCRIPT
    args: tuple[str, ...] = ()
    kind: str = "script"
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """None: not set."""
    links: Mapping[str, str] = field(default_factory=dict)
    signal: signal.Signals | None = None
    """Sent when the script has said `ready`."""
    starts_cold: bool = False
    proof: str = ""
    """What has to be in the output, so that equal outputs mean something."""


def script(name: str, code: str, proof: str = "", **others: object) -> Case:
    files = {SCRIPT: dedent(code), **others.pop("files", {})}  # type: ignore[dict-item]
    return Case(name, files, proof=proof, **others)  # type: ignore[arg-type]


def module(name: str, target: str, files: Mapping[str, str], proof: str = "", **others: object) -> Case:
    texts = {path: dedent(text) for path, text in files.items()}
    return Case(name, texts, target, kind="module", proof=proof, **others)  # type: ignore[arg-type]


IDENTITY = (
    script(
        "main module",
        """
        '''A docstring.'''
        print({name: repr(value) for name, value in globals().items()})
        import __main__, sys
        print(__main__.__dict__ is globals(), sys.modules["__main__"] is __main__, type(__builtins__))
        number: int = 1
        print(__annotations__)
        """,
        "A docstring.",
    ),
    script(
        "arguments, path and flags",
        """
        import sys
        print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.executable, sys.prefix, sys.warnoptions)
        print(sys._xoptions, sys.dont_write_bytecode, sys.hexversion, sys.getswitchinterval())
        print(sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__, sys.displayhook)
        print([name for name in dir(sys)])
        """,
        "--lr",
        args=("--lr", "0.1", "a b", ""),
    ),
    script("modules at the start", "import sys\nprint(sorted(sys.modules))", "'os'"),
    script(
        "stack",
        """
        import sys, traceback, inspect
        traceback.print_stack()
        print(sys._getframe().f_back, len(inspect.stack()), sys.exc_info())
        """,
        "None 1",
    ),
    script(
        "what proc tells",
        """
        import os
        def words(name): return open(f"/proc/self/{name}", errors="surrogateescape").read().split(chr(0))
        print(ascii([words("cmdline"), sorted(words("environ")), words("comm")]))
        print(os.path.basename(os.readlink("/proc/self/exe")), os.getpgrp() == os.getsid(0) == os.getpid())
        """,
        "A_MARK=of this worker",
        args=("--epochs", "3"),
        environment={"A_MARK": "of this worker", "ODD": "\u00e9\udcff"},
    ),
    script(
        "environment",
        """
        import ctypes, os
        libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p
        print(ascii([sorted(os.environ.items()), sorted(os.environb.items())]))
        print(libc.getenv(b"A_MARK"), libc.getenv(b"OMP_NUM_THREADS"), libc.getenv(b"NOT_THERE"))
        os.environ["NEW"] = "1"; print(libc.getenv(b"NEW")); os.system("echo $NEW $A_MARK")
        import tempfile, time; print(tempfile.gettempdir(), time.tzname, os.getcwd(), oct(os.umask(0)))
        """,
        "of this worker",
        environment={"A_MARK": "of this worker", "TZ": "Asia/Kolkata", "LEFT": None},
    ),
    script(
        "descriptors and signals",
        """
        import os, signal
        print(sorted(os.listdir("/proc/self/fd"), key=int))
        print([(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.set_wakeup_fd(-1))
        shown = ("SigP", "SigB", "SigI", "SigC", "Shd", "Threads")  # SigQ counts those of all the user's processes
        print([line for line in open("/proc/self/status") if line.startswith(shown)])
        """,
        "default_int_handler",
    ),
    script(
        "streams",
        """
        import os, sys
        for stream in sys.stdin, sys.stdout, sys.stderr:
            for layer in stream, stream.buffer, getattr(stream.buffer, "raw", None):
                print(layer, [(name, getattr(layer, name, "-")) for name in (
                    "name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closefd")])
            print(stream.isatty(), stream.seekable(), stream.fileno())
            print(stream is getattr(sys, "__" + stream.name[1:-1] + "__"))
        print(repr(sys.stdin.read()), os.readlink("/proc/self/fd/0"))
        print("no newline, and yet there", end=""); print("error, too", end="", file=sys.stderr)
        os.kill(os.getpid(), 9)
        """,
        "and yet there",
    ),
    script(
        "C streams",
        """
        import ctypes, os
        libc = ctypes.CDLL(None)
        libc.printf(b"from C "); os.write(1, b"from the kernel "); print("from Python"); libc.puts(b"again")
        os.kill(os.getpid(), 9)
        """,
        "from C from the kernel from Python",
    ),
    script(
        "collector and limits",
        """
        import gc, resource, sys, threading, os
        print(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks, sys.getrecursionlimit())
        print([resource.getrlimit(number) for number in range(15)], os.sched_getaffinity(0), os.nice(0))
        class Cycle:
            def __init__(self): self.me = self
            def __del__(self): print("collected")
        Cycle(); gc.collect(); print("done")
        """,
        "collected\ndone",
    ),
)

ENDS = (
    script("nothing", ""),
    script(
        "exception",
        """
        def f(n):
            return 1 / n
        try:
            f(0)
        except ZeroDivisionError as error:
            raise ValueError("x") from error
        """,
        "Traceback",
    ),
    script("exit without a code", "import sys\nsys.exit()"),
    script("exit with a code", "raise SystemExit(7)"),
    script("exit with words", "import sys\nsys.exit('no data')", "no data"),
    script("exit with a large code and an object", "import sys\nsys.exit([300])", "[300]"),
    script("interrupt raised", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    script(
        "interrupt sent",
        "import time\nprint('ready')\ntime.sleep(60)",
        "KeyboardInterrupt",
        signal=signal.SIGINT,
    ),
    script("termination", "import time\nprint('ready')\ntime.sleep(60)", "ready", signal=signal.SIGTERM),
    script(
        "handler",
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
        print("ready"); time.sleep(60)
        """,
        "asked to end",
        signal=signal.SIGTERM,
    ),
    script(
        "no last words", "import os, atexit\natexit.register(print, 'never')\nprint('x')\nos._exit(9)", "x"
    ),
    script(
        "abort",
        "import os\ndef f(): os.abort()\nf()",
        "Fatal Python error",
        environment={"PYTHONFAULTHANDLER": "1"},
    ),
    script(
        "crash",
        "import ctypes\nctypes.string_at(0)",
        "Segmentation fault",
        environment={"PYTHONFAULTHANDLER": "1"},
    ),
    script(
        "broken pipe",
        "import os, sys, signal\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
        "BrokenPipeError",
    ),
    script("syntax error", "x = 1\nif x\n    print(x)\n", "SyntaxError"),
    script("indentation", "def f():\nprint(1)\n", "IndentationError"),
    script("not UTF-8", "print('\udcff')\n", "SyntaxError"),
    script("own encoding", "# coding: latin-1\nprint(ascii('\udce9'))\n", "xe9"),
    script("nested errors", "try:\n    open('nowhere')\nexcept OSError:\n    undefined\n", "During handling"),
    script(
        "excepthook",
        """
        import sys
        def hook(kind, error, traceback):
            print("mine", kind, error, traceback.tb_next, traceback.tb_frame.f_code.co_name, sys.last_value is error)
        sys.excepthook = hook
        raise OSError(2, "x")
        """,
        "mine",
    ),
    script(
        "excepthook that fails",
        "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise OSError",
        "Error in sys.excepthook",
    ),
    script("excepthook that exits", "import sys\nsys.excepthook = lambda *_: sys.exit(5)\nraise OSError"),
    script(
        "at exit",
        """
        import atexit, logging, threading, time, weakref, sys
        class Kept: pass
        kept = Kept(); weakref.finalize(kept, print, "finalized")
        class Last:
            def __del__(self): print("deleted")
        last = Last()
        atexit.register(lambda: print("registered", [name for name in globals() if name.startswith("__f")]))
        def later():
            time.sleep(0.05); print("thread", threading.main_thread().is_alive())
        threading.Thread(target=later).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        print("end", threading.active_count())
        """,
        "thread",
    ),
    script("failure at exit", "import atexit\natexit.register(lambda: 1 / 0)\n", "ZeroDivisionError"),
    script(
        "exit code of a failed flush",
        "import os, sys\nsys.stdout = open(1, 'w')\nos.close(1)\nprint('x')\n",
        "Bad file descriptor",
    ),
    script(
        "what C writes at exit",
        """
        import ctypes, sys
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
        libc.fputs(b"left in a buffer of C\\n", stream)
        class Last:
            def __del__(self): libc.fputs(b"written when Python was at its end\\n", stream)
        last = Last()
        sys.exit(7)
        """,
        "written when Python was at its end",
    ),
    script(
        "thread that fails",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()",
        "Exception in thread T",
    ),
    script("unraisable", "class A:\n    def __del__(self): 1 / 0\nA()\n", "Exception ignored"),
)

NAMES = (
    Case("missing", {}, "nowhere.py", starts_cold=True, proof="No such file"),
    Case(
        "folder",
        {"job/__main__.py": "import sys; print(sys.argv, sys.path[0], __file__, __spec__)"},
        "job",
        starts_cold=True,
        proof="job",
    ),
    Case(
        "spaces",
        {"my job/the train.py": "import sys; print(sys.argv, sys.path[0], __file__)"},
        "my job/the train.py",
        proof="the train.py",
    ),
    Case(
        "dots",
        {"job/train.py": "import sys; print(sys.argv, sys.path[0], __file__)"},
        "./job/../job/train.py",
        proof="/job/../job/",
    ),
    Case(
        "link",
        {"real/train.py": "import sys, x; print(sys.argv, sys.path[0], __file__)", "real/x.py": ""},
        "link.py",
        links={"link.py": "real/train.py"},
        proof="link.py",
    ),
    Case("no ending", {"train": "print(__file__, __loader__.get_filename())"}, "train", proof="train"),
)

MODULES = (
    module(
        "module",
        "job",
        {
            "job.py": """
            import sys
            print(__name__, __spec__.name, __file__, __package__, sys.argv, sys.path, sys.orig_argv)
            print(sorted(sys.modules), list(globals()))
            """
        },
        "'--lr'",
        args=("--lr", "1"),
    ),
    module(
        "package",
        "job",
        {
            "job/__init__.py": "import sys\nprint('package', sys.argv)",
            "job/__main__.py": "from .part import value\nprint(__name__, __package__, value)",
            "job/part.py": "value = 3",
        },
        "job 3",
    ),
    module(
        "module in a package",
        "job.train",
        {"job/__init__.py": "from . import train", "job/train.py": "print(__name__)"},
        "RuntimeWarning",
    ),
    module("missing module", "nowhere.train", {}, "No module named"),
    module("package without main", "job", {"job/__init__.py": ""}, "cannot be directly executed"),
    module("module that fails", "job", {"job.py": "def f(): raise ValueError('x')\nf()"}, "ValueError"),
    module(
        "package that fails",
        "job.train",
        {"job/__init__.py": "1 / 0", "job/train.py": ""},
        "ZeroDivisionError",
    ),
    module("module that exits", "job", {"job.py": "import sys; sys.exit('over')"}, "over"),
    module(
        "module interrupted",
        "job",
        {"job.py": "import time\nprint('ready')\ntime.sleep(60)"},
        "KeyboardInterrupt",
        signal=signal.SIGINT,
    ),
    module("module with a syntax error", "job", {"job.py": "x ="}, "SyntaxError"),
    module(
        "module with a hook",
        "job",
        {
            "job.py": """
            import sys
            def hook(kind, error, traceback):
                print('mine', traceback.tb_frame.f_code.co_name, sys.last_traceback is traceback)
            sys.excepthook = hook
            1 / 0
            """
        },
        "mine",
    ),
)

IMPORTS = (
    script(
        "nothing more than asked for",
        """
        import sys
        def new(known=set(sys.modules)):
            found = sorted(set(sys.modules) - known); known.update(found); return found
        import json; print(new())
        import concurrent.futures; print(new(), hasattr(concurrent.futures, "thread"))
        import logging; print(new(), hasattr(logging, "handlers"))
        import logging.handlers; print(new(), hasattr(logging, "handlers"))
        import multiprocessing; print(new(), multiprocessing.get_all_start_methods())
        import asyncio; print(new())
        import numpy; print(new(), "torch" in sys.modules)
        """,
        "numpy.linalg",
    ),
    script(
        "search and loading",
        """
        import importlib, importlib.util, importlib.metadata, pkgutil, sys
        for name in "json", "json.decoder", "numpy", "torch", "nowhere", "math", "_json":
            spec = importlib.util.find_spec(name)
            print(name, spec, spec and (type(spec.loader), spec.origin, spec.cached, spec.submodule_search_locations))
            print(name in sys.modules)
        """,
        "torch/__init__.py",
    ),
    script(
        "again",
        """
        import importlib, sys, pkgutil, importlib.metadata
        def late():
            import json, json.decoder as d; return json, d
        first, decoder = late()
        print(importlib.reload(first) is first, first.__spec__, first.__loader__)
        del sys.modules["json"]
        import json; print(json is first, sys.modules["json.decoder"] is decoder, decoder.__spec__)
        print(importlib.metadata.version("torch"), len(list(pkgutil.iter_modules())))
        print(pkgutil.get_data("json", "tool.py")[:20])
        import math, select; print(math.__spec__, select, importlib.import_module("_struct").__spec__)
        from importlib import resources; print(resources.files("json"))
        """,
        "False True",
    ),
    script(
        "own module of a known name",
        "import numpy, logging\nprint(numpy.__file__)",
        "work/numpy.py",
        files={"numpy.py": "print('my own numpy')"},
        starts_cold=True,
    ),
    script(
        "own module of another name",
        "import helper\nprint(helper.__file__)",
        "helper.py",
        files={"helper.py": "import json", "data/x.txt": "", "json.txt": ""},
    ),
    script(
        "own folder put in front",
        """
        import sys
        sys.path.insert(0, "lib")
        import numpy
        print(numpy.__file__, numpy.__spec__, "ctypes" in sys.modules)
        """,
        "lib/numpy/__init__.py",
        files={"lib/numpy/__init__.py": "print('my own numpy')"},
    ),
    script(
        "warnings",
        """
        import sys, warnings
        print(warnings.filters, warnings.showwarning.__module__, warnings.defaultaction)
        warnings.warn("plain"); warnings.warn("deprecated", DeprecationWarning); warnings.warn("too high", stacklevel=2)
        def f(): warnings.warn("from below", stacklevel=3)
        def g(): f()
        g(); g()
        import logging; logging.captureWarnings(True); warnings.warn("logged"); logging.error("x %s", 1)
        """,
        "sys:1: UserWarning: too high",
    ),
    script(
        "what a module leaves open at the end",
        "import torch, helper\nprint(helper.left)",
        "socket.socket",
        files={"helper.py": "import socket\nleft = socket.socket()"},
    ),
    script(
        "warnings as errors",
        "import warnings\nwarnings.warn('x')",
        "UserWarning",
        environment={"PYTHONWARNINGS": "error"},
        starts_cold=True,
    ),
    script(
        "hash seed",
        "print(hash('a'), {'x', 'y', 'z'})",
        "x",
        environment={"PYTHONHASHSEED": "3"},
        starts_cold=True,
    ),
    script(
        "optimized",
        "assert False\nprint(__debug__)",
        "False",
        environment={"PYTHONOPTIMIZE": "1"},
        starts_cold=True,
    ),
    script(
        "language",
        "import locale\nprint(locale.getlocale(), open('x', 'w').encoding)",
        "x",
        environment={"LC_ALL": "C"},
        starts_cold=True,
    ),
)

PROCESSES = (
    script(
        "pickles of main",
        """
        import inspect, pickle
        class Model:
            def __init__(self, x): self.x = x
        def loss(model):
            return model.x  # a comment to find
        print(pickle.dumps(Model(1)), pickle.loads(pickle.dumps(Model(2))).x, pickle.loads(pickle.dumps(loss)) is loss)
        print(inspect.getsource(loss), inspect.getmodule(loss), inspect.getfile(Model), Model.__module__)
        """,
        "a comment to find",
    ),
    script(
        "multiprocessing",
        """
        import multiprocessing as mp, os, sys
        class Item:
            def __init__(self, x): self.x = x
        def work(item):
            return item.x * 2, __name__, mp.current_process().name, sys.argv[1:], os.environ["A_MARK"]
        if __name__ == "__main__":
            for method in "fork", "spawn", "forkserver":
                context = mp.get_context(method)
                with context.Pool(1) as pool:
                    print(method, pool.map(work, [Item(1), Item(2)]))
                process = context.Process(target=sys.exit, args=(3,), name="P"); process.start(); process.join()
                print(process.exitcode, mp.active_children(), mp.current_process().name, mp.parent_process())
                queue = context.Queue(); queue.put(1); print(queue.get())
        """,
        "forkserver [(2, '__mp_main__'",
        args=("x",),
        environment={"A_MARK": "of this worker"},
    ),
    script(
        "forks and programs",
        """
        import os, subprocess, sys, random, threading
        code = "import sys; print(sys.argv, 'torch' in sys.modules)"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True))
        r, w = os.pipe()
        if os.fork() == 0:
            import json; os.write(w, json.dumps(["child", len(threading.enumerate())]).encode()); sys.exit(4)
        print(os.read(r, 99), os.wait()[1])
        os.execv(sys.executable, [sys.executable, "-c", "import os; print('executed', os.environ['A_MARK'])"])
        """,
        "executed of this worker",
        environment={"A_MARK": "of this worker"},
    ),
    script(
        "threads and loops",
        """
        import asyncio, concurrent.futures, os, signal, sys, threading, time
        main = threading.main_thread()
        print(main is threading.current_thread(), [thread.name for thread in threading.enumerate()])
        print(main.native_id == os.getpid() == threading.get_native_id())
        with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(abs, [-1, -2])))
        async def wait(): await asyncio.sleep(0.01); return asyncio.get_running_loop().get_debug()
        print(asyncio.run(wait()))
        def ring(*_): raise TimeoutError("rung")
        signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.02)
        try: time.sleep(60)
        except TimeoutError as error: print(error)
        import faulthandler; print(faulthandler.is_enabled()); faulthandler.dump_traceback(sys.stderr)
        """,
        "rung",
    ),
    script(
        "logging",
        """
        import logging, time
        logging.basicConfig(format="%(levelname)s %(name)s %(module)s %(lineno)d %(funcName)s %(message)s")
        logging.getLogger("a").warning("x"); record = logging.makeLogRecord({})
        print(record.relativeCreated < 2000, record.processName, record.threadName, logging.root.handlers)
        print(sorted(logging.root.manager.loggerDict))
        """,
        "WARNING a train 4 <module>",
    ),
    script(
        "chosen seeds",
        "import random, numpy\nrandom.seed(1); numpy.random.seed(1)\nprint(random.random(), numpy.random.rand())",
        "0.13",
    ),
)

TORCH = (
    script(
        "training",
        """
        import json, os, shutil, sys, warnings
        before = dict(os.environ)
        import torch
        print(sorted(sys.modules), warnings.filters, len(os.listdir("/proc/self/task")))
        print(torch.get_num_threads(), torch.get_num_interop_threads())
        print({name: value for name, value in os.environ.items() if before.get(name) != value})
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.full((4,), float(i)), torch.utils.data.get_worker_info().id
        if __name__ == "__main__":
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
            from elastic_agent.worker import Checkpointer, step
            checkpoints = Checkpointer("runs", {"model": model, "optimizer": optimizer})
            step(checkpoints.load() + 1); checkpoints.save(1); print(checkpoints.load())
            # A whole module, by its class: whether pickles work in a fork is the question, and the file is our own.
            torch.save(model.module, "model.pt"); print(type(torch.load("model.pt", weights_only=False)))
            os.remove("model.pt"); shutil.rmtree("runs")  # there is a time in them
            print(torch.multiprocessing.spawn, torch.optim, hasattr(torch, "_dynamo"))
            print(sorted(sys.modules), len(os.listdir("/proc/self/task")))
            dist.destroy_process_group()
        """,
        "<function spawn at",
        environment={"OMP_NUM_THREADS": None, "OPENBLAS_NUM_THREADS": None},
    ),
    script(
        "settings by the script",
        """
        import os
        os.environ["OMP_NUM_THREADS"] = "3"
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
        os.environ["TORCH_LOGS"] = "+torch.distributed,bytecode"
        del os.environ["OPENBLAS_NUM_THREADS"]
        import warnings; warnings.simplefilter("ignore")
        def imports_late():
            import torch, torch.distributed as dist, logging
            print(torch.get_num_threads(), dist.get_debug_level(), len(os.listdir("/proc/self/task")))
            loggers = sorted(logging.root.manager.loggerDict.items())
            print({name: (logger.level, logger.handlers) for name, logger in loggers
                   if isinstance(logger, logging.Logger) and name.startswith("torch")})
            print([(entry[0], entry[2], entry[4]) for entry in warnings.filters])
        imports_late()
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main(): raise RuntimeError("recorded")
        main()
        """,
        "DebugLevel.DETAIL",
        environment={"TORCHELASTIC_ERROR_FILE": "error.json"},
    ),
)

LIGHT = (*IDENTITY, *ENDS, *NAMES, *MODULES, *PROCESSES)
"""Run beside a cache without torch, which lets them end sooner."""
CASES = (*LIGHT, *IMPORTS, *TORCH)
