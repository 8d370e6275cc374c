"""Settings of NCCL and torch where the user has set none: the table, as data.

A row's value may name *facts* in braces: it holds only where these are known, its condition is met, and the versions
are in its ranges. Of two rows with one name the later wins, so a profile is stronger than the defaults.
docs/tuning.md shows the same rows.

A value that is torch's or NCCL's own default is here only where that differs between versions. What costs speed, or
has been seen to hang (timing, desync debugging, stack traces from the watchdog's thread), is not switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from ....worker.wire.environment import PROCESS_GROUP_TIMEOUT
from ...common.variables import Variable
from ...configuration.stopping import HEARTBEAT_VARIABLE, TimeoutConfig, process_group_s, watchdog_s
from ...machine.network.profiles import Profile, Transport
from ...machine.software import ANY, Range, Software


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table depends on."""

    software: Software
    profile: Profile
    timeouts: TimeoutConfig
    workers: int = 1
    flight_records: Path | None = None
    """Where the flight recorder's dumps of this generation belong; None where they would not be found."""

    @property
    def known(self) -> dict[str, str]:
        """What the value of a row may name."""
        group_s = process_group_s(self.timeouts)
        facts: dict[str, object] = {"flight_records": self.flight_records}
        if self.profile.foreign_ports:
            facts["ports"] = ",".join(self.profile.ports)
        if group_s is not None:
            facts |= {"process_group_timeout": group_s, "heartbeat": watchdog_s(group_s)}
        return {
            name: f"{fact:g}" if isinstance(fact, float) else str(fact)
            for name, fact in facts.items()
            if fact
        }


@dataclass(frozen=True, slots=True)
class Condition:
    text: str
    holds: Callable[[Facts], bool]


ALWAYS = Condition("", lambda facts: True)
SEVERAL_WORKERS = Condition("several workers on the node", lambda facts: facts.workers > 1)
WITH_NCCL = Condition("torch is not a CPU build", lambda facts: facts.software.has_nccl)
BY_NAME = Condition("the profile was chosen by name", lambda facts: facts.profile.by_name)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. `aliases` are its other names, under which the user may have set it."""

    name: str
    value: str
    reason: str
    when: Condition = ALWAYS
    torch: Range = ANY
    nccl: Range = ANY
    aliases: tuple[str, ...] = ()
    yielding: bool = True


def _renamed(new: str, old: str, value: str, reason: str) -> tuple[Row, Row]:
    """The flight recorder's own names, which torch has from 2.8 on: the old ones are still read, with a warning."""
    return (
        Row(new, value, reason, WITH_NCCL, torch=Range(since="2.8"), aliases=(old,)),
        Row(old, value, reason, WITH_NCCL, torch=Range(below="2.8"), aliases=(new,)),
    )


_PLACE = "below --log-dir, a folder for each generation; without --log-dir torch's own place is kept"
_DUMP = "the flight recorder writes that down when a collective does not end"
_PIPE = "through it the agent asks for the flight recorder's dump when workers seem to hang"
_HEARTBEAT = (
    "1.5 times the process-group timeout, so that it does not end a process before that has named the "
    "collective"
)
_STACKS = "to collect stacks a dump waits for Python's lock, which a hung process may never release"
_ERRORS = (
    "a failed collective ends its process; torchrun's 1 also tries to abort the communicator, which can hang"
)
_DEAD_PATH = "30 s until a path counts as dead, as newer NCCL has it: older ones give up after 8 s"

DEFAULTS = (
    Row("OMP_NUM_THREADS", "1", "a thread per core in each of several workers is too many", SEVERAL_WORKERS),
    Row("PYTHONUNBUFFERED", "1", "a killed worker's last words are not lost in a buffer"),
    Row("PYTHONFAULTHANDLER", "1", "a worker that dies by a signal says where it was"),
    Row("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", _ERRORS, aliases=("NCCL_ASYNC_ERROR_HANDLING",)),
    Row("NCCL_DEBUG", "WARN", "NCCL says which call failed, and nothing else", WITH_NCCL),
    *_renamed(
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "2000",
        "the flight recorder keeps the last collectives of each rank",
    ),
    Row("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", _DUMP, WITH_NCCL),
    *_renamed("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "{flight_records}/rank_", _PLACE),
    Row("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "{flight_records}/pipe_", _PIPE, WITH_NCCL),
    Row("TORCH_INCLUDE_STACK_TRACE", "0", _STACKS, WITH_NCCL),
    Row(
        PROCESS_GROUP_TIMEOUT,
        "{process_group_timeout}",
        "applied by elastic_agent.worker.init_process_group",
        yielding=False,
    ),
    Row(HEARTBEAT_VARIABLE, "{heartbeat}", _HEARTBEAT, WITH_NCCL),
)

_OVER_VERBS = (
    Row(
        "NCCL_IB_HCA",
        "={ports}",
        "there are other active RDMA ports, which NCCL would use as well",
        WITH_NCCL,
    ),
    Row("NCCL_IB_TIMEOUT", "20", _DEAD_PATH, WITH_NCCL, nccl=Range(below="2.23")),
)
_GID_INDEX = "RoCE v2 in most set-ups; newer NCCL finds the index by itself"
_LIBFABRIC = "else libfabric may offer another provider, such as TCP, without an error"

PROFILES: dict[Transport, tuple[Row, ...]] = {
    "ethernet": (Row("NCCL_IB_DISABLE", "1", "TCP, although there may be RDMA ports", BY_NAME),),
    "infiniband": _OVER_VERBS,
    "roce": (
        *_OVER_VERBS,
        Row("NCCL_IB_GID_INDEX", "3", _GID_INDEX, WITH_NCCL, nccl=Range(below="2.21")),
    ),
    "efa": (Row("FI_PROVIDER", "efa", _LIBFABRIC, WITH_NCCL),),
}

DEBUG = (
    Row("NCCL_DEBUG", "INFO", "which transports, interfaces and settings NCCL has chosen"),
    Row("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET", "NCCL reports these parts, not every collective"),
    Row("TORCH_DISTRIBUTED_DEBUG", "INFO", "what torch knows about a process group and DDP"),
    Row("TORCH_CPP_LOG_LEVEL", "INFO", "also what torch's C++ part has to say"),
)


def torch_settings(facts: Facts) -> tuple[Variable, ...]:
    """The rows that hold, in the order in which they overrule each other."""
    known = facts.known
    return tuple(
        Variable(row.name, row.value.format(**known), row.reason, row.yielding, room, row.aliases)
        for room, row in _rows(facts.profile)
        if _holds(row, facts, known)
    )


def _rows(profile: Profile) -> Iterator[tuple[str, Row]]:
    yield from (("default", row) for row in DEFAULTS)
    yield from ((f"profile {profile.transport}", row) for row in PROFILES[profile.transport])
    if profile.debug:
        yield from (("profile debug", row) for row in DEBUG)


def _holds(row: Row, facts: Facts, known: dict[str, str]) -> bool:
    named = (name for _, name, _, _ in Formatter().parse(row.value) if name is not None)
    return (
        row.when.holds(facts)
        and facts.software.torch in row.torch
        and facts.software.nccl in row.nccl
        and all(name in known for name in named)
    )
