"""submit, jobs, wait, logs and cancel: what they refuse, in which words, with which code, and that nothing is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.commands import command as head
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.pool import commands
from elastic_agent.pool.commands import cancel, code_of, follow, jobs, logs, submit, wait
from elastic_agent.pool.logs import LogReader
from elastic_agent.pool.records import (
    JOBS_PREFIX,
    MAX_JOB_CHARS,
    NODES_PREFIX,
    PLAN_KEY,
    SCOPES,
    Allocation,
    Attempt,
    Job,
    JobResult,
    Outcome,
    Plan,
    PoolNode,
    PoolView,
    Record,
)
from elastic_agent.rendezvous.errors import StoreError, StoreRefused, StoreUnavailable
from elastic_agent.rendezvous.store.interface import Compare, Delete, Put, Snapshot
from elastic_agent.rendezvous.store.interface import Outcome as StoreOutcome
from elastic_agent.rendezvous.store.memory import MemoryStore

JOB = Job("ab12", "train.py", (), ("--", "train.py"), {}, "/home/u", 2, 3, 1.7e9, "u@h")
RESULT = JobResult("ab12", Outcome.FAILED, "a: exit code 3", 3, 1, 1.7e9, 1.8e9, ("a",))


class PoolStore(MemoryStore):
    """Of the tests: commands close what they open, and look at it again."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: Exception | None = None
        self.turns: list[Callable[[], object]] = []
        """Each is called before one of the next reads."""

    def read(self, scopes: tuple[str, ...], oldest_under: str | None = None) -> Snapshot:
        if self.turns:
            self.turns.pop(0)()
        if self.broken is not None:
            raise self.broken
        return super().read(scopes, oldest_under)

    def close(self) -> None:
        pass

    def put(self, *records: Record) -> None:
        self.transact((), tuple(Put(one.key, one.to_json()) for one in records))

    @property
    def view(self) -> PoolView:
        view = PoolView()
        view.read(self.read(SCOPES))
        return view

    @property
    def cancelled(self) -> list[str]:
        return [job.job for job in self.view.jobs if job.cancelled_by]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolStore]:
    store = PoolStore()
    monkeypatch.setattr(head, "open_to_look", lambda place, timeout_s: store)
    monkeypatch.setattr("elastic_agent.pool.commands.os.getcwd", lambda: "/here")
    before = signal.getsignal(signal.SIGINT)
    yield store
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def pool(store: PoolStore) -> PoolStore:
    store.put(PoolNode("a", "a1", most_nodes=2), PoolNode("b", "b1", most_nodes=2))
    return store


Command = Callable[[Sequence[str]], int]
ABOUT_ONE_JOB = (cancel, wait, logs)
Screen = pytest.CaptureFixture[str]


# --- Which job


@pytest.mark.parametrize("command", ABOUT_ONE_JOB)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["zz"], ExitCode.NO_JOB, ": the pool has no job 'zz': elastic-agent jobs lists them\n"),
        (["ab"], ExitCode.NO_JOB, "'ab' may be any of ab12, ab34: write one of these"),
        (["train.py"], ExitCode.NO_JOB, "'train.py' may be any of ab12, ab34: write one of these"),
        ([], ExitCode.BAD_CONFIG, ": expected JOB; write elastic-agent "),
        ([""], ExitCode.BAD_CONFIG, ": expected JOB; write elastic-agent "),  # `wait "$id"` after a refusal
        (["--pool=p"], ExitCode.BAD_CONFIG, ": expected JOB; write elastic-agent "),
        (["ab12", "cd34"], ExitCode.BAD_CONFIG, "'cd34': expected nothing more"),
    ],
)
def test_a_command_about_one_job_says_which_one_it_wants(
    command: Command, words: list[str], code: ExitCode, said: str, pool: PoolStore, capsys: Screen
) -> None:
    pool.put(JOB, replace(JOB, job="ab34"))
    assert command(words) == code
    assert said in capsys.readouterr().err
    assert not pool.cancelled


def test_a_job_is_found_by_its_id_the_beginning_of_it_or_its_name_before_or_behind_options(
    pool: PoolStore,
) -> None:
    for words in (["ab12"], ["ab1"], ["train.py"], ["--pool=p", "ab12"]):
        pool.put(JOB, replace(JOB, job="cd34", name="other.py"))
        assert cancel(words) == ExitCode.SUCCESS
        assert pool.cancelled == ["ab12"]
    pool.put(replace(JOB, job="cd345", name="third.py"))
    assert cancel(["cd34"]) == ExitCode.SUCCESS, "an id wins over the beginning of another one"


def test_logs_take_the_job_behind_follow(pool: PoolStore, capsys: Screen) -> None:
    pool.put(JOB, RESULT)
    assert logs(["--follow", "ab12"]) == 3
    assert "job ab12 (train.py): failed: a: exit code 3" in capsys.readouterr().err


def test_jobs_take_no_word(pool: PoolStore, capsys: Screen) -> None:
    assert jobs(["ab12"]) == ExitCode.BAD_CONFIG
    assert "'ab12': expected nothing more" in capsys.readouterr().err


# --- The store


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreUnavailable("no answer"), ExitCode.NO_ANSWER),
        (StoreRefused("not you"), ExitCode.BAD_CONFIG),
    ],
)
def test_a_store_that_does_not_answer_is_said(
    error: StoreError, code: ExitCode, store: PoolStore, capsys: Screen
) -> None:
    store.broken = error
    for command, words in ((jobs, []), (submit, ["x.py"]), (wait, ["ab"])):
        assert command(words) == code
        assert str(error) in capsys.readouterr().err


def test_records_that_cannot_be_read_hide_no_other(
    pool: PoolStore, capsys: Screen, caplog: pytest.LogCaptureFixture
) -> None:
    pool.put(JOB)
    pool.transact((), (Put(NODES_PREFIX + "z", "{}"), Put(JOBS_PREFIX + "x", "nonsense")))
    assert jobs([]) == ExitCode.SUCCESS
    shown = capsys.readouterr().out
    assert shown.startswith("2 nodes, 2 idle; 1 job\n")
    assert "ab12" in shown
    assert "nodes/z" in caplog.text
    assert "jobs/x" in caplog.text


def test_a_plan_that_cannot_be_read_is_of_another_version(pool: PoolStore, capsys: Screen) -> None:
    pool.transact((), (Put(PLAN_KEY, '{"v": 99}'),))
    for command in (jobs, submit):
        assert command(["x.py"] if command is submit else []) == ExitCode.MISMATCH
        assert "'plan'" in capsys.readouterr().err
    assert not [entry for entry in pool.read(SCOPES).entries if entry.key.startswith(JOBS_PREFIX)]


# --- submit


def test_the_last_line_of_submit_is_the_id_of_what_is_in_the_queue(pool: PoolStore, capsys: Screen) -> None:
    words = "--name=n --env=A=1,B=x,y,C= --directory=d --min-nodes=2 --max-nodes=4 --hang-timeout=60s"
    assert submit([*words.split(), "-m", "pkg.train", "--lr", "1"]) == ExitCode.SUCCESS
    [job] = pool.view.jobs
    assert capsys.readouterr() == (f"{job.job}\n", "n: needs 2 nodes; 2 idle\n")
    expected = Job(
        job.job,
        "n",
        ("--hang-timeout=60s",),
        ("-m", "pkg.train", "--lr", "1"),
        {"A": "1", "B": "x,y", "C": ""},
        "/here/d",
        2,
        4,
        job.submitted_at,
        job.submitted_by,
    )
    assert job == expected


def test_a_script_that_is_not_in_the_jobs_directory_is_refused(
    pool: PoolStore, tmp_path: Path, capsys: Screen
) -> None:
    here = f"--directory={tmp_path}"
    assert submit([here, "nofile.py"]) == ExitCode.BAD_CONFIG
    assert f"{tmp_path}, where the job is to run, has no nofile.py" in capsys.readouterr().err
    (tmp_path / "nofile.py").touch()
    assert submit([here, "nofile.py"]) == ExitCode.SUCCESS


def test_nothing_is_submitted_where_no_node_is(store: PoolStore, capsys: Screen) -> None:
    assert submit(["x.py"]) == ExitCode.NOT_FOUND
    assert "start elastic-agent without a script on each of its nodes" in capsys.readouterr().err
    assert not store.view.jobs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-nodes=3", "x.py"], "needs 3 nodes, and the pool has at most 2 (--max-nodes of its daemons)"),
        (["x.py", *["y" * 30_000] * (MAX_JOB_CHARS // 30_000 + 1)], ": put it into a file, and name that"),
        *(
            ([f"--env=A=1,{name}=hunter2", "x.py"], f"--env {name}: expected no secret")
            for name in ("HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "PGPASSWD", "SSH_PRIVATE_KEY")
        ),
    ],
)
def test_what_no_pool_runs_or_may_know_is_refused(
    words: list[str], said: str, pool: PoolStore, capsys: Screen
) -> None:
    assert submit(words) == ExitCode.BAD_CONFIG
    shown = capsys.readouterr().err
    assert said in shown
    assert "hunter2" not in shown
    assert not pool.view.jobs


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HF_TOKEN_PATH", "API_KEY_FILE"])
def test_what_is_no_secret_is_stored(name: str, pool: PoolStore) -> None:
    assert submit([f"--env={name}=1", "x.py"]) == ExitCode.SUCCESS


def test_bad_options_are_named_all_at_once(pool: PoolStore, capsys: Screen) -> None:
    words = "--min-nodes=3 --max-nodes=2 --env=MY_TOKEN=1 --node-id=n --log-dir=/l --nodes-multiple-of=2"
    assert submit([*words.split(), "--rdzv-endpoint=h:1"]) == ExitCode.BAD_CONFIG
    shown = capsys.readouterr().err
    for part in (
        "--rdzv-endpoint 'h:1': expected etcd with TLS for a pool",
        "--node-id 'n': expected an option of jobs",
        "--log-dir '/l': expected an option of jobs",
        "--env MY_TOKEN",
        "--min-nodes '3'",
        "--min-nodes '3': expected a multiple of nodes-multiple-of, which is 2",
        "expected a script to run",
    ):
        assert part in shown, part
    assert not pool.view.jobs


def test_a_submission_without_an_answer_names_the_job(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    def transact(compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> StoreOutcome:
        MemoryStore.transact(pool, compares, writes)
        raise StoreUnavailable("no answer in time")

    monkeypatch.setattr(pool, "transact", transact)
    assert submit(["x.py"]) == ExitCode.NO_ANSWER
    [job] = pool.view.jobs
    assert f"no answer in time; whether job {job.job} is in the queue is not known" in capsys.readouterr().err


# --- cancel


def test_a_job_is_cancelled_once_and_keeps_its_place(pool: PoolStore, capsys: Screen) -> None:
    pool.put(JOB)
    pool.put(replace(JOB, job="cd34"))
    assert cancel(["ab12"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out == "job ab12 (train.py) is cancelled\n"
    assert [job.job for job in pool.view.jobs] == ["ab12", "cd34"]
    assert cancel(["ab12"]) == ExitCode.NO_JOB
    assert "job ab12 has ended, or is cancelled already" in capsys.readouterr().err


def test_what_has_ended_or_ends_meanwhile_is_not_cancelled(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch, capsys: Screen
) -> None:
    pool.put(JOB)
    before = pool.view
    pool.put(RESULT)
    views = iter((before, pool.view))
    monkeypatch.setattr(commands, "read_view", lambda store: next(views))
    for _ in range(2):
        assert cancel(["ab12"]) == ExitCode.NO_JOB
        assert "job ab12 has ended, or is cancelled already" in capsys.readouterr().err
    assert not pool.cancelled


# --- jobs


def test_the_document_of_jobs_is_pinned(pool: PoolStore, capsys: Screen) -> None:
    runs = (Attempt("cd34", 1, 1.75e9, (Allocation("a", "a1", 1), Allocation("b", "b1", 2))),)
    pool.put(JOB, RESULT, replace(JOB, job="cd34"), replace(JOB, job="ef56"), Plan(2, runs))
    assert jobs(["--json"]) == ExitCode.SUCCESS
    keys = ("job", "state", "detail", "nodes", "code", "started_at", "ended_at")
    rows = (
        ("ab12", "failed", "a: exit code 3", ["a"], 3, 1.7e9, 1.8e9),
        ("cd34", "running", "attempt 1", ["a", "b"], None, 1.75e9, None),
        ("ef56", "waiting", "needs 2 nodes; 0 idle", [], None, None, None),
    )
    common = {"name": "train.py", "submitted_at": 1.7e9, "submitted_by": "u@h"}
    assert json.loads(capsys.readouterr().out) == {
        "schema": 2,
        "pool": {"nodes": 2, "idle_nodes": 0, "queued_jobs": 1, "running_jobs": 1},
        "jobs": [{**dict(zip(keys, row, strict=True)), **common} for row in rows],
    }


# --- wait, and what follows a job


@pytest.mark.parametrize(
    ("outcome", "of_agent", "code"),
    [
        (Outcome.SUCCEEDED, 0, 0),
        (Outcome.FAILED, 3, 3),
        (Outcome.FAILED, 0, ExitCode.FAILED),
        (Outcome.FAILED, 78, ExitCode.FAILED),
        (Outcome.CANCELLED, 0, ExitCode.STOPPED_BY_SIGTERM),
        (Outcome.UNABLE, 0, ExitCode.UNABLE),
    ],
)
def test_wait_ends_as_the_job_did(
    outcome: Outcome, of_agent: int, code: int, pool: PoolStore, capsys: Screen
) -> None:
    pool.put(JOB, replace(RESULT, outcome=outcome, code=of_agent))
    assert wait(["ab12"]) == code
    assert capsys.readouterr().err == f"job ab12 (train.py): {outcome.value}: a: exit code 3\n"


def test_no_code_of_waiting_means_something_else_of_an_agent() -> None:
    failed = [replace(RESULT, outcome=Outcome.FAILED, code=code) for code in ExitCode]
    assert {code_of(result) for result in failed} == {1, 3, 65, 72}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(commands, name, 0.001)


def nothing() -> None:
    pass


def away() -> None:
    raise StoreUnavailable("away")


def test_wait_says_when_the_job_is_forgotten(pool: PoolStore, impatient: None) -> None:
    pool.put(JOB)
    view = pool.view
    pool.turns = [lambda: pool.transact((), (Delete(JOB.key),))]
    with pytest.raises(CannotDo, match="not in the pool any more") as caught:
        follow(pool, view, JOB)
    assert caught.value.code is ExitCode.NO_JOB


def test_a_store_that_is_away_for_a_while_is_borne(pool: PoolStore, impatient: None) -> None:
    pool.put(JOB)
    view = pool.view
    pool.turns = [away, away, nothing, away, lambda: pool.put(RESULT)]
    assert follow(pool, view, JOB) == 3
    assert not pool.turns


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreRefused("password")])
def test_a_store_that_stays_away_or_lets_nobody_in_is_not_waited_for(
    error: Exception, pool: PoolStore, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "OUTAGE_S", 0.2 if not isinstance(error, StoreRefused) else 60.0)
    pool.put(JOB)
    view = pool.view
    pool.broken = error
    with pytest.raises(type(error)):
        follow(pool, view, JOB)


def test_follow_says_what_a_job_waits_for_among_all_jobs_and_ends_with_it(
    pool: PoolStore, impatient: None, capsys: Screen
) -> None:
    run = Attempt("ab12", 1, 0.0, (Allocation("a", "a1", 1), Allocation("b", "b1", 2)))
    pool.put(replace(JOB, job="aa00", min_nodes=2))
    pool.put(JOB, Plan(2, (run,)))
    view = pool.view
    pool.turns = [nothing, lambda: pool.put(Plan(2)), nothing, lambda: pool.put(RESULT)]
    assert follow(pool, view, JOB, LogReader("ab12")) == 3
    lonely = "cannot be read: its daemon answers on its own loopback only (--http-address)"
    said = capsys.readouterr().err.splitlines()
    assert sorted(said[:2]) == [f"node a {lonely}", f"node b {lonely}"]
    assert said[2:] == [
        "job ab12 (train.py): running: attempt 1",
        "job ab12 (train.py): waiting: behind 1 other job of the queue",
        "job ab12 (train.py): failed: a: exit code 3",
    ]


# --- logs


def test_logs_of_a_job_that_waits_or_whose_node_is_gone_say_so(pool: PoolStore, capsys: Screen) -> None:
    pool.put(replace(JOB, min_nodes=9))
    assert logs(["ab12"]) == ExitCode.SUCCESS
    output, shown = capsys.readouterr()
    assert output == ""
    assert "waits and has printed nothing: needs 9 nodes" in shown
    pool.put(replace(RESULT, nodes=("gone",)))
    assert logs(["ab12"]) == ExitCode.NO_JOB
    assert "node gone has left the pool; what it has is in its daemon's --log-dir" in capsys.readouterr().err
