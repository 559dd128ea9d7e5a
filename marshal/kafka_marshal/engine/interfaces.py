"""What consumers and claims need of an engine, as Protocols.

``Engine``, ``Session`` and ``Context`` have these members, and so have their
stand-ins for a process whose claims a sidecar holds (``remote``): hand-outs look at
leases alike, whoever renews these.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import Background, Clock, DataLog, WrongSetting
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.types import Key

from .holding import Holding
from .meters import EngineMeters, SessionMeters
from .replica import Glance, Replica
from .subscription import Subscription

if TYPE_CHECKING:
    from .grants import GrantRequester


class ClaimPorts(Protocol):
    """What consumers reach the world outside by."""

    @property
    def clock(self) -> Clock:
        """Local time."""
        ...

    @property
    def data(self) -> DataLog:
        """Look-ups about data topics, and readers of them."""
        ...

    @property
    def background(self) -> Background:
        """Where look-ups block without harm."""
        ...


class ClaimContext(Protocol):
    """What is shared by all that is used of one engine."""

    @property
    def ports(self) -> ClaimPorts:
        """The ports."""
        ...

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """The log as folded here; empty where another process does that."""
        ...

    @property
    def wrong_settings(self) -> Sequence[WrongSetting]:
        """Settings of the coordination topic that break PROTOCOL 2.1."""
        ...

    @property
    def meters(self) -> EngineMeters:
        """What is counted on the way."""
        ...

    @property
    def now_ms(self) -> int:
        """Local time."""
        ...

    @property
    def heartbeat_interval_ms(self) -> int:
        """H of the log."""
        ...

    def glance(self, key: Key) -> Glance | None:
        """Return what is known of a key, None where nothing is."""
        ...

    def member_count(self, group_id: str) -> int | None:
        """Return how many live members a group has, None where that is not known."""
        ...

    def is_paused(self, group_id: str) -> bool:
        """Return whether a group is paused, as far as is known."""
        ...

    def observe(self, name: str, fields: Mapping[str, Any]) -> None:
        """Tell the observer."""
        ...


class ClaimEngine(Protocol):
    """What drives claims, as seen by those that use them."""

    @property
    def changed(self) -> threading.Condition:
        """Notified when there is news; its lock guards all state."""
        ...

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The lock of ``changed``; alone it costs a third, once a record."""
        ...

    @property
    def context(self) -> ClaimContext:
        """What its parts share."""
        ...

    @property
    def failure(self) -> MarshalError | None:
        """Set once it can go no further."""
        ...


class ClaimSession(Protocol):
    """One client of a group. Every method is called under the engine's lock."""

    @property
    def claimant(self) -> Claimant:
        """Who claims, as the log has it."""
        ...

    @property
    def failure(self) -> MarshalError | None:
        """Set once it can go no further."""
        ...

    @property
    def holdings(self) -> Mapping[Key, Holding]:
        """What is contended for or held."""
        ...

    @property
    def grants(self) -> "GrantRequester":
        """Asks for ranges of offsets at most once."""
        ...

    @property
    def meters(self) -> SessionMeters:
        """What is counted on the way."""
        ...

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """What is pursued now."""
        ...

    @property
    def leaving_count(self) -> int:
        """Number of releases that the log does not show yet."""
        ...

    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        """Stop to pursue a subscription; return what to wait for."""
        ...

    def unwant(self, holding: Holding) -> None:
        """Stop to contend for a key that was wanted; release it where held."""
        ...

    def release(self, holding: Holding, *, reason: str) -> None:
        """Give a held key up at its position."""
        ...

    def check_lease(self, holding: Holding, now_ms: int) -> None:
        """End a claim whose hard stop has come."""
        ...

    def beat_now(self) -> list[int]:
        """Tell every position at once; return what to wait for."""
        ...

    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        """Return whether any is still to be waited for."""
        ...

    def lag_of(self, key: Key) -> int | None:
        """Return how far a held key is behind the end of its log, None if unknown."""
        ...

    def end_of(self, key: Key) -> int | None:
        """Return where the log of a held key ended, None if not known."""
        ...
