"""Replaces the engine in a client whose claims a sidecar holds: lock, clock, ports."""

import threading
from collections.abc import Mapping
from typing import Any

import attrs

from kafka_marshal.conditions import Condition
from kafka_marshal.engine import Holding
from kafka_marshal.engine.interfaces import ClaimPorts
from kafka_marshal.engine.meters import EngineMeters
from kafka_marshal.engine.replica import Glance, Replica
from kafka_marshal.errors import MarshalError  # noqa: TC001 - of a plain class
from kafka_marshal.ports import Event, WrongSetting
from kafka_marshal.protocol.items import is_in_scope
from kafka_marshal.protocol.records import Scope
from kafka_marshal.protocol.types import Key


@attrs.define(eq=False, kw_only=True)
class RemoteContext:
    """State shared by the parts of one client.

    Attributes:
        ports: The ports.
        heartbeat_interval_ms: Heartbeat interval, as reported by the sidecar.
        span: Most offsets that a request may ask for, as reported by the sidecar.
        holdings: Keys that the client contends for or holds.
        heads: At most once: next offset that is not granted, as last reported.
        follows: Epoch of the claim before the held one, if the sidecar reported it.
        replicas: Empty: the sidecar folds the log.
        wrong_settings: Empty: the sidecar checks the topic.
        meters: Counters.
        pause: Whether the whole group is paused, as last reported.
        scope: Topics and partitions that are paused separately, as last reported.
    """

    ports: ClaimPorts
    heartbeat_interval_ms: int
    span: int
    holdings: dict[Key, Holding] = attrs.field(factory=dict)
    heads: dict[Key, int] = attrs.field(factory=dict)
    follows: dict[Key, int | None] = attrs.field(factory=dict)
    replicas: Mapping[int, Replica] = attrs.field(factory=dict)
    wrong_settings: tuple[WrongSetting, ...] = ()
    meters: EngineMeters = attrs.field(factory=EngineMeters)
    pause: bool = False
    scope: Scope = ()

    @property
    def now_ms(self) -> int:
        """Local time."""
        return self.ports.clock.now_ms()

    def glance(self, key: Key) -> Glance | None:
        """Return the state of a key, None unless this client holds it."""
        holding = self.holdings.get(key)
        if holding is None or not holding.claim.is_owned:
            return None
        position = holding.position
        if position is None:
            position = self.heads.get(key, holding.claim.start_position)
        owner = holding.claim.claimant.owner
        return Glance(
            holder=owner.client_id,
            freshness="fresh",
            age_ms=None,
            position=position,
            noted=holding.claim.epoch,
            follows=self.follows.get(key),
        )

    def member_count(self, group_id: str) -> int | None:
        """Return None: only the sidecar knows the members of a group."""
        del group_id
        return None

    def plan_generation(self, group_id: str) -> int | None:
        """Return None: only the sidecar reads Plans."""
        del group_id
        return None

    def is_paused(self, group_id: str) -> bool:
        """Return whether the group is paused, as last reported."""
        del group_id
        return self.pause

    def pauses(self, group_id: str) -> list[dict[str, Any]]:
        """Return no pauses: the sidecar knows them, and exports their metrics."""
        del group_id
        return []

    def is_key_paused(self, key: Key) -> bool:
        """Return whether a key is paused, as last reported."""
        is_group_paused = self.pause and is_in_scope(None, key)
        return is_group_paused or is_in_scope(self.scope, key)

    def observe(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count an event and pass it to the observer."""
        self.meters.count_event(name)
        self.ports.observer.observe(Event(name, fields))


class RemoteEngine:
    """Takes the place of an engine for consumers and claims.

    Attributes:
        changed: Notified on every change; its lock guards all state.
        lock: The lock of ``changed``.
        context: State shared by the parts.
        failure: Always None: the session has the failures.
    """

    def __init__(self, context: RemoteContext) -> None:
        self.lock = threading.RLock()
        self.changed = Condition(self.lock)
        self.context = context
        self.failure: MarshalError | None = None
