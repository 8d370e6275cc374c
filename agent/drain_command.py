"""`elastic-agent drain NODE`: ask a node of a job to leave it, and show how far that has come.

The wish is a key of its own in the job's store, which the node's agent watches. It names the agent's life, so that one
that was not heard harms nobody later. Everything else is what happens when the agent gets SIGTERM: all workers end
after the same step, and the next generation goes on without the node.

The store is found as `status` finds it: by the options of the agents, their file, or the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..rendezvous.errors import RecordInvalid, StoreError, StoreMismatch, StoreRefused, StoreUnavailable
from ..rendezvous.fields import NAME
from ..rendezvous.records import NODES_PREFIX, WORLD_KEY, NodeRecord, Phase, Wish, World, life_of, wish_key
from ..rendezvous.store import Compare, Delete, Entry, Put, Store
from .cli import option_help
from .configuration.config import ConfigError, Problem, RendezvousConfig
from .configuration.kinds import duration
from .configuration.layers import Layer, read_argv
from .configuration.options import CONFIG_FILE, HELP, Option
from .configuration.resolve import resolve_meeting_place
from .exits import DrainCode
from .status.doors import CannotShow, open_job

_USAGE = """\
usage: elastic-agent drain NODE --rdzv-endpoint HOST:PORT --rdzv-id NAME [--etcd-...] [--config FILE.toml]

Lets a node leave its job. The workers of all nodes end after the same step and the next generation begins there,
without this node: no step is lost. It may come back: start its agent again. On the node itself, SIGTERM to the agent
does the same.
"""

ANSWER_S = 10.0
"""How long the store may take at the beginning."""

LOOK_S = 0.2

TIMEOUT: Option[float] = Option(
    "timeout",
    duration(0.1),
    "how long to wait until the node has left; longer than the --stop-grace of its job",
    metavar="DURATION",
    default="2m",
)


class CannotDrain(Exception):
    """The node does not leave, and `code` and text say why and what to try."""

    def __init__(self, code: DrainCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def main(words: Sequence[str]) -> int:
    """Returns a `DrainCode`."""
    node = words[0] if words and not words[0].startswith("-") else None
    command_line = read_argv(words[1:] if node is not None else words, (TIMEOUT,))
    if HELP.name in command_line.given:
        print(help_text())
        return DrainCode.LEFT
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what happened is said by us, in one line
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(DrainCode.INTERRUPTED))
    try:
        rendezvous = _meeting_place(node, command_line, os.environ)
        given = command_line.given.get(TIMEOUT.name)
        timeout_s = given.value if given is not None else TIMEOUT.default_value
        assert node is not None
        assert isinstance(timeout_s, float)
        store = open_job(rendezvous, ANSWER_S)
        try:
            drain(store, rendezvous.job_id, node, timeout_s, lambda line: print(line, flush=True))
        finally:
            store.close()
    except ConfigError as error:
        return _say(DrainCode.BAD_CONFIG, error)
    except CannotDrain as error:
        return _say(error.code, error)
    except CannotShow as error:
        return _say(DrainCode.BAD_CONFIG, error)  # a name that does not resolve
    except StoreRefused as error:
        return _say(DrainCode.BAD_CONFIG, error)
    except (StoreMismatch, RecordInvalid) as error:
        return _say(DrainCode.MISMATCH, error)
    except StoreError as error:
        return _say(DrainCode.NO_ANSWER, error)
    finally:
        signal.signal(signal.SIGINT, before)
    return DrainCode.LEFT


def drain(
    store: Store,
    job: str,
    node: str,
    timeout_s: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the node has left. Raises CannotDrain, StoreError and RecordInvalid."""
    deadline = clock() + timeout_s
    incarnation = _ask(store, job, node)
    tell(f"node {node} is asked to leave job {job}")
    told, silent = "", False
    while True:
        try:
            world, nodes, wish = _read(store, job, node)
        except StoreUnavailable as error:
            if not silent:
                tell(f"the store does not answer, trying on: {error}")
            silent = True
        else:
            silent = False
            record = next((each for each in nodes if life_of(each.incarnation) == incarnation), None)
            if record is None:
                _take_back(store, wish, incarnation)
                tell(f"node {node} has left; {_state(world)}")
                return
            state = f"{'leaving' if record.leaving else 'has not heard of it yet'}; {_state(world)}"
            if state != told:
                told = state
                tell(f"node {node}: {state}")
        if clock() >= deadline:
            raise CannotDrain(
                DrainCode.TIMED_OUT,
                f"node {node} has not left within {timeout_s:g} s: {told or 'nothing is known of it'}. It was asked, "
                "and may still leave; look with elastic-agent status",
            )
        sleep(min(LOOK_S, max(0.0, deadline - clock())))


def help_text() -> str:
    options = (TIMEOUT, HELP, CONFIG_FILE)
    store = "Also every option of the agent's rendezvous and of etcd, and their variables; see elastic-agent --help."
    codes = [f"  {int(code):>3}  {code.meaning}" for code in DrainCode]
    return "\n".join([_USAGE, *map(option_help, options), "", store, "", "Exit codes:", *codes])


def _meeting_place(node: str | None, command_line: Layer, environ: Mapping[str, str]) -> RendezvousConfig:
    """Raises ConfigError with all problems."""
    if node is None or not NAME.fullmatch(node):
        advice = "write its name first, as elastic-agent status shows it: elastic-agent drain NODE"
        command_line.problems.append(Problem("node", node, "the name of a node", advice))
    place = resolve_meeting_place(command_line, environ)
    if place is None:
        advice = "add --rdzv-endpoint as the agents have it; on the node itself, send SIGTERM to its agent"
        raise ConfigError([Problem("rdzv-endpoint", None, "the address of the job's store", advice)])
    return place


def _ask(store: Store, job: str, node: str) -> str:
    """Write the wish; the life of the agent that it is for."""
    for _ in range(10):
        world, nodes, wish = _read(store, job, node)
        if world is None and not nodes:
            raise CannotDrain(
                DrainCode.NO_JOB,
                f"the store holds nothing of a job {job!r}: check --rdzv-id and --rdzv-endpoint",
            )
        record = next((each for each in nodes if each.node == node), None)
        if record is None and world is not None and world.phase is Phase.ENDED:
            raise CannotDrain(DrainCode.NO_JOB, f"job {job!r} has ended: {world.cause.detail}")
        if record is None:
            names = ", ".join(each.node for each in nodes) or "none"
            raise CannotDrain(DrainCode.NO_NODE, f"job {job!r} has no node {node!r} now; its nodes: {names}")
        life = life_of(record.incarnation)
        compare = Compare(wish_key(node), wish.mod_revision if wish is not None else 0)
        if store.transact((compare,), (Put(compare.key, Wish(life).to_json()),)).succeeded:
            return life
    raise StoreUnavailable(f"others write {wish_key(node)!r} all the time")


def _read(store: Store, job: str, node: str) -> tuple[World | None, list[NodeRecord], Entry | None]:
    entries = {entry.key: entry for entry in store.read((WORLD_KEY, NODES_PREFIX, wish_key(node))).entries}
    world = World.from_json(entries[WORLD_KEY].value) if WORLD_KEY in entries else None
    if world is not None and world.job != job:
        raise StoreMismatch(
            f"the store holds job {world.job!r}, not {job!r}: check --rdzv-endpoint and --rdzv-id"
        )
    return world, list(_records(entries.values())), entries.get(wish_key(node))


def _records(entries: Iterable[Entry]) -> Iterable[NodeRecord]:
    for entry in entries:
        if entry.key.startswith(NODES_PREFIX):
            yield NodeRecord.from_json(entry.key, entry.value)


def _take_back(store: Store, wish: Entry | None, incarnation: str) -> None:
    """An agent that ended before it heard of it has left the wish behind."""
    if wish is not None and Wish.from_json(wish.key, wish.value).incarnation == incarnation:
        store.transact((Compare(wish.key, wish.mod_revision),), (Delete(wish.key),))


def _state(world: World | None) -> str:
    if world is None:
        return "there is no world yet"
    names = ", ".join(member.node for member in world.members[:8])
    more = f" and {len(world.members) - 8} more" if len(world.members) > 8 else ""
    if world.phase is Phase.RUNNING:
        return f"generation {world.generation} runs on {names}{more}"
    if world.phase is Phase.ENDED:
        return f"the job has ended: {world.cause.detail}"
    how = "ends between two steps" if world.drains else "is being stopped"
    return f"generation {world.generation} on {names}{more} {how}: {world.cause.detail}"


def _say(code: DrainCode, error: Exception) -> DrainCode:
    print(f"elastic-agent drain: {error}", file=sys.stderr)
    return code
