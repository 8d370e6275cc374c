"""Where each stream of each worker goes: torchrun's rules, as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.agent.configuration.config import LogConfig
from elastic_agent.agent.configuration.parse import read_local_ranks, read_streams, read_texts
from elastic_agent.agent.output.worker_logs import OutputRoute
from elastic_agent.agent.workers.environment import output_routes

FOLDER = Path("logs")
WORDS = {"role_name": "trainer", "rank": 9, "local_rank": 1, "hostname": "h", "node": "n", "generation": 3}


def config(line: str, directory: Path | None = FOLDER) -> LogConfig:
    given = dict(word.split("=", 1) for word in line.split())
    return LogConfig(
        directory,
        read_streams(given["-r"]) if "-r" in given else None,
        read_streams(given["-t"]) if "-t" in given else None,
        read_local_ranks(given["ranks"]) if "ranks" in given else None,
        read_texts(given.get("out", "")),
        read_texts(given.get("err", "")),
    )


def places(route: OutputRoute) -> str:
    places = {"file": route.file, "console": route.console, "copy": bool(route.copied)}
    return " ".join(name for name, there in places.items() if there)


@pytest.mark.parametrize(
    ("line", "out", "err"),
    [
        ("", "file console", "file console"),
        ("-r=0", "console", "console"),
        ("-r=1", "file", "console"),
        ("-r=2", "console", "file"),
        ("-r=3", "file", "file"),
        ("-t=1", "file console", "console"),
        ("-t=3", "file console", "file console"),
        ("-r=3 -t=2", "file", "file console"),
        ("-r=1 -t=2", "file", "file console"),
        ("-r=1:3", "file", "file"),
        ("-r=0:3", "console", "console"),
        ("-r=0:3,1:2", "console", "file"),
        ("-r=3 -t=10:1,1:1", "file console", "file"),
        ("ranks=0,2", "file", "file"),
        ("ranks=1", "file console", "file console"),
        ("ranks=0 -r=1", "file", ""),
        ("ranks=0 -t=3", "file", "file"),
        ("out=loss", "file console copy", "file console"),
        ("out=loss err=Error -t=1", "file console copy", "console"),
        ("out=loss err=Error -r=1 -t=2", "file", "file console copy"),
        ("out=loss ranks=0", "file", "file"),
    ],
)
def test_the_second_workers_streams_go(line: str, out: str, err: str) -> None:
    found = output_routes(config(line), 1, WORDS)
    assert tuple(map(places, found)) == (out, err)


@pytest.mark.parametrize(
    ("line", "out", "err"),
    [
        ("", "console", "console"),
        ("-r=3", "console", "console"),
        ("-t=3 out=loss", "console", "console"),
        ("ranks=0", "", ""),
    ],
)
def test_where_no_file_can_be_all_is_on_the_console(line: str, out: str, err: str) -> None:
    assert tuple(map(places, output_routes(config(line, None), 1, WORDS))) == (out, err)


@pytest.mark.parametrize(
    ("line", "wants"),
    [
        ("", False),
        ("-r=0 -t=0:0", False),
        ("-r=1", True),
        ("-t=4:2", True),
        ("out=a", True),
        ("ranks=1", False),
    ],
)
def test_files_are_wanted_also_without_a_directory(line: str, wants: bool) -> None:
    assert config(line, None).wants_files is wants


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("[${node}/${rank}] ", "[n/9] "),
        ("[${role_name}${local_rank}]:", "[trainer1]:"),
        ("${hostname}:$rank: ", "h:9: "),
        ("$$ ${unknown} ${generation}>", "$ ${unknown} 3>"),
        ("", ""),
    ],
)
def test_the_prefix_is_torchruns_template(template: str, prefix: str) -> None:
    out, err = output_routes(replace(config(""), prefix_template=template), 1, WORDS)
    assert (out.prefix, err.prefix) == (prefix, prefix)
