"""The command `status`: which source it takes, what it refuses, what it prints and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_agent.agent.commands import status
from elastic_agent.agent.commands.status import STATUS_OPTIONS, choose_source
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.agent.configuration.config import ConfigError
from elastic_agent.agent.configuration.load import read_argv
from elastic_agent.agent.observability.sources import AgentsSource, FoundJob, JobSource, StoreSource
from elastic_agent.agent.observability.status import JobStatus
from elastic_agent.cli import main
from elastic_agent.rendezvous.records import Endpoint

from .test_status_pages import JOB

NOBODY = Endpoint("127.0.0.1", 1)


def source(*words: str, **environ: str) -> JobSource:
    return choose_source(read_argv(words, STATUS_OPTIONS), environ)


STORE = ("--rdzv-endpoint", "node1:29400")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), AgentsSource),
        (("--json", "--timeout", "1s"), AgentsSource),
        (("--agent", "node1:9100"), AgentsSource),
        (STORE, StoreSource),
        ((*STORE, "--rdzv-id", "j", "--nproc-per-node", "2", "train.py", "--json"), StoreSource),
        (("--rdzv-endpoint", "etcd://127.0.0.1", "--rdzv-id", "j", "-m", "train"), StoreSource),
        (("--nproc-per-node", "2"), AgentsSource),
    ],
)
def test_the_source(words: tuple[str, ...], kind: type[JobSource]) -> None:
    assert type(source(*words)) is kind


def test_a_job_of_a_pool_is_looked_for_in_the_pools_store() -> None:
    found = choose_source(read_argv(["--pool=p", "--rdzv-endpoint=local:///x"]), {}, "5fa46501")
    assert isinstance(found, StoreSource)
    place = found._rendezvous
    assert (place.pool, place.job_id, place.folder) == ("p", "5fa46501", Path("/x"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("10.0.0.1:9100",),
            "'10.0.0.1:9100': expected the id of a job of the pool; elastic-agent jobs lists them; or",
        ),
        (("j", "--agent=h:1"), "--agent 'h:1': expected an agent, a job, or the store to ask"),
        (("../j",), "expected the id of a job"),
    ],
)
def test_what_is_no_job_of_a_pool_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *words]) == ExitCode.BAD_CONFIG
    assert said in capsys.readouterr().err


def test_a_file_means_the_store_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('rdzv-endpoint = "node1:29400"\nscript = "/not/on/this/machine.py"\nmax-nodes = 4\n')
    assert type(source("--config", str(file))) is StoreSource
    assert type(source("--config", str(file), "--agent", "node1:1")) is AgentsSource
    file.write_text('script = "/not/on/this/machine.py"\n')
    assert type(source("--config", str(file))) is AgentsSource


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--json", "10.0.0.1:9100"), "only options"),
        (("--jsn",), "did you mean --json?"),
        (("--agent", "node1"), "HOST:PORT"),
        (("--agent", "node1:0"), "HOST:PORT"),
        (("--agent", "node1:1", *STORE), "an agent, a job, or the store to ask"),
        (("--timeout", "0"), "a duration from 0.1 s"),
        (("--rdzv-id", "j"), "the address of the job's store"),
        (("--rdzv-backend", "memory"), "the address of the job's store"),
        (("--rdzv-backend", "etcd"), "the members of the etcd cluster"),
        (("--rdzv-endpoint", "etcd://h1", "--rdzv-id", "j"), "TLS"),
        (("--rdzv-endpoint", "etcd://127.0.0.1"), "a name for this job"),
        (("--config", "/none.toml"), "a readable TOML file"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        source(*words)
    assert main(["status", *words]) == ExitCode.BAD_CONFIG
    assert said in capsys.readouterr().err


def test_a_variable_that_no_agent_knows_matters_only_to_who_asks_the_store() -> None:
    assert type(source(ELASTIC_AGENT_MIN_NODE="1")) is AgentsSource
    with pytest.raises(ConfigError, match="ELASTIC_AGENT_MIN_NODES"):
        source(*STORE, ELASTIC_AGENT_MIN_NODE="1")


def test_where_no_agent_is_the_store_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "agents_here", lambda *_: [])
    here = source(ELASTIC_AGENT_RDZV_ENDPOINT="127.0.0.1:1", ELASTIC_AGENT_RDZV_ID="j")
    monkeypatch.setattr(StoreSource, "jobs", lambda self: [FoundJob("store", JOB)])
    assert here.jobs() == [FoundJob("store", JOB)]
    with pytest.raises(CannotDo) as nothing:
        source().jobs()
    assert nothing.value.code is ExitCode.NOT_FOUND


def test_a_job_is_looked_for_among_the_agents_here_first_and_then_in_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status, "agents_here", lambda *_: [])
    asked = choose_source(read_argv([], STATUS_OPTIONS), {}, "digits")
    monkeypatch.setattr(AgentsSource, "jobs", lambda self: [FoundJob("agent", JOB)])
    assert asked.jobs() == [FoundJob("agent", JOB)]
    monkeypatch.undo()
    monkeypatch.setattr(status, "agents_here", lambda *_: [])

    def away(self: StoreSource) -> list[FoundJob]:
        raise CannotDo(ExitCode.NO_ANSWER, "no agent hosts it")

    monkeypatch.setattr(StoreSource, "jobs", away)
    with pytest.raises(CannotDo, match=r"no agent of job digits answers on this machine.*no agent hosts it"):
        asked.jobs()


class FakeSource(JobSource):
    def __init__(self, answer: list[FoundJob] | CannotDo) -> None:
        self.answer = answer

    def jobs(self) -> list[FoundJob]:
        if isinstance(self.answer, CannotDo):
            raise self.answer
        return self.answer


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the command take a source with this answer."""

    def take(answer: list[FoundJob] | CannotDo) -> None:
        monkeypatch.setattr(status, "choose_source", lambda *_: FakeSource(answer))

    return take


EMPTY = [FoundJob("agent", JobStatus("digits", None, (), None, complete=True))]
NO_JOB = CannotDo(ExitCode.NO_JOB, "no such job")


def test_agents_without_an_answer_have_a_block_of_their_own_at_the_end(
    through: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeSource, "silent", ("the agent at h:1 gives no answer",))
    through([*EMPTY, FoundJob("agent", JobStatus("letters", None, (), None, complete=True))])
    assert main(["status"]) == 0
    assert capsys.readouterr().out.endswith("\n\n! the agent at h:1 gives no answer\n")
    through(EMPTY)
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == ["the agent at h:1 gives no answer"]


def test_json_is_a_document_also_when_there_is_nothing(
    through: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    through(EMPTY)
    assert main(["status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["problem"]) == (3, None)
    assert [job["job"] for job in document["jobs"]] == ["digits"]
    through(NO_JOB)
    assert main(["status", "--json"]) == 67
    out, err = capsys.readouterr()
    assert json.loads(out)["problem"] == {"code": 67, "name": "NO_JOB", "text": "no such job"}
    assert "no such job" in err
