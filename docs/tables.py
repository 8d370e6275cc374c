"""Writes the tables of the pages from the code's own: `make tables`.

A page has a table between two comments, `<!-- table: NAME -->` and `<!-- end -->`. `tests/unit/test_documents.py`
compares each with what this program would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from elastic_agent.agent.common.exits import ExitCode
from elastic_agent.agent.common.variables import Variable
from elastic_agent.agent.configuration.config import GROUPS
from elastic_agent.agent.configuration.parse import Option, OptionSource
from elastic_agent.agent.workers.causes import CAUSES, FailureCause
from elastic_agent.agent.workers.environment import ALWAYS, OF_NCCL
from elastic_agent.health.metrics import PREFIX, Build, Family, Histogram, Metrics
from elastic_agent.pool.pages import PoolMetrics

PAGES = sorted(Path(__file__).parent.glob("*.md"))
TABLE = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
SHORT = {", in seconds or like 500ms, 30s, 5m": "", "a text that is not empty": "a text"}
"""What the page says once, and not in each row."""
SOURCES = {OptionSource.FILE: "file", OptionSource.ENV: "environment", OptionSource.CLI: "command line"}
FREE_LABELS = {"local_rank", "version", "torch_version", "nccl_version", "python_version"}
"""Their values are no list."""


def table(*rows: tuple[str, ...]) -> str:
    heading, *others = (f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
    return "\n".join([heading, "|" + "---|" * len(rows[0]), *others])


def row_of_option(option: Option[object]) -> tuple[str, ...]:
    flags = [f"--{name}" for name in option.names] if OptionSource.CLI in option.sources else []
    names = ", ".join(f"`{name}`" for name in [*filter(None, [option.short]), *flags] or [option.name])
    value = option.parser.expects
    for long, short in SHORT.items():
        value = value.replace(long, short)
    places = ", ".join(word for source, word in SOURCES.items() if source in option.sources)
    only = "" if option.sources == OptionSource.ALL else f" (only {places})"
    default = f"`{option.default}`" if option.default else ""
    return names + only, value, default, option.help


def options() -> str:
    heading = ("option", "value", "default", "meaning")
    return "\n\n".join(
        f"### {group.title}\n\n{table(heading, *map(row_of_option, group))}" for group in GROUPS
    )


def exit_codes() -> str:
    rows = ((f"{int(code)}", code.name, code.meaning) for code in ExitCode)
    return table(("code", "name", "meaning"), *rows)


def causes() -> str:
    def marks(cause: FailureCause) -> str:
        return ", collateral" * cause.collateral + ", from outside" * cause.outside

    rows = ((f"`{cause.name}`", f"{cause.action.value}{marks(cause)}", cause.hint) for cause in CAUSES)
    return table(("cause", "action", "what to do"), *rows)


def settings() -> str:
    def rows(variables: Iterable[Variable], when: str) -> list[tuple[str, ...]]:
        return [(f"`{each.name}`", f"`{each.value}`", when, each.reason) for each in variables]

    always, of_nccl = rows(ALWAYS, "always"), rows(OF_NCCL, "torch is not a CPU build")
    return table(("variable", "value", "when", "why"), *always, *of_nccl)


def families() -> list[Family]:
    build = Build(version="", torch_version="")
    return Metrics("", "", build, workers=1, min_nodes=1, started_at_s=0.0, causes=["..."]).families


def table_of_metrics(families: Iterable[Family]) -> str:
    def labels(family: Family) -> str:
        shown = (
            label if label in FREE_LABELS else f"{label}={{{','.join(values)}}}"
            for label, values in family.labels.items()
        )
        return f"`{'; '.join(shown)}`" if family.labels else ""

    rows = ((f"`{PREFIX}{each.name}`", each.kind, labels(each), each.help_text) for each in families)
    return table(("name", "type", "labels", "meaning"), *rows)


def metrics() -> str:
    return table_of_metrics(families())


def pool_metrics() -> str:
    return table_of_metrics(PoolMetrics("", "").families)


def buckets() -> str:
    histograms = [family for family in families() if isinstance(family, Histogram)]
    rows = []
    for bounds in sorted({one.buckets for one in histograms}):
        of = ", ".join(f"`{one.name}`" for one in histograms if one.buckets == bounds)
        rows.append((" ".join(f"{bound:g}" for bound in bounds), of))
    return table(("buckets, in seconds", "of"), *rows)


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "exit-codes": exit_codes,
    "causes": causes,
    "settings": settings,
    "metrics": metrics,
    "pool-metrics": pool_metrics,
    "buckets": buckets,
}


def with_tables(page: str) -> str:
    """The text of a page, with each of its tables as the code has it."""
    return TABLE.sub(lambda found: f"{found[1]}{found[2]}\n{TABLES[found[1]]()}\n\n", page)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if (new := with_tables(text)) != text:
            page.write_text(new)
            print(f"{page.name}: written anew")


if __name__ == "__main__":
    main()
