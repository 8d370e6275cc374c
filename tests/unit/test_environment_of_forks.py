"""Which difference between two environments, and which line of a script, ask for a cold start."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic_agent.agent.workers.processes.imported import obstacle, set_too_late

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
        ({"TORCH_LOGS": "+dynamo"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        (
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000", "NCCL_DEBUG": "WARN"},
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


def test_what_a_module_has_read() -> None:
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
        ("if os.environ['OMP_PROC_BIND'] == 'true': pass", False),
        ("print(os.environ['GOMP_CPU_AFFINITY'])", False),
        ("os.environ['OMP_NUM_THREADS'] = '4'", True),
        ("os.environ['TORCH_LOGS'] = 'dynamo'", True),
        ("os.environ['PYTHONHASHSEED'] = '0'", False),
        ("os.environ['READ_AT_IMPORT'] = '0'", True),
        ("os.environ['MINE'] = '0'", False),
    ],
)
def test_what_a_script_sets_before_its_imports(line: str, cold: bool) -> None:
    found = set_too_late(f"import os\n{line}\nimport torch\n", reads={"READ_AT_IMPORT"})
    assert bool(found) == cold, found
