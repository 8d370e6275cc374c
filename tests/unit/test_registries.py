"""What modules enter in Python's own lists while they are imported: all of it is found, and once."""

from __future__ import annotations

import logging
import uuid
import weakref

from elastic_agent.agent.workers.preloader.fidelity.global_registries import Growth, enter, take_out


def test_a_logger_that_takes_the_place_kept_for_it_is_found_like_any_other() -> None:
    """As torch does: loggers below `torch` come first, and then `torch` itself, with the level for all."""
    name = f"test-{uuid.uuid4().hex}"
    growth = Growth()
    growth.new()
    child = logging.getLogger(f"{name}.child")
    found = growth.new()["logging"]
    assert found[f"{name}.child"] is child
    assert isinstance(found[name], logging.PlaceHolder)
    parent = logging.getLogger(name)
    assert growth.new()["logging"] == {name: parent}
    assert growth.new() == {}


class Kept:
    pass


def test_what_is_entered_after_something_was_removed_is_found_too() -> None:
    first, second = Kept(), Kept()
    finalizer = weakref.finalize(first, print)
    growth = Growth()
    finalizer.detach()
    after = weakref.finalize(second, print)
    assert growth.new() == {"weakref": {after: weakref.finalize._registry[after]}}  # type: ignore[attr-defined]
    after.detach()


def test_what_is_taken_out_is_forgotten_where_it_is_over_and_comes_back_where_it_is_not() -> None:
    name = f"test-{uuid.uuid4().hex}"
    growth, over, kept = Growth(), Kept(), Kept()
    done, waiting = weakref.finalize(over, print), weakref.finalize(kept, print)
    logger = logging.getLogger(name)
    entered = growth.new()
    done.detach()
    manager = logging.Logger.manager
    others = dict(manager.loggerDict)
    del others[name]
    try:
        take_out({"weakref": weakref, "logging": logging}, [entered])
        assert dict(manager.loggerDict) == others
        assert not waiting.alive
        assert list(entered["weakref"]) == [waiting]
    finally:
        enter(entered)
    assert manager.loggerDict[name] is logger
    assert (done.alive, waiting.alive) == (False, True)
    waiting.detach()


def test_a_logger_that_comes_back_goes_by_the_levels_of_now() -> None:
    name = f"test-{uuid.uuid4().hex}"
    growth = Growth()
    logger = logging.getLogger(name)
    entered = growth.new()
    was = logging.root.level
    try:
        logging.root.setLevel(logging.ERROR)
        assert not logger.isEnabledFor(logging.INFO)
        take_out({"logging": logging}, [entered])
        logging.root.setLevel(logging.INFO)
        enter(entered)
        assert logger.isEnabledFor(logging.INFO)
    finally:
        logging.root.setLevel(was)
