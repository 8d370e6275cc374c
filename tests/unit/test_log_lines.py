"""The agent's own log as JSON: each line is one object, whatever the text is."""

from __future__ import annotations

import json
import logging
import sys
import time

import pytest

from elastic_agent.agent.output.console import JsonLines, TextLines


def record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("elastic_agent.agent.main.loop", level, "loop.py", 1, message, args, None)
    made.created = 1_772_366_400.1254
    return made


def test_a_line_has_what_programs_look_for() -> None:
    lines = JsonLines("a", lambda: 3)
    assert json.loads(lines.format(record("leaving in %d s", 5))) == {
        "time": "2026-03-01T12:00:00.125Z",
        "level": "warning",
        "logger": "elastic_agent.agent.main.loop",
        "message": "leaving in 5 s",
        "node": "a",
        "generation": 3,
    }


@pytest.mark.parametrize("text", ["two\nlines", 'a "quote"', "\x1b[31m", "\udcff", "\u2028", "ü"])
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    line = JsonLines("a", lambda: 0).format(record("%s", text))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == text


def test_a_traceback_is_part_of_its_line() -> None:
    failed = record("it failed")
    try:
        raise ValueError("no")
    except ValueError:
        failed.exc_info = sys.exc_info()
    line = JsonLines("a", lambda: 0).format(failed)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["exception"].endswith("ValueError: no")


def test_lines_for_people_name_date_zone_and_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        line = TextLines("a").format(record("leaving"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line == "2026-03-01 17:30:00.125+05:30 [a] leaving"
