"""torch's interface of a rendezvous, over a `Membership`.

torchrun's agent calls it from one thread, and knows three things: `next_rendezvous` when it has no workers,
`num_nodes_waiting` ten times a second while they run, `shutdown` at the end. What else happened follows from which
call comes when: a node that asks for the next rendezvous without a stop of its generation has lost a worker; one that
shuts down without an error has finished.

Each world gets a `TCPStore` of its own, served by the agent of its first node on a socket that was bound before the
world was made, so that no key and no address of an earlier world is ever seen. A place counts as taken when all nodes
have met there: until then the death of one brings the next world, afterwards torchrun's own exchange follows at once.

Its parameters become a `Config`, read and checked by the code that reads our own options.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed import Store as TorchStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ...rendezvous.errors import RendezvousError, StoreError
from ...rendezvous.etcd import ETCD
from ...rendezvous.node.node_actions import Refusal
from ...rendezvous.records import NodeRecord, Result
from ...rendezvous.store.interface import Store
from ...threads import Thread
from ..common.exits import CannotStart
from ..common.ports import OfferedPort, PortError, bind_listener
from ..configuration.config import LOCAL_ADDR, MAX_NODES, MIN_NODES, NO_PYTHON, Config, ConfigError, Problem
from ..configuration.derive import resolve
from ..configuration.load import IGNORED_RDZV_CONF_KEYS, RDZV_CONF_KEYS, Settings
from ..configuration.rendezvous import BACKEND as BACKEND_OPTION
from ..configuration.rendezvous import ENDPOINT, JOB_ID
from ..machine.network import unique_node_id, wait_for_network
from ..rendezvous_io.store_opening import connect_to_store, policy_of
from .membership import NEVER_GIVE_UP, Membership, PlaceEnd, Status, WorldPlace

log = logging.getLogger(__name__)

BACKEND = "etcd-v3"
"""The entry point's name: torch refuses a handler that calls itself otherwise."""

OURS_IN_TORCHRUN = (
    "under torchrun an option such as --etcd-ca FILE is --rdzv-conf ca=FILE: see docs/migrating.md"
)

MEET_S = 60.0
"""For the nodes of a new world to reach its store, and then for what torchrun's agents exchange there."""

LOOK_S = 0.01
"""Between two looks whether all are there."""


class EtcdV3Handler(RendezvousHandler):
    """torch's interface to our rendezvous."""

    def __init__(self, config: Config, connect: Callable[[], Store] | None = None) -> None:
        self._config = config
        self._node = config.node_id or unique_node_id()
        self._connect = connect or (lambda: connect_to_store(config.rendezvous))
        self._membership: Membership | None = None
        self._place: WorldPlace | None = None
        self._stop_announced = False
        self._left = False
        self._handled_outside = sys.exc_info()[1]

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._config.rendezvous.job_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises what torch's interface names: closed, timed out, cannot connect, another's data in the store, or a
        graceful exit where the job has succeeded without this node."""
        membership = self._join()
        status = membership.status
        must_stop = self._stop_announced or status.stop or status.problem
        status = self._end_place(PlaceEnd.STOPPED if must_stop else PlaceEnd.FAILED)
        while not status.problem:
            membership.want_place()
            status = membership.wait(lambda now: now.place is not None or now.leave is not None)
            if status.place is None or status.problem:
                raise _refusal(status)
            self._place = place = status.place
            store = self._meet(membership, place)
            if store is not None:
                master = place.world.master
                return RendezvousInfo(
                    PrefixStore(f"{BACKEND}/", store),
                    place.rank,
                    len(place.world.members),
                    RendezvousStoreInfo(master.address, master.port),
                )
            status = self._end_place(PlaceEnd.STOPPED)
        raise _refusal(status)

    def num_nodes_waiting(self) -> int:
        """Positive while the workers here must end, whatever the reason: torchrun's agent then restarts them."""
        if self._membership is None or self._place is None:
            return 0
        status = self._membership.status
        if status.stop or status.problem:
            self._stop_announced = True
            return 1
        return 0

    def is_closed(self) -> bool:
        """As far as this node knows. A job that ended before this node came is no matter: it begins anew."""
        return self._left or (self._membership is not None and self._membership.status.leave is not None)

    def set_closed(self) -> None:
        """Ends the job for all nodes that have met."""
        try:
            self._join().end_job(f"torchrun on node {self._node} gave up")
        except RendezvousError as error:
            raise RendezvousConnectionError(f"the job could not be closed: {error}") from error

    def shutdown(self) -> bool:
        """torchrun calls this when its agent has finished, and when it fails: then an exception is under way.

        Who has finished waits for the other nodes, lest they take it for lost and start again.
        """
        membership = self._membership
        error = sys.exc_info()[1]
        if error is self._handled_outside:
            error = None
        try:
            if membership is not None and self._place is not None and not self._left:
                if error is None:
                    self._end_place(PlaceEnd.SUCCEEDED)
                    membership.wait(lambda status: not status.finishing)
                elif isinstance(error, Exception):
                    self.set_closed()
            return True
        except RendezvousConnectionError as refused:
            log.warning("%s", refused)
            return False
        finally:
            self._leave()

    # ---------------------------------------------------------------- the membership

    def _join(self) -> Membership:
        if self._left:
            raise RendezvousClosedError(f"node {self._node} has left the rendezvous")
        if self._membership is None:
            self._membership = self._new_membership()
            # torchrun does not call `shutdown` when a signal ends it.
            atexit.register(self._leave)
        return self._membership

    def _new_membership(self) -> Membership:
        config = self._config
        rendezvous = config.rendezvous
        try:
            address = wait_for_network(config).address
            store = self._connect()
            listener = bind_listener(address, 0, "master")
        except (CannotStart, PortError, StoreError) as error:
            raise RendezvousConnectionError(str(error)) from error
        identity = NodeRecord(self._node, uuid.uuid4().hex[:12], address, listener.getsockname()[1], slots=1)
        policy = replace(
            policy_of(config),
            store_outage_grace_s=0.0,
            unleased_s=0.0,
            runs_again=True,
            restarts=NEVER_GIVE_UP,
        )
        membership = Membership(
            store,
            identity,
            policy,
            OfferedPort(listener, lambda: bind_listener(address, 0, "master")),
            lease_ttl_s=rendezvous.lease_ttl_s,
        )
        membership.start()
        return membership

    def _end_place(self, end: PlaceEnd) -> Status:
        membership, place, status = self._membership, self._place, Status()
        if membership is not None and place is not None:
            status = membership.give_back(place, end)
        self._place, self._stop_announced = None, False
        return status

    def _leave(self) -> None:
        if not self._left and self._membership is not None:
            self._membership.close()
            atexit.unregister(self._leave)
        self._left = True

    # ---------------------------------------------------------------- the workers' store

    def _meet(self, membership: Membership, place: WorldPlace) -> TorchStore | None:
        """The world's store as soon as all nodes are there; None when the world has ended before."""
        meeting = _Meeting(place, membership.wake)
        meeting.start()
        try:
            status = membership.wait(lambda now: now.stop or meeting.store is not None, MEET_S)
        finally:
            meeting.abandoned.set()
        if status.stop or status.problem:
            return None
        if meeting.store is None:
            world = place.world
            raise RendezvousConnectionError(
                f"the {len(world.members)} nodes of generation {world.generation} did not meet within {MEET_S:g} s at "
                f"the store that node {world.members[0].node} serves at {world.master.address} port "
                f"{world.master.port} ({meeting.problem}): check that every node reaches this address, or choose "
                "others with --local-addr"
            )
        return meeting.store


class _Meeting(Thread):
    """Opens the store of one world and waits there for all its nodes. A thread, because a connection to a machine
    that has just died blocks, torch offers no way to end that, and no signal is handled meanwhile."""

    def __init__(self, place: WorldPlace, wake: Callable[[], None]) -> None:
        super().__init__(self._meet, "worker-store", wake)
        self.store: TorchStore | None = None
        self.problem = "some are missing"
        self.abandoned = threading.Event()
        self._place = place
        self._wake = wake

    def _meet(self) -> None:
        try:
            store = _open(self._place)
            meeting = PrefixStore(f"{BACKEND}/meeting/", store)
            if meeting.add("nodes", 1) == len(self._place.world.members):
                meeting.set("all", "1")
            while not meeting.check(["all"]):
                if self.abandoned.wait(LOOK_S):
                    return
            self.store = store
            self._wake()
        except Exception as error:  # the first node may have died: the next world says so
            self.problem = str(error)


def _open(place: WorldPlace) -> TCPStore:
    """On the first node also its server, on the socket that was bound before the world was made."""
    master, listener = place.world.master, place.listener
    return TCPStore(
        master.address,
        master.port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEET_S),
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _refusal(status: Status) -> Exception:
    """What torch's contract has for it."""
    if status.problem or status.leave is None:
        return RendezvousStateError(status.problem)
    why, text = status.leave.why, status.leave.reason
    if why in (Refusal.JOIN_TIMEOUT, Refusal.STORE_AWAY):
        return RendezvousTimeoutError(text)
    if why is Result.SUCCEEDED:
        return RendezvousGracefulExitError(f"the job has ended: {text}")
    if isinstance(why, Result):
        return RendezvousClosedError(f"the job has ended: {text}")
    return RendezvousStateError(text)


# ---------------------------------------------------------------- torchrun's parameters


def read_parameters(params: RendezvousParameters) -> Config:
    """Raises ValueError with all problems."""
    settings = Settings()
    settings.put(BACKEND_OPTION, ETCD.name, "--rdzv-backend")
    settings.put(JOB_ID, params.run_id, "--rdzv-id")
    settings.put(MIN_NODES, str(params.min_nodes), "--nnodes")
    settings.put(MAX_NODES, str(params.max_nodes), "--nnodes")
    settings.put(NO_PYTHON, "torchrun", "torchrun")  # it starts the workers, and knows what they are
    if params.local_addr is not None:
        settings.put(LOCAL_ADDR, params.local_addr, "--local-addr")
    conf = {key.replace("-", "_"): str(value) for key, value in params.config.items()}
    settings.put(ENDPOINT, params.endpoint, "--rdzv-endpoint")
    for key, text in conf.items():
        if key in RDZV_CONF_KEYS:
            settings.put(RDZV_CONF_KEYS[key], text, f"--rdzv-conf {key}")
        elif key not in IGNORED_RDZV_CONF_KEYS:
            expected = f"a key of {', '.join(RDZV_CONF_KEYS)}"
            advice = "correct it, or leave it out"
            if key == "prefix":
                advice = "write it in --rdzv-endpoint: etcd://HOST/PREFIX"
            settings.problems.append(Problem(f"--rdzv-conf {key}", None, expected, advice))
    try:
        return resolve(settings, {}, lambda: uuid.uuid4().hex).config
    except ConfigError as error:
        raise ValueError(f"{error}\n  {OURS_IN_TORCHRUN}") from None
