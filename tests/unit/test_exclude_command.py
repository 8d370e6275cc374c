"""`elastic-agent exclude` and `readmit`: what they write, what they tell, and each way in which they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.agent.commands import command, control
from elastic_agent.agent.commands.control import JobStore, read_reason
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.agent.configuration.rendezvous import RendezvousConfig
from elastic_agent.rendezvous.errors import StoreMismatch, StoreUnavailable
from elastic_agent.rendezvous.messages import MAX_EXCLUSIONS, Exclusion
from elastic_agent.rendezvous.records import (
    WORLD_KEY,
    Cause,
    CauseKind,
    NodeRecord,
    Phase,
    Result,
    World,
    assign_ranks,
    node_key,
)
from elastic_agent.rendezvous.store.interface import Snapshot
from elastic_agent.rendezvous.store.memory import MemoryStore

from .bench import Bench
from .job_scene import WORLD, A, B, JobScene

OUT = Exclusion("b", "life-b", "operator", "a fan is loud", by_operator=True)


class Scene(JobScene):
    @property
    def world(self) -> World:
        (entry,) = self.store.read((WORLD_KEY,)).entries
        return World.from_json(entry.value)

    def exclude(self, node: str = "b", timeout_s: float = 60.0) -> None:
        self.job.exclude(node, "a fan is loud", timeout_s)

    @property
    def job(self) -> JobStore:
        return JobStore(self.store, "job", lambda: self.now, self.sleep)


@pytest.fixture
def scene() -> Scene:
    return Scene(WORLD, A, B)


def test_a_node_is_excluded_and_the_command_waits_until_the_job_goes_on_without_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    def goes_on() -> None:
        assert scene.world == replace(WORLD, exclusions=(OUT,))
        scene.put(replace(scene.world, phase=Phase.DRAINING, cause=Cause(CauseKind.LEAVE, "b", "it goes")))

    scene.happens = iter(
        [
            goes_on,
            lambda: scene.put(
                replace(scene.world, generation=5, phase=Phase.RUNNING, members=assign_ranks((A,)))
            ),
        ]
    )
    scene.exclude()
    assert capsys.readouterr().out.splitlines() == [
        "node b is excluded from job job: a fan is loud",
        "job job goes on without node b",
    ]


def test_a_node_that_stands_by_is_excluded_at_once(scene: Scene) -> None:
    scene.put(NodeRecord("c", "life-c", "host-c", 4003, slots=1))
    scene.exclude("c")
    assert scene.now == 0.0
    assert scene.world.exclusion("c") is not None


def test_a_member_whose_agent_is_away_is_excluded_and_the_command_does_not_wait(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.delete(node_key("b"))
    scene.exclude()
    assert scene.now == 0.0
    assert scene.world.exclusions == (OUT,)
    assert capsys.readouterr().out.splitlines() == [
        "node b is excluded from job job: a fan is loud",
        "its agent is away: it is left out when it comes (nodes of the job now: a)",
    ]


def test_a_node_that_is_needed_stays_and_the_command_says_so(scene: Scene) -> None:
    with pytest.raises(CannotDo, match="stays while the others are fewer than the job needs") as caught:
        scene.exclude(timeout_s=1.0)
    assert caught.value.code is ExitCode.LATER
    assert scene.now == 1.0


def test_a_world_that_remembers_no_more_exclusions_says_so(scene: Scene) -> None:
    full = tuple(Exclusion(f"n{index}", "l", "gpu_fault", "GPU 3 is sick") for index in range(MAX_EXCLUSIONS))
    scene.put(replace(WORLD, exclusions=full))
    with pytest.raises(CannotDo, match="64 nodes of job 'job' are excluded already") as caught:
        scene.exclude()
    assert caught.value.code is ExitCode.NOT_HERE
    assert scene.world.exclusions == full


def test_what_another_writes_meanwhile_stays(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    read, wrote = scene.store.read, []

    def read_late(*scopes: object) -> object:
        found = read(*scopes)  # type: ignore[arg-type]
        if not wrote:
            wrote.append(1)
            scene.put(replace(WORLD, generation=5, members=assign_ranks((A,))))
        return found

    monkeypatch.setattr(scene.store, "read", read_late)
    scene.exclude()
    monkeypatch.undo()
    assert (scene.world.generation, scene.world.exclusions) == (5, (OUT,))


@pytest.mark.parametrize(
    ("world", "node", "code", "text"),
    [
        (None, "b", ExitCode.NO_JOB, "holds nothing of a job 'job'"),
        (
            replace(
                WORLD,
                phase=Phase.ENDED,
                result=Result.SUCCEEDED,
                cause=Cause(CauseKind.SUCCESS, detail="it is over"),
            ),
            "b",
            ExitCode.NO_JOB,
            "has ended: it is over",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
    scene: Scene, world: World | None, node: str, code: ExitCode, text: str
) -> None:
    if world is None:
        scene.delete(WORLD_KEY)
    else:
        scene.put(world)
    with pytest.raises(CannotDo, match=text) as caught:
        scene.exclude(node)
    assert caught.value.code is code


def test_a_node_is_readmitted_whether_the_job_or_an_operator_has_excluded_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in (OUT, replace(OUT, cause="gpu_fault", by_operator=False)):
        scene.put(replace(WORLD, exclusions=(row,)))
        scene.job.readmit("b")
        assert scene.world.exclusions == (replace(row, readmitted=True),)
    assert capsys.readouterr().out == "node b is readmitted to job job\n" * 2
    with pytest.raises(
        CannotDo, match="node 'b' of job 'job' is not excluded; those that are: none"
    ) as caught:
        scene.job.readmit("b")
    assert caught.value.code is ExitCode.NOT_FOUND


def test_agents_do_what_the_commands_write() -> None:
    """A member goes by plan, comes back no earlier than it is readmitted, and then by plan."""
    bench = Bench()
    for peer in bench.joined("a", "b"):
        peer.listens = True
    bench.join("c").listens = True
    bench.settle()
    store = MemoryStore(lambda: bench.now, bench.kv)
    job = JobStore(store, "job", lambda: bench.now, lambda _: bench.settle())
    job.exclude("a", "a fan is loud", 5.0)
    assert bench.members() == ["c", "b"]
    bench.after(10 * 60.0)
    assert bench.members() == ["c", "b"]
    job.readmit("a")
    bench.settle()
    assert sorted(bench.members()) == ["a", "b", "c"]
    assert not [peer for peer in bench.peers if peer.stops()], "no worker was signalled"


@pytest.mark.parametrize("text", ["", "  ", "x" * 513, "\x1b[31m"])
def test_a_reason_is_a_short_text(text: str) -> None:
    with pytest.raises(ValueError, match="empty or too long"):
        read_reason(text)
    assert read_reason(" a fan\nis \x1b[31mloud ") == "a fan is loud"


def test_another_jobs_store_is_left_alone(scene: Scene) -> None:
    other = replace(WORLD, job="other")
    scene.put(other)
    with pytest.raises(StoreMismatch):
        scene.exclude()
    assert scene.world == other


def test_a_store_that_is_away_for_a_while_is_waited_for(scene: Scene) -> None:
    class Away(MemoryStore):
        away = 0

        def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
            if self.away:
                self.away -= 1
                raise StoreUnavailable("cut off")
            return super().read(scopes, oldest_under)

    scene.store = store = Away()
    scene.put(WORLD, A, B)
    scene.happens = iter(
        [lambda: setattr(store, "away", 3), *[lambda: None] * 3, lambda: scene.delete("nodes/b")]
    )
    scene.exclude()
    assert store.away == 0


C10D = {"rdzv-backend": "c10d", "rdzv-endpoint": "10.0.0.1:29400", "rdzv-id": "digits"}
ETCD = {
    "rdzv-backend": "etcd",
    "rdzv-endpoint": "etcd://127.0.0.1:2379/jobs",
    "rdzv-id": "words",
    "etcd-insecure": "true",
}


@pytest.mark.parametrize(
    ("words", "stores", "backend", "job"),
    [
        ((), [C10D], "c10d", "digits"),
        ((), [ETCD], "etcd", "words"),
        (("--rdzv-id=words",), [C10D, ETCD], "etcd", "words"),
    ],
)
def test_without_any_word_of_a_store_it_is_that_of_the_job_on_this_machine(
    words: tuple[str, ...],
    stores: list[dict[str, str]],
    backend: str,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def open_job(place: RendezvousConfig, timeout_s: float) -> MemoryStore:
        asked.append(place)
        return MemoryStore()

    monkeypatch.setattr(control, "stores_here", lambda *_: tuple(stores))
    monkeypatch.setattr(command, "open_to_look", open_job)
    assert control.readmit(["b", *words]) == ExitCode.NO_JOB
    assert [(place.backend, place.job_id) for place in asked] == [(backend, job)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected NODE; write elastic-agent exclude NODE"),
        (["--rdzv-endpoint=127.0.0.1:1"], "expected NODE"),
        (["no name!"], "the name of a node"),
        (["b"], "the address of the job's store"),
        (["b", "--timeout=soon"], "timeout"),
    ],
)
def test_words_that_cannot_be_meant_are_problems(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "stores_here", lambda *_: ())
    assert control.exclude(words) == ExitCode.BAD_CONFIG
    assert text in capsys.readouterr().err
