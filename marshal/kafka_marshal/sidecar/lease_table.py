"""The state of one group at a sidecar: clients, their subscriptions and leases."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import msgspec

from kafka_marshal.engine import OfferedKey, Subscription
from kafka_marshal.engine.subscription import StandingBy
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.ports import Pending
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote.api import SubscriptionSpec
from kafka_marshal.sidecar.clients import Client, ClientLease
from kafka_marshal.sidecar.lease_journal import (
    JournaledClient,
    JournaledLease,
    LeaseJournal,
    gone_client,
)

# --- Shared subscriptions --------------------------------------------------------


# Settings that may differ between the clients of a shared subscription.
OWN = frozenset({"claims_max", "warms", "standbys"})


@attrs.define
class Subscriber:
    """One client of a shared subscription.

    Attributes:
        name: Name of the client's own subscription.
        spec: Its settings; those in ``OWN`` may differ from other clients' settings.
        is_detached: Whether that subscription has ended, but its leases are kept for
            the client's next subscription.
    """

    name: str
    spec: SubscriptionSpec
    is_detached: bool = False


@attrs.frozen
class Transfer:
    """A partition's reservation, until a deadline, for the client that it moves to."""

    to: str
    until_ms: int


@attrs.define(eq=False)
class SharedSubscription:
    """One subscription of the session, shared by clients with equal settings.

    Attributes:
        spec: Their settings; ``claims_max`` is per client.
        subscription: The session's subscription.
        subscribers: The clients, by name.
        transfers: Partitions that move from one client to another.
        seen_version: Version of the subscription at the last round.
        has_unreported_failure: Whether a key has no start position and no client was
            there to receive the error.
    """

    spec: SubscriptionSpec
    subscription: Subscription
    subscribers: dict[str, Subscriber] = attrs.field(factory=dict)
    transfers: dict[Key, Transfer] = attrs.field(factory=dict)
    seen_version: int = -1
    has_unreported_failure: bool = False

    def is_for(self, spec: SubscriptionSpec) -> bool:
        """Return whether a client with these settings belongs to this subscription.

        Raises:
            ConfigurationError: Topics overlap but other settings differ.
        """
        if self.spec.pattern is not None or spec.pattern is not None:
            is_same = self.spec.pattern == spec.pattern
        else:
            is_same = set(self.spec.topics) == set(spec.topics)
        shared = sorted(set(spec.topics) & set(self.subscription.topics))
        if not (is_same or shared):
            return False
        for field in msgspec.structs.fields(SubscriptionSpec):
            ours, theirs = getattr(spec, field.name), getattr(self.spec, field.name)
            if field.name == "topics":
                ours, theirs = sorted(ours), sorted(theirs)
            if field.name not in OWN and ours != theirs:
                raise self._differs(field.name, ours, theirs)
        return True

    def _differs(
        self, setting: str, ours: object, theirs: object
    ) -> ConfigurationError:
        names = ", ".join(sorted(self.subscribers)[:3])
        return ConfigurationError(
            f"{setting} is {ours!r} in this request, but {theirs!r} for the clients of "
            f"this sidecar that consume the same topics already ({names}); one "
            "subscription serves them all: give the same settings, or use another "
            "group",
            setting=setting,
        )

    def admit(self, client: Client, name: str, *, spec: SubscriptionSpec) -> None:
        """Add or update a subscriber, and retry keys that others could not start."""
        self.subscription.want_all()
        self.subscribers[client.client_id] = Subscriber(name, spec)

    def retry_unreported(self) -> None:
        """Retry keys without a start position: a client can receive the error now."""
        if self.has_unreported_failure:
            self.has_unreported_failure = False
            self.subscription.want_all()

    def is_wanted(self, clients: Mapping[str, Client]) -> bool:
        """Return whether any subscriber is registered and not leaving."""
        found = (clients.get(name) for name in self.subscribers)
        return any(client is not None and not client.is_leaving for client in found)

    def update_limits(
        self,
        clients: Mapping[str, Client],
        *,
        warm_by: Callable[[OfferedKey], Pending[None]],
        standby: StandingBy,
    ) -> bool:
        """Sum limit and weight over the subscribers; return whether anything changed.

        Args:
            clients: The registered clients.
            warm_by: Makes a client warm up; set if any subscriber warms up.
            standby: Makes a client stand by; set if any subscriber stands by.
        """
        active = [
            subscriber.spec
            for client_id, subscriber in self.subscribers.items()
            if client_id in clients and not clients[client_id].is_leaving
        ]
        limits = [spec.claims_max for spec in active]
        claims_max = 0 if 0 in limits else sum(limits)
        sub = self.subscription
        before = (sub.claims_max, sub.weight, sub.can_warm, sub.standby_count)
        sub.claims_max, sub.weight = claims_max, max(1, len(active))
        sub.warm_by = warm_by if any(each.warms for each in active) else None
        sub.standby_count = max((each.standbys for each in active), default=0)
        sub.standby = standby if sub.standby_count else None
        return before != (sub.claims_max, sub.weight, sub.can_warm, sub.standby_count)

    @property
    def counts_topics(self) -> bool:
        """Whether limits count whole topics."""
        return self.subscription.counts_topics

    def members(
        self, clients: Mapping[str, Client], *, present: Mapping[Key, str], now_ms: int
    ) -> dict[str, int | None]:
        """Return the clients that take part in the assignment, with their limits.

        A limit counts partitions, or whole topics; None is no limit. A silent client
        keeps what it has and gets nothing new.
        """
        had: defaultdict[str, list[Key]] = defaultdict(list)
        for key, who in present.items():
            had[who].append(key)
        members: dict[str, int | None] = {}
        for client_id, subscriber in self.subscribers.items():
            client = clients.get(client_id)
            if client is None or client.is_leaving:
                continue
            most = subscriber.spec.claims_max or None
            if not self.is_taking(client, now_ms):
                count = self._count(had[client_id])
                most = count if most is None else min(most, count)
            members[client_id] = most
        return members

    def is_taking(self, client: Client, now_ms: int) -> bool:
        """Return whether a subscriber may get keys now."""
        subscriber = self.subscribers.get(client.client_id)
        is_attached = subscriber is not None and not subscriber.is_detached
        is_well = not client.is_away(now_ms) and now_ms >= client.excluded_until_ms
        return is_attached and is_well and not client.is_leaving

    def names_with_room(
        self, clients: Mapping[str, Client], *, now_ms: int
    ) -> tuple[str, ...]:
        """Return at most two subscribers that may get keys now and have room."""
        found: list[str] = []
        for name, subscriber in self.subscribers.items():
            client = clients.get(name)
            if client is None or not self.is_taking(client, now_ms):
                continue
            most = subscriber.spec.claims_max
            if not most or (
                self._count(
                    k for k in client.leases if k.topic in self.subscription.topics
                )
                < most
            ):
                found.append(name)
                if len(found) == 2:  # noqa: PLR2004 - any client finds another
                    break
        return tuple(found)

    def _count(self, keys: Iterable[Key]) -> int:
        return len({key.topic for key in keys} if self.counts_topics else set(keys))

    def drop_finished_transfers(
        self, is_settled: Callable[[Key, str], bool], now_ms: int
    ) -> None:
        """Drop transfers that are complete or timed out."""
        self.transfers = {
            key: each
            for key, each in self.transfers.items()
            if now_ms < each.until_ms and not is_settled(key, each.to)
        }


# --- The lease table -------------------------------------------------------------


@attrs.frozen(kw_only=True)
class UnexpiredLease:
    """A lease that ended here while its client may still be using the key.

    Attributes:
        instance: Process of the client.
        epoch: Epoch of the claim under which the client had the key.
        until_ms: Latest deadline sent to the client.
    """

    client_id: str
    instance: str
    epoch: int
    until_ms: int

    def is_of(self, client: Client) -> bool:
        """Return whether it is a lease of this client, in the same process.

        Several clients of one process may have the same instance.
        """
        return (self.client_id, self.instance) == (client.client_id, client.instance)


@attrs.define(eq=False)
class LeaseTable:
    """The state of one group. Used under the engine's lock.

    Attributes:
        journal: Durable copy of the deadlines.
        clients: Registered clients, by name.
        subscriptions: Their shared subscriptions.
        single_claims: Keys claimed without consumption, with the clients that ask for
            each; the first client has the key.
        leases: Current leases.
        unexpired: Ended leases whose deadline has not passed; until then only the same
            client, in the same process, may get the key.
        backoff: Until when a client is not given a key again that it has just returned.
        is_dirty: Whether the next round has anything to do.
        is_journaled: Whether the journal matches this table.
        version: Counts the changes of clients, subscriptions and leases.
    """

    journal: LeaseJournal
    clients: dict[str, Client] = attrs.field(factory=dict)
    subscriptions: list[SharedSubscription] = attrs.field(factory=list)
    single_claims: dict[Key, list[str]] = attrs.field(factory=dict)
    leases: dict[Key, ClientLease] = attrs.field(factory=dict)
    unexpired: dict[Key, UnexpiredLease] = attrs.field(factory=dict)
    backoff: dict[tuple[Key, str], int] = attrs.field(factory=dict)
    is_dirty: bool = True
    is_journaled: bool = True
    version: int = 0

    def subscription_at(self, key: Key) -> SharedSubscription | None:
        """Return the subscription that consumes a key."""
        for shared in self.subscriptions:
            if key.topic in shared.subscription.topics:
                return shared
        return None

    def subscription_of(self, client: Client, name: str) -> SharedSubscription | None:
        """Return the shared subscription that serves a client's own subscription."""
        for shared in self.subscriptions:
            subscriber = shared.subscribers.get(client.client_id)
            if subscriber is not None and subscriber.name == name:
                return shared
        return None

    # --- leases

    def add_lease(self, lease: ClientLease) -> None:
        """Record a new lease."""
        self.leases[lease.key] = lease.client.leases[lease.key] = lease
        self.unexpired.pop(lease.key, None)
        self.is_journaled = False
        self.version += 1

    def remove_lease(self, lease: ClientLease) -> None:
        """Record the end of a lease."""
        self.leases.pop(lease.key, None)
        lease.client.leases.pop(lease.key, None)
        self.mark_changed()

    def mark_changed(self) -> None:
        """Make the next round process this table and write the journal."""
        self.is_journaled = False
        self.is_dirty = True
        self.version += 1

    def is_available(self, key: Key, client: Client) -> bool:
        """Return whether a client may get a key: no other process may still use it."""
        former = self.unexpired.get(key)
        is_free = former is None or former.is_of(client)
        return is_free and (key, client.client_id) not in self.backoff

    # --- unexpired leases and the journal

    def keep_until_expired(self, lease: ClientLease, now_ms: int) -> None:
        """Reserve the key of an ended lease until its latest sent deadline."""
        if now_ms < lease.sent_until_ms:
            client = lease.client
            self.unexpired[lease.key] = UnexpiredLease(
                client_id=client.client_id,
                instance=client.instance,
                epoch=lease.epoch,
                until_ms=lease.sent_until_ms,
            )
            self.is_journaled = False

    def has_unexpired(self, client: Client) -> bool:
        """Return whether a process may still be using a key that it has lost."""
        return any(each.is_of(client) for each in self.unexpired.values())

    def drop_unexpired(self, client: Client) -> None:
        """Free everything that a dead process may have used."""
        for key, former in list(self.unexpired.items()):
            if former.is_of(client):
                del self.unexpired[key]
        self.is_journaled = False

    def drop_expired(self, now_ms: int) -> None:
        """Drop unexpired leases and backoffs whose time is over."""
        past = [key for key, each in self.unexpired.items() if now_ms >= each.until_ms]
        for key in past:
            del self.unexpired[key]
        names = [name for name, until_ms in self.backoff.items() if now_ms >= until_ms]
        for name in names:
            del self.backoff[name]
        self.is_dirty = self.is_dirty or bool(past or names)

    def write_journal(self) -> OSError | None:
        """Write every deadline that may be sent; return the error, if any."""
        error = self.journal.save(self._journal_entries())
        self.is_journaled = error is None
        if error is None or self.journal.is_emptied:
            for lease in self.leases.values():
                lease.note_journaled()
        return error

    def append_to_journal(self, leases: Sequence[ClientLease]) -> OSError | None:
        """Write the deadlines of some leases; return the error, if any."""
        error = self.journal.append([lease.added_entry() for lease in leases])
        self.is_journaled = False
        if error is None or self.journal.is_emptied:
            for lease in leases:
                lease.note_journaled()
        return error

    def _journal_entries(self) -> list[JournaledClient]:
        """Return the journal's content, including clients that are gone."""
        kept: dict[tuple[str, str], dict[Key, JournaledLease]] = {}
        for key, each in self.unexpired.items():
            kept.setdefault((each.client_id, each.instance), {})[key] = JournaledLease(
                topic=key.topic,
                partition=key.partition,
                epoch=each.epoch,
                until_ms=each.until_ms,
            )
        claims: dict[str, list[Key]] = {}
        for key, names in self.single_claims.items():
            for name in names:
                claims.setdefault(name, []).append(key)
        entries = []
        for client in self.clients.values():
            own = kept.pop((client.client_id, client.instance), {})
            if client.reserved_until_ms is None:
                asked = claims.get(client.client_id, [])
                entries.append(client.journal_entry(own, asked))
        for (client_id, instance), ended in kept.items():
            entries.append(gone_client(client_id, instance, keys=tuple(ended.values())))
        return entries
