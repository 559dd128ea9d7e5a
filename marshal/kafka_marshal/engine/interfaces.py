"""What consumers and claims need of an engine, and a session of what subleases.

``Engine``, ``Session`` and ``Context`` have it, and so do their replacements in
a process whose claims a sidecar holds (``remote``). Dispatchers check leases the same
way in both cases.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kafka_marshal.errors import MarshalError, PositionError
from kafka_marshal.ports import Background, Clock, DataLog, WrongSetting
from kafka_marshal.protocol.claiming import Claimant
from kafka_marshal.protocol.types import Key

from .holding import Drain, Holding
from .meters import EngineMeters, SessionMeters
from .replica import Glance, Replica
from .subscription import Subscription

if TYPE_CHECKING:
    from .grants import GrantRequester
    from .holdings import Holdings


class Subleaser(Protocol):
    """Grants subleases of a session's claims to other processes: a sidecar's group.

    Called under the engine's lock.
    """

    def drive(self, now_ms: int) -> None:
        """Act after each round of the session, and after it was fenced."""
        ...

    def is_reserved(self, key: Key) -> bool:
        """Return whether a process may still use a key under an earlier claim."""
        ...

    def foresee(self, sub: Subscription, keys: Iterable[Key]) -> Mapping[Key, str]:
        """Return the process that each key will probably be subleased to."""
        ...

    def on_no_position(self, key: Key, error: PositionError) -> None:
        """Note that a key was released because it has no start position."""
        ...

    def has_warmed(self, key: Key) -> bool:
        """Return whether the process that a key moves to has warmed up for it."""
        ...

    def acted_on(self, generation: int) -> int:
        """Return the least Config generation that these processes act on.

        Args:
            generation: That of this process, which is the most.
        """
        ...

    @property
    def handoff_counts(self) -> Mapping[str, int]:
        """Open handoffs between these processes, by phase."""
        ...


class ClaimPorts(Protocol):
    """The ports that consumers use."""

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
        """Threads for blocking look-ups."""
        ...


class ClaimContext(Protocol):
    """State shared by all parts of one engine."""

    @property
    def ports(self) -> ClaimPorts:
        """The ports."""
        ...

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """The log as folded here; empty if the sidecar folds it."""
        ...

    @property
    def wrong_settings(self) -> Sequence[WrongSetting]:
        """Settings of the coordination topic that break PROTOCOL 2.1."""
        ...

    @property
    def meters(self) -> EngineMeters:
        """Counters."""
        ...

    @property
    def now_ms(self) -> int:
        """Local time."""
        ...

    @property
    def heartbeat_interval_ms(self) -> int:
        """Heartbeat interval of the log."""
        ...

    def glance(self, key: Key) -> Glance | None:
        """Return the state of a key, None if it is not known."""
        ...

    def member_count(self, group_id: str) -> int | None:
        """Return the number of live members of a group, None if not known."""
        ...

    def plan_generation(self, group_id: str) -> int | None:
        """Return the number of Plans that a group had, None if not known."""
        ...

    def is_paused(self, group_id: str) -> bool:
        """Return whether a whole group is paused, as far as is known."""
        ...

    def pauses(self, group_id: str) -> list[dict[str, Any]]:
        """Return every pause of a group, as far as is known."""
        ...

    def is_key_paused(self, key: Key) -> bool:
        """Return whether a key is paused, as far as is known."""
        ...

    def observe(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count an event and pass it to the observer."""
        ...


class ClaimEngine(Protocol):
    """The part of an engine that consumers and claims use."""

    @property
    def changed(self) -> threading.Condition:
        """Notified on every change; its lock guards all state."""
        ...

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The lock of ``changed``: acquiring it directly takes a third of the time."""
        ...

    @property
    def context(self) -> ClaimContext:
        """State shared by its parts."""
        ...

    @property
    def failure(self) -> MarshalError | None:
        """Set once it cannot continue."""
        ...


class ClaimSession(ABC):
    """One client of a group, which holds its claims in its ``Holdings``.

    Every method is called under the engine's lock.

    Attributes:
        claimant: Identity of the claimant in the log.
        holdings: Keys that the client contends for or holds.
        grants: Requests ranges of offsets at most once.
    """

    claimant: Claimant
    holdings: Mapping[Key, Holding]
    grants: "GrantRequester"
    _held: "Holdings"

    @property
    @abstractmethod
    def handoff_counts(self) -> Mapping[str, int]:
        """Open handoffs of this client by phase; empty if the sidecar does them."""

    @property
    @abstractmethod
    def leaving_count(self) -> int:
        """Number of releases that are not yet confirmed."""

    @abstractmethod
    def unsubscribe(self, subscription: Subscription, *, release: bool) -> list[int]:
        """End a subscription; return the numbers to wait for."""

    @abstractmethod
    def unwant(self, holding: Holding) -> None:
        """Stop contending for a wanted key; release it if held."""

    @abstractmethod
    def release(self, holding: Holding, *, reason: str) -> None:
        """Release a held key at its position."""

    @abstractmethod
    def seek(self, holding: Holding, position: int) -> None:
        """Move the position of a held key anywhere, at least once (PROTOCOL 6.6).

        ``holding.rewind`` is None again once the log has it.
        """

    @abstractmethod
    def beat_now(self) -> list[int]:
        """Send every position at once; return the numbers to wait for."""

    @abstractmethod
    def is_pending(self, seqs: Iterable[int], *, late: bool = True) -> bool:
        """Return whether any of the numbers is unconfirmed.

        Args:
            seqs: The numbers.
            late: Whether those that were given up count as pending.
        """

    @property
    def failure(self) -> MarshalError | None:
        """Set once nothing more can be held; consumers raise it."""
        return self._held.failure

    @property
    def meters(self) -> SessionMeters:
        """Counts of claims won, lost and released."""
        return self._held.meters

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """The subscriptions of the client's open consumers."""
        return self._held.subscriptions

    def delays_release(self, holding: Holding, drain: Drain) -> bool:
        """Return False: no other process uses what this one holds."""
        del holding, drain
        return False

    def check_lease(self, holding: Holding, now_ms: int) -> None:
        """End a claim whose hard deadline has passed, and release it in the log."""
        self._held.check_lease(holding, now_ms)

    def end_drain(self, holding: Holding) -> None:
        """Release a key at once that drains, if nothing of it is uncommitted."""
        self._held.end_drain(holding)

    def fail(self, failure: MarshalError) -> None:
        """Release everything for good; consumers raise ``failure``."""
        self._held.fail(failure)

    def lag_of(self, key: Key) -> int | None:
        """Return how far a held key is behind the end of its log, None if unknown."""
        return self._held.lag_of(key)

    def end_of(self, key: Key) -> int | None:
        """Return where the log of a held key ended, None if not known."""
        return self._held.end_of(key)
