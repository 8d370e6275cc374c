"""The proof suite: each kind of state lives through each disturbance, whatever place it must come back from.

A cell of the table is one job of real agents that trains `training.py`, is disturbed at a step that all ranks have
finished, and goes on to its end. It ends with the numbers of the same steps without any of the library in between: to
the last bit in a world of the same size, with each rank's random states; to 1e-12, in float64, in another one. And it
has begun where it should: `loaded` says which step was loaded, and which step the disk had then.

- memory: of what was loaded the disk had an older step only, and no node was lost that had a part for itself. The last
  step of a planned change is brought to disk, too: there the agent tells where it was loaded from.
- replica: so too, but a node is gone that had a part for itself.
- disk: the agents keep nothing in memory; or no replicas, where what a node has alone leaves with it.

Only what docs/ name for everyone is used: options, `/status`, `/events`, the manifests' names, the library's functions.
So the suite judges any way to keep states. `make test` runs one cell of each source; `make proof` runs all, and prints
the table.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Agent, Generation, Job, Record, python_path

SCRIPT = Path(__file__).with_name("training.py")
RECORDED = Path(__file__).with_name("recorded")

KINDS = {"ddp": 1, "fsdp": 1, "tp": 1, "fsdp-tp": 2, "hsdp": 2, "fsdp1": 1, "pipeline": 1, "dcp": 1}
"""How many workers a node has."""
ON_ALL_NODES = ("ddp", "hsdp")
"""What one node has, others have."""
DISTURBANCES = ("worker killed", "node killed", "node leaves", "node joins", "3 -> 2 -> 3", "power cut")
SOURCES = ("memory", "replica", "disk")
CELL = "cell of the proof"
"""The property that names it."""

STEPS, PAUSE, SECOND_PAUSE = 14, 7, 10
"""Training waits after these steps until the test lets it go on."""
EARLY_SAVE, SAVES = 2, (2, 4, 6, 8, 10, 12)
CLOSE = 1e-12
PRELOAD = "--preload=torch.distributed.fsdp,torch.distributed.tensor.parallel,elastic_agent.worker"


def why_not(kind: str, disturbance: str, source: str) -> str:
    """Why there is no such cell; empty: there is."""
    if source == "disk":
        return ""
    if disturbance == "power cut":
        return "the memory of all nodes is lost in a power cut"
    if source == "replica":
        if disturbance in ("worker killed", "node joins"):
            return "each node still has what it had in memory itself"
        if kind in ON_ALL_NODES:
            return "other nodes hold the same for themselves: no replicas are made"
    elif disturbance in ("node killed", "node leaves", "3 -> 2 -> 3") and kind not in ON_ALL_NODES:
        return "a part of the state was in the memory of that node alone, and is a replica elsewhere"
    if kind == "dcp" and disturbance in ("node leaves", "node joins"):
        return "the script saves its last step itself, to memory and disk at once"
    return ""


CELLS = [cell for cell in itertools.product(KINDS, DISTURBANCES, SOURCES) if not why_not(*cell)]
SAMPLE = {
    ("fsdp-tp", "worker killed", "memory"),
    ("fsdp", "3 -> 2 -> 3", "replica"),
    ("ddp", "node joins", "disk"),
}
"""In `make test`."""


def cells(disturbance: str) -> pytest.MarkDecorator:
    """Of a test that gets a `run` for each."""
    found = [
        pytest.param(cell, marks=() if cell in SAMPLE else pytest.mark.long, id=", ".join(cell[::2]))
        for cell in CELLS
        if cell[1] == disturbance
    ]
    return pytest.mark.parametrize("run", found, indirect=True)


@dataclass
class Run:
    """One job, of one cell."""

    job: Job
    kind: str
    disturbance: str
    source: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    """More of what the script is asked for."""
    generation: int = 0
    """The newest that was seen."""

    @property
    def noise(self) -> bool:
        """Where no rank's random state may be lost: the world is the same, and no lost node knew it alone."""
        alone = self.kind in ON_ALL_NODES and self.source == "memory"
        same_world = ("worker killed", "node killed", "power cut")
        return self.disturbance in same_world and not (alone and self.disturbance == "node killed")

    @property
    def saves_often(self) -> bool:
        return self.kind == "dcp" or self.source == "disk"

    @property
    def newest(self) -> int:
        """What a failure at the pause leaves to go on from."""
        return SAVES[2] if self.saves_often else PAUSE

    @property
    def agents(self) -> dict[str, Agent]:
        return {agent.name: agent for agent in self.job.agents}

    def start(self, *names: str, nodes: str, last_call_s: int = 0) -> None:
        asked = {"kind": self.kind, "noise": self.noise, "pauses": [PAUSE, SECOND_PAUSE], "quiet": True}
        asked["saves"] = SAVES if self.saves_often else (EARLY_SAVE,)
        asked["memory"] = not self.saves_often
        options = [PRELOAD, f"--nproc-per-node={KINDS[self.kind]}", f"--nnodes={nodes}", "--lease-ttl=60"]
        options += [f"--last-call={last_call_s}s"]
        if self.source == "disk" and self.disturbance == "node leaves" and self.kind not in ON_ALL_NODES:
            options += ["--memory-replicas=0"]
        elif self.source == "disk" and self.disturbance != "power cut":
            options += ["--memory-checkpoints=off"]
        script = (SCRIPT, self.folder, json.dumps({**asked, **self.words}))
        environment = {"OMP_NUM_THREADS": "1", **self.environment}
        for name in names:
            self.job.join(name, *options, script=script, environment=environment)

    def reach(self, step: int) -> Generation:
        """Until all ranks wait there, and what they have is where the cell wants it, and nowhere else."""

        def waits() -> Generation | None:
            for one in self.job.generations()[-1:]:
                there = self.job.history(what="at", generation=one.number, step=step)
                if one.number >= self.generation and there and len(there) == there[0]["world"]:
                    return one
            return None

        generation = self.job.wait_for(waits, f"all ranks to wait after step {step}")
        assert generation is not None
        self.generation = generation.number
        if self.source != "disk" and step == PAUSE:
            if self.kind not in ON_ALL_NODES:
                self.job.wait_for(
                    lambda: self._have_replicas(generation.nodes), f"replicas of step {self.newest}"
                )
            if self.kind == "dcp":  # which has it on disk, too
                self.job.wait_for(lambda: newest_on_disk(self.folder) == self.newest, "it to be there")
                self.job.wait_for(lambda: is_removed(self.folder / "disk"), "nobody to write to the disk")
        return generation

    def _have_replicas(self, nodes: Iterable[str]) -> bool:
        found = [json.loads(self.agents[node].get("/status")[1])["replica"] for node in nodes]
        return all(replica is not None and replica["step"] == self.newest for replica in found)

    def go(self, *steps: int) -> None:
        for step in steps:
            (self.folder / f"go-{step}").touch()

    def lose(self, name: str) -> None:
        """A node. It is not the host of a store."""
        self.agents[name].kill()
        self.job.wait_for(lambda: not self.job.workers(name), "the node's workers to end")

    def change(self, pause: int, nodes: int) -> None:
        """A planned change ends the generation: where each rank keeps its state alone at the pause, else at a step."""
        alone, known = self.kind == "ddp" and self.source == "memory", f"generation {self.generation} pauses"
        starts = self.job.history(what="start", generation=self.generation)
        agents = [self.agents[node] for node in {start["node"] for start in starts}]
        self.job.wait_for(
            lambda: all(agent.says(known) for agent in agents), "all nodes to know of the change"
        )
        if not alone:
            self.go(pause)
        assert (self.loads(None, nodes) == pause) == alone, "it has ended elsewhere"
        signalled = [agent.name for agent in agents if agent.says("did not end by themselves in time")]
        assert not signalled, "this was no planned change"

    def loads(self, step: int | None, nodes: int) -> int:
        """All ranks of a new generation load this step, or the last of the one before, from where the cell wants it."""
        before, world = self.generation, nodes * KINDS[self.kind]

        def loaded() -> list[Record] | None:
            for one in self.job.generations()[-1:]:
                found = self.job.history(what="loaded", generation=one.number)
                if one.number > self.generation and len(found) == world == found[0]["world"]:
                    return found
            return None

        found = self.job.wait_for(loaded, f"{world} ranks to load")
        assert found is not None
        self.generation = found[0]["generation"]
        if step is None:
            step = max(one["step"] for one in self.job.history(what="step", generation=before))
        assert {one["step"] for one in found} == {step}, "it has begun elsewhere"
        had = {one["disk"] for one in found}
        if self.source == "disk":
            assert had == {step}, "it has not come from the disk"
        elif step == self.newest:
            assert max(had) < step, "it may have come from the disk"
        elif self.kind != "dcp":  # whose script has saved its last step, and does not tell
            agent, source = self.agents[found[0]["node"]], f"training goes on from step {step}, from memory"
            self.job.wait_for(lambda: source in agent.get("/events")[1], "it to have come from memory")
        return step

    def ends(self, *names: str, same_world: bool) -> None:
        for name in names:
            assert self.agents[name].exit_code() == 0
        loaded = max(one["step"] for one in self.job.history(what="loaded"))
        if self.noise or self.kind != "ddp":  # which keeps what has lost random states in memory
            assert newest_on_disk(self.folder) >= loaded, "what was loaded is not on disk at the end"
        check_end(self, self.job, same_world=same_world)


def check_end(quiet: Run, disturbed: Job, *, same_world: bool) -> None:
    expected, ended = quiet.job.history(what="quiet", step=STEPS), disturbed.history(what="end")
    was, is_now = [next(one["numbers"] for one in ranks if one["rank"] == 0) for ranks in (expected, ended)]
    assert is_now.keys() == was.keys()
    allowed = 0.0 if same_world else CLOSE
    came_to = {name: pytest.approx(numbers, rel=0.0, abs=allowed) for name, numbers in was.items()}
    assert is_now == came_to, "it has come to something else"
    if quiet.noise:
        draws = [{one["rank"]: one["draws"] for one in ranks} for ranks in (expected, ended)]
        assert draws[0] == draws[1], "random states are others"


def newest_on_disk(folder: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in folder.glob("disk/step-*.json")), default=0)


def is_removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.fixture
def run(job: Job, in_etcd: None, request: pytest.FixtureRequest, record_property: Callable[..., None]) -> Run:
    record_property(CELL, request.param)
    return Run(job, *request.param, job.folder)


@cells("worker killed")
def test_a_worker_is_killed(run: Run) -> None:
    run.words = {"dies": PAUSE + 1}
    run.start("a", "b", nodes="2")
    run.reach(PAUSE)
    run.go(PAUSE, SECOND_PAUSE)
    run.loads(run.newest, nodes=2)
    run.ends("a", "b", same_world=True)


@cells("node killed")
def test_a_node_is_killed(run: Run) -> None:
    run.start("a", "b", nodes="2")
    run.reach(PAUSE)
    run.start("c", nodes="2")
    run.job.wait_for(lambda: '"c"' in run.agents["a"].get("/job")[1], "the new node to stand by")
    run.lose("b")
    run.go(PAUSE, SECOND_PAUSE)
    run.loads(run.newest, nodes=2)
    run.ends("a", "c", same_world=True)


@cells("node leaves")
def test_a_node_leaves(run: Run) -> None:
    run.start("a", "b", "c", nodes="2:3", last_call_s=60)
    run.reach(PAUSE)
    run.go(SECOND_PAUSE)
    run.agents["b"].signal(signal.SIGTERM)
    run.change(PAUSE, nodes=2)
    assert run.agents["b"].exit_code() == 128 + signal.SIGTERM
    run.ends("a", "c", same_world=False)


@cells("node joins")
def test_a_node_joins(run: Run) -> None:
    run.start("a", "b", nodes="2:3")
    run.reach(PAUSE)
    run.go(SECOND_PAUSE)
    run.start("c", nodes="2:3")
    run.change(PAUSE, nodes=3)
    run.ends("a", "b", "c", same_world=False)


@cells("3 -> 2 -> 3")
def test_a_node_is_lost_and_another_one_joins(run: Run) -> None:
    run.start("a", "b", "c", nodes="2:3", last_call_s=60)
    run.reach(PAUSE)
    run.lose("b")
    run.go(PAUSE)
    run.loads(run.newest, nodes=2)
    run.reach(SECOND_PAUSE)
    run.start("d", nodes="2:3")
    run.change(SECOND_PAUSE, nodes=3)
    run.ends("a", "c", "d", same_world=False)


# --- Power cuts

CUT_IN = 8
"""The save of this step does not come to its end."""


@cells("power cut")
def test_the_power_is_cut(run: Run, second_job: Job) -> None:
    """The power is cut at a system call of a commit; and it might have been at each call before."""
    log, disk = run.folder / "calls", run.folder / "disk"
    disk.mkdir()
    calls = 2 + 2 * list(KINDS).index(run.kind)
    path = f"{RECORDED}{os.pathsep}{python_path()}"
    run.environment = {"PYTHONPATH": path, "PROOF_DISK_LOG": str(log), "PROOF_DISK": str(disk)}
    run.environment["PROOF_CUT"] = f"{CUT_IN} {calls}"
    run.words = {"durable": True}
    run.go(PAUSE, SECOND_PAUSE)
    run.start("a", "b", nodes="2")
    run.job.wait_for(lambda: log.exists() and '"cut"' in log.read_text(), "the cut")
    for agent in run.job.agents:
        agent.kill()
    run.job.wait_for(lambda: not run.job.processes(), "all processes to end")
    for memory in {start["env"]["ELASTIC_AGENT_MEMORY"] for start in run.job.history(what="start")}:
        shutil.rmtree(memory, ignore_errors=True)

    images, last = images_of(log, run.folder / "images")
    check_images(run, images)
    shutil.rmtree(disk)
    last.rename(disk)
    after = replace(run, job=second_job, environment={}, words={"durable": True, "quiet": False})
    after.start("a", "b", nodes="2")
    after.loads(newest_on_disk(run.folder), nodes=2)
    assert [agent.exit_code() for agent in after.job.agents] == [0, 0]
    check_end(run, after.job, same_world=True)


Image = dict[str, str]
"""By path below the directory, the digest of what the file holds; empty: nothing."""
Entries = dict[str, tuple[int, str | None]]
"""Of a directory, by name: which file, and the digest of what it holds; None: it is a directory."""


class Disk:
    """What a power cut may leave of a directory: the harshest that a file system may be.

    Of a file that is what was synced last, or all; of a directory its entries when it was synced last, with each change
    since then or without it.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        """Of what is there, by inode: another file may get its number."""
        self._new = itertools.count()
        self._root = -1
        self._contents: dict[int, str] = {}
        self._synced: dict[int, str] = {}
        self._entries: dict[int, Entries] = {}
        self._synced_entries: dict[int, Entries] = {}
        self._changes: dict[int, list[tuple[Collection[str], Entries]]] = {}

    def see(self, call: dict[str, Any]) -> None:
        """One call, and what is there after it."""
        folders = {int(inode): entries for inode, entries in call["tree"].items()}
        there = {inode for entries in folders.values() for inode, _ in entries.values()} | folders.keys()
        self._ids = {inode: self._ids[inode] if inode in self._ids else next(self._new) for inode in there}
        for inode, raw in folders.items():
            folder, before = self._ids[inode], self._entries.get(self._ids[inode], {})
            entries = {name: (self._ids[one], digest) for name, (one, digest) in raw.items()}
            self._contents |= {one: digest for one, digest in entries.values() if digest is not None}
            new = {
                name: one for name, one in entries.items() if name not in before or before[name][0] != one[0]
            }
            if new or entries.keys() < before.keys():
                self._changes.setdefault(folder, []).append((before.keys() - entries.keys(), new))
            self._entries[folder] = entries
        self._root = self._ids[int(call["root"])] if call["root"] else -1
        synced = self._ids.get(call["synced"], -1)
        if call["synced"] in folders:
            self._synced_entries[synced], self._changes[synced] = self._entries[synced], []
        elif synced >= 0:
            self._synced[synced] = self._contents[synced]

    def images(self) -> Iterator[Image]:
        """The first one has only what is certain."""
        changes = self._changes.get(self._root, [])
        survivors = [[], *([change] for change in changes), changes]
        for survived, all_below, whole in itertools.product(survivors, (False, True), (False, True)):
            entries = dict(self._synced_entries.get(self._root, {}))
            for gone, new in survived:
                entries = {name: entry for name, entry in entries.items() if name not in gone} | new
            yield dict(self._files(entries, "", all_below=all_below, whole=whole))

    def _files(
        self, entries: Entries, above: str, *, all_below: bool, whole: bool
    ) -> Iterator[tuple[str, str]]:
        for name, (one, digest) in entries.items():
            if digest is not None:
                yield above + name, (self._contents if whole else self._synced).get(one, "")
            else:
                below = (self._entries if all_below else self._synced_entries).get(one, {})
                yield from self._files(below, f"{above}{name}/", all_below=all_below, whole=whole)


def images_of(log: Path, into: Path) -> tuple[dict[Path, tuple[int, int]], Path]:
    """Directories as a cut may leave them, with the oldest and newest step that each may have; and that of the last."""
    disk, begun, promised = Disk(), 0, 0
    found: dict[frozenset[tuple[str, str]], tuple[int, int]] = {}
    last: frozenset[tuple[str, str]] = frozenset()
    for call in map(json.loads, log.read_text().splitlines()):
        if call["what"] == "begun":
            begun = call["step"]
        elif call["what"] == "promised":
            promised = call["step"]
        elif call["what"] != "cut":
            disk.see(call)
        for number, image in enumerate(disk.images()):
            name = frozenset(image.items())
            low, high = found.get(name, (0, STEPS))
            found[name] = max(low, promised), min(high, begun)
            last = name if number == 0 else last
    folders = {}
    for number, (image, steps) in enumerate(found.items()):
        for path, digest in image:
            file = into / str(number) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes((log.with_name(f"{log.name}.files") / digest).read_bytes() if digest else b"")
        (into / str(number)).mkdir(parents=True, exist_ok=True)
        folders[into / str(number)] = steps
    return folders, into / str(list(found).index(last))


def check_images(run: Run, images: dict[Path, tuple[int, int]]) -> None:
    """One process loads them all: what was promised is there, whole, or what was being saved then."""
    read = run.folder / "read"
    environment = {**os.environ, "SYSTEM_TEST_HISTORY": str(read), "OMP_NUM_THREADS": "1"}
    words = json.dumps({"kind": run.kind, "reads": [str(folder) for folder in images]})
    command = [sys.executable, SCRIPT, run.folder, words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    of_images = [one for one in map(json.loads, read.read_text().splitlines()) if one["what"] == "read"]
    quiet = {one["step"]: one["numbers"] for one in run.job.history(what="quiet", rank=0)}
    wrong = []
    for one in of_images:
        low, high = images[Path(one["directory"])]
        if one["refused"] or not low <= one["step"] <= high:
            wrong.append(f"{one['directory']}: step {one['step']} of {low} to {high} {one['refused']}")
        elif one["step"] and one["numbers"] != quiet[one["step"]]:
            wrong.append(f"{one['directory']}: step {one['step']} is not what it was")
    assert len(of_images) == len(images) > 20, "or no call was seen"
    assert not wrong, "\n".join(wrong)


def test_the_sample_has_each_source() -> None:
    assert {source for _, _, source in SAMPLE} == set(SOURCES)
