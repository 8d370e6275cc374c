"""Command lines that torchrun's users have: what they mean to us, and what of them has no effect."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_agent.agent.configuration.config import OPTIONS, ConfigError
from elastic_agent.agent.configuration.derive import Resolved
from elastic_agent.agent.configuration.load import IGNORED_TORCHRUN_OPTIONS, read_argv
from elastic_agent.rendezvous.records import Endpoint
from tests.unit.settings import means_the_same, run_resolve

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating.md"


def run(line: str, *script: str, **environ: str) -> Resolved:
    return run_resolve([*shlex.split(line), *script], environ)


@pytest.mark.parametrize(
    ("line", "environ", "endpoint", "node_rank"),
    [
        ("--nnodes=2 --node-rank=1 --master-addr=h --master-port=1234", {}, Endpoint("h", 1234), 1),
        ("--nnodes 2 --node_rank 0 --master_addr 10.0.0.1", {}, Endpoint("10.0.0.1", 29500), 0),
        ("--nnodes=1:4 --master-addr=::1", {}, Endpoint("::1", 29500), None),
        ("--nnodes=2 --rdzv-backend=static", {}, Endpoint("127.0.0.1", 29500), None),
        (
            "",
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "23456"},
            Endpoint("job-0", 23456),
            1,
        ),
        ("--master-port=1", {"PET_NNODES": "2", "PET_MASTER_ADDR": "h"}, Endpoint("h", 1), None),
    ],
)
def test_the_static_form_names_the_store(
    line: str, environ: dict[str, str], endpoint: Endpoint, node_rank: int | None, script: str
) -> None:
    resolved = run(line, script, **environ)
    rendezvous = resolved.config.rendezvous
    assert (rendezvous.backend, rendezvous.endpoints, rendezvous.job_id) == ("c10d", (endpoint,), "default")
    assert rendezvous.node_rank == node_rank
    assert resolved.warnings == ()


def test_a_rank_alone_orders_nodes_and_names_no_store(script: str) -> None:
    """The first node hosts the store, and prints where the others find it."""
    rendezvous = run("--nnodes=2 --node-rank=0", script).config.rendezvous
    assert (rendezvous.backend, rendezvous.endpoints, rendezvous.node_rank) == ("c10d", (), 0)


def test_what_ultralytics_writes_for_torchrun_is_one_job_of_this_node(script: str) -> None:
    """The list of its `generate_ddp_command`, behind the module's name."""
    resolved = run("--nproc_per_node 2 --master_port 41213", script)
    config = resolved.config
    assert (config.nproc_per_node, config.rendezvous.backend, config.command.target) == (2, "memory", script)
    assert resolved.warnings == ("--master_port is ignored: one node meets no other",)


def test_the_command_of_torchs_tutorial_for_ddp_is_taken_word_for_word(script: str) -> None:
    line = "--nnodes=2 --nproc_per_node=8 --rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29400"
    resolved = run(line, script)
    config, rendezvous = resolved.config, resolved.config.rendezvous
    assert (rendezvous.backend, rendezvous.job_id) == ("c10d", "100")
    assert rendezvous.endpoints == (Endpoint("10.0.0.1", 29400),)
    assert (config.nodes.min, config.nodes.max, config.nproc_per_node) == (2, 2, 8)
    assert resolved.warnings == ()


@pytest.mark.parametrize("line", ["-m --no-python prog", "--no-python -m prog", "-m --no-python=prog"])
def test_two_things_to_run_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="expected one thing to run"):
        run(line)


@pytest.mark.parametrize(
    ("line", "environ", "kind"),
    [
        ("prog -x", {"PET_MODULE": "1", "PET_NO_PYTHON": "0"}, "module"),
        ("prog -x", {"PET_NO_PYTHON": "1", "PET_MODULE": ""}, "binary"),
        ("--no-python prog -x", {"PET_MODULE": "1"}, "binary"),
        ("-m prog -x", {"PET_MODULE": "1"}, "module"),
    ],
)
def test_torchruns_variables_say_what_the_script_is(line: str, environ: dict[str, str], kind: str) -> None:
    resolved = run(line, **environ)
    command = resolved.config.command
    assert (command.kind, command.target, command.args) == (kind, "prog", ("-x",))
    assert resolved.warnings == ()


@pytest.mark.parametrize(
    ("line", "environ", "prefix"),
    [
        ("", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a"}, "a"),
        ("", {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a", "PET_LOG_LINE_PREFIX_TEMPLATE": "b"}, "b"),
        (
            "",
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a", "ELASTIC_AGENT_LOG_LINE_PREFIX_TEMPLATE": ""},
            "",
        ),
        ("--log_line_prefix_template=c", {"PET_LOG_LINE_PREFIX_TEMPLATE": "b"}, "c"),
        (
            "",
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "", "PET_TEE": "", "PET_ROLE": ""},
            "[${node}/${rank}] ",
        ),
    ],
)
def test_torchruns_variable_of_the_prefix_is_the_weakest(
    line: str, environ: dict[str, str], prefix: str, script: str
) -> None:
    assert run(line, script, **environ).config.logs.prefix_template == prefix


@pytest.mark.parametrize(("line", "grace_s"), [("", 7.0), ("--shutdown-timeout=9", 9.0)])
def test_torchruns_variable_of_the_shutdown_is_read(line: str, grace_s: float, script: str) -> None:
    assert run(line, script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").config.stop.grace_s == grace_s


@pytest.mark.parametrize(
    ("line", "backend", "warnings"),
    [
        (
            "--nnodes=2 --rdzv-endpoint=x:1 --master-addr=h",
            "c10d",
            ("--master-addr is ignored: nodes meet at --rdzv-endpoint",),
        ),
        (
            "--nproc-per-node=2 --master_port=29501",
            "memory",
            ("--master_port is ignored: one node meets no other",),
        ),
        ("--nnodes=1 --node-rank=0 --rdzv-backend=static", "c10d", ()),
        ("--nnodes=2 --rdzv-endpoint=x:1", "c10d", ()),
    ],
)
def test_beside_another_meeting_place_it_has_no_effect(
    line: str, backend: str, warnings: tuple[str, ...], script: str
) -> None:
    resolved = run(line, script)
    assert resolved.config.rendezvous.backend == backend
    assert resolved.warnings == warnings


def test_the_file_that_is_printed_means_the_same(script: str, tmp_path: Path) -> None:
    resolved = run("--nnodes=2 --node-rank=1 --master-addr=h", script)
    again = means_the_same(resolved, tmp_path)
    assert (again.config, again.warnings) == (resolved.config, ())


@pytest.mark.parametrize(
    ("line", "kind", "target", "args"),
    [
        ("--standalone -m --nproc-per-node=2 pkg.mod --lr 1", "module", "pkg.mod", ("--lr", "1")),
        ("-m pkg.mod -x", "module", "pkg.mod", ("-x",)),
        ("--module --standalone -- pkg.mod -x", "module", "pkg.mod", ("-x",)),
        ("--no-python --standalone true a", "binary", "true", ("a",)),
        ("--no_python true", "binary", "true", ()),
    ],
)
def test_module_and_no_python_may_stand_alone(
    line: str, kind: str, target: str, args: tuple[str, ...]
) -> None:
    command = run(line).config.command
    assert (command.kind, command.target, command.args) == (kind, target, args)


@pytest.mark.parametrize("target", ["-m pkg.mod", "--no-python true"])
def test_run_path_is_for_scripts(target: str) -> None:
    with pytest.raises(ConfigError, match="--run-path 'true': expected a script, and not"):
        run(f"--run-path {target}")


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("--redirect=3", "did you mean --redirects?"),
        ("--nproc_per_nod=2", "did you mean --nproc-per-node?"),
        ("--lease-tll=3", "did you mean --lease-ttl?"),
        ("--print-completions=bash", "did you mean --print-completion?"),
        ("--frobnicate", "see elastic-agent --help"),
    ],
)
def test_what_no_torchrun_has_is_a_mistake(written: str, advice: str, script: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{written.partition('=')[0]}: expected an option.*{re.escape(advice)}"
    ):
        run(written, script)


def test_a_text_that_is_not_utf_8_is_refused(script: str) -> None:
    [problem] = read_argv(["--duplicate-stdout-filters=\udcff", script]).problems
    assert "a text in UTF-8" in str(problem)
    str(problem).encode()


def test_every_flag_of_the_installed_torchrun_is_known() -> None:
    ours = {name for option in OPTIONS for name in option.names} | {*IGNORED_TORCHRUN_OPTIONS}
    theirs = [
        {spelling.lstrip("-").replace("_", "-") for spelling in action.option_strings}
        for action in get_args_parser()._actions
        if action.option_strings
    ]
    assert [names for names in theirs if not names & ours] == []


def test_the_document_has_every_flag_of_the_installed_torchrun() -> None:
    text = DOCUMENT.read_text()
    flags = {
        max(action.option_strings, key=len) for action in get_args_parser()._actions if action.option_strings
    }
    known = {flag for flag in flags if f"`{flag.replace('_', '-')}`" in text}
    assert flags - known == {"--help"}
    ignored = [f"--{name}" for name in IGNORED_TORCHRUN_OPTIONS]
    rows = [line for line in text.splitlines() if line.startswith("| `--") and "| ignored |" in line]
    assert sorted(flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row.split("|")[1])) == sorted(
        ignored
    )
