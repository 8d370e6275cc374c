"""The worker's side of a drain: what it says, what it does with each answer, and that nothing disturbs training."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.worker.errors import SaveFailed
from elastic_agent.worker.steps import drain, progress
from elastic_agent.worker.steps.drain import DRAINED, Checkpointers, Drained
from elastic_agent.worker.steps.progress import poll
from elastic_agent.worker.wire import shared_progress
from elastic_agent.worker.wire.channel import receive, send
from elastic_agent.worker.wire.environment import NAMES
from elastic_agent.worker.wire.messages import FROM_WORKERS, StepAnswer, StepEnded, StepStatus, Verdict
from elastic_agent.worker.wire.shared_progress import SharedProgress

WORD = StepEnded(7, 3, 1, 120, StepStatus.FINISHED)


class Agent:
    """Answers as the test says, and remembers what it was told."""

    def __init__(self, path: Path, answer: Callable[[StepEnded], Verdict | None]) -> None:
        self.words: list[StepEnded] = []
        self.leaves = False
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                word = receive(connection, FROM_WORKERS, 5.0)
                self.words.append(word)
                answer = self._answer(word)
                if answer is not None:
                    send(connection, StepAnswer(answer, self.leaves), 5.0)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class DrainSaver:
    """Notes what it is asked to keep."""

    def __init__(
        self, kept: list[tuple[str, int]], *, saves_alone: bool = True, refused: bool | Exception = False
    ) -> None:
        self.saves_alone = saves_alone
        self.has_room = True
        self.copies: frozenset[tuple[int, int]] | None = frozenset({(7, 100), (7, 110)})
        self._kept = kept
        self._refused = refused

    def save_last_step(self, step: int, *, leaves: bool) -> bool:
        self._kept.append(("leaving" if leaves else "together", step))
        if isinstance(self._refused, Exception):
            raise self._refused
        return not self._refused

    def order_write(self, step: int) -> None:
        self._kept.append(("to disk", step))

    def save_last_step_alone(self, step: int) -> bool:
        self._kept.append(("alone", step))
        return self.has_room

    def give_up(self, step: int) -> None:
        self._kept.append(("given up", step))

    def versions(self, step: int) -> frozenset[tuple[int, int]] | None:
        return self.copies

    def go_back(self, step: int, version: tuple[int, int]) -> None:
        self._kept.append(("back to", version[1]))


def taking_part(**savers: DrainSaver) -> Checkpointers:
    """In the place of this process's."""
    checkpointers = Checkpointers()
    for name, saver in savers.items():
        checkpointers.add(name, saver)
    return checkpointers


class Scene:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = SharedProgress.make(7)
        self.path = tmp_path / "drain"
        self.answer: Verdict | None = Verdict.GO_ON
        self.agent = Agent(self.path, lambda word: self.answer)
        self.kept: list[tuple[str, int]] = []
        for name, value in {
            NAMES["page"]: self.page.path,
            NAMES["socket"]: str(self.path),
            "ELASTIC_AGENT_GENERATION": "7",
            "RANK": "3",
            "ELASTIC_AGENT_LOCAL_RANK": "1",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(progress, "_words", None)
        monkeypatch.setattr(progress, "_listeners", ())
        monkeypatch.setattr(progress, "checkpointers", taking_part(here=DrainSaver(self.kept)))
        monkeypatch.setattr(drain, "_left_to_script", False)
        monkeypatch.setattr(drain, "_leave_at_exit", lambda: None)  # this process goes on

    def announce(self) -> None:
        self.page.words[shared_progress.PENDING] = 1

    @property
    def reported(self) -> list[tuple[StepStatus, int]]:
        return [(word.status, word.step) for word in self.agent.words]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    scene = Scene(tmp_path, monkeypatch)
    yield scene
    scene.agent.close()
    scene.page.close()
    for number, handler in before.items():  # a process that ends at its last step ignores them
        signal.signal(number, handler)


def test_a_step_that_is_not_the_last_one_goes_on(scene: Scene) -> None:
    scene.announce()
    progress.step(120)
    assert scene.agent.words == [WORD]
    assert scene.kept == []


@pytest.mark.parametrize(("refused", "raised"), [(True, Drained), (SaveFailed("the tenth time"), SaveFailed)])
def test_where_one_last_save_was_refused_all_go_back_and_none_is_said_to_be_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, refused: bool | Exception, raised: type[BaseException]
) -> None:
    both = taking_part(kept=DrainSaver(scene.kept), refused=DrainSaver(scene.kept, refused=refused))
    monkeypatch.setattr(progress, "checkpointers", both)
    scene.announce()
    scene.answer = Verdict.END
    with pytest.raises(raised):
        progress.step(120)
    assert scene.kept == [("together", 120)] * 2 + [("given up", 120)] * 2 + [("back to", 110)] * 2
    assert scene.reported == [(StepStatus.FINISHED, 120)]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [(Verdict.END, [("together", 120), ("to disk", 120)]), (Verdict.END_ALONE, [("alone", 120)])],
)
def test_the_last_step_is_kept_and_then_said_and_then_ends_the_process(
    scene: Scene, answer: Verdict, kept: list[tuple[str, int]]
) -> None:
    scene.announce()
    scene.answer = answer
    with pytest.raises(Drained) as ended:
        progress.step(120)
    assert (ended.value.code, ended.value.step) == (DRAINED, 120)
    assert not isinstance(ended.value, Exception), "`except Exception` must not swallow it"
    assert scene.kept == kept
    assert scene.reported == [(StepStatus.FINISHED, 120), (StepStatus.KEPT, 120)]


def test_the_state_is_kept_so_that_it_outlives_a_node_that_leaves(scene: Scene) -> None:
    scene.announce()
    scene.answer = Verdict.END
    scene.agent.leaves = True
    with pytest.raises(Drained):
        progress.step(120)
    assert scene.kept == [("leaving", 120), ("to disk", 120)]


def test_a_state_that_could_not_be_kept_is_not_said_to_be(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int, *, leaves: bool) -> None:
        raise OSError("no space left")

    (here,) = progress.checkpointers.all()
    monkeypatch.setattr(here, "save_last_step", fail)
    scene.announce()
    scene.answer = Verdict.END
    with pytest.raises(OSError, match="no space left"):
        progress.step(120)
    assert scene.reported == [(StepStatus.FINISHED, 120)]


def test_all_that_take_part_are_kept_at_one_step(scene: Scene) -> None:
    (here,) = progress.checkpointers.all()
    progress.checkpointers.add("there", DrainSaver(scene.kept))
    progress.checkpointers.add("here", here)
    scene.announce()
    scene.answer = Verdict.END
    with pytest.raises(Drained):
        progress.step(120)
    assert scene.kept == [("together", 120)] * 2 + [("to disk", 120)] * 2
    assert scene.reported == [(StepStatus.FINISHED, 120), (StepStatus.KEPT, 120)], "when all are"


@pytest.mark.parametrize(
    ("copies", "back_to"),
    [
        pytest.param(frozenset({(7, 100), (7, 119)}), 100, id="a common copy"),
        pytest.param(frozenset(), -1, id="no copy at all"),
        pytest.param(None, 110, id="no part in this step"),
    ],
)
def test_where_one_has_no_room_all_go_back_to_what_all_have(
    scene: Scene, copies: frozenset[tuple[int, int]] | None, back_to: int
) -> None:
    full = DrainSaver(scene.kept)
    full.has_room, full.copies = False, copies
    progress.checkpointers.add("full", full)
    scene.announce()
    scene.answer = Verdict.END_ALONE
    with pytest.raises(Drained):
        progress.step(120)
    assert scene.kept == [("alone", 120)] * 2 + [("given up", 120)] * 2 + [("back to", back_to)] * 2
    assert scene.reported == [(StepStatus.FINISHED, 120)], "it is not said to be kept"


def test_between_steps_a_process_that_can_keep_its_state_alone_says_so(scene: Scene) -> None:
    progress.step(120)
    scene.announce()
    poll()
    assert scene.reported == [(StepStatus.PAUSING, 120)]


@pytest.mark.parametrize("savers", [{"here": True, "there": False}, {}], ids=["one part", "by the script"])
def test_what_may_not_be_kept_alone_waits_for_all_ranks_at_the_next_step(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, savers: dict[str, bool]
) -> None:
    some = {name: DrainSaver(scene.kept, saves_alone=alone) for name, alone in savers.items()}
    monkeypatch.setattr(progress, "checkpointers", taking_part(**some))
    progress.step(120)
    scene.announce()
    poll()
    assert scene.reported == [(StepStatus.FINISHED, 120)]


@pytest.mark.parametrize("trouble", ["no answer", "no agent", "no variable"])
def test_without_an_answer_training_goes_on(
    scene: Scene, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.announce()
    if trouble == "no answer":
        scene.answer = None
    elif trouble == "no agent":
        monkeypatch.setenv(NAMES["socket"], "/nowhere")
    else:
        monkeypatch.delenv(NAMES["socket"])
    progress.step(120)
    assert scene.kept == []


def test_an_agent_that_is_silent_is_not_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "ANSWER_S", 0.1)
    over = threading.Event()

    def say_nothing(_: StepEnded) -> None:
        over.wait(20)

    scene.agent._answer = say_nothing
    scene.announce()
    progress.step(120)
    over.set()


def test_a_script_that_keeps_its_state_by_itself_does_so_once(scene: Scene) -> None:
    progress.checkpointers.clear()
    scene.announce()
    scene.answer = Verdict.END
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(120))
    try:
        progress.step(120)
        progress.step(121)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [120]
    assert scene.reported == [(StepStatus.FINISHED, 120)]


@pytest.mark.parametrize(
    ("handler", "code"),
    [
        ("raise OSError('disk full')", drain.FAILED),
        ("raise KeyboardInterrupt", drain.FAILED),
        ("sys.excepthook = print; raise OSError", drain.FAILED),
        ("raise", DRAINED),
        ("pass", DRAINED),
    ],
)
def test_an_error_in_the_scripts_own_save_is_seen_in_the_exit_code(handler: str, code: int) -> None:
    """What it registers for its end meanwhile is done once."""
    program = (
        "import atexit, sys\n"
        "from elastic_agent.worker.steps import torch_workarounds\n"
        "from elastic_agent.worker.steps import drain\n"
        "torch_workarounds.leave_when_failed()\n"
        "sys.last_value = ValueError('shown by a console of the script')\n"
        "atexit.register(print, 'before')\n"
        "try:\n    drain._end(7, (), None, alone=False, leaves=True)\n"
        "except drain.Drained:\n"
        "    atexit.register(print, 'in the handler')\n"
        f"    {handler}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["in the handler", "before"]
    assert ended.stdout.count("in the handler") == 1


def test_a_drained_process_cleans_up_and_leaves_at_once(tmp_path: Path) -> None:
    """What it has registered for its end is done; what Python takes apart after that is not waited for."""
    program = (
        "import atexit, sys\n"
        "from elastic_agent.worker.steps import drain\n"
        "class Slow:\n    def __del__(self): print('taken apart')\n"
        "slow = Slow()\n"
        "atexit.register(print, 'at exit')\n"
        "answer = drain.StepAnswer(drain.Verdict.GO_ON, leaves=True)\n"
        "drain._StepReporter = type('Reporter', (), {'report': lambda *_: answer})\n"
        "try:\n    drain._end(7, (), drain._StepReporter(), alone=False, leaves=True)\n"
        "finally:\n    print('finally', end=' ')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (DRAINED, "finally at exit\n", "")


def test_a_thread_of_the_script_that_holds_up_the_end_is_named_and_not_waited_for(tmp_path: Path) -> None:
    """Idle threads of a pool end by themselves when Python asks them to; one at work does not."""
    program = (
        "import atexit, concurrent.futures, threading, time\n"
        "from elastic_agent.worker.steps import drain\n"
        "drain.THREADS_S = 0.2\n"
        "idle = concurrent.futures.ThreadPoolExecutor(thread_name_prefix='idle')\n"
        "idle.submit(int).result()\n"
        "busy = concurrent.futures.ThreadPoolExecutor(thread_name_prefix='busy')\n"
        "busy.submit(time.sleep, 600)\n"
        "threading.Thread(target=time.sleep, args=[600], name='uploader').start()\n"
        "threading.Thread(target=time.sleep, args=[600], name='unnoticed', daemon=True).start()\n"
        "atexit.register(print, 'at exit')\n"
        "reporter = type('Reporter', (), {'report': lambda *_: drain.StepAnswer(drain.Verdict.GO_ON, True)})()\n"
        "drain._end(7, (), reporter, alone=False, leaves=True)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (DRAINED, "at exit\n")
    assert "no daemons: busy_0, uploader; all other workers wait" in ended.stderr
