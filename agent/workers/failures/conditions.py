"""The conditions of the table of causes: pure predicates over the facts of a worker's end.

Patterns are strings, compiled when they are first needed: the start of an agent does not wait for that."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TypeAlias

from .facts import Facts, Trouble
from .ports import says_port_taken, wanted_a_port

_CHILD_KILLED = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: Killed")


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of one of these types ended the worker; `text` matches somewhere in its message."""

    types: str
    text: str | None = None

    def holds(self, facts: Facts) -> bool:
        if not facts.exception or not re.match(self.types, facts.exception):
            return False
        return self.text is None or re.search(self.text, facts.exception) is not None


@dataclass(frozen=True, slots=True)
class Says:
    """`text` matches in `Facts.words`, with which the worker ended. `types`: where it was an exception, it is one of
    these types, because any other may quote such a text."""

    text: str
    types: str = ""

    def holds(self, facts: Facts) -> bool:
        if facts.exception and not re.match(self.types, facts.exception):
            return False
        return any(re.search(self.text, words) for words in facts.words)


@dataclass(frozen=True, slots=True)
class Exits:
    """The worker exited with one of these codes; `text` matches in `Facts.words`."""

    codes: frozenset[int]
    text: str | None = None

    def holds(self, facts: Facts) -> bool:
        if facts.code not in self.codes:
            return False
        return self.text is None or any(re.search(self.text, words) for words in facts.words)


@dataclass(frozen=True, slots=True)
class Fails:
    """The worker exited with an error code."""

    def holds(self, facts: Facts) -> bool:
        return facts.code != 0


@dataclass(frozen=True, slots=True)
class Killed:
    """One of these signals ended the worker, which has recorded no exception. None: any signal."""

    by: frozenset[int] | None = None

    def holds(self, facts: Facts) -> bool:
        if facts.exception or not facts.signal:
            return False
        return self.by is None or facts.signal in self.by


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The kernel killed the worker, or a child of it, because no memory was left."""

    def holds(self, facts: Facts) -> bool:
        if not facts.oom_killed:
            return False
        return facts.signal == signal.SIGKILL or _CHILD_KILLED.search(facts.exception) is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel or NVML reported this trouble while the worker ran."""

    trouble: Trouble

    def holds(self, facts: Facts) -> bool:
        return any(event.trouble is self.trouble for event in facts.events)


@dataclass(frozen=True, slots=True)
class PortTaken:
    """The worker wanted to listen on a TCP port that was in use."""

    def holds(self, facts: Facts) -> bool:
        if facts.exception:
            return wanted_a_port(facts.exception)
        return facts.returncode > 0 and bool(says_port_taken(facts.words))


Condition: TypeAlias = Raised | Says | Exits | Fails | Killed | OutOfMemory | Machine | PortTaken
