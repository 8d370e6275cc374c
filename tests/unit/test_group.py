"""What ranks exchange is of one version; nothing of a collective is left to torch's threads when it has returned."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import dlpack

from elastic_agent.worker.checkpointing.checkpointer import Checkpointer
from elastic_agent.worker.checkpointing.loading import state_loader
from elastic_agent.worker.checkpointing.loading.node_sharing import RankBytes
from elastic_agent.worker.checkpointing.loading.selection import Offer
from elastic_agent.worker.checkpointing.sharded import meeting
from elastic_agent.worker.errors import CheckpointError
from elastic_agent.worker.ranks import group
from elastic_agent.worker.ranks.group import RECORDS, Group, _Refusal, records_of
from elastic_agent.worker.storage.disk.manifests import Manifest
from elastic_agent.worker.storage.disk.ownership import Claim
from elastic_agent.worker.storage.memory.copy_header import Header, NotedState, RankShards

GROUP = Group(0, 2, torch.device("cpu"))


class SlowThread:
    """Lets go of the tensors of the newest collective some time after that has returned."""

    def __init__(self, hold: Callable[[torch.Tensor], Any], after_s: float | None) -> None:
        """None: it never does."""
        self.holds: list[Any] = []
        self._hold = hold
        self._after_s = after_s

    def all_gather(self, rows: list[torch.Tensor], mine: torch.Tensor) -> None:
        for row in rows:
            row.copy_(mine)
        self._take([mine, *rows])

    def broadcast(self, chunk: torch.Tensor, source: int) -> None:
        self._take([chunk])

    def _take(self, tensors: list[torch.Tensor]) -> None:
        self.holds = [self._hold(tensor) for tensor in tensors]
        if self._after_s is not None:
            threading.Timer(self._after_s, self.holds.clear).start()


HOLDS = [pytest.param(lambda tensor: tensor, id="python"), pytest.param(dlpack.to_dlpack, id="c++")]


@pytest.mark.parametrize("hold", HOLDS)
def test_a_collective_returns_when_nobody_has_its_tensors_any_more(
    hold: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = SlowThread(hold, 0.05)
    monkeypatch.setattr(dist, "all_gather", thread.all_gather)
    monkeypatch.setattr(dist, "broadcast", thread.broadcast)
    assert GROUP.gather(b"abc") == [b"abc"] * 2
    assert not thread.holds
    GROUP.send(None, 10, source=1)
    assert not thread.holds


def test_who_never_lets_go_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LET_GO_S", 0.01)
    thread = SlowThread(lambda tensor: tensor, None)
    monkeypatch.setattr(dist, "all_gather", thread.all_gather)
    assert GROUP.gather(b"abc") == [b"abc"] * 2
    assert thread.holds


def test_an_error_of_a_collective_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LET_GO_S", 60.0)
    thread = SlowThread(lambda tensor: tensor, None)

    def fail(rows: list[torch.Tensor], mine: torch.Tensor) -> None:
        thread.all_gather(rows, mine)
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "all_gather", fail)
    with pytest.raises(RuntimeError, match="closed by peer"):
        GROUP.gather(b"abc")
    assert thread.holds


def sent(record: object, **changes: Any) -> bytes:
    return json.dumps({"v": RECORDS, "library": "1.0", "record": record, **changes}).encode()


NOTHING = {"error": "", "reason": ""}


def test_records_of_one_version_are_read_whatever_library_has_made_them() -> None:
    assert records_of(_Refusal, [sent(NOTHING), sent(NOTHING, library="1.1")]) == [_Refusal(), _Refusal()]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (sent(NOTHING, v=RECORDS + 1, library="2.0"), f"'2.0' (records {RECORDS + 1}) on rank 1"),
        (sent({**NOTHING, "more": 1}, library="1.1"), f"'1.1' (records {RECORDS}) on rank 1"),
        (json.dumps(NOTHING).encode(), "unknown (records None) on rank 1"),
        (sent([]), "unknown (records None) on rank 1"),
        (b"\xff", "unknown (records None) on rank 1"),
    ],
    ids=["newer", "of other fields", "before versions", "no object", "no JSON"],
)
def test_records_of_several_versions_are_refused_on_all_ranks_alike(theirs: bytes, text: str) -> None:
    raw = [sent(NOTHING), theirs, theirs]
    refusals = []
    for _ in raw:
        with pytest.raises(CheckpointError, match="Install the same version on all nodes") as refusal:
            records_of(_Refusal, raw)
        refusals.append(str(refusal.value))
    assert len(set(refusals)) == 1
    assert f"'1.0' (records {RECORDS}) on rank 0, {text}." in refusals[0]


def test_a_change_of_what_ranks_exchange_is_a_new_version() -> None:
    """A rank of another version must be told apart before its record is read: change both numbers together."""
    kinds = (_Refusal, RankBytes, Offer, Manifest, NotedState, Header, RankShards)
    form = [(kind.__name__, [(one.name, one.type) for one in dataclasses.fields(kind)]) for kind in kinds]
    form.append((meeting.RECORD.format, []))
    assert (RECORDS, hashlib.sha256(repr(form).encode()).hexdigest()[:12]) == (7, "bb34b8a00713")


@dataclasses.dataclass(frozen=True)
class WithOlderPeer(Group):
    """Rank 0 of two; the other rank's offer is of an older library, and all else as this rank's."""

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload, json.dumps({"manifest": None}).encode() if b"manifest" in payload else payload]


def test_a_load_beside_another_version_gives_the_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_loader, "current_group", lambda: WithOlderPeer(0, 2, torch.device("cpu")))
    released = []
    release = Claim.release_lock

    def releasing(claim: Claim) -> None:
        released.append(claim)
        release(claim)

    monkeypatch.setattr(Claim, "release_lock", releasing)
    with pytest.raises(CheckpointError, match="Install the same version"):
        Checkpointer(tmp_path, {}).load()
    assert len(released) == 1


@pytest.mark.parametrize(
    ("environ", "device"),
    [
        ({"LOCAL_RANK": "1"}, "cuda:1"),
        ({"LOCAL_RANK": "1", "ELASTIC_AGENT_DEVICES": "2"}, "cuda:2"),
        ({"LOCAL_RANK": "0", "ELASTIC_AGENT_DEVICES": "2"}, "cuda:0"),
        ({"LOCAL_RANK": "5"}, "cuda:3"),
    ],
)
def test_checkpoints_travel_over_the_first_of_the_worker_s_own_devices(
    environ: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert group.current_group().device == torch.device(device)
