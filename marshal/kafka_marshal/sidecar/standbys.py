"""Clients that stand by for partitions of other hosts (PROTOCOL 9.9, 12).

The sidecar is the standby by the log. One of its clients loads the state, and gets the
partition if this sidecar takes it over.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.engine import Context, Session
from kafka_marshal.engine.standbys import StandingBy
from kafka_marshal.ports import Pending
from kafka_marshal.protocol.standbys import Candidate, standbys_of
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.sidecar.clients import Client

if TYPE_CHECKING:
    from kafka_marshal.sidecar.assignment import LeaseTable


@attrs.define(eq=False, kw_only=True)
class Standby:
    """A partition that this sidecar stands by for.

    Attributes:
        key: The partition.
        owner: Its owner in the log, as it began.
        position: The next offset to process at that time, None if unknown.
        client: The client that loads its state; None while none can.
        has_come: Whether this sidecar owns the partition by now.
    """

    key: Key
    owner: str
    position: int | None
    client: Client | None = None
    has_come: bool = False


class _Sent(Pending[None]):
    """The outcome of an event: what the client makes of it, the sidecar never knows."""

    def done(self) -> bool:
        """Return True."""
        return True

    def exception(self, timeout: float | None = None) -> None:
        """Return None."""

    def result(self, timeout: float | None = None) -> None:
        """Return None."""


class ClientStandbys:
    """The standbys of one group. Used under the engine's lock.

    Attributes:
        by_key: What clients stand by for.
    """

    def __init__(
        self,
        context: Context,
        session: Session,
        table: "LeaseTable",
        *,
        publish: Callable[[Client, api.Standby], None],
    ) -> None:
        """Begin without any.

        Args:
            context: State shared by all parts of the engine.
            session: Claims of this sidecar in the group.
            table: Clients and leases.
            publish: Sends the events.
        """
        self.by_key: dict[Key, Standby] = {}
        self._context = context
        self._session = session
        self._table = table
        self._publish = publish

    def counted(self, count: int) -> "StandingBy | None":
        """Return what stands by for a subscription of clients that want so many."""
        return CountedStandbys(self, count) if count else None

    def begin(self, key: Key, *, owner: str, position: int | None) -> None:
        """Have a client load the state of a partition."""
        found = Standby(key=key, owner=owner, position=position)
        self.by_key[key] = found
        self._choose(found)

    def end(self, key: Key, *, has_come: bool) -> None:
        """Have the client forget it, unless this sidecar owns it now."""
        found = self.by_key.get(key)
        if found is not None and has_come:
            found.has_come = True
        elif found is not None:
            self._drop(found)

    def _drop(self, found: Standby) -> None:
        del self.by_key[found.key]
        client = found.client
        if client is not None and self._is_registered(client):
            self._publish(client, self._event(found, is_on=False))

    def _is_registered(self, client: Client) -> bool:
        return self._table.clients.get(client.client_id) is client

    def _choose(self, found: Standby) -> None:
        shared = self._table.subscription_at(found.key)
        found.client = None
        if shared is None:
            return
        now_ms = self._context.now_ms
        names = [
            name
            for name, subscriber in shared.subscribers.items()
            if subscriber.standbys
            and (client := self._table.clients.get(name)) is not None
            and shared.is_taking(client, now_ms)
        ]
        candidates = [Candidate(name, "", 1) for name in names]
        for name in standbys_of(found.key, owner="", host="", candidates=candidates):
            found.client = self._table.clients[name]
            self._publish(found.client, self._event(found, is_on=True))

    def _event(self, found: Standby, *, is_on: bool) -> api.Standby:
        shared, name = self._table.subscription_at(found.key), ""
        if shared is not None and found.client is not None:
            subscriber = shared.subscribers.get(found.client.client_id)
            name = "" if subscriber is None else subscriber.name
        return api.Standby(
            subscription=name,
            topic=found.key.topic,
            partition=found.key.partition,
            owner=found.owner if is_on else None,
            position=found.position if is_on else None,
        )

    def check(self) -> None:
        """End what has arrived; choose again where a client is gone."""
        for found in list(self.by_key.values()):
            lease = self._table.leases.get(found.key)
            if lease is not None and lease.client is found.client:
                del self.by_key[found.key]
            elif lease is not None or (
                found.has_come and found.key not in self._session.holdings
            ):
                self._drop(found)
            elif not self._is_served(found):
                self._choose(found)

    def _is_served(self, found: Standby) -> bool:
        """Return whether the client of a partition may still get it."""
        client, shared = found.client, self._table.subscription_at(found.key)
        if client is None or shared is None or not self._is_registered(client):
            return False
        subscriber = shared.subscribers.get(client.client_id)
        is_willing = subscriber is not None and subscriber.standbys > 0
        return is_willing and shared.is_taking(client, self._context.now_ms)

    def events_of(self, client: Client) -> tuple[api.Standby, ...]:
        """Return the events of all that a client stands by for."""
        mine = (each for each in self.by_key.values() if each.client is client)
        return tuple(self._event(each, is_on=True) for each in mine)

    def client_for(self, key: Key) -> str | None:
        """Return which client stands by for a partition, None if none does."""
        found = self.by_key.get(key)
        client = None if found is None else found.client
        is_known = client is not None and self._is_registered(client)
        return client.client_id if client is not None and is_known else None


@attrs.frozen
class CountedStandbys(StandingBy):
    """What stands by for one subscription of clients.

    Attributes:
        clients: The standbys of the group.
    """

    clients: ClientStandbys
    _count: int

    @property
    def count(self) -> int:
        """The largest number that a client wants."""
        return self._count

    def begin(self, key: Key, *, owner: str, position: int | None) -> Pending[None]:
        """Have a client load the state of a partition."""
        self.clients.begin(key, owner=owner, position=position)
        return _Sent()

    def end(self, key: Key, *, has_come: bool) -> None:
        """Have the client forget it, unless this sidecar owns it now."""
        self.clients.end(key, has_come=has_come)

    def close(self) -> None:
        """Do nothing: the clients of a subscription end it."""
