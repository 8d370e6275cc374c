"""submit, jobs, wait, logs and cancel: what they refuse, in which words, with which code, and that nothing is lost."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.commands import command as head
from elastic_agent.agent.common.exits import CannotDo, ExitCode
from elastic_agent.pool import commands
from elastic_agent.pool.commands import (
    JobLog,
    cancel,
    code_of,
    follow,
    jobs,
    logs,
    wait,
)
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
from elastic_agent.pool.submit import submit
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


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolStore]:
    store = PoolStore()
    monkeypatch.setattr(head, "open_to_look", lambda place, timeout_s: store)
    monkeypatch.setattr("elastic_agent.pool.submit.os.getcwd", lambda: "/here")
    before = signal.getsignal(signal.SIGINT)
    yield store
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def pool(store: PoolStore) -> PoolStore:
    store.put(PoolNode("a", "a1", most_nodes=2), PoolNode("b", "b1", most_nodes=2))
    return store


Command = Callable[[Sequence[str]], int]
ABOUT_ONE_JOB = (cancel, wait, logs)


# --- Which job


@pytest.mark.parametrize("command", ABOUT_ONE_JOB)
def test_an_unknown_job_is_named(
    command: Command, pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.put(JOB)
    assert command(["zz"]) == ExitCode.NO_JOB
    assert capsys.readouterr().err.endswith(": the pool has no job 'zz': elastic-agent jobs lists them\n")


@pytest.mark.parametrize("command", ABOUT_ONE_JOB)
@pytest.mark.parametrize("words", [[], [""]])
def test_a_job_that_is_not_named_is_asked_for(
    command: Command, words: list[str], pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `wait "$id"` after a `submit` that was refused."""
    pool.put(JOB)
    assert command(words) == ExitCode.BAD_CONFIG
    assert ": expected JOB; write elastic-agent " in capsys.readouterr().err


@pytest.mark.parametrize("command", ABOUT_ONE_JOB)
@pytest.mark.parametrize("name", ["ab", "train.py"])
def test_a_name_of_several_jobs_is_refused(
    command: Command, name: str, pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.put(JOB, replace(JOB, job="ab34"))
    assert command([name]) == ExitCode.NO_JOB
    assert f"'{name}' may be any of ab12, ab34: write one of these" in capsys.readouterr().err
    assert not pool.view.pool().cancelled


@pytest.mark.parametrize("name", ["ab12", "ab1", "train.py"])
def test_a_job_is_found_by_its_id_the_beginning_of_it_or_its_name(name: str, pool: PoolStore) -> None:
    pool.put(JOB, replace(JOB, job="cd34", name="other.py"))
    assert cancel([name]) == ExitCode.SUCCESS
    assert set(pool.view.pool().cancelled) == {"ab12"}


def test_an_id_wins_over_the_beginning_of_another_one(pool: PoolStore) -> None:
    pool.put(JOB, replace(JOB, job="ab123"))
    assert cancel(["ab12"]) == ExitCode.SUCCESS


@pytest.mark.parametrize("command", ABOUT_ONE_JOB)
@pytest.mark.parametrize("words", [[], ["--pool=p"]])
def test_a_command_about_a_job_wants_one(
    command: Command, words: list[str], pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(words) == ExitCode.BAD_CONFIG
    assert "expected JOB; write elastic-agent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"), [(jobs, ["ab12"]), *((one, ["ab12", "cd34"]) for one in ABOUT_ONE_JOB)]
)
def test_a_word_too_many_is_refused(
    command: Command, words: list[str], pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.put(JOB)
    assert command(words) == ExitCode.BAD_CONFIG
    assert f"'{words[-1]}': expected nothing more" in capsys.readouterr().err
    assert not pool.view.pool().cancelled


# --- The store


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreUnavailable("no answer"), ExitCode.NO_ANSWER),
        (StoreRefused("not you"), ExitCode.BAD_CONFIG),
    ],
)
def test_a_store_that_does_not_answer_is_said(
    error: StoreError, code: ExitCode, store: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.broken = error
    for command, words in (
        (jobs, []),
        (submit, ["x.py"]),
        *((one, ["ab"]) for one in ABOUT_ONE_JOB),
    ):
        assert command(words) == code
        assert str(error) in capsys.readouterr().err


def test_records_that_cannot_be_read_hide_no_other(
    pool: PoolStore, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pool.put(JOB)
    pool.transact((), (Put(NODES_PREFIX + "z", "{}"), Put(JOBS_PREFIX + "x", "nonsense")))
    assert jobs([]) == ExitCode.SUCCESS
    shown = capsys.readouterr().out
    assert shown.startswith("2 nodes, 2 idle; 1 job\n")
    assert "ab12" in shown
    assert "nodes/z" in caplog.text
    assert "jobs/x" in caplog.text


def test_a_plan_that_cannot_be_read_is_of_another_version(
    pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.transact((), (Put(PLAN_KEY, '{"v": 99}'),))
    for command in (jobs, submit):
        assert command(["x.py"] if command is submit else []) == ExitCode.MISMATCH
        assert "'plan'" in capsys.readouterr().err
    assert not [entry for entry in pool.read(SCOPES).entries if entry.key.startswith(JOBS_PREFIX)]


def test_output_that_is_closed_is_told_to_the_start(pool: PoolStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):  # of which it makes the exit code
        jobs([])


# --- submit


def test_the_last_line_of_submit_is_the_id_of_what_is_in_the_queue(
    pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--name=n --env=A=1,B=x,y,C= --directory=d --min-nodes=2 --max-nodes=4 --hang-timeout=60s"
    assert submit([*words.split(), "-m", "pkg.train", "--lr", "1"]) == ExitCode.SUCCESS
    [job] = pool.view.jobs
    assert capsys.readouterr() == (f"{job.job}\n", "n: needs 2 nodes; 2 idle\n")
    assert job == Job(
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


def test_a_script_that_is_not_in_the_jobs_directory_is_refused(
    pool: PoolStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = f"--directory={tmp_path}"
    assert submit([here, "nofile.py"]) == ExitCode.BAD_CONFIG
    assert f"{tmp_path}, where the job is to run, has no nofile.py" in capsys.readouterr().err
    (tmp_path / "nofile.py").touch()
    assert submit([here, "nofile.py"]) == ExitCode.SUCCESS


def test_nothing_is_submitted_where_no_node_is(store: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["x.py"]) == ExitCode.NOT_FOUND
    assert "start elastic-agent without a script on each of its nodes" in capsys.readouterr().err
    assert not store.view.jobs


def test_a_job_that_is_larger_than_the_pool_can_be_is_refused(
    pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(["--min-nodes=3", "x.py"]) == ExitCode.BAD_CONFIG
    assert "needs 3 nodes, and the pool has at most 2 (--max-nodes of its daemons)" in capsys.readouterr().err
    assert not pool.view.jobs


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "wandb_api_key",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "PGPASSWD",
        "SSH_PRIVATE_KEY",
        "GCP_CREDENTIALS",
    ],
)
def test_what_looks_like_a_secret_is_not_stored(
    name: str, pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit([f"--env=A=1,{name}=hunter2", "x.py"]) == ExitCode.BAD_CONFIG
    shown = capsys.readouterr().err
    assert f"--env {name}: expected no secret" in shown
    assert "give the file's name" in shown
    assert "hunter2" not in shown
    assert not pool.view.jobs


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HF_TOKEN_PATH", "API_KEY_FILE", "KEY"]
)
def test_what_is_no_secret_is_stored(name: str, pool: PoolStore) -> None:
    assert submit([f"--env={name}=1", "x.py"]) == ExitCode.SUCCESS


def test_a_job_that_is_too_large_for_a_record_is_refused(
    pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(["x.py", *["y" * 30_000] * (MAX_JOB_CHARS // 30_000 + 1)]) == ExitCode.BAD_CONFIG
    assert ": put it into a file, and name that" in capsys.readouterr().err
    assert not pool.view.jobs


def test_bad_options_are_named_all_at_once(pool: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--min-nodes=3 --max-nodes=2 --env=MY_TOKEN=1 --node-id=n --log-dir=/l --lease-ttl=1s"
        " --nodes-multiple-of=2"
    )
    assert submit([*words.split(), "--rdzv-endpoint=h:1"]) == ExitCode.BAD_CONFIG
    shown = capsys.readouterr().err
    for part in (
        "--rdzv-endpoint 'h:1': expected etcd with TLS for a pool",
        "--node-id 'n': expected an option of jobs",
        "--log-dir '/l': expected an option of jobs",
        "--lease-ttl '1s': expected an option of jobs",
        "--env MY_TOKEN",
        "--min-nodes '3'",
        "--min-nodes '3': expected a multiple of nodes-multiple-of, which is 2",
        "expected a script to run",
    ):
        assert part in shown, part
    assert not pool.view.jobs


def test_a_submission_without_an_answer_names_the_job(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def transact(compares: tuple[Compare, ...], writes: tuple[Put | Delete, ...]) -> StoreOutcome:
        MemoryStore.transact(pool, compares, writes)
        raise StoreUnavailable("no answer in time")

    monkeypatch.setattr(pool, "transact", transact)
    assert submit(["x.py"]) == ExitCode.NO_ANSWER
    [job] = pool.view.jobs
    assert f"no answer in time; whether job {job.job} is in the queue is not known" in capsys.readouterr().err


# --- cancel


def test_a_job_is_cancelled_once(pool: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    pool.put(JOB)
    assert cancel(["ab12"]) == ExitCode.SUCCESS
    assert capsys.readouterr().out == "job ab12 (train.py) is cancelled\n"
    assert cancel(["ab12"]) == ExitCode.NO_JOB
    assert "job ab12 is cancelled already, and about to end" in capsys.readouterr().err


def test_what_has_ended_is_not_cancelled(pool: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    pool.put(JOB, RESULT)
    assert cancel(["ab12"]) == ExitCode.NO_JOB
    assert "job ab12 has ended already: failed, a: exit code 3" in capsys.readouterr().err
    assert not pool.view.pool().cancelled


def test_what_ends_meanwhile_is_not_cancelled(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.put(JOB)
    monkeypatch.setattr(commands, "read_view", lambda store: before)
    before = pool.view
    pool.put(RESULT)
    assert cancel(["ab12"]) == ExitCode.NO_JOB
    assert "has ended already: failed, a: exit code 3" in capsys.readouterr().err
    assert not pool.view.pool().cancelled


# --- jobs


def test_the_document_of_jobs_is_pinned(pool: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = pool.view.nodes
    allocations = tuple(
        Allocation(node.node, node.incarnation, 1 + place) for place, node in enumerate(nodes)
    )
    runs = (Attempt("cd34", 1, 1.75e9, allocations),)
    pool.put(JOB, RESULT, replace(JOB, job="cd34"), replace(JOB, job="ef56"), Plan(2, runs))
    assert jobs(["--json"]) == ExitCode.SUCCESS
    common = {"name": "train.py", "submitted_at": 1.7e9, "submitted_by": "u@h"}
    assert json.loads(capsys.readouterr().out) == {
        "schema": 2,
        "pool": {"nodes": 2, "idle_nodes": 0, "queued_jobs": 1, "running_jobs": 1},
        "jobs": [
            {
                "job": "ab12",
                "state": "failed",
                "detail": "a: exit code 3",
                "nodes": ["a"],
                "code": 3,
                "started_at": 1.7e9,
                "ended_at": 1.8e9,
                **common,
            },
            {
                "job": "cd34",
                "state": "running",
                "detail": "attempt 1",
                "nodes": ["a", "b"],
                "code": None,
                "started_at": 1.75e9,
                "ended_at": None,
                **common,
            },
            {
                "job": "ef56",
                "state": "waiting",
                "detail": "needs 2 nodes; 0 idle",
                "nodes": [],
                "code": None,
                "started_at": None,
                "ended_at": None,
                **common,
            },
        ],
    }


# --- wait


@pytest.mark.parametrize(
    ("outcome", "of_agent", "code"),
    [
        (Outcome.SUCCEEDED, 0, 0),
        (Outcome.FAILED, 3, 3),
        (Outcome.FAILED, 72, 72),
        (Outcome.FAILED, 0, ExitCode.FAILED),
        (Outcome.FAILED, 76, ExitCode.FAILED),
        (Outcome.FAILED, 78, ExitCode.FAILED),
        (Outcome.CANCELLED, 0, ExitCode.STOPPED_BY_SIGTERM),
        (Outcome.UNABLE, 0, ExitCode.UNABLE),
    ],
)
def test_wait_ends_as_the_job_did(
    outcome: Outcome, of_agent: int, code: int, pool: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replace(RESULT, outcome=outcome, code=of_agent)
    pool.put(JOB, result)
    assert wait(["ab12"]) == code_of(result) == code
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


def test_wait_says_when_the_job_is_forgotten(pool: PoolStore, impatient: None) -> None:
    pool.put(JOB)
    view = pool.view
    pool.turns = [lambda: pool.transact((), (Delete(JOB.key),))]
    with pytest.raises(CannotDo, match="not in the pool any more") as caught:
        follow(pool, view, JOB)
    assert caught.value.code is ExitCode.NO_JOB


# --- What follows a job


def failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_store_that_is_away_for_a_while_is_borne(pool: PoolStore, impatient: None) -> None:
    pool.put(JOB)
    view = pool.view
    away = failing(StoreUnavailable("away"))
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


def test_follow_says_what_a_job_waits_for_and_ends_with_it(
    pool: PoolStore, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    large = replace(JOB, min_nodes=9)
    pool.put(large)
    view = pool.view
    pool.turns = [nothing, nothing, lambda: pool.put(RESULT)]
    assert follow(pool, view, large, JobLog("ab12")) == 3
    assert capsys.readouterr().err.splitlines() == [
        "job ab12 (train.py): waiting: needs 9 nodes; the pool has 2 that can run it",
        "node a cannot be read: its daemon answers on its own loopback only (--http-address)",
        "job ab12 (train.py): failed: a: exit code 3",
    ]


def test_a_job_that_waits_again_says_what_for_among_all_jobs(
    pool: PoolStore, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = replace(JOB, job="aa00", min_nodes=2)
    run = Attempt("ab12", 1, 0.0, (Allocation("a", "a1", 1), Allocation("b", "b1", 2)))
    pool.put(first)
    pool.put(JOB, Plan(2, (run,)))
    view = pool.view
    pool.turns = [nothing, lambda: pool.put(Plan(2)), nothing, lambda: pool.put(RESULT)]
    assert follow(pool, view, JOB) == 3
    assert capsys.readouterr().err.splitlines() == [
        "job ab12 (train.py): running: attempt 1",
        "job ab12 (train.py): waiting: behind 1 other job of the queue",
        "job ab12 (train.py): failed: a: exit code 3",
    ]


# --- logs


def test_logs_of_a_job_that_waits_say_what_for(pool: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    pool.put(replace(JOB, min_nodes=9))
    assert logs(["ab12"]) == ExitCode.SUCCESS
    output, shown = capsys.readouterr()
    assert output == ""
    assert "waits and has printed nothing: needs 9 nodes" in shown


def test_logs_of_a_node_that_is_gone(pool: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    pool.put(JOB, replace(RESULT, nodes=("gone",)))
    assert logs(["ab12"]) == ExitCode.NO_JOB
    assert "node gone has left the pool; what it has is in its daemon's --log-dir" in capsys.readouterr().err


def test_logs_of_a_job_that_runs_cut_no_line(
    store: PoolStore, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(commands, "ask_daemon", lambda node, job, start: b"1\n2"[start:])
    run = Attempt("ab12", 1, 0.0, (Allocation("a", "a1", 1),))
    store.put(PoolNode("a", "a1"), JOB, Plan(1, (run,)))
    assert logs(["ab12"]) == ExitCode.SUCCESS
    assert capfdbinary.readouterr().out == b"1\n"
    store.put(RESULT, Plan())
    assert logs(["ab12"]) == ExitCode.SUCCESS
    assert capfdbinary.readouterr().out == b"1\n2\n"
