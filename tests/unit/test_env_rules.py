"""Which difference between two environments, and which line of a script, ask for a cold start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic_agent.agent.workers.preloader.fidelity.env_rules import obstacle, rules_for

BASE = {"OMP_NUM_THREADS": "1", "HOME": "/root"}


@pytest.mark.parametrize(
    ("changed", "cold"),
    [
        ({}, False),
        ({"RANK": "1", "MASTER_PORT": "1234", "CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"HOME": "/home"}, False),
        ({"OMP_NUM_THREADS": "4"}, False),
        ({"OMP_NUM_THREADS": "4,2"}, True),
        ({"OMP_NUM_THREADS": None}, False),
        ({"OPENBLAS_NUM_THREADS": "2"}, False),
        ({"MKL_NUM_THREADS": "2"}, True),
        ({"OMP_PROC_BIND": "true"}, True),
        ({"GOMP_CPU_AFFINITY": "0-1"}, True),
        ({"KMP_AFFINITY": "compact"}, True),
        ({"PYTHONHASHSEED": "0"}, True),
        ({"PYTHONPATH": "/lib"}, True),
        ({"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}, False),
        ({"LD_PRELOAD": "x.so"}, True),
        ({"LC_ALL": "C"}, True),
        ({"TZ": "UTC"}, False),
        (
            {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_LOGS": "+dynamo", "TORCH_CPP_LOG_LEVEL": "INFO"},
            False,
        ),
    ],
    ids=str,
)
def test_another_environment(changed: Mapping[str, str | None], cold: bool) -> None:
    worker = {name: value for name, value in {**BASE, **changed}.items() if value is not None}
    found = obstacle(BASE, worker)
    assert bool(found) == cold, found
    assert any(name in found for name in changed) or not cold


def test_what_a_module_has_read_and_cannot_be_replayed() -> None:
    worker = {**BASE, "MY_PACKAGE_MODE": "fast"}
    assert obstacle(BASE, worker) == ""
    assert "MY_PACKAGE_MODE" in obstacle(BASE, worker, reads={"MY_PACKAGE_MODE"})
    assert obstacle(BASE, BASE, reads={"MY_PACKAGE_MODE", "HOME"}) == ""


@pytest.mark.parametrize(
    ("line", "cold"),
    [
        ("print('hello')", False),
        ("os.environ['GOMP_CPU_AFFINITY'] = '0'", True),
        ('os.environ.setdefault("KMP_AFFINITY", "none")', True),
        ('environ["OMP_PROC_BIND"]="true"', True),
        ("os.putenv('MKL_DEBUG_CPU_TYPE', '5')", True),
        ("os.environ.update(OMP_PROC_BIND='true')", True),
        ("if os.environ['OMP_PROC_BIND'] == 'true': pass", False),
        ("print(os.environ['GOMP_CPU_AFFINITY'])", False),
        ("os.environ['OMP_NUM_THREADS'] = '4'", False),
        ("os.environ['TORCH_LOGS'] = 'dynamo'", False),
        ("os.environ['PYTHONHASHSEED'] = '0'", False),
        ("os.environ['READ_AT_IMPORT'] = '0'", True),
        ("os.environ['MINE'] = '0'", False),
    ],
)
def test_what_a_script_sets_before_its_imports(tmp_path: Path, line: str, cold: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{line}\nimport torch\n")
    found = obstacle(BASE, BASE, str(script), reads={"READ_AT_IMPORT"})
    assert bool(found) == cold, found
    assert str(script) in found or not cold


def test_a_script_that_cannot_be_read_is_no_obstacle_here(tmp_path: Path) -> None:
    assert obstacle(BASE, BASE, str(tmp_path / "nowhere.py")) == ""


def test_a_variable_that_two_libraries_read_has_two_rules() -> None:
    assert [rule.read_by for rule in rules_for("OMP_NUM_THREADS")] == ["torch", "numpy"]
    assert [rule.read_by for rule in rules_for("OMP_SCHEDULE")] == ["torch"]
    assert rules_for("RANK") == ()
