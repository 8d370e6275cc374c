"""The Dockerfile, as far as it can be judged without building it, and the wheel that it makes of its context."""

from __future__ import annotations

import json
import re
import zipfile

from tests.installed import ROOT, Installed, context


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def test_the_last_stage_runs_the_agent_itself_and_not_as_root() -> None:
    last = dict(stages()[-1])
    assert json.loads(last["ENTRYPOINT"]) == ["elastic-agent"], "no shell between it and the signals"
    user, group = last["USER"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert [word for word, _ in stages()[-1]].index("USER") > [word for word, _ in stages()[-1]].index("RUN")


def test_the_last_stage_compiles_nothing() -> None:
    assert len(stages()) == 2
    assert not re.search(r"apt-get|gcc|build-essential|curl|ADD", json.dumps(stages()[-1]))


def test_every_image_has_a_version() -> None:
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    for stage in stages():
        image = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], stage[0][1].split()[0])
        assert re.search(r":[0-9]", image), image


def test_the_context_is_what_the_package_needs_and_no_more() -> None:
    assert all((ROOT / path).exists() for path in context())
    links = {path.name for path in (ROOT / "elastic_agent").iterdir() if path.is_symlink()}
    assert {path.name for path in context() if (ROOT / path).is_dir()} == {"elastic_agent", *links}


def test_a_wheel_made_of_the_context_holds_every_module(installed: Installed) -> None:
    """The folders are links in the package, and only a wheel shows whether what they lead to is packed."""
    tree = installed.tree
    packed = set(zipfile.ZipFile(installed.wheel).namelist())
    folders = [path for path in context() if (tree / path).is_dir() and path.name != "elastic_agent"]
    modules = [module.relative_to(tree) for folder in folders for module in (tree / folder).rglob("*.py")]
    assert len(modules) > 50
    assert {f"elastic_agent/{module}" for module in modules} <= packed
    assert {"elastic_agent/__main__.py", "elastic_agent/py.typed"} <= packed
    assert {
        "elastic_agent/agent/observability/page.html",
        "elastic_agent/rendezvous/etcd/etcd.proto",
    } <= packed
    assert "elastic_agent/deploy/systemd/elastic-agent@.service" in packed
