"""Interfaces of an engine that consumers and claims use.

``Engine`` and ``Context`` implement them, and so do their replacements (``remote``) in
a process whose claims a sidecar holds.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs

from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import (
    Background,
    Clock,
    DataLog,
    Entropy,
    Observer,
    WrongSetting,
)
from kafka_marshal.protocol.types import Key

from .meters import EngineMeters
from .replica import Glance, Replica

# Number of partitions that an event names; it counts all.
PARTITIONS_NAMED_MAX = 10


@attrs.frozen(kw_only=True)
class ClaimPorts:
    """Interfaces to Kafka, time, threads and observers of a process with claims."""

    data: DataLog
    clock: Clock
    entropy: Entropy
    background: Background
    observer: Observer


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
