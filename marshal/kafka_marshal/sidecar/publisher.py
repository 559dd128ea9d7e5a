"""Events of a sidecar for the clients of a group."""

from collections.abc import Iterable

from kafka_marshal.config import Delivery
from kafka_marshal.engine import (
    Context,
)
from kafka_marshal.errors import (
    MarshalError,
)
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.items import Pause
from kafka_marshal.protocol.state import stuck_count
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.sidecar.clients import Client, ClientLease
from kafka_marshal.sidecar.events import LogPosition
from kafka_marshal.sidecar.http_errors import to_http_error
from kafka_marshal.sidecar.lease_table import (
    LeaseTable,
)
from kafka_marshal.sidecar.warming import WarmUp, WarmUps


class EventPublisher:
    """Sends events to the clients of one group. Used under the engine's lock."""

    __slots__ = ("_context", "_generation", "_group_id", "_paused", "_table")

    def __init__(self, context: Context, table: LeaseTable, *, group_id: str) -> None:
        self._context = context
        self._table = table
        self._group_id = group_id
        self._paused: tuple[bool, tuple[api.PausedTopic, ...]] = (False, ())
        # Config generation that clients know from the events sent so far.
        self._generation = self._newest

    def assigned(self, lease: ClientLease) -> None:
        """Send a lease with its deadlines."""
        lease.client.events.push(
            self._assigned(lease), self._at(lease.key, lease.epoch)
        )

    def drains(self, leases: Iterable[ClientLease]) -> None:
        """Ask clients to give back each lease that is drained, once for each lease."""
        for lease in leases:
            drain = lease.holding.drain
            if drain is None or lease.releasing is not None:
                continue
            lease.releasing = api.Releasing(
                topic=lease.key.topic,
                partition=lease.key.partition,
                epoch=lease.epoch,
                reason=drain.reason,
                successor=drain.successor,
                until_ms=drain.until_ms,
            )
            lease.client.events.push(lease.releasing, self._at(lease.key))

    def lost(self, lease: ClientLease, ending: Ending) -> None:
        """Report the end of a lease."""
        claim = lease.holding.claim
        is_same = claim.epoch == lease.epoch and claim.token is not None
        event = api.Lost(
            topic=lease.key.topic,
            partition=lease.key.partition,
            epoch=lease.epoch,
            reason=ending.reason,
            winner=ending.winner,
            at_offset=ending.at_offset,
            was_lost=ending.was_lost,
            token=str(claim.token) if is_same else None,
        )
        lease.client.events.push(event, self._at(lease.key, ending.at_offset))

    def pause(self, clients: Iterable[Client]) -> None:
        """Report that a pause began or ended; a renewal is not reported."""
        event = self._pause()
        paused = event.is_paused, event.topics
        if paused != self._paused:
            self._paused = paused
            for client in clients:
                client.events.push(event, self._home())

    @property
    def _newest(self) -> int | None:
        config = self._context.config
        return None if config is None else config.generation

    @property
    def has_new_layout(self) -> bool:
        """Whether clients have not been sent the Config generation in force yet."""
        return self._generation != self._newest

    def layout(self, clients: Iterable[Client]) -> None:
        """Report the Config generation in force, after the recalls that it causes.

        As with an engine's own announcement, keys of a coordinating partition whose
        fence has not been read yet are recalled later.
        """
        self._generation = self._newest
        if self._generation is not None:
            event = api.Layout(generation=self._generation)
            for client in clients:
                client.events.push(event, self._home())

    def failed(self, clients: Iterable[Client], failure: MarshalError) -> None:
        """Report that this sidecar cannot hold the group's claims any more."""
        event = api.Failed(failure=to_http_error(failure).failure)
        for client in clients:
            client.events.push(event, self._home())

    def warm(self, found: WarmUp) -> None:
        """Ask a client to warm up for a partition."""
        if found.client is not None:
            event = self._warm(found.client, found)
            found.client.events.push(event, self._at(found.key))

    def _warm(self, client: Client, found: WarmUp) -> api.Warm:
        shared = self._table.subscription_at(found.key)
        subscriber = shared and shared.subscribers.get(client.client_id)
        return found.event(subscriber.name if subscriber else "")

    def standby(self, client: Client, event: api.Standby) -> None:
        """Ask a client to stand by for a partition, or to stop doing so."""
        key = Key(self._group_id, event.topic, event.partition)
        client.events.push(event, self._at(key))

    def snapshot(
        self, client: Client, warm_ups: WarmUps
    ) -> tuple[api.Snapshot, LogPosition]:
        """Return all that a client has, warms up for and stands by for."""
        leases = client.leases.values()
        event = api.Snapshot(
            warming=tuple(self._warm(client, each) for each in warm_ups.of(client)),
            standbys=warm_ups.standbys.events_of(client),
            assigned=tuple(self._assigned(lease) for lease in leases),
            releasing=tuple(x.releasing for x in leases if x.releasing is not None),
            paused=self._pause(),
            subscriptions=tuple(sorted(client.specs)),
            generation=self._generation,
        )
        return event, self._home()

    def _assigned(self, lease: ClientLease) -> api.Assignment:
        known = self._context.replica_of(lease.key).world.keys.get(lease.key)
        if known is None:
            return assigned_event(lease, head=None)
        note = self._context.replica_of(lease.key).world.soft.notes.get(lease.key)
        stuck = stuck_count(note, known)
        is_noted = note is not None and note.offset == lease.epoch
        follows = note.follows if note is not None and is_noted else None
        head = known.next_unclaimed()
        return assigned_event(lease, head=head, stuck=stuck, follows=follows)

    def _pause(self) -> api.Paused:
        groups = [
            group
            for replica in self._context.replicas.values()
            if (group := replica.world.groups.get(self._group_id)) is not None
        ]
        topics = _paused_topics(each for group in groups for each in group.scoped)
        pauses = [group.pause for group in groups if group.pause is not None]
        if not pauses:
            return api.Paused(is_paused=False, topics=topics)
        last = max(pauses, key=lambda pause: pause.until_ms)
        return api.Paused(
            is_paused=True,
            topics=topics,
            until_wall_ms=last.until_ms,
            reason=f"paused by {last.client_id}",
        )

    def _at(self, key: Key, offset: int | None = None) -> LogPosition:
        world = self._context.replica_of(key).world
        last = max(0, world.next_offset - 1)
        return world.partition, last if offset is None else offset

    def _home(self) -> LogPosition:
        world = self._context.replicas[self._context.home_of(self._group_id)].world
        return world.partition, max(0, world.next_offset - 1)


def _paused_topics(pauses: Iterable[Pause]) -> tuple[api.PausedTopic, ...]:
    """Return the topics and partitions that all pauses with a scope cover."""
    found: dict[str, set[int] | None] = {}
    for pause in pauses:
        for each in pause.scope or ():
            known = found.setdefault(each.topic, set())
            if known is not None and each.partitions:
                known.update(each.partitions)
            else:
                found[each.topic] = None
    return tuple(
        api.PausedTopic(topic=topic, partitions=tuple(sorted(numbers or ())))
        for topic, numbers in sorted(found.items())
    )


def assigned_event(
    lease: ClientLease, *, head: int | None, stuck: int = 0, follows: int | None = None
) -> api.Assignment:
    """Return the event that gives a lease to its client.

    Args:
        lease: The lease.
        head: The next offset that was never granted or processed, by the log.
        stuck: How many owners in a row were stuck at that offset, by the log.
        follows: Epoch of the previous claim, by the log.
    """
    holding, claim = lease.holding, lease.holding.claim
    position = holding.position
    if holding.delivery is Delivery.AT_MOST_ONCE and position is None:
        position = claim.start_position if head is None else head
    until = lease.deadline()
    owner = claim.claimant.owner
    return api.Assignment(
        subscription=lease.name,
        topic=lease.key.topic,
        partition=lease.key.partition,
        epoch=lease.epoch,
        token=str(claim.token),
        client_id=owner.client_id,
        incarnation=owner.incarnation.hex(),
        secret=claim.secret.hex(),
        position=position,
        is_anchored=head is not None,
        soft_until_ms=until.soft_until_ms,
        hard_until_ms=until.hard_until_ms,
        why=holding.why,
        stuck=stuck,
        follows=follows,
        topic_id=None if holding.topic_id is None else holding.topic_id.hex(),
        set_by=holding.set_by,
        request=lease.request,
    )
