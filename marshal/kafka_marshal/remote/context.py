"""Stands in for an engine where a sidecar has the claims: a lock, a clock, ports."""

import threading
from collections.abc import Mapping
from typing import Any

import attrs

from kafka_marshal.engine import Holding
from kafka_marshal.engine.meters import EngineMeters
from kafka_marshal.engine.replica import Glance, Replica
from kafka_marshal.errors import MarshalError  # noqa: TC001 - of a plain class
from kafka_marshal.ports import (
    Background,
    Clock,
    DataLog,
    Entropy,
    Event,
    Observer,
    WrongSetting,
)
from kafka_marshal.protocol.types import Key


@attrs.frozen
class RemotePorts:
    """What a process without an engine reaches the world outside by."""

    data: DataLog
    clock: Clock
    entropy: Entropy
    background: Background
    observer: Observer


@attrs.define(eq=False)
class RemoteContext:
    """What the parts of one client share.

    Attributes:
        ports: The ports.
        heartbeat_interval_ms: H, as the sidecar says.
        span: Most offsets that a request may ask for, as the sidecar says.
        holdings: What the client contends for or holds.
        heads: At most once: next offset that nobody was granted, as last heard.
        follows: Epoch of the claim before the one that is held, where it was told.
        replicas: Empty: the sidecar folds the log.
        wrong_settings: Empty: the sidecar looks at the topic.
        meters: What is counted on the way.
        pause: Whether the group is paused, as last heard.
    """

    ports: RemotePorts
    heartbeat_interval_ms: int
    span: int
    holdings: dict[Key, Holding] = attrs.field(factory=dict)
    heads: dict[Key, int] = attrs.field(factory=dict)
    follows: dict[Key, int | None] = attrs.field(factory=dict)
    replicas: Mapping[int, Replica] = attrs.field(factory=dict)
    wrong_settings: tuple[WrongSetting, ...] = ()
    meters: EngineMeters = attrs.field(factory=EngineMeters)
    pause: bool = False

    @property
    def now_ms(self) -> int:
        """Local time."""
        return self.ports.clock.now_ms()

    def glance(self, key: Key) -> Glance | None:
        """Return what is known of a key; nothing of what is not held here."""
        holding = self.holdings.get(key)
        if holding is None or not holding.claim.is_owned:
            return None
        position = holding.position
        if position is None:
            position = self.heads.get(key, holding.claim.start_position)
        owner = holding.claim.claimant.owner
        at = (holding.claim.epoch, self.follows.get(key))
        return Glance(owner.client_id, "fresh", None, position, *at)

    def member_count(self, group_id: str) -> int | None:
        """Return None: only the sidecar knows the members of a group."""
        del group_id
        return None

    def is_paused(self, group_id: str) -> bool:
        """Return whether the group is paused, as last heard."""
        del group_id
        return self.pause

    def observe(self, name: str, fields: Mapping[str, Any]) -> None:
        """Tell the observer."""
        self.meters.count_event(name)
        self.ports.observer.observe(Event(name, fields))


class RemoteEngine:
    """What consumers and claims see in an engine's place.

    Attributes:
        changed: Notified whenever there is news; its lock guards all state.
        lock: The lock of ``changed``.
        context: What the parts share.
        failure: Always None: what fails is the session.
    """

    def __init__(self, context: RemoteContext) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.context = context
        self.failure: MarshalError | None = None
