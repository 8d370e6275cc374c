"""Which of the names that a worker has noted are preloaded."""

from __future__ import annotations

from elastic_agent.agent.workers.preloader.import_profile import installed, noted


def test_names_are_noted_once_in_their_order_and_what_is_no_name_is_none() -> None:
    text = b"b\na.c\nb\n\n../x\n1a\na b\n\xff\nhalf a na"
    assert noted(text) == ("b", "a.c")
    assert noted(b"") == ()


def test_only_what_lies_in_site_packages_counts() -> None:
    names = ["json", "torch.nn", "no_such_module.x", "pytest", "tests", "sys", "torch"]
    assert installed(names) == ["torch.nn", "pytest", "torch"]
