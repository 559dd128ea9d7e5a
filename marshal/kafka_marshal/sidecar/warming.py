"""Warm-ups and standbys: clients load state before they get a partition.

See PROTOCOL 9.5, 9.9 and 12. If another host has the partition, a record offers it to
the sidecar; between two clients of one sidecar no record is written. In both cases a
client gets the event ``warm``, answers ``ready``, and gets the partition once its owner
has given it back. No guarantee depends on this: a warm-up that ends early, or never,
only costs time.

In the log the standby is the sidecar. One of its clients loads the state, and gets the
partition if this sidecar takes it over.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import attrs

from kafka_marshal.engine import Context, OfferedKey, Session
from kafka_marshal.engine.subscription import StandingBy
from kafka_marshal.ports import FAR_MS, Pending
from kafka_marshal.protocol.handoffs import OFFERED, READY, phase_of
from kafka_marshal.protocol.standbys import Candidate, standbys_of
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import Handoff
from kafka_marshal.sidecar.clients import Client, ClientLease
from kafka_marshal.sidecar.lease_table import LeaseTable

WARMING = "warming"
# Reasons to refuse ``ready``, the same as the fold's for HandoffReady (PROTOCOL 9.4).
OLD_EPOCH = "old_epoch"
NO_OFFER = "no_offer"
NOT_SUCCESSOR = "not_successor"
LATE = "late"
# Pause before a move that may not begin yet, or a search for a client, is retried.
RETRY_MS = 1_000


@attrs.define(eq=False, kw_only=True)
class Standby:
    """A partition that this sidecar stands by for.

    Attributes:
        key: The partition.
        owner: Its owner in the log when the standby began.
        position: The next offset to process at that time, None if unknown.
        client: The client that loads its state; None while no client can.
        is_owner: Whether this sidecar owns the partition now.
    """

    key: Key
    owner: str
    position: int | None
    client: Client | None = None
    is_owner: bool = False


# Outcome of each standby event: the sidecar never learns what the client did with it.
_SENT: Future[None] = Future()
_SENT.set_result(None)


class ClientStandbys(StandingBy):
    """The standbys of one group. Used under the engine's lock.

    Attributes:
        by_key: Partitions that clients stand by for.
    """

    def __init__(
        self,
        context: Context,
        session: Session,
        table: LeaseTable,
        *,
        publish: Callable[[Client, api.Standby], None],
    ) -> None:
        """Begin without standbys.

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

    def begin(self, key: Key, *, owner: str, position: int | None) -> Pending[None]:
        """Ask a client to load the state of a partition."""
        found = Standby(key=key, owner=owner, position=position)
        self.by_key[key] = found
        self._choose(found)
        return _SENT

    def end(self, key: Key, *, is_owner: bool) -> None:
        """Ask the client to drop a key's state, unless this sidecar owns the key."""
        found = self.by_key.get(key)
        if found is not None and is_owner:
            found.is_owner = True
        elif found is not None:
            self._drop(found)

    def close(self) -> None:
        """Do nothing: standbys end with the clients of a subscription."""

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
            if subscriber.spec.standbys
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
        """End standbys whose partition was assigned; replace clients that are gone."""
        for found in list(self.by_key.values()):
            lease = self._table.leases.get(found.key)
            if lease is not None and lease.client is found.client:
                del self.by_key[found.key]
            elif lease is not None or (
                found.is_owner and found.key not in self._session.holdings
            ):
                self._drop(found)
            elif not self._is_served(found):
                self._choose(found)

    def _is_served(self, found: Standby) -> bool:
        """Return whether the client that stands by for a partition may still get it."""
        client, shared = found.client, self._table.subscription_at(found.key)
        if client is None or shared is None or not self._is_registered(client):
            return False
        subscriber = shared.subscribers.get(client.client_id)
        is_willing = subscriber is not None and subscriber.spec.standbys > 0
        return is_willing and shared.is_taking(client, self._context.now_ms)

    def events_of(self, client: Client) -> tuple[api.Standby, ...]:
        """Return the events of all that a client stands by for."""
        mine = (each for each in self.by_key.values() if each.client is client)
        return tuple(self._event(each, is_on=True) for each in mine)

    def client_for(self, key: Key) -> str | None:
        """Return the client that stands by for a partition, None if no client does."""
        found = self.by_key.get(key)
        client = None if found is None else found.client
        is_known = client is not None and self._is_registered(client)
        return client.client_id if client is not None and is_known else None


@attrs.define(eq=False, kw_only=True)
class WarmUp(Pending[None]):
    """A partition that is offered to a client; pending until the client is ready.

    Attributes:
        key: The partition.
        epoch: Epoch of its owner's claim.
        owner: The local client that has it, or its owner in the log, another host.
        position: The next offset to process, None if unknown.
        is_local: Whether a client of this sidecar has it.
        since_ms: Local time of the offer.
        until_ms: End of the offer, local time.
        topic_id: Kafka's id of the topic, None if unknown.
        client: The client that warms up; None while no client can take it.
        chosen_ms: Local time of the last search for a client.
        is_ready: Whether that client is ready.
    """

    key: Key
    epoch: int
    owner: str
    position: int | None
    is_local: bool
    since_ms: int
    until_ms: int
    topic_id: bytes | None = None
    client: Client | None = None
    chosen_ms: int = 0
    is_ready: bool = False

    def done(self) -> bool:
        """Return whether the client is ready."""
        return self.is_ready

    def exception(self, timeout: float | None = None) -> None:
        """Return None: a client that fails to warm up does not answer."""

    def result(self, timeout: float | None = None) -> None:
        """Return None."""

    def event(self, subscription: str) -> api.Warm:
        """Return the event that asks a client to warm up."""
        return api.Warm(
            subscription=subscription,
            topic=self.key.topic,
            partition=self.key.partition,
            epoch=self.epoch,
            owner=self.owner,
            position=self.position,
            until_ms=self.until_ms,
            topic_id=None if self.topic_id is None else self.topic_id.hex(),
        )


class WarmUps:
    """The warm-ups of one group. Used under the engine's lock.

    Attributes:
        by_key: Warm-ups that are open, or whose partition has not arrived yet.
        standbys: Partitions of other hosts that clients stand by for.
    """

    def __init__(
        self,
        context: Context,
        session: Session,
        table: LeaseTable,
        *,
        publish: Callable[[WarmUp], None],
        choose: Callable[[Key], Client | None],
        standbys: ClientStandbys,
    ) -> None:
        """Begin without warm-ups.

        Args:
            context: State shared by all parts of the engine.
            session: Claims of this sidecar in the group.
            table: Clients and leases.
            publish: Sends the event to the client.
            choose: Returns the client that a partition will probably go to.
            standbys: The standbys of the group, which are checked with the warm-ups.
        """
        self.by_key: dict[Key, WarmUp] = {}
        self.standbys = standbys
        self._context = context
        self._session = session
        self._table = table
        self._publish = publish
        self._choose = choose
        self._barred: dict[tuple[Key, str], int] = {}
        self._retry_ms: int | None = None

    # --- moves between clients of this sidecar

    def permits(self, lease: ClientLease, to: Client, *, now_ms: int) -> bool:
        """Return whether a partition may move to another client now.

        If that client warms up, the partition is first offered to it.
        """
        key = lease.key
        found = self.by_key.get(key)
        if found is not None and (found.client is not to or found.epoch != lease.epoch):
            self.withdraw(key)
            found = None
        # A drained sidecar would not claim the key again after its release.
        if self._session.self_drain.is_in_force or self._is_offered_elsewhere(key):
            return self._delay(now_ms)
        if not (self._works_on(lease) and self._can_warm(key, to)):
            return True
        if found is not None:
            return found.is_ready
        is_barred = now_ms < self._barred.get((key, to.client_id), now_ms)
        if is_barred or self._is_full(lease.client, to):
            return self._delay(now_ms)
        self._offer(lease, to, now_ms)
        return False

    def _works_on(self, lease: ClientLease) -> bool:
        """Return whether a client works on a partition until it is handed off."""
        client, shared = lease.client, self._table.subscription_at(lease.key)
        is_subscribed = shared is not None and client.client_id in shared.subscribers
        return is_subscribed or client.awaits_drain

    def _delay(self, now_ms: int) -> bool:
        if self._retry_ms is None:
            self._retry_ms = now_ms + RETRY_MS
        return False

    def _offer(self, lease: ClientLease, to: Client, now_ms: int) -> None:
        known, position = self._known(lease.key), lease.holding.position
        if position is None and known is not None:
            position = known.next_unclaimed()
        found = self.by_key[lease.key] = WarmUp(
            key=lease.key,
            epoch=lease.epoch,
            owner=lease.client.client_id,
            position=position,
            is_local=True,
            since_ms=now_ms,
            until_ms=now_ms + self._setting("handoff_ms"),
            topic_id=lease.holding.topic_id,
            client=to,
        )
        self._observe("handoff_offered", found, epoch=lease.epoch)
        self._publish(found)

    def _is_offered_elsewhere(self, key: Key) -> bool:
        """Return whether the log shows an offer of this key to another host."""
        known, replica = self._known(key), self._context.replica_of(key)
        log_ms = replica.log_ms(self._context.now_ms)
        return known is not None and phase_of(known, log_ms) is not None

    def _is_full(self, source: Client, to: Client) -> bool:
        """Return whether a client offers, or is offered, the most keys allowed."""
        waiting = [each for each in self.by_key.values() if not each.is_ready]
        given = sum(each.owner == source.client_id for each in waiting if each.is_local)
        taken = sum(each.client is to for each in waiting)
        return max(given, taken) >= self._setting("handoffs_max")

    def withdraw(self, key: Key) -> None:
        """End the offer of a key that should stay with its client."""
        found = self.by_key.get(key)
        if found is not None and found.is_local:
            self._end(found, "unwanted")

    # --- partitions of other hosts

    def begin(self, offered: OfferedKey) -> WarmUp:
        """Ask a client to warm up for a key that another host offers."""
        now_ms = self._context.now_ms
        found = self.by_key[offered.key] = WarmUp(
            key=offered.key,
            epoch=offered.epoch,
            owner=offered.owner,
            position=offered.position,
            is_local=False,
            since_ms=now_ms,
            until_ms=offered.until_ms,
            topic_id=offered.topic_id,
        )
        self._choose_for(found, now_ms)
        return found

    def _choose_for(self, found: WarmUp, now_ms: int) -> None:
        """Ask the client that will probably get the key to warm up."""
        found.chosen_ms, found.client = now_ms, None
        found.client = client = self._choose(found.key)
        if client is None:
            return  # ``check`` searches again after ``RETRY_MS``
        if self._can_warm(found.key, client):
            self._publish(found)
        else:
            found.is_ready = True

    # --- both

    def on_ready(self, client: Client, report: api.ReadyRequest) -> str | None:
        """Record that a client is ready; return the reason of a refusal. Idempotent."""
        now_ms = self._context.now_ms
        key = Key(self._group_id, report.topic, report.partition)
        known, found = self._known(key), self.by_key.get(key)
        if known is None or known.epoch != report.epoch:
            return OLD_EPOCH
        if found is None or found.epoch != report.epoch:
            return NO_OFFER
        if found.client is not client:
            return NOT_SUCCESSOR
        if found.is_ready:
            return None
        if now_ms >= found.until_ms:
            return LATE
        found.is_ready = self._table.is_dirty = True
        if found.is_local:
            warm_ms = now_ms - found.since_ms
            self._observe("handoff_ready", found, warm_ms=warm_ms)
        return None

    def check(self, now_ms: int) -> None:
        """End warm-ups and standbys that failed, or whose partition has arrived."""
        self.standbys.check()
        for found in list(self.by_key.values()):
            if found.is_local:
                self._check_local(found, now_ms)
            else:
                self._check_foreign(found, now_ms)
        self._barred = {pair: ms for pair, ms in self._barred.items() if now_ms < ms}
        if self._retry_ms is not None and now_ms >= self._retry_ms:
            self._retry_ms, self._table.is_dirty = None, True

    def _check_local(self, found: WarmUp, now_ms: int) -> None:
        lease = self._table.leases.get(found.key)
        shared = self._table.subscription_at(found.key)
        if shared is None:
            del self.by_key[found.key]
        elif lease is None or lease.epoch != found.epoch:
            if not found.is_ready:
                self._end(found, "owner_gone")
            elif lease is not None or found.key not in shared.transfers:
                del self.by_key[found.key]  # the key has arrived, or went elsewhere
        elif not self._is_taking(found, now_ms):
            self._end(found, "successor_gone")
        elif found.is_ready:
            return  # the owner gives the key back
        elif lease.holding.drain is not None:
            self._end(found, "unwanted")
        elif now_ms >= found.until_ms:
            self._bar(found, now_ms)
            self._end(found, LATE)

    def _bar(self, found: WarmUp, now_ms: int) -> None:
        assert found.client is not None
        within_ms = found.until_ms - found.since_ms
        self._barred[found.key, found.client.client_id] = now_ms + within_ms
        self._retry_ms = min(now_ms + within_ms, self._retry_ms or FAR_MS)

    def _check_foreign(self, found: WarmUp, now_ms: int) -> None:
        known = self._known(found.key)
        if known is None or known.epoch != found.epoch:
            holding = self._session.holdings.get(found.key)
            if holding is None or found.key in self._table.leases:
                del self.by_key[found.key]
            return
        is_reserved = known.handoff is not None and known.handoff[0] == self._own_name
        if known.owner is None and is_reserved:
            return
        offer = known.offer
        is_ours = offer is not None and offer.successor == self._own_name
        if not is_ours or not (found.is_ready or now_ms < found.until_ms):
            del self.by_key[found.key]
        elif found.is_ready or self._is_taking(found, now_ms):
            return
        elif found.client is not None or now_ms >= found.chosen_ms + RETRY_MS:
            self._choose_for(found, now_ms)

    def _is_taking(self, found: WarmUp, now_ms: int) -> bool:
        client, shared = found.client, self._table.subscription_at(found.key)
        if client is None or shared is None:
            return False
        is_same = self._table.clients.get(client.client_id) is client
        return is_same and shared.is_taking(client, now_ms)

    def _can_warm(self, key: Key, client: Client) -> bool:
        shared = self._table.subscription_at(key)
        if shared is None or client.client_id not in shared.subscribers:
            return False
        return shared.subscribers[client.client_id].spec.warms

    def _end(self, found: WarmUp, reason: str) -> None:
        del self.by_key[found.key]
        self._table.is_dirty = True
        self._observe("handoff_withdrawn", found, reason=reason)

    def _observe(self, name: str, found: WarmUp, **more: object) -> None:
        client = found.client
        successor = None if client is None else client.client_id
        fields = {"key": found.key, "successor": successor, **more}
        self._context.observe(name, fields)

    # --- look-ups

    def of(self, client: Client) -> Iterable[WarmUp]:
        """Return the open warm-ups of a client."""
        found = self.by_key.values()
        return [each for each in found if each.client is client and not each.is_ready]

    def warmed_by(self, key: Key, *, among: Mapping[str, Client]) -> str | None:
        """Return the client among these that has warmed up for a key, else None."""
        found = self.by_key.get(key)
        if found is None or found.client is None or not found.is_ready:
            standby = self.standbys.client_for(key)
            return standby if standby in among else None
        name = found.client.client_id
        return name if among.get(name) is found.client else None

    def places(self) -> dict[Key, str]:
        """Return the registered client that each key with a warm-up will go to."""
        clients = self._table.clients
        return {
            key: found.client.client_id
            for key, found in self.by_key.items()
            if found.client is not None
            and clients.get(found.client.client_id) is found.client
        }

    def counts(self) -> Mapping[str, int]:
        """Return how many keys move between clients here, by phase."""
        local = [each for each in self.by_key.values() if each.is_local]
        waiting = sum(not each.is_ready for each in local)
        leases = self._table.leases
        draining = sum(each.is_ready and each.key in leases for each in local)
        return Counter({OFFERED: waiting, READY: draining, WARMING: waiting})

    def clear(self) -> None:
        """Drop all warm-ups and standbys."""
        self.by_key.clear()
        self.standbys.by_key.clear()

    @property
    def _own_name(self) -> str:
        return self._session.claimant.owner.client_id

    @property
    def _group_id(self) -> str:
        return self._session.claimant.group_id

    def _known(self, key: Key) -> KeyState | None:
        return self._context.replica_of(key).world.keys.get(key)

    def _setting(self, name: str) -> int:
        return self._context.settings_of(self._group_id).value(name)


def handoff_row(
    key: Key,
    *,
    known: KeyState,
    warm_up: WarmUp | None,
    phase: str | None,
    since_ms: int | None,
    ahead_ms: int,
    has: str | None,
) -> Handoff | None:
    """Return one open handoff as the API shows it, None if there is none.

    Args:
        key: The partition.
        known: Its state by the log.
        warm_up: Its warm-up by a client of this sidecar, None without one.
        phase: Phase of its offer in the log, None without one.
        since_ms: Log time of that offer.
        ahead_ms: Wall time minus local time.
        has: The client of this sidecar that has it, None without one.
    """
    to = None if warm_up is None or warm_up.client is None else warm_up.client.client_id
    owner = "" if known.owner is None else known.owner.client_id
    if phase is not None and known.offer is not None:
        successor, until_ms = known.offer.successor, known.offer.until_ms
    elif warm_up is not None and warm_up.is_local and has is not None:
        # Owner and successor are clients of this sidecar; the log has no such offer.
        successor, phase = owner, READY if warm_up.is_ready else OFFERED
        since_ms = warm_up.since_ms + ahead_ms
        until_ms = warm_up.until_ms + ahead_ms
    else:
        return None
    return Handoff(
        topic=key.topic,
        partition=key.partition,
        owner=owner,
        successor=successor,
        phase=phase,
        since_ms=since_ms,
        until_ms=until_ms,
        from_client=has,
        to_client=to,
    )
