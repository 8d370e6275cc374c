"""What modules enter in Python's own lists while they are imported: all of it is told, and once."""

from __future__ import annotations

import logging
import uuid

from elastic_agent.agent.preloader.registries import Growth


def test_a_logger_that_takes_the_place_kept_for_it_is_told_like_any_other() -> None:
    """As torch does: loggers below `torch` come first, and then `torch` itself, with the level for all."""
    name = f"test-{uuid.uuid4().hex}"
    growth = Growth()
    growth.new()
    child = logging.getLogger(f"{name}.child")
    told = growth.new()["logging"]
    assert told[f"{name}.child"] is child
    assert isinstance(told[name], logging.PlaceHolder)
    parent = logging.getLogger(name)
    assert growth.new()["logging"] == {name: parent}
    assert growth.new() == {}
