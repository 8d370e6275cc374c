"""Checkpoints that all ranks take and load together, written by rank 0.

`Checkpointer` keeps four promises. All ranks of a world continue from the same step, also when only one node has
the files. A step that `save` reported as saved survives a power cut (how: see `files`). A process that stood still
while others took its place changes none of their checkpoints (how: see `permit`). A run that was killed and restarted
with the same world size ends with the very bits of a run that was not.

It is for state that is the same on every rank, as in data-parallel training: rank 0's model, optimizer, scheduler
and sampler position are what is saved. Only the random state is kept per rank. Nothing loaded is ever code: files
are opened with `weights_only=True`, and a state that could not be opened so is refused when it is saved.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import operator
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from . import errors, progress, rng
from .collectives import Group, current_group
from .errors import (
    CheckpointError,
    CheckpointMismatch,
    NotPlainData,
    NoUsableCheckpoint,
    SaveFailed,
    StepNotGrowing,
    Unconfirmed,
)
from .files import CheckpointFiles, Manifest, VerifiedCheckpoint, digest
from .permit import Permit

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 500
_CALL = struct.Struct("!q")  # what a rank brings to save(): the step, followed by the rank's random state


class Stateful(Protocol):
    """Anything whose state can be taken out and put back: modules, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Checkpointer:
    """Saves and loads the named parts of `state` in `directory`, on all ranks together.

        checkpoints = Checkpointer("runs/x", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        start = checkpoints.load()                # 0 in a new directory
        for step in range(start, total_steps):
            train_one()
            if (step + 1) % 100 == 0:
                checkpoints.save(step + 1)        # `step + 1` steps are done

    state: by name, objects with `state_dict` and `load_state_dict` (a DDP model is unwrapped), or plain dicts,
        which are updated in place. Everything in them must be tensors and plain Python data. Parts are loaded in
        the order given here.
    keep: how many good checkpoints to retain, at least 1; with 1 a bit flip on disk loses everything.
    max_failed_saves: a full or read-only disk does not end training: `save` warns and returns False, until this
        many saves in a row have failed. 1 means raise at the first. Saves that fail because the rendezvous store is
        away do not count: how long that may last is for the agent to judge.

    The directory may be shared by all nodes or local to each; only rank 0 writes to it. After `load`, tensors
    reach the parts' `load_state_dict` on the CPU: modules and optimizers copy them to where theirs are, and
    optimizers keep the tensors that belong on the CPU there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: Mapping[str, Stateful | dict[str, Any]],
        *,
        keep: int = 2,
        max_failed_saves: int = 10,
    ) -> None:
        if max_failed_saves < 1:
            raise ValueError(f"max_failed_saves is {max_failed_saves}, expected at least 1")
        self._files = CheckpointFiles(directory, keep=keep)
        self._state = dict(state)
        self._max_failed_saves = max_failed_saves
        self._failed_saves = 0
        # Steps up to this one are not saved again; None until load() or save() has found out.
        self._floor: int | None = None

    def load(self) -> int:
        """Load the newest checkpoint that any rank has whole; returns the number of steps it holds.

        Returns 0, and changes nothing, when no rank has any checkpoint. Every rank must call it, and every rank
        returns the same. A checkpoint that does not verify is named in a warning and the next older one tried.
        With another world size than at the time of saving the random states are left as they are, with a warning.

        Raises NoUsableCheckpoint when checkpoints exist and none verifies (delete them to start again from step 0);
        CheckpointMismatch when the checkpoint does not fit `state` (some of it may have been changed by then);
        CheckpointError when it broke on its way from the rank that has it.
        """
        progress.loading()
        group = current_group()
        started_s = time.monotonic()
        step = 0
        try:
            with contextlib.ExitStack() as stack:
                mine, reasons = self._look(started_s)
                if mine is not None:
                    stack.enter_context(mine.stream)
                offer = Offer(mine.manifest if mine else None, reasons)
                offers = [Offer.from_json(raw) for raw in group.gather(offer.to_json())]
                owner = choose_owner(offers)
                if owner is None:
                    self._floor = -1
                    progress.checkpoint_load(0, "none", time.monotonic() - started_s)
                    return 0
                step = owner.manifest.step
                self._load_from(group, owner, offers, mine)
        except CheckpointError:
            progress.checkpoint_load(step, "error", time.monotonic() - started_s)
            raise
        # The step just loaded may be saved again: where the files came from another node this is its second copy.
        self._floor = step - 1
        progress.checkpoint_load(step, "ok", time.monotonic() - started_s)
        return step

    def save(self, step: int) -> bool:
        """Save the state after `step` finished steps; True when it is durable. Every rank must call it.

        No rank returns before rank 0 is done, and all return or raise the same. False means that the disk refused,
        or that nobody could confirm this generation, that a warning said so, and that training may go on with the
        older checkpoints intact.

        Raises Fenced when this generation is over, which its agent is about to tell in its own way; SaveFailed after
        `max_failed_saves` refusals in a row; StepNotGrowing when `step` is not beyond the newest saved one (the step
        that was just loaded may be saved again); NotPlainData when some part's state could not be loaded again;
        CheckpointError when ranks ask for different steps.
        """
        group = current_group()
        started_s = time.monotonic()
        step = operator.index(step)
        calls = group.gather(_CALL.pack(step) + rng.capture())
        steps = {rank: _CALL.unpack_from(call)[0] for rank, call in enumerate(calls)}
        if len(set(steps.values())) > 1:
            raise CheckpointError(
                f"ranks save different steps, by rank: {steps}; call save() in the same iteration"
            )

        error: CheckpointError | None = None
        if group.rank == 0:
            size = 0
            try:
                size = self._commit(step, [call[_CALL.size :] for call in calls])
            except CheckpointError as refusal:
                error = refusal
            except OSError as refusal:
                error = _because(
                    SaveFailed, f"step {step} not saved in {self._files.directory}: {refusal}", refusal
                )
            except Exception as failure:
                # The other ranks are waiting: they must hear of this before it ends rank 0.
                error = _because(CheckpointError, f"step {step} not saved: {failure!r}", failure)
            progress.checkpoint_save(step, "error" if error else "ok", time.monotonic() - started_s, size)
        try:
            _raise_together(group, error)
        except SaveFailed as refusal:
            if not isinstance(refusal, Unconfirmed):
                self._failed_saves += 1
            if self._failed_saves >= self._max_failed_saves:
                raise
            logger.warning(
                "checkpoint not saved, training goes on: failed=%d limit=%d reason=%s",
                self._failed_saves,
                self._max_failed_saves,
                refusal,
            )
            return False
        self._failed_saves = 0
        self._floor = step
        return True

    def _commit(self, step: int, rng_by_rank: Sequence[bytes]) -> int:
        """Make the checkpoint of `step` exist; returns its size. Rank 0 only."""
        if self._floor is None:
            # save() without load(): the directory itself says how far the run has come.
            self._floor = max(self._files.steps(), default=-1)
        if step <= self._floor:
            raise StepNotGrowing(
                f"step {step} is not beyond step {self._floor}, the newest in {self._files.directory}: "
                "call load() first and continue from what it returns, or use another directory"
            )
        payload = {
            "step": step,
            "state": {name: _state_of(part) for name, part in self._state.items()},
            "rng": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in rng_by_rank],
        }
        manifest = self._files.write(
            step,
            generation=int(os.environ.get("ELASTIC_AGENT_GENERATION", "0")),
            world_size=len(rng_by_rank),
            serialize=lambda sink: torch.save(payload, sink),
        )
        self._prove_loadable(manifest)
        permit = Permit(os.environ.get("ELASTIC_AGENT_COMMITS", ""), manifest.generation)
        self._files.publish(manifest, permit.check)
        return manifest.size

    def _prove_loadable(self, manifest: Manifest) -> None:
        # Mapping the file reads its structure and none of its gigabytes, with the very rules that load() obeys.
        path = os.path.join(self._files.directory, manifest.file)
        try:
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise NotPlainData(
                f"step {manifest.step} not saved: torch.load(weights_only=True) refuses some part's state; let its "
                f"state_dict() return tensors, numbers, strings, lists and dicts only: {_what_was_refused(error)}"
            ) from error

    def _look(self, started_s: float) -> tuple[VerifiedCheckpoint | None, list[str]]:
        """The newest good checkpoint in this rank's directory, and what is wrong with those before it."""
        try:
            found, bad = self._files.find()
        except OSError as error:
            return None, [f"{self._files.directory}: {error}"]
        for one in bad:
            logger.warning(
                "checkpoint does not verify, trying the next older one: step=%d reason=%s", one.step, one
            )
            progress.checkpoint_load(one.step, "corrupt", time.monotonic() - started_s)
        return found, [str(one) for one in bad]

    def _load_from(
        self, group: Group, owner: Owner, offers: Sequence[Offer], mine: VerifiedCheckpoint | None
    ) -> None:
        """Load the owner's checkpoint on every rank, or raise on every rank."""
        wanted = owner.manifest
        has_it = mine is not None and mine.manifest.sha256 == wanted.sha256
        stream: io.BufferedReader | io.BytesIO = mine.stream if mine is not None and has_it else io.BytesIO()
        error: CheckpointError | None = None
        try:
            if any(offer.manifest is None or offer.manifest.sha256 != wanted.sha256 for offer in offers):
                group.send(stream, wanted.size, source=owner.rank)
            stream.seek(0)
            if not has_it and digest(stream) != wanted.sha256:
                raise CheckpointError(
                    f"step {wanted.step} broke on its way from rank {owner.rank}: start again"
                )
            self._apply(torch.load(stream, map_location="cpu", weights_only=True), group)
        except CheckpointError as refusal:
            error = refusal
        except Exception as failure:
            # A rank that left alone would leave the others waiting.
            error = _because(CheckpointError, f"step {wanted.step} cannot be loaded: {failure!r}", failure)
        _raise_together(group, error)

    def _apply(self, payload: Mapping[str, Any], group: Group) -> None:
        saved, step = payload["state"], payload["step"]
        if saved.keys() != self._state.keys():
            raise CheckpointMismatch(
                f"the checkpoint of step {step} in {self._files.directory} holds {sorted(saved)}, this script's state "
                f"is {sorted(self._state)}: give Checkpointer the same names, or use another directory"
            )
        for name, part in self._state.items():
            try:
                _load_into(part, saved[name])
            except Exception as error:
                raise CheckpointMismatch(
                    f"{name!r} of step {step} in {self._files.directory} does not fit this script: {error}"
                ) from error
        if len(payload["rng"]) == group.world_size:
            rng.restore(bytes(payload["rng"][group.rank].tolist()))
        else:
            logger.warning(
                "random states not restored, the world size changed: step=%d saved=%d now=%d",
                step,
                len(payload["rng"]),
                group.world_size,
            )


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank found in its directory: its newest good checkpoint, and what does not verify."""

    manifest: Manifest | None
    bad: list[str]

    def to_json(self) -> bytes:
        manifest = self.manifest.to_json().decode() if self.manifest else None
        return json.dumps([manifest, [reason[:_MAX_REASON_CHARS] for reason in self.bad]]).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Offer:
        manifest, bad = json.loads(raw)
        return cls(Manifest.from_json(manifest) if manifest else None, bad)


@dataclass(frozen=True, slots=True)
class Owner:
    """The rank whose checkpoint is loaded."""

    rank: int
    manifest: Manifest


def choose_owner(offers: Sequence[Offer]) -> Owner | None:
    """Who has the newest step: of one step the newest generation's, of equals the lowest rank's.

    None when nobody has ever had a checkpoint. Raises NoUsableCheckpoint when some exist and none is good.
    """
    good = [Owner(rank, offer.manifest) for rank, offer in enumerate(offers) if offer.manifest is not None]
    if good:
        return max(good, key=lambda owner: (owner.manifest.step, owner.manifest.generation, -owner.rank))
    bad = [f"rank {rank}: {reason}" for rank, offer in enumerate(offers) for reason in offer.bad]
    if bad:
        raise NoUsableCheckpoint(
            "checkpoints exist and none verifies; not starting again from step 0 by itself. Restore one, or delete "
            f"them to start again. {'; '.join(bad)}"
        )
    return None


def _raise_together(group: Group, error: CheckpointError | None) -> None:
    """Raise on every rank when one has an error: its own there, and the first rank's on those without."""
    note = json.dumps([type(error).__name__, str(error)[:_MAX_REASON_CHARS]]).encode() if error else b""
    notes = group.gather(note)
    if error is not None:
        raise error
    for rank, note in enumerate(notes):
        if note:
            name, text = json.loads(note)
            raise getattr(errors, name)(f"rank {rank}: {text}")


def _because(kind: type[CheckpointError], text: str, cause: Exception) -> CheckpointError:
    error = kind(text)
    error.__cause__ = cause
    return error


def _state_of(part: Stateful | dict[str, Any]) -> Any:
    return dict(part) if isinstance(part, dict) else _unwrapped(part).state_dict()


def _load_into(part: Stateful | dict[str, Any], state: Any) -> None:
    if isinstance(part, dict):
        part.clear()
        part.update(state)
    else:
        _unwrapped(part).load_state_dict(state)


def _unwrapped(part: Stateful) -> Stateful:
    return part.module if isinstance(part, DistributedDataParallel | DataParallel) else part


def _what_was_refused(error: Exception) -> str:
    # torch explains at length how to switch the protection off; what it refused is in one line of that.
    lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line]
    return (lines or [repr(error)])[0][:_MAX_REASON_CHARS]
