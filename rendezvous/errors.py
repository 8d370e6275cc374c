"""What can go wrong between a node and its store, split by what the caller does about it.

RendezvousError
├── StoreError
│   ├── StoreUnavailable   ask again later; the outcome of a write is unknown until it is read back
│   │   └── StoreRefused   it does not let us in: at the start give up, later a person may repair it
│   ├── StoreClosed        we closed it ourselves
│   ├── StoreMismatch      another job's or a newer version's store: leave; fix the endpoint or the job id
│   ├── LeaseExpired       the others may already count this node as gone: stop workers, rejoin
│   └── Compacted          the history asked for is gone: read everything again, then watch from there
└── RecordInvalid          a value in the store is not one of ours: named by key, never half-used
"""

from __future__ import annotations


class RendezvousError(Exception):
    """Base of everything that this folder raises."""


class StoreError(RendezvousError):
    """The store did not do what was asked."""


class StoreUnavailable(StoreError):
    """No answer in time. A write may or may not have happened: read it back, never assume."""


class StoreRefused(StoreUnavailable):
    """The password, the certificates, the permissions or the address are wrong; nothing was done."""


class StoreClosed(StoreError):
    """The store was closed on this side."""


class StoreMismatch(StoreError):
    """The store answers, but does not hold this job in this version."""


class LeaseExpired(StoreError):
    """The lease is unknown to the store: every record under it has been removed."""


class Compacted(StoreError):
    """The watch asked for a revision that the store no longer remembers."""


class RecordInvalid(RendezvousError):
    """A stored value could not be understood."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(
            f"the value under {key!r} in the rendezvous store is not usable: {problem}; "
            "another program or another version of elastic-agent wrote it: delete this key of the job, or use a "
            "different --rdzv-id or store"
        )
        self.key = key
        self.problem = problem
