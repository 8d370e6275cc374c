"""The configuration: every option from every source, who wins, all problems at once, and no text that breaks it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastic_agent.agent.common.ports import PortRange
from elastic_agent.agent.configuration.config import OPTIONS, Command, Config, ConfigError, LogConfig
from elastic_agent.agent.configuration.derive import resolve_daemon, resolve_pool
from elastic_agent.agent.configuration.load import (
    IGNORED_RDZV_CONF_KEYS,
    IGNORED_TORCHRUN_OPTIONS,
    MOST_FILE_BYTES,
    REMOVED,
    read_argv,
)
from elastic_agent.agent.configuration.parse import NodeCounts, NoticeSource, Option, OptionSource, Streams
from elastic_agent.agent.configuration.rendezvous import ETCD_OPTIONS, EtcdConfig, RendezvousConfig
from elastic_agent.agent.configuration.stopping import StopConfig, TimeoutConfig
from elastic_agent.rendezvous.records import Endpoint
from elastic_agent.worker.wire.environment import WORKER_VARIABLES
from tests.unit.settings import means_the_same, parse, problems_of, run_resolve, written

# option: (a text that differs from the default, where it lands in Config, the value expected there)
LANDINGS: dict[str, tuple[str, str, object]] = {
    "min-nodes": ("3", "nodes.min", 3),
    "max-nodes": ("3", "nodes.max", 3),
    "nodes-multiple-of": ("3", "nodes_multiple_of", 3),
    "nnodes": ("3:6", "nodes", NodeCounts(3, 6)),
    "nproc-per-node": ("8", "nproc_per_node", 8),
    "devices-per-worker": ("2", "devices_per_worker", 2),
    "run-path": ("true", "command.kind", "run-path"),
    "virtual-local-rank": ("true", "device_pinning", "mask"),
    "affinity": ("exclusive", "affinity", "cores"),
    "preload": ("default, my.own_package,default", "preload", ("default", "my.own_package")),
    "node-id": ("rack-1.node_2", "node_id", "rack-1.node_2"),
    "check": ("fail", "check", "fail"),
    "rdzv-backend": ("c10d", "rendezvous.backend", "c10d"),
    "rdzv-endpoint": ("node1:2000", "rendezvous.endpoints", (Endpoint("node1", 2000),)),
    "node-rank": ("3", "rendezvous.node_rank", 3),
    "rdzv-id": ("job-7", "rendezvous.job_id", "job-7"),
    "pool": ("lab", "rendezvous.pool", "lab"),
    "standalone": ("true", "rendezvous.backend", "memory"),
    "join-timeout": ("5m", "rendezvous.join_timeout_s", 300.0),
    "last-call": ("500ms", "rendezvous.last_call_s", 0.5),
    "lease-ttl": ("2.5", "rendezvous.lease_ttl_s", 2.5),
    "rdzv-conf": ("join_timeout=60,lease_ttl=3", "rendezvous.join_timeout_s", 60.0),
    "max-restarts": ("0", "max_restarts", 0),
    "stop-grace": ("1h", "stop.grace_s", 3600.0),
    "signals-to-handle": ("SIGTERM, SIGXCPU", "stop.more_signals", (signal.SIGTERM, signal.SIGXCPU)),
    "notice": ("file:/run/leave", "stop.notice", NoticeSource("file", "/run/leave")),
    "memory-checkpoints": ("1.5GiB", "memory_checkpoints", 3 * 2**29),
    "memory-replicas": ("2", "memory_replicas", 2),
    "hang-timeout": ("5m", "timeouts.hang", 300.0),
    "local-addr": ("fe80::1", "local_addr", "fe80::1"),
    "port-range": ("2000-2010", "port_range", PortRange(2000, 2010)),
    "http-address": ("[::]:9090", "http_address", Endpoint("::", 9090)),
    "role": ("my trainer", "role", "my trainer"),
    "log-dir": ("/var/log/x", "logs.directory", Path("/var/log/x")),
    "redirects": ("10:1,2:3", "logs.redirects", Streams(0, ((2, 3), (10, 1)))),
    "tee": ("3", "logs.tee", Streams(3)),
    "local-ranks-filter": ("2,0", "logs.local_ranks", (0, 2)),
    "duplicate-stdout-filters": ("loss,a,,b", "logs.stdout_filters", ("loss", "a,b")),
    "duplicate-stderr-filters": ("Error", "logs.stderr_filters", ("Error",)),
    "log-line-prefix-template": ("${hostname}:${rank}: ", "logs.prefix_template", "${hostname}:${rank}: "),
    "log-level": ("error", "logs.level", 40),
    "log-format": ("json", "logs.format", "json"),
}

# option: texts that must be refused
REFUSED: dict[str, Sequence[str]] = {
    "min-nodes": ["0", "-1", "1.5", "100001", "two", "", "1_0", "٣", "9" * 5000],
    "max-nodes": ["0", "many"],
    "nodes-multiple-of": ["0", "pairs"],
    "nnodes": ["0:4", "1:", ":4", "1:2:3", "x"],
    "nproc-per-node": ["0", "-2", "all", "4097"],
    "devices-per-worker": ["-1", "1.5", "gpu", "4097"],
    "run-path": ["perhaps"],
    "signals-to-handle": ["TERM", "SIGKILL", "SIGSEGV", "SIGTERM,", "15"],
    "virtual-local-rank": ["maybe"],
    "affinity": ["socket", "core-complex", "Numa"],
    "preload": ["", "torch,", "a b", "torch.", "9lives", "torch,none", "torch;os", "../x"],
    "node-id": ["", "a/b", "a b", "x" * 65, "ä", "a\n"],
    "check": ["", "on", "true"],
    "rdzv-backend": ["etcd-v2", "etcd-v4", "redis"],
    "rdzv-endpoint": ["", "host:port", "host:70000", "::1:29400", "[host]:1", "a/b:1", "node1:0"],
    "master-addr": ["", "h:1", "a b"],
    "master-port": ["0", "65536", "x"],
    "node-rank": ["-1", "first"],
    "rdzv-id": ["", "a/b", "x" * 65],
    "pool": ["", "a/b", "x" * 65],
    "standalone": ["perhaps"],
    "slurm": ["perhaps"],
    "join-timeout": ["0", "0.5", "-1", "10 years", "inf", "nan", "1e3", "200h", "4s"],
    "last-call": ["-1", "soon", "700s"],
    "lease-ttl": ["0.9", "999ms", "700"],
    "rdzv-conf": ["join_timeout", "=3", "unheard_of=1", "lease_ttl=0", "a=1,b=2"],
    "max-restarts": ["-1", "never"],
    "stop-grace": ["-0.1", "5 parsecs"],
    "memory-checkpoints": ["2 GB", "-1GiB", "most", "9999999TiB"],
    "memory-replicas": ["-1", "9", "all"],
    "notice": ["", "ec2", "aws:/x", "file", "file:", "file:leave", "command:/x", "off:/x"],
    "hang-timeout": ["0", "never"],
    "local-addr": ["", "a b", "host:1", "http://x"],
    "port-range": ["0-10", "29600-29500", "1-65536", "a-b", ""],
    "http-address": ["127.0.0.1:99999", ":", "localhost", "node1:9407", "127.1"],
    "role": ["", "a\nb", 'a"b', "x" * 65],
    "log-dir": ["", "a\0b"],
    "redirects": ["", "4", "0:4", "0:", "1:1;2:2", "all", "33"],
    "tee": ["", "-1", "0:1,"],
    "local-ranks-filter": ["", "0,", "first", "-1"],
    "duplicate-stdout-filters": ["a\0b"],
    "duplicate-stderr-filters": ["a\0b"],
    "log-line-prefix-template": ["a\0b"],
    "log-level": ["", "verbose", "trace", "1.5", "Level 20", "-1"],
    "log-format": ["", "JSON", "yaml"],
    "script": ["", "a\0b", "no/such/file.py"],
    "module": [""],
    "no-python": [""],
    "args": ["'unclosed"],
}


@pytest.fixture(params=["cli", "environment", "file"])
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_tables_of_this_test_know_every_option() -> None:
    elsewhere = {option.name for option in ETCD_OPTIONS}  # test_config_etcd
    settable = {option.name for option in OPTIONS if OptionSource.FILE in option.sources} - elsewhere
    assert set(REFUSED) == settable
    assert set(LANDINGS) == settable - {
        *("script", "module", "no-python", "args"),
        "slurm",  # with its environment: `test_slurm_config`
        *("master-addr", "master-port"),  # with more than one node: `test_torchrun_config`
    }


def test_each_option_fills_at_most_one_field_and_gives_its_default() -> None:
    """So no default is declared a second time. The other options are read where the rest is put together."""
    filled: list[Option[object]] = []
    for part in (Config, RendezvousConfig, EtcdConfig, StopConfig, TimeoutConfig, LogConfig):
        for field in fields(part):
            option = field.metadata.get("option")
            if option is not None:
                filled.append(option)
                assert field.default == option.default_value
    assert len(set(filled)) == len(filled)
    others = {option.name for option in OPTIONS if not option.shorthand and option not in filled}
    assert others == {
        *("script", "module", "no-python", "args", "min-nodes", "max-nodes"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "standalone", "etcd-insecure"),
        *("master-addr", "master-port"),
        *("run-path", "config", "check-config", "print-completion", "version", "help"),
    }


def test_defaults(script: str) -> None:
    assert run_resolve([script]).config == Config(
        command=Command("script", script, ()),
        nodes=NodeCounts(1, 1),
        nproc_per_node=1,
        rendezvous=RendezvousConfig("memory", (), None, "fresh", 600.0, 1.0, 5.0, 60.0),
        node_id=None,
        local_addr=None,
        port_range=None,
        max_restarts=None,
        stop=StopConfig(30.0, 1.0),
        timeouts=TimeoutConfig("auto"),
        logs=LogConfig(None, None, None, None, (), (), "[${node}/${rank}] "),
        http_address=None,
    )


@pytest.mark.parametrize("name", LANDINGS)
def test_every_option_lands_from_every_source(name: str, source: str, script: str, tmp_path: Path) -> None:
    text, landing, expected = LANDINGS[name]
    # max-nodes is wide enough that min-nodes alone is right, too.
    argv, environ = written(source, tmp_path, {name: text})
    assert attrgetter(landing)(parse([*argv, script], environ)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_every_option_wrong_once_is_the_one_problem(
    name: str, source: str, script: str, tmp_path: Path
) -> None:
    for text in REFUSED[name]:
        if source == "cli" and (name == "args" or text.startswith("-")):
            continue
        argv, environ = written(source, tmp_path, {name: text})
        command = [] if name in ("script", "module", "no-python") else [script]
        found = problems_of([*argv, *command], environ)
        assert len(found) == (2 if text == "a=1,b=2" else 1), found
        key = name.upper().replace("-", "_") if source == "environment" else name
        assert key in found[0] or name in found[0]
        assert len(found[0]) < 1000


def test_one_pass_reports_the_problems_of_all_sources(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('min-nodes = 0\nlog_dirr = "x"\n[rendezvous]\nbackend = "c10d"\n')
    argv = [
        *("--config", str(file), "--nproc-per-nod=2", "--lease-ttl", "0.1"),
        *("--node-id", "a/b", "--last-call", "--rdzv-backend", "etcd-v2", "train.py"),
    ]
    environ = {"ELASTIC_AGENT_PORT_RANGE": "x", "ELASTIC_AGENT_MAXNODES": "4", "PET_MAX_RESTARTS": "-1"}
    found = "\n".join(problems_of(argv, environ))
    for origin, advice in (
        (f"{file}: min-nodes '0'", ""),
        (f"{file}: log_dirr", "log-dir?"),
        (f"{file}: rendezvous", ""),
        ("ELASTIC_AGENT_PORT_RANGE 'x'", "FIRST-LAST"),
        ("ELASTIC_AGENT_MAXNODES", "ELASTIC_AGENT_MAX_NODES?"),
        ("PET_MAX_RESTARTS '-1'", ""),
        ("--nproc-per-nod", "--nproc-per-node?"),
        ("--lease-ttl '0.1'", ""),
        ("--node-id 'a/b'", ""),
        ("--last-call", ""),
        ("--rdzv-backend 'etcd-v2'", "etcd 3.6 has removed that interface"),
    ):
        assert re.search(rf"{re.escape(origin)}: expected .*{re.escape(advice)}", found), origin
    assert found.count("\n") == 10


def test_command_line_wins_over_environment_over_file_over_default(script: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("max-nodes = 9\nlease-ttl = 9\nlast-call = 9\n")
    environ = {"ELASTIC_AGENT_MAX_NODES": "8", "ELASTIC_AGENT_LEASE_TTL": "8", "PET_NNODES": "1:7"}
    config = parse(["--config", str(file), "--max-nodes", "5", script], environ)
    rendezvous = config.rendezvous
    assert (config.nodes.max, rendezvous.lease_ttl_s, rendezvous.last_call_s) == (5, 8.0, 9.0)
    assert rendezvous.join_timeout_s == 600.0


def test_a_broken_value_is_reported_even_where_a_stronger_source_replaces_it(script: str) -> None:
    assert len(problems_of(["--min-nodes", "1", script], {"ELASTIC_AGENT_MIN_NODES": "x"})) == 1


def test_within_one_source_an_option_wins_over_the_shorthand_for_it(script: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('max-nodes = 6\nnnodes = "2:4"\n')
    assert parse(["--config", str(file), script], {}).nodes == NodeCounts(2, 6)
    environ = {"ELASTIC_AGENT_MAX_NODES": "6", "ELASTIC_AGENT_NNODES": "2:4", "PET_NNODES": "3:3"}
    assert parse([script], environ).nodes == NodeCounts(2, 6)
    assert parse(["--max-nodes", "6", "--nnodes", "2:4", script], {}).nodes == NodeCounts(
        2, 4
    )  # the last wins


@pytest.mark.parametrize(
    ("argv", "backend", "endpoints", "job_id"),
    [
        ("", "memory", (), "fresh"),
        ("--rdzv-backend c10d", "c10d", (), "fresh"),
        ("--max-nodes 4", "c10d", (), "fresh"),
        ("--max-nodes 4 --rdzv-endpoint localhost:0", "c10d", (), "fresh"),
        ("--rdzv-endpoint node1", "c10d", (Endpoint("node1", 29400),), "default"),
        ("--rdzv-endpoint [::1]:5 --rdzv-id none", "c10d", (Endpoint("::1", 5),), "default"),
        ("--rdzv-endpoint node1:5 --rdzv-id j", "c10d", (Endpoint("node1", 5),), "j"),
        ("--nnodes 4 --rdzv-backend c10d --rdzv-endpoint node1 --standalone", "memory", (), "fresh"),
        ("--max-nodes 4 --rdzv-id none", "c10d", (), "fresh"),
    ],
)
def test_where_the_nodes_meet(
    argv: str, backend: str, endpoints: tuple[Endpoint, ...], job_id: str, script: str
) -> None:
    rendezvous = run_resolve([*argv.split(), script]).config.rendezvous
    assert (rendezvous.backend, rendezvous.endpoints, rendezvous.job_id) == (backend, endpoints, job_id)


POOL_FOLDER = Path(tempfile.gettempdir(), f"elastic-agent-pool-{os.geteuid()}")


@pytest.mark.parametrize(
    ("argv", "environ", "backend", "endpoints", "folder", "pool"),
    [
        ("", {}, "local", (), POOL_FOLDER, "pool"),
        ("--pool p", {}, "local", (), POOL_FOLDER, "p"),
        ("", {"RUNTIME_DIRECTORY": "/run/a:/run/b"}, "local", (), Path("/run/a"), "pool"),
        ("", {"RUNTIME_DIRECTORY": "a"}, "local", (), POOL_FOLDER, "pool"),
        ("", {"STATE_DIRECTORY": "/var/lib/a"}, "local", (), POOL_FOLDER, "pool"),
        # A service keeps its store where it outlives the machine's restart.
        ("", {"RUNTIME_DIRECTORY": "/r", "STATE_DIRECTORY": "/s:/t"}, "local", (), Path("/s"), "pool"),
        ("", {"RUNTIME_DIRECTORY": "/r", "STATE_DIRECTORY": "s"}, "local", (), Path("/r"), "pool"),
        ("--rdzv-backend local", {}, "local", (), POOL_FOLDER, "pool"),
        ("--rdzv-endpoint local:///x/./y/", {}, "local", (), Path("/x/y"), "pool"),
        ("--rdzv-backend c10d", {}, "c10d", (Endpoint("127.0.0.1", 29401),), None, "pool"),
        ("--rdzv-endpoint h --etcd-insecure", {}, "c10d", (Endpoint("h", 29400),), None, "pool"),
        ("--rdzv-endpoint localhost:1", {}, "c10d", (Endpoint("localhost", 1),), None, "pool"),
        ("--rdzv-endpoint etcd://127.0.0.1", {}, "etcd", (Endpoint("127.0.0.1", 2379),), None, "pool"),
    ],
)
def test_where_a_pool_is(
    argv: str,
    environ: dict[str, str],
    backend: str,
    endpoints: tuple[Endpoint, ...],
    folder: Path | None,
    pool: str,
) -> None:
    """For a daemon and for the commands alike."""
    words = read_argv(argv.split())
    for found in (resolve_daemon(words, environ).config.rendezvous, resolve_pool(words, environ)):
        assert (found.backend, found.endpoints, found.folder) == (backend, endpoints, folder)
        assert (found.job_id, found.pool) == (pool, None)


@pytest.mark.parametrize("endpoint", ["h", "etcd://h"])
def test_a_pool_that_anybody_may_reach_is_refused(endpoint: str) -> None:
    """Who writes to a pool's store runs commands on its nodes."""
    words = read_argv(["--rdzv-endpoint", endpoint])
    for read in (resolve_daemon, resolve_pool):
        with pytest.raises(ConfigError, match=r"--rdzv-endpoint .*--etcd-ca FILE.*--etcd-insecure") as caught:
            read(words, {})
        assert len(caught.value.problems) == 1


def test_a_daemon_leaves_the_multiple_of_nodes_to_its_jobs() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_daemon(read_argv(["--nodes-multiple-of=2", "--max-nodes=4"]), {})
    expected = "1 for a daemon, as each job has its own; give it to elastic-agent submit"
    assert [str(one) for one in caught.value.problems] == [f"--nodes-multiple-of '2': expected {expected}"]


def test_a_pools_job_may_have_what_its_daemon_has_in_the_environment(script: str) -> None:
    argv = ["--rdzv-endpoint=h:1", "--pool=p", "--rdzv-id=j", script]
    run_resolve(argv, {"ELASTIC_AGENT_ETCD_INSECURE": "true"})
    with pytest.raises(ConfigError, match="--rdzv-backend etcd with it, not c10d"):
        run_resolve(["--rdzv-endpoint=h:1", script], {"ELASTIC_AGENT_ETCD_INSECURE": "true"})


def test_a_job_of_this_machines_pool_meets_in_its_store(script: str) -> None:
    argv = ["--rdzv-backend=local", "--rdzv-endpoint=local:///f", "--pool=p", "--rdzv-id=j", "--max-nodes=3"]
    config = run_resolve([*argv, script]).config
    assert (config.rendezvous.folder, config.rendezvous.pool, config.rendezvous.job_id) == (
        Path("/f"),
        "p",
        "j",
    )
    assert config.solitary, "loopback will do"


@pytest.mark.parametrize(
    ("argv", "origin", "advice"),
    [
        ("--min-nodes 4 --max-nodes 2", "--min-nodes '4'", "at most max-nodes, which is 2"),
        ("--nnodes 4:2", "--nnodes '4:2'", "write the smaller"),
        ("--nnodes 3:8 --nodes-multiple-of 2", "--nnodes '3'", "use --min-nodes 2 or 4"),
        ("--nnodes 4095:4096 --nodes-multiple-of 4095", "--nnodes '4096'", "use --max-nodes 4095"),
        ("--max-nodes 6 --nodes-multiple-of 4", "--max-nodes '6'", "use --max-nodes 4 or 8"),
        ("--join-timeout 5 --lease-ttl 5s", "--join-timeout '5'", "more than lease-ttl, which is 5 s"),
        ("--lease-ttl 700", "join-timeout (default) '600s'", "more than lease-ttl, which is 700 s"),
        ("--last-call 600", "--last-call '600'", "less than join-timeout, which is 600 s"),
        ("--rdzv-endpoint h:port", "--rdzv-endpoint 'h:port'", "HOST[:PORT]"),
        ("--rdzv-endpoint h:65536", "--rdzv-endpoint 'h:65536'", "HOST[:PORT]"),
        ("--rdzv-endpoint node1:0", "--rdzv-endpoint 'node1:0'", "localhost:0"),
        ("--rdzv-backend memory --max-nodes 2", "--rdzv-backend 'memory'", "c10d or etcd"),
        ("--rdzv-backend memory --rdzv-endpoint a:1", "--rdzv-backend 'memory'", "c10d or etcd"),
        ("--rdzv-backend local", "--rdzv-backend 'local'", "elastic-agent submit"),
        ("--rdzv-endpoint local:///f", "--rdzv-endpoint 'local'", "elastic-agent submit"),
        ("--rdzv-endpoint local://f", "--rdzv-endpoint 'local://f'", "HOST[:PORT]"),
        ("--pool p --rdzv-backend local --rdzv-endpoint a:1", "--rdzv-endpoint 'a:1'", "local:///FOLDER"),
        ("--rdzv-backend c10d --rdzv-endpoint local:///f", "--rdzv-endpoint 'local:///f'", "--rdzv-backend local"),
    ],
)  # fmt: skip
def test_relations_between_settings(argv: str, origin: str, advice: str, script: str) -> None:
    (found,) = problems_of([*argv.split(), script])
    assert found.startswith(f"{origin}: expected ")
    assert advice in found


def test_relations_with_an_unreadable_value_are_not_judged(script: str) -> None:
    assert len(problems_of(["--lease-ttl", "700", "--join-timeout", "x", script])) == 1


@pytest.mark.parametrize(
    ("argv", "environ", "file", "expected"),
    [
        (["S", "--lr", "0.1", "--help"], {}, "", Command("script", "S", ("--lr", "0.1", "--help"))),
        (["--", "S", "-m"], {}, "", Command("script", "S", ("-m",))),
        (["S", "--", "--z", "--"], {}, "", Command("script", "S", ("--z", "--"))),
        (["-m", "pkg.mod", "--", "--z"], {}, "", Command("module", "pkg.mod", ("--z",))),
        (["-m", "pkg.mod", "--min-nodes", "x"], {}, "", Command("module", "pkg.mod", ("--min-nodes", "x"))),
        (["--module=pkg.mod", "S"], {}, "", Command("module", "pkg.mod", ("S",))),
        (["--no-python", "./run", "-x"], {}, "", Command("binary", "./run", ("-x",))),
        (["--no_python=./run"], {}, "", Command("binary", "./run", ())),
        ([], {"SCRIPT": "S", "ARGS": "--name 'a b'"}, "", Command("script", "S", ("--name", "a b"))),
        ([], {"MODULE": "m"}, "", Command("module", "m", ())),
        ([], {}, 'no_python = "p"\nargs = ["a b", 1, 0.5, true]', Command("binary", "p", ("a b", "1", "0.5", "true"))),
        ([], {}, 'module = "m"\nargs = "--x \'a b\'"', Command("module", "m", ("--x", "a b"))),
        # The command goes as a whole: no arguments of a weaker source's command, but a stronger source's arguments.
        (["S"], {"MODULE": "m", "ARGS": "-x"}, "", Command("script", "S", ())),
        ([], {"MODULE": "m"}, 'script = "S"\nargs = ["-x"]', Command("module", "m", ())),
        ([], {"ARGS": "-y"}, 'script = "S"\nargs = ["-x"]', Command("script", "S", ("-y",))),
    ],
)  # fmt: skip
def test_what_to_run(
    argv: list[str], environ: dict[str, str], file: str, expected: Command, script: str, tmp_path: Path
) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(file.replace('"S"', json.dumps(script)))
    argv = ["--config", str(path), *(script if word == "S" else word for word in argv)]
    variables = {f"ELASTIC_AGENT_{k}": script if v == "S" else v for k, v in environ.items()}
    target = script if expected.target == "S" else expected.target
    args = tuple(script if word == "S" else word for word in expected.args)
    assert parse(argv, variables).command == Command(expected.kind, target, args)


def test_file_or_environment_can_make_a_complete_daemon_command_line(script: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f"script = {json.dumps(script)}\n")
    environ = {"ELASTIC_AGENT_CONFIG": str(file)}
    assert parse(["--min-nodes", "1", "--max-nodes", "4"], environ).nodes == NodeCounts(1, 4)
    (problem,) = problems_of(["--min-nodes", "1", "--max-nodes", "4"])
    assert problem.startswith("command line: expected a script to run; write it after the options")


@pytest.mark.parametrize("name", REMOVED)
def test_an_option_of_an_earlier_version_says_what_to_write(
    name: str, source: str, script: str, tmp_path: Path
) -> None:
    argv, environ = written(source, tmp_path, {name: "1"})
    [problem] = problems_of([*argv, script], environ)
    assert problem.endswith(f"expected no such option any more; {REMOVED[name]}")


def test_two_things_to_run_in_one_source_are_refused(script: str) -> None:
    (problem,) = problems_of([], {"ELASTIC_AGENT_SCRIPT": script, "ELASTIC_AGENT_MODULE": "m"})
    assert problem == (
        "ELASTIC_AGENT_MODULE 'm': expected one thing to run; keep either it or ELASTIC_AGENT_SCRIPT"
    )


def test_a_script_that_cannot_be_read_is_refused(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root may read everything
    assert "expected a Python file, but " in problems_of([script])[0]


def test_numbers_in_a_file_may_be_small(script: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("last-call = 0.00001\nstop-grace = 0\n")
    config = parse(["--config", str(file), script], {})
    assert (config.rendezvous.last_call_s, config.stop) == (0.00001, StopConfig(0.0))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"min-nodes = ", "expected a readable TOML file"),
        (b"\xff\xfe", "expected a readable TOML file"),
        (b"a = " + b"[" * 5000, "expected a readable TOML file"),
        (b"#" * (MOST_FILE_BYTES + 1), "larger than"),
        (b"min-nodes = [1]\n", "min-nodes '[1]': expected a text, a number, true or false"),
        (b"min-nodes = 1979-05-27\n", "expected a text, a number, true or false"),
        (b"min-nodes = true\n", "min-nodes 'true': expected a whole number"),
        (b'args = [["a"]]\n', "args \"[['a']]\": expected a list of texts"),
        (b'config = "other.toml"\n', "config: expected a key that elastic-agent knows"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(content: bytes | None, problem: str, script: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    if content is not None:
        file.write_bytes(content)
    (found,) = problems_of(["--config", str(file), script])
    assert str(file) in found
    assert problem in found


def test_what_an_agent_gives_its_workers_is_no_setting(script: str) -> None:
    assert parse([script], dict.fromkeys(WORKER_VARIABLES, "7")).command.target == script


TORCHRUN_VARIABLES = [option for option in OPTIONS if option.torchruns and option.name in LANDINGS]


@pytest.mark.parametrize("option", TORCHRUN_VARIABLES, ids=lambda option: option.torchruns)
def test_torchruns_names_and_variables_are_read(option: Option[object], script: str) -> None:
    text, landing, expected = LANDINGS[option.name]
    variable = f"PET_{option.torchruns.upper().replace('-', '_')}"
    assert attrgetter(landing)(parse([script], {variable: text})) == expected
    assert attrgetter(landing)(parse([f"--{option.torchruns}={text}", script], {})) == expected


@pytest.mark.parametrize("name", IGNORED_TORCHRUN_OPTIONS)
def test_torchrun_options_without_meaning_here_are_ignored_aloud(name: str, script: str) -> None:
    plain = run_resolve([script])
    variable = f"PET_{name.upper().replace('-', '_')}"
    for resolved, origin in (
        (run_resolve([f"--{name.replace('-', '_')}", "3", script]), f"--{name.replace('-', '_')}"),
        (run_resolve([script], {variable: "3"}), variable),
    ):
        assert resolved.config == plain.config
        assert resolved.warnings == (f"{origin} is ignored: {IGNORED_TORCHRUN_OPTIONS[name]}",)


def test_torchruns_rdzv_conf_keys_are_accepted_and_the_option_may_be_repeated(script: str) -> None:
    ignored = ",".join(f"{key}=1" for key in sorted(IGNORED_RDZV_CONF_KEYS))
    resolved = run_resolve(
        ["--rdzv-conf", f"join_timeout=60,{ignored}", "--rdzv-conf", "last-call-timeout=2", script]
    )
    assert resolved.config.rendezvous.join_timeout_s == 60.0
    assert resolved.config.rendezvous.last_call_s == 2.0
    assert len(resolved.warnings) == len(IGNORED_RDZV_CONF_KEYS)


def test_standalone_warns_of_what_it_overrules(script: str) -> None:
    resolved = run_resolve(["--rdzv-backend", "c10d", "--nnodes=1:4", "--standalone", script])
    assert resolved.config.nodes == NodeCounts(1, 1)
    assert resolved.warnings == (
        "--nnodes is ignored: --standalone overrules it",
        "--rdzv-backend is ignored: --standalone overrules it",
    )


# --- The printed settings and the documentation ---

VALUES = st.fixed_dictionaries({}, optional={name: st.just(text) for name, (text, _, _) in LANDINGS.items()})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=VALUES, args=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
)
@example(values={}, args=["--memory-checkpoints"])
def test_the_printed_settings_are_a_file_that_means_the_same(
    values: dict[str, str], args: list[str], script: str, tmp_path: Path
) -> None:
    if "rdzv-endpoint" in values or values.get("rdzv-backend") == "c10d":
        values.pop("standalone", None)
    words, _ = written("cli", tmp_path, values)
    first = run_resolve([*words, script, *args])
    again = means_the_same(first, tmp_path)
    assert again.config == first.config
    assert set(again.warnings) <= set(first.warnings), (
        "an argument of the script may look like an option of ours"
    )


def test_the_origin_of_every_printed_setting_is_named(script: str) -> None:
    lines = run_resolve(["--nnodes", "2", script], {"ELASTIC_AGENT_LEASE_TTL": "3"}).settings.lines()
    origins = {line.split(" = ")[0]: line.split("  # ")[-1] for line in lines}
    assert origins["min-nodes"] == origins["max-nodes"] == "--nnodes"
    assert origins["lease-ttl"] == "ELASTIC_AGENT_LEASE_TTL"
    assert origins["script"] == "command line: script"
    assert origins["join-timeout"] == "default"
    given = ["script", "args", "min-nodes", "max-nodes", "lease-ttl"]
    assert list(origins)[: len(given)] == given, "what the user has set is seen first"


# --- Fuzz: a Config or a ConfigError, nothing else ---

NAMES = [name for option in OPTIONS for name in option.names] + list(IGNORED_TORCHRUN_OPTIONS)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "0", "1", "4", "1:4", "-1", "none", "auto", "5m", "a=b", "host:0", "[::1]:1", "/", "nan"]
    ),
    st.sampled_from([text for texts in REFUSED.values() for text in texts]),
    st.text(max_size=8),
)
WORDS = st.one_of(
    TEXTS,
    st.sampled_from(NAMES).map(lambda name: f"--{name}"),
    st.tuples(st.sampled_from(NAMES), TEXTS).map(lambda pair: f"--{pair[0].replace('-', '_')}={pair[1]}"),
    st.sampled_from(["-m", "-r", "-t", "--", "-", "--nonsense"]),
)
KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=6))
ENVIRONS = st.dictionaries(
    st.tuples(st.sampled_from(["ELASTIC_AGENT_", "PET_"]), KEYS).map(
        lambda p: p[0] + p[1].upper().replace("-", "_")
    ),
    TEXTS,
    max_size=4,
)
TOML_VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(lambda value: str(value).lower()),
    TEXTS.filter(lambda text: text.isascii()).map(json.dumps),
    st.lists(st.integers()).map(str),
    st.just("{ a = 1 }"),
    st.just("1979-05-27T07:32:00Z"),
)
FILES = st.one_of(
    st.binary(max_size=40),
    st.lists(st.tuples(KEYS.map(json.dumps), TOML_VALUES), max_size=5).map(
        lambda rows: "\n".join(f"{key} = {value}" for key, value in rows).encode()
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argv=st.lists(WORDS, max_size=8), environ=ENVIRONS, content=FILES)
def test_whatever_is_written_the_answer_is_a_config_or_the_problems(
    argv: list[str], environ: dict[str, str], content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "agent.toml"
    file.write_bytes(content)
    try:
        config = parse(["--config", str(file), *argv], environ)
    except ConfigError as error:
        problems = error.problems
    else:
        assert 1 <= config.nodes.min <= config.nodes.max
        assert config.rendezvous.join_timeout_s > config.rendezvous.lease_ttl_s >= 1.0
        assert config.command.target
        return
    assert problems
    assert all(problem.expected and problem.advice for problem in problems)


@settings(max_examples=100, deadline=None)
@given(args=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))))
def test_arguments_after_the_command_are_untouched(args: list[str]) -> None:
    assert parse(["-m", "mod", *args], {}).command.args == tuple(args)
    environ = {"ELASTIC_AGENT_MODULE": "mod", "ELASTIC_AGENT_ARGS": shlex.join(args)}
    assert parse([], environ).command.args == tuple(args)
