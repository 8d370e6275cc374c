"""This node's folders for the workers of its generations."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from elastic_agent.agent.workers.environment import make_directory


def test_the_run_directory_does_not_grow_with_each_generation(tmp_path: Path) -> None:
    node = Mock(run_dir=tmp_path)
    node.env.socket = str(tmp_path / "socket")
    (tmp_path / "socket").touch()
    for generation in (1, 2, 5, *range(7, 130)):
        make_directory(node, generation)
        (tmp_path / f"gen{generation}" / "error-0.json").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"socket", "gen129"}
