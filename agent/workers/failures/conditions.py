"""What a row of the table of causes looks for in the facts of a worker's end. All are pure.

Patterns are texts, which are compiled when they are needed first: no agent waits for that at its start."""

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
    """An exception of one of these types ended it; `text` is somewhere in its message."""

    types: str
    text: str | None = None

    def holds(self, facts: Facts) -> bool:
        if not facts.exception or not re.match(self.types, facts.exception):
            return False
        return self.text is None or re.search(self.text, facts.exception) is not None


@dataclass(frozen=True, slots=True)
class Says:
    """This is in the words with which it ended."""

    text: str

    def holds(self, facts: Facts) -> bool:
        return any(re.search(self.text, words) for words in facts.words)


@dataclass(frozen=True, slots=True)
class Prints:
    """This is in its exception or in one of its last lines, however it ended."""

    text: str

    def holds(self, facts: Facts) -> bool:
        return any(re.search(self.text, line) for line in (*facts.exception.split("\n"), *facts.output))


@dataclass(frozen=True, slots=True)
class Exits:
    """With one of these codes; `text` is in the words with which it ended."""

    codes: frozenset[int]
    text: str | None = None

    def holds(self, facts: Facts) -> bool:
        if facts.code not in self.codes:
            return False
        return self.text is None or any(re.search(self.text, words) for words in facts.words)


@dataclass(frozen=True, slots=True)
class Fails:
    """With any code, and no more is known."""

    def holds(self, facts: Facts) -> bool:
        return facts.code != 0


@dataclass(frozen=True, slots=True)
class Killed:
    """One of these signals ended it, without an exception that it has recorded. None: any signal."""

    by: frozenset[int] | None = None

    def holds(self, facts: Facts) -> bool:
        if facts.exception or not facts.signal:
            return False
        return self.by is None or facts.signal in self.by


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The kernel killed it, or a process of its own, because no memory was left."""

    def holds(self, facts: Facts) -> bool:
        if not facts.oom_killed:
            return False
        return facts.signal == signal.SIGKILL or _CHILD_KILLED.search(facts.exception) is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel, or a GPU's driver, told of this trouble meanwhile."""

    trouble: Trouble

    def holds(self, facts: Facts) -> bool:
        return any(event.trouble is self.trouble for event in facts.events)


@dataclass(frozen=True, slots=True)
class PortTaken:
    """It wanted to listen on a TCP port that was in use."""

    def holds(self, facts: Facts) -> bool:
        if facts.exception:
            return wanted_a_port(facts.exception)
        return facts.returncode > 0 and bool(says_port_taken(facts.words))


Condition: TypeAlias = Raised | Says | Prints | Exits | Fails | Killed | OutOfMemory | Machine | PortTaken
