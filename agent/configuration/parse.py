"""What an option is, one row of the table of settings, and the parsers that read its texts.

An option `min-nodes` is written `--min-nodes` or `--min_nodes`, `ELASTIC_AGENT_MIN_NODES`, and `min-nodes = 1` or
`min_nodes = 1`. The command line, the environment, the TOML file, `--help`, `--check-config` and the table in
`docs/configuration.md` follow the rows. A new option is a row in `config`, `stopping` or `rendezvous`, with the field
of `Config` beside it that has its value.

Words: a *parser* turns the text that any source gives into a value, or refuses it with advice. A *shorthand* has no
setting of its own, it stands for others (`--nnodes 1:4`). An option with a *torchrun* name is also read under that
name, and from torchrun's own variable (`PET_NNODES`).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import signal
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Flag
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from ...rendezvous.records import Endpoint
from ..common.ports import PortError, PortRange

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Affinity = Literal["none", "numa", "cores"]
WorkerCount = int | Literal["auto", "gpu", "cpu"]


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """A world has at least `min` and at most `max` nodes, 1 <= min <= max."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class Streams:
    """Some of the standard streams of a node's workers: each set is 1 for stdout, 2 for stderr, 3 for both or 0."""

    default: int = 0
    by_local_rank: tuple[tuple[int, int], ...] = ()
    """In the place of `default`."""

    def of(self, local_rank: int) -> int:
        return dict(self.by_local_rank).get(local_rank, self.default)

    def of_any(self, streams: int) -> bool:
        """Some worker's set has one of these."""
        sets = (self.default, *(each for _, each in self.by_local_rank))
        return any(each & streams for each in sets)

    def __str__(self) -> str:
        return ",".join(f"{rank}:{streams}" for rank, streams in self.by_local_rank) or str(self.default)


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Where a notice that this machine goes away comes from."""

    kind: Literal["auto", "aws", "gcp", "azure", "file", "off"]
    path: str = ""
    """Of the file."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" if self.path else self.kind


def in_words(kinds: Iterable[object]) -> str:
    """
    >>> in_words(["c10d", "etcd", "memory"])
    'c10d, etcd or memory'
    """
    *others, last = map(str, kinds)
    return f"{', '.join(others)} or {last}" if others else last


MOST_NODES = 4096
MOST_WORKERS = 4096
MOST_REPLICAS = 8
WEEK_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Parser(Generic[T_co]):
    """Reads one text. `parse` raises `ValueError` for a text that it refuses; the error's own text is advice, or empty.

    `shown` is how a text may appear in messages, whether it was refused or not: without the secrets in it. `metavar`
    stands for it in `--help`.
    """

    expects: str
    parse: Callable[[str], T_co]
    shown: Callable[[str], str] = str
    metavar: str = ""


def matched(pattern: str, text: str, advice: str = "") -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(advice)
    return match


def whole_number(least: int, most: int, unit: str = "") -> Parser[int]:
    def parse(text: str) -> int:
        # Nine digits are more than any limit here, and keep `int` cheap whatever the text.
        if re.fullmatch(r"[0-9]{1,9}", text) is None or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    of = f" of {unit}" if unit else ""
    return Parser(f"a whole number{of} from {least} to {most}", parse, metavar="N")


_UNIT_S = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(least_s: float) -> Parser[float]:
    def parse(text: str) -> float:
        match = matched(r"([0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}) ?(ms|s|m|h)?", text)
        value_s = float(match[1]) * _UNIT_S[match[2] or ""]
        if not least_s <= value_s <= WEEK_S:
            raise ValueError
        return value_s

    return Parser(
        f"a duration from {least_s:g} s to 168 h, in seconds or like 500ms, 30s, 5m",
        parse,
        metavar="DURATION",
    )


_UNIT_BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _read_size(text: str) -> int:
    if text == "off":
        return 0
    match = matched(r"([0-9]{1,16}(?:\.[0-9]{0,3})?) ?(KiB|MiB|GiB|TiB)?", text)
    size = float(match[1]) * _UNIT_BYTES[match[2] or ""]
    if not 0 <= size < 2**60:
        raise ValueError
    return int(size)


SIZE = Parser("a size in bytes or like 512MiB and 1.5GiB; 0 or off for none", _read_size, metavar="SIZE")


def read_text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _matching(pattern: str) -> Callable[[str], str]:
    return lambda text: matched(pattern, text)[0]


def _yes_or_no(text: str) -> bool:
    return matched("true|1|yes|(false|0|no)", text.lower())[1] is None


def read_node_counts(text: str) -> NodeCounts:
    least, colon, most = text.partition(":")
    parse = whole_number(1, MOST_NODES, "nodes").parse
    counts = NodeCounts(parse(least), parse(most if colon else least))
    if counts.min > counts.max:
        raise ValueError("write the smaller number first")
    return counts


def read_worker_count(text: str) -> WorkerCount:
    if text in ("auto", "gpu", "cpu"):
        return cast(WorkerCount, text)
    return whole_number(1, MOST_WORKERS, "workers").parse(text)


def one_of(literal: Any) -> Parser[Any]:
    """One of the words of a `Literal`."""

    def parse(text: str) -> str:
        if text not in get_args(literal):
            raise ValueError
        return text

    return Parser(in_words(get_args(literal)), parse, metavar="|".join(get_args(literal)))


_TORCHRUNS_AFFINITY = {"node": "numa", "exclusive": "cores"}


def read_affinity(text: str) -> Affinity:
    return cast(Affinity, one_of(Affinity).parse(_TORCHRUNS_AFFINITY.get(text, text)))


def read_preload(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if words == ("none",):
        return ()
    if not all(part.isidentifier() for word in words for part in word.split(".")):
        raise ValueError
    if "none" in words:
        raise ValueError("none stands alone")
    return words


def read_host(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) else _ipv6(text)


def _ipv6(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError("check the spelling of the host name or address") from None
    return text


def read_endpoint(text: str) -> Endpoint:
    host, port = host_and_port(text)
    return Endpoint(host, port or 0)


def _read_listen_address(text: str) -> Endpoint:
    found = read_endpoint(text)
    try:
        ipaddress.ip_address(found.address)
    except ValueError:  # a name may have several addresses, or none on this machine
        raise ValueError("write the address: 127.0.0.1 for localhost, 0.0.0.0 for all") from None
    return found


def host_and_port(text: str) -> tuple[str, int | None]:
    if not text:
        raise ValueError("a host is missing")
    host = r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([^:\[\]]*))?"
    match = matched(host, text, "write an IPv6 address in brackets: [::1]:29400")
    if match[3] is not None and (not re.fullmatch("[0-9]{1,5}", match[3]) or int(match[3]) > 65535):
        raise ValueError("write a number from 0 to 65535 as the port")
    port = None if match[3] is None else int(match[3])
    return _ipv6(match[1]) if match[1] else read_host(match[2]), port


def read_streams(text: str) -> Streams:
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    pairs = [matched("([0-9]{1,4}):([0-3])", part) for part in text.split(",")]
    by_local_rank = {int(pair[1]): int(pair[2]) for pair in pairs}
    return Streams(by_local_rank=tuple(sorted(by_local_rank.items())))


def read_local_ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(matched("[0-9]{1,4}", part.strip())[0]) for part in text.split(",")}))


def read_log_level(text: str) -> int:
    """
    >>> [read_log_level(text) for text in ("Debug", " warn ", "20", "15", "notset")]
    [10, 30, 20, 15, 1]
    """
    word = text.strip().upper()
    level = int(word) if re.fullmatch("[0-9]{1,9}", word) else logging.getLevelName(word)
    if not isinstance(level, int):
        raise ValueError
    return max(level, 1)  # 0 would be the level of another logger


def read_texts(text: str) -> tuple[str, ...]:
    """
    >>> read_texts("loss,a,,b")
    ('loss', 'a,b')
    """
    texts = (part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
    return tuple(filter(None, texts))


_NO_REQUESTS = frozenset(
    f"SIG{name}"
    for name in "KILL STOP CHLD CLD PIPE SEGV BUS FPE ILL TRAP ABRT IOT SYS STKFLT".split()  # noqa: SIM905
)
"""Those that cannot be handled, tell of a fault, or come by themselves."""


def read_signals(text: str) -> tuple[signal.Signals, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()
    if not all(name in signal.Signals.__members__ and name not in _NO_REQUESTS for name in names):
        raise ValueError
    return tuple(signal.Signals[name] for name in names)


def read_notice(text: str) -> NoticeSource:
    match = matched(r"(auto|aws|gcp|azure|off)|(file):([^\0]+)", text)
    kind, path = match[1] or match[2], match[3] or ""
    if path and not os.path.isabs(path):
        raise ValueError("write the whole path, from / on")
    return NoticeSource(cast(Any, kind), path)


def read_port_range(text: str) -> PortRange:
    try:
        return PortRange.parse(text)
    except PortError as error:
        raise ValueError(str(error)) from error


def read_hang_timeout(text: str) -> float | Literal["auto"] | None:
    if text == "auto":
        return "auto"
    return None if text == "off" else duration(1.0).parse(text)


def read_restarts(text: str) -> int | None:
    return None if text == "auto" else whole_number(0, 1_000_000, "restarts").parse(text)


def read_conf(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(key and equals for key, equals, _ in pairs):
        raise ValueError
    return tuple((key.strip().replace("-", "_"), value.strip()) for key, _, value in pairs)


TEXT = Parser("a text that is not empty", read_text, metavar="TEXT")
IDENTIFIER = Parser(
    "1 to 64 characters of A-Z a-z 0-9 . _ -", _matching(r"[A-Za-z0-9._-]{1,64}"), metavar="NAME"
)
ROLE_NAME = Parser(
    '1 to 64 printable ASCII characters but no " and \\', _matching(r"[ !#-\[\]-~]{1,64}"), metavar="NAME"
)
PATH = Parser(TEXT.expects, lambda text: Path(read_text(text)), metavar="PATH")
LISTEN_ADDRESS = Parser(
    "an IP address or address:port, port 0 to 65535 (default 0)",
    _read_listen_address,
    metavar="ADDRESS[:PORT]",
)
USER = Parser(
    "1 to 128 printable ASCII characters without blanks", _matching(r"[!-~]{1,128}"), metavar="NAME"
)
YES_OR_NO = Parser("true or false", _yes_or_no)


class OptionSource(Flag):
    """Where an option may be written."""

    CLI = 1
    ENV = 2
    FILE = 4
    ALL = 7


TORCHRUNS = frozenset(
    (
        *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr", "standalone"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "role", "run-path"),
        *(
            "log-dir",
            "redirects",
            "tee",
            "local-ranks-filter",
            "log-line-prefix-template",
            "print-completion",
        ),
        *("duplicate-stdout-filters", "duplicate-stderr-filters", "signals-to-handle", "virtual-local-rank"),
    )
)
"""Options that have the same name under torchrun."""


@dataclass(frozen=True, slots=True)
class Option(Generic[T_co]):
    """One row of the table. `default` is a text for `parser`; `help` explains None."""

    name: str
    parser: Parser[T_co]
    help: str
    default: str | None = None
    short: str = ""  # "-m"
    torchrun: str = ""  # torchrun's name for the same thing, where it is another one
    flag: bool = False  # on the command line it stands alone and means true
    shorthand: bool = False
    conf: tuple[str, ...] = ()  # keys of torchrun's --rdzv-conf, the one to recommend first
    sources: OptionSource = OptionSource.ALL

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.torchrun) if self.torchrun else (self.name,)

    @property
    def torchruns(self) -> str:
        """Its name under torchrun; empty: it has none there."""
        return self.torchrun or (self.name if self.name in TORCHRUNS else "")

    @property
    def default_value(self) -> T_co | None:
        return None if self.default is None else self.parser.parse(self.default)

    def field(self) -> T_co:
        """A field of `Config`, or of a part of it, that has the value of this option."""
        return cast(T_co, field(default=self.default_value, metadata={"option": self}))

    def help_text(self) -> str:
        """Its names, what it does and its default."""
        names = ", ".join(filter(None, [self.short, *(f"--{name}" for name in self.names)]))
        shown = "" if self.flag or not self.default else f" (default: {self.default})"
        body = textwrap.fill(
            self.help + shown, 100, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
        )
        return f"  {names} {self.parser.metavar}".rstrip() + "\n" + body


class OptionGroup(list[Option[object]]):
    """Options that stand together in `--help` and in the documentation."""

    def __init__(self, title: str) -> None:
        self.title = title

    def option(self, name: str, parser: Parser[T], help: str, **more: Any) -> Option[T]:
        """Declare one; `more` are the other fields of `Option`."""
        option = Option(name, parser, help, **more)
        self.append(option)
        return option

    def flag(self, name: str, help: str, **more: Any) -> Option[bool]:
        """Declare one that is off unless it is given, on the command line without a value."""
        return self.option(name, YES_OR_NO, help, default="false", flag=True, **more)
