"""Saves the last finished step of a generation that has failed, before its survivors leave.

When a rank dies, the others wait in a collective or get its error. Their weights and optimizers are those of the last
*boundary*: the end of the newest `step()`. A step is changed into the next one by the optimizer only, and all that
follows it up to `step()`; during that *update* the state is not whole. So this guard marks where an update begins (a
hook on all optimizers of torch) and ends (`step`), and keeps aside what else changes between two boundaries: random
states and buffers (see `rank_state`), and what plain dicts hold.

When the generation fails, the agent says "hold" to a thread that has been waiting for nothing else. It takes the lock
that an update needs, so that none can begin, and says which boundary the state is of; a rank in an update ends it
first. One that is behind a step which another rank has finished is given time to come to it: it has that step's
gradients already, or its collective raises. One worker of a node, whose boundary is the newest, then gets the order to
copy its state to memory. One whose collective has raised waits for that at the end of the guard; one whose collective
never returns can be left where it is, for the copy is the thread's. The agent waits for all this no longer than 2 s.

A process has one guard, for all Checkpointers that take part in training, and keeps all of them at one step or none. So
it keeps no step that a sharded state belongs to, of which no rank has another one's part.

On a GPU a boundary is one for the GPU too: `step()` waits until it has finished the step.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ....codec import Invalid
from ...state.state_dicts import modules_in
from ...steps import progress
from ...steps.drain import give_up
from ...storage.memory.rank_state import Buffers, RankStateFile
from ...storage.memory.slot_memory import RankPlace
from ...wire.channel import Lines
from ...wire.messages import TO_GUARDS, Broken, FromGuard, Guarding, Held, Hold, Keep, Kept, ToGuard, encode
from ..saving.base_saver import BaseSaver, all_savers
from .contents import Boundary
from .saver import Saver

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""A worker whose collective has failed gets "go" from its agent, or its connection ends; this is for neither. In that
time a copy that is being made ends, too."""

_COLLECTIVE = re.compile(
    r"gloo|nccl|process ?group|collective|connection (closed|reset) by peer", re.IGNORECASE
)


class _Guarded:
    """One Checkpointer's parts, and what is kept aside of them."""

    def __init__(self, owner: Saver, place: RankPlace) -> None:
        """Raises OSError."""
        self.owner = owner
        self._state = dict(owner.parts)
        self.modules = modules_in(self._state)
        self._buffers = Buffers(self.modules)
        self._file = RankStateFile(owner.folder, place, self._buffers.size)
        self._dicts: dict[str, dict[str, Any]] = {}

    def finished(self, step: int) -> None:
        """Raises ValueError when the buffers have changed their size."""
        self._file.finished(step, self._buffers)
        self._dicts = {name: dict(part) for name, part in self._state.items() if isinstance(part, dict)}

    def under_way(self) -> None:
        """Raises as `finished`."""
        self._file.under_way(self._buffers)

    def boundary(self) -> Boundary:
        return Boundary(self._dicts, self._buffers.kept(self._file.newest_buffers()))


class JustInTime:
    """See the module's docstring, and `Checkpointer.just_in_time`. Within another one it does nothing."""

    def __init__(self, place: RankPlace, address: str) -> None:
        self._place = place
        self._address = address
        self._savers: tuple[BaseSaver, ...] = ()
        """All that take part; one may be loaded when the guard has begun."""
        self._guarded: dict[Saver, _Guarded] = {}
        self._boundary: int | None = None
        """The newest, as long as the state of this process can be brought back to it."""
        self._update = threading.Lock()
        """Held through an update, and by the thread once the agent has said hold."""
        self._updating = False
        self._holding = False
        self._moved = threading.Event()
        """There is another boundary, or there will be none: the training loop was left."""
        self._left = False
        self._lost = False
        """Something could not be put back: buffers have changed their size, or no rank state can be written."""
        self._go = threading.Event()
        self._ends: list[Callable[[], object]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener = threading.Thread(target=self._listen, name="just-in-time", daemon=True)

    def __enter__(self) -> None:
        global _active
        if _active is not None:
            return
        _active = self
        try:
            self._socket.connect(self._address)
            self._send(Guarding(self._place.generation, self._place.local_rank))
        except OSError as error:
            logger.warning("no save just in time: the agent cannot be reached: reason=%s", error)
            return
        self._ends = [
            progress.on_step(self._finished, stage=progress.Stage.STATE),
            register_optimizer_step_pre_hook(self._begins).remove,
        ]
        self._adopt()
        self._listener.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if _active is not self:
            self._socket.close()
            return
        _active = None
        self._left = True
        self._moved.set()
        if self._ends and error is not None and of_a_collective(error):
            self._end_update(whole=False)
            try:
                self._send(Broken())
                self._go.wait(PATIENCE_S)
            except OSError:
                pass  # the agent has ended, and so will this process
        for end in self._ends:
            end()
        self._ends = []
        with contextlib.suppress(OSError):  # it is connected no more
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone does not
        if self._listener.ident is not None:
            # Tensors may die with it. While Python ends, torch would end the process for that (SIGABRT).
            self._listener.join(PATIENCE_S)
        self._socket.close()

    # ---------------------------------------------------------------- what the training loop runs into

    def _begins(self, *_: object) -> None:
        """An optimizer is about to change the weights."""
        if not self._updating:
            self._update.acquire()
            self._updating = True

    def _finished(self, step: int) -> None:
        """This is a boundary."""
        self._begins()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left it without annotations
            torch.cuda.synchronize()
        self._adopt()
        for one in self._guarded.values():
            one.owner.prove(step)
            self._write_down(partial(one.finished, step))
        self._boundary = step if not self._lost else None
        self._end_update(whole=True)
        self._moved.set()

    def _adopt(self) -> None:
        """Guard all that take part now."""
        before, self._savers = self._savers, all_savers()
        if self._savers == before:
            return
        known, self._guarded = self._guarded, {}
        for saver in self._savers:
            if isinstance(saver, Saver):
                try:
                    self._guarded[saver] = known[saver] if saver in known else self._guard(saver)
                except OSError as error:
                    self._lose(error)
            elif saver not in before:
                logger.warning(
                    "just_in_time() keeps no step that the sharded state in %s belongs to: put all parts into one "
                    "Checkpointer with memory_every=1, and leave the guard out",
                    saver.directory,
                )

    def _guard(self, owner: Saver) -> _Guarded:
        one = _Guarded(owner, self._place)
        write = partial(self._write_down, one.under_way)
        for module in one.modules:
            # On one weight: the last one is usually the first to get its gradient. Whatever the other ranks still need
            # of this one for their step comes after that.
            for weight in [weight for weight in module.parameters() if weight.requires_grad][-1:]:
                hook = weight.register_post_accumulate_grad_hook(lambda _: write())  # type: ignore[no-untyped-call]
                self._ends.append(hook.remove)
        return one

    def _end_update(self, *, whole: bool) -> None:
        if self._updating:
            if not whole:
                self._boundary = None
            self._updating = False
            self._update.release()

    def _write_down(self, write: Callable[[], None]) -> None:
        try:
            write()
        except ValueError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if not self._lost:
            self._lost = True
            logger.warning("no save just in time any more: reason=%s", error)

    # ---------------------------------------------------------------- what the agent runs into

    def _listen(self) -> None:
        lines = Lines(TO_GUARDS)
        try:
            while data := self._socket.recv(4096):
                for message in lines.add(data):
                    self._handle(message)
        except OSError:
            pass  # the agent has ended, or the guard
        except Invalid as error:
            logger.warning("no save just in time any more: reason=%s", error)
        finally:
            self._release()

    def _handle(self, message: ToGuard) -> None:
        if isinstance(message, Hold):
            self._holding = self._holding or self._hold(message, time.monotonic())
            self._send(Held(self._boundary if self._holding else None))
        elif isinstance(message, Keep):
            self._send(Kept(self._copy()))
        else:
            self._release()

    def _hold(self, order: Hold, now: float) -> bool:
        """Whether no update can begin from here on."""
        until, catch_up_until = now + order.within_s, now + order.within_s / 2
        while True:
            self._moved.clear()
            if not self._update.acquire(timeout=max(0.0, until - time.monotonic())):
                return False
            behind = self._boundary is not None and self._boundary < (order.finished or 0)
            left_s = catch_up_until - time.monotonic()
            if not behind or self._left or left_s <= 0:
                return True
            self._update.release()
            self._moved.wait(left_s)

    def _release(self) -> None:
        if self._holding:
            self._holding = False
            self._update.release()
        self._go.set()

    def _copy(self) -> int | None:
        """The boundary whose state is in memory now."""
        step = self._boundary
        if not self._holding or step is None:
            return None
        if self._all_are_guarded(step) and all(self._save(one, step) for one in self._guarded.values()):
            return step
        give_up(step, self._savers)
        return None

    def _all_are_guarded(self, step: int) -> bool:
        for saver in self._savers:
            if not isinstance(saver, Saver) and not saver.is_beyond(step):
                logger.warning(
                    "step %d is not kept: the state in %s is sharded, and no rank has what another one had of it",
                    step,
                    saver.directory,
                )
                return False
        return True

    def _save(self, one: _Guarded, step: int) -> bool:
        try:
            return one.owner.save_just_in_time(step, one.boundary())
        except Exception as error:
            logger.warning("step %d was not kept: reason=%r", step, error)
            return False

    def _send(self, message: FromGuard) -> None:
        self._socket.sendall(encode(message))


_active: JustInTime | None = None
"""The guard of this process."""


def of_a_collective(error: BaseException) -> bool:
    """Whether it is of torch.distributed. gloo's errors are plain RuntimeErrors, which only their text shows."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or (
            isinstance(cause, RuntimeError) and _COLLECTIVE.search(str(cause))
        ):
            return True
        cause = cause.__cause__
    return False
