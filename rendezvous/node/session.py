"""What belongs to one incarnation of this node, and is forgotten with it.

Its lease, what it has learned of the job (`MembershipView`), why its workers may go on (`LeaseValidity`), and its
record: what it reports, and what of that stands in the store as far as is known.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

from ..liveness.lease_validity import LeaseValidity
from ..records import NodeRecord
from ..store.interface import Entry, LeaseId
from .membership_view import MembershipView

_NEWS = attrgetter(*(one.name for one in fields(NodeRecord) if one.name not in ("step", "progress")))
"""All of a record but the steps."""


@dataclass(slots=True)
class Session:
    """The state of one incarnation. Changed by `Participant` alone."""

    says: NodeRecord
    """This node's record as it should be."""
    validity: LeaseValidity
    membership: MembershipView
    lease: LeaseId | None = None
    written: NodeRecord | None = None
    """The record as this incarnation last knew it to be in the store; None before the first."""
    own_revision: int | None = 0
    """mod_revision of our record; None after a write whose outcome is unknown."""
    created_revision: int = 0
    started: int = 0
    """The highest generation that was started here, or will not be any more."""

    @property
    def incarnation(self) -> str:
        return self.says.incarnation

    @property
    def news(self) -> NodeRecord | None:
        """What to write, if anything. Steps alone are not worth it: the newest travels with the next change."""
        written = self.written
        return None if written is not None and _NEWS(written) == _NEWS(self.says) else self.says

    def wrote(self, record: NodeRecord, entry: Entry) -> None:
        """`record` is ours, and stands in the store as `entry`."""
        self.written = record
        self.own_revision, self.created_revision = entry.mod_revision, entry.create_revision
