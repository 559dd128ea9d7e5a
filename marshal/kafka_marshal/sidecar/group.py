"""One consumer group at a sidecar: its claims, its clients and their leases.

Safety: a client gets a key only under a claim that no other client has used, and only
after the previous client of the key here has confirmed that it stopped, is known to be
dead, or has passed the latest deadline that was sent to it (PROTOCOL 5.2, 12).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from kafka_marshal.engine import (
    Context,
    Holding,
    Session,
    Subscription,
)
from kafka_marshal.engine.coverage import best_taker
from kafka_marshal.engine.session import TOPIC_GONE
from kafka_marshal.errors import (
    ClaimLost,
    ClaimRejected,
    InvalidTransition,
    MarshalError,
    PositionError,
)
from kafka_marshal.identity import Identity
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.plans import RESTART
from kafka_marshal.protocol.state import STUCK
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import LocalClient
from kafka_marshal.sidecar.assignment import MOVED, Assignor
from kafka_marshal.sidecar.clients import Client, ClientLease, reclaim
from kafka_marshal.sidecar.departures import Departure
from kafka_marshal.sidecar.events import LogPosition
from kafka_marshal.sidecar.http_errors import GONE, UNKNOWN
from kafka_marshal.sidecar.lease_journal import LeaseJournal
from kafka_marshal.sidecar.lease_table import LeaseTable, SharedSubscription, Transfer
from kafka_marshal.sidecar.publisher import EventPublisher
from kafka_marshal.sidecar.warming import OLD_EPOCH, ClientStandbys, WarmUp, WarmUps

CHECK_MS = 100
BACKOFF_MS_MAX = 5_000
GONE_MAX = 10_000

SHUTDOWN = "shutdown"
DIED = "client_died"
SILENT = "client_silent"
# Length of the drain that begins while deadlines cannot be journaled.
BLOCKED_MS = 24 * 3_600_000
BLOCKED = "its lease journal cannot be written"
LEFT = "client_left"
CLOSED = "closed"
RELEASED = "released"
OUT_OF_RANGE = "position_out_of_range"
NOT_OWNER = "not_owner"
# Reasons in a client's report which only mean that it missed a deadline.
_SILENCES = frozenset({"lease_expired", "taken_over", "identity_conflict", "fenced"})
# Reasons after which a client may get the same key again at once.
_ORDERLY = frozenset({CLOSED, RELEASED, TOPIC_GONE})

Takers = tuple[SharedSubscription, tuple[str, ...], list[str]]
"""A subscription, up to two of its clients with room, topics other hosts can take."""


class LocalGroup:
    """One consumer group at a sidecar. Used under the engine's lock.

    Attributes:
        session: Claims for all clients.
        table: Clients and leases.
        failure: Why this sidecar cannot hold the group's claims any more, else None.
        identity: Lock against a second sidecar of this name on this machine.
    """

    def __init__(
        self,
        context: Context,
        session: Session,
        *,
        journal: LeaseJournal,
        identity: Identity | None,
        refusals: Counter[tuple[str, str]],
        restarts: bool = False,
        handoff_ms: int = 0,
    ) -> None:
        """Open a group without clients.

        Args:
            context: State shared by all parts of the engine.
            session: Claims for all clients.
            journal: Durable copy of the deadlines.
            identity: Lock on this machine.
            refusals: Counts reports that were refused or had no effect, by request
                and reason.
            restarts: Whether the sidecar, or its replacement, starts again soon.
            handoff_ms: How long the last client continues while other hosts take over.
        """
        self.session = session
        self._restarts = restarts
        self.table = LeaseTable(journal)
        self.failure: MarshalError | None = None
        self.identity = identity
        self._context = context
        self._refusals = refusals
        self._publisher = EventPublisher(
            context, self.table, group_id=session.claimant.group_id
        )
        self._warm_ups = WarmUps(
            context,
            session,
            self.table,
            publish=self._publisher.warm,
            choose=self._client_for,
            standbys=ClientStandbys(
                context, session, self.table, publish=self._publisher.standby
            ),
        )
        self._assignor = Assignor(
            context, session, table=self.table, warm_ups=self._warm_ups
        )
        self._departure = Departure(
            context,
            session,
            table=self.table,
            handoff_ms=handoff_ms,
            is_handed_off=lambda: self.is_handed_off,
        )
        self._gone: dict[str, None] = {}
        self._taking: frozenset[str] = frozenset()
        self._is_draining = False
        self._is_journal_failing = False
        self._blocked_since_ms: int | None = None  # since when no deadline may be sent
        self._is_yielding = False
        self._is_handing_off = False
        self._check_at_ms = 0
        # Earliest time to write all clients to the journal again.
        self._journal_at_ms = 0
        self._takers: list[Takers] = []
        self._takers_at_ms = self._takers_version = -1
        # Clients with room, by subscription, and the state it was computed from.
        self._with_room: list[tuple[SharedSubscription, tuple[str, ...]]] = []
        self._with_room_of: tuple[int, frozenset[str]] = (-1, frozenset())
        self._idle_since_ms: int | None = None
        session.sublease_by(self)

    @property
    def group_id(self) -> str:
        """The group."""
        return self.session.claimant.group_id

    # --- clients

    def find(self, client_id: str, instance: str) -> Client:
        """Return the calling client.

        Raises:
            ClaimLost: The client, or this process of it, is not registered.
        """
        if self.failure is not None:
            raise self.failure
        client = self.table.clients.get(client_id)
        if client is None or client.instance != instance:
            is_known = client is not None or instance in self._gone
            raise ClaimLost(
                f"client {client_id!r} of group {self.group_id!r} is not registered "
                "as this process at this sidecar; its leases are over: register again",
                reason=GONE if is_known else UNKNOWN,
            )
        return client

    def add(self, client: Client) -> None:
        """Register a client."""
        self.table.clients[client.client_id] = client
        self.table.mark_changed()

    def leave(self, client: Client, *, awaits_drain: bool) -> None:
        """End a client's subscriptions; it is removed once it has no leases.

        Args:
            client: The client. With ``awaits_drain``, the group's last client first
                continues until other hosts have taken over, if they can.
            awaits_drain: Whether the client works until its partitions are taken.
        """
        if awaits_drain and self._departure.holds_back(client):
            return
        client.is_leaving, client.awaits_drain = True, awaits_drain
        self._end_subscriptions(client)

    def stay(self, client: Client) -> None:
        """Keep a client that has reconnected, even if it had begun to leave."""
        client.is_leaving = client.awaits_drain = False
        self._departure.cancel(client)

    def evict(self, client: Client, *, reason: str) -> None:
        """Remove a client that can use nothing any more; its keys are free at once."""
        for lease in list(client.leases.values()):
            self.table.remove_lease(lease)
            reclaim(lease.holding, is_settled=False)
            self._release(lease.holding, reason=reason)
        self.table.drop_unexpired(client)
        self._remove(client, reason=reason)

    def _remove(self, client: Client, *, reason: str = "") -> None:
        table = self.table
        table.clients.pop(client.client_id, None)
        self._gone[client.instance] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._end_subscriptions(client, reason=reason)
        client.close()
        self.table.mark_changed()

    def _end_subscriptions(self, client: Client, *, reason: str = "") -> None:
        """End the subscriptions and the claims of single keys of a client."""
        for name in list(client.specs):
            self.remove_subscriber(client, name, reason=reason)
        for key, names in list(self.table.single_claims.items()):
            if client.client_id in names:
                self.remove_single_claim(key, client, reason=reason)

    def describe(self, client: Client, now_ms: int) -> LocalClient:
        """Return the description of a client in the API."""
        beat_at_ms = client.beat_at_ms
        return LocalClient(
            group=self.group_id,
            client=client.client_id,
            pid=client.peer.pid,
            state=client.state(now_ms),
            beat_age_ms=None if beat_at_ms is None else now_ms - beat_at_ms,
            subscriptions=tuple(sorted(client.specs)),
            assigned=tuple(str(key.topic_partition) for key in sorted(client.leases)),
            lease_until_ms=max(
                (x.sent_until_ms for x in client.leases.values()), default=None
            ),
            warming=tuple(
                sorted(
                    str(each.key.topic_partition)
                    for each in self.warm_ups
                    if each.client is client and not each.is_ready
                )
            ),
        )

    # --- subscriptions and claims without consumption

    def add_subscription(
        self, spec: api.SubscriptionSpec, subscription: Subscription
    ) -> SharedSubscription:
        """Subscribe the session to topics that no client consumes yet.

        Raises:
            InvalidTransition: The session consumes a topic with other settings.
        """
        self.session.subscribe(subscription)
        shared = SharedSubscription(spec, subscription)
        self.table.subscriptions.append(shared)
        return shared

    def add_subscriber(
        self,
        shared: SharedSubscription,
        client: Client,
        *,
        name: str,
        spec: api.SubscriptionSpec,
    ) -> None:
        """Add a client to a shared subscription.

        Raises:
            InvalidTransition: It consumes these topics under another name.
        """
        subscriber = shared.subscribers.get(client.client_id)
        if subscriber is not None and subscriber.name != name:
            if not subscriber.is_detached:
                raise InvalidTransition(
                    f"client {client.client_id!r} consumes these topics already, as "
                    f"{subscriber.name!r}; end that subscription first, or use another "
                    "client_id"
                )
            client.specs.pop(subscriber.name, None)
            for lease in client.leases.values():
                if lease.name == subscriber.name:
                    lease.name = name
        client.specs[name] = spec
        shared.admit(client, name, spec=spec)
        self.reconcile(shared)

    def remove_subscriber(self, client: Client, name: str, *, reason: str = "") -> None:
        """End a client's subscription, and recall its leases."""
        shared = self.table.subscription_of(client, name)
        client.specs.pop(name, None)
        if shared is not None:
            del shared.subscribers[client.client_id]
            self.reconcile(shared, reason=reason)
        self.table.mark_changed()

    def detach(self, client: Client, name: str) -> None:
        """End a client's subscription; its next subscription keeps the leases."""
        shared = self.table.subscription_of(client, name)
        if shared is not None:
            shared.subscribers[client.client_id].is_detached = True
        self.table.mark_changed()

    def reconcile(self, shared: SharedSubscription, *, reason: str = "") -> None:
        """Apply the limits of the remaining subscribers; without any, unsubscribe.

        Args:
            shared: The subscription.
            reason: Reason in the releases of keys that no client wants any more.
        """
        if not shared.is_wanted(self.table.clients):
            if shared in self.table.subscriptions:
                self.table.subscriptions.remove(shared)
                self.session.drop(shared.subscription, reason=reason or CLOSED)
        elif shared.update_limits(
            self.table.clients,
            warm_by=self._warm_ups.begin,
            standby=self._warm_ups.standbys,
        ):
            self.session.reconsider()
        self.table.mark_changed()

    def add_single_claim(self, client: Client, key: Key) -> None:
        """Claim one key for a client that does not consume it; the first client has it.

        Raises:
            InvalidTransition: Clients of this sidecar consume it.
        """
        names = self.table.single_claims.get(key)
        if names is None:
            is_held = key in self.session.holdings
            if self.table.subscription_at(key) is not None or not is_held:
                self.session.want(key)
            names = self.table.single_claims[key] = []
        if client.client_id not in names:
            names.append(client.client_id)
        self.table.mark_changed()

    def remove_single_claim(
        self, key: Key, client: Client, *, reason: str = ""
    ) -> None:
        """End a client's claim of one key."""
        names = self.table.single_claims.get(key, [])
        if client.client_id in names:
            names.remove(client.client_id)
        if not names and self.table.single_claims.pop(key, None) is not None:
            holding = self.session.holdings.get(key)
            if holding is not None:
                self.session.drop_want(holding, reason=reason or RELEASED)
            self.session.forget_want(key)
        self.table.mark_changed()

    def has_warmed(self, key: Key) -> bool:
        """Return whether the client that a key moves to has warmed up for it."""
        found = self._warm_ups.by_key.get(key)
        return found is not None and found.is_local and found.is_ready

    def acknowledge(self, client: Client, generation: int) -> None:
        """Record the Config generation that a client acts on (PROTOCOL 10.7)."""
        if generation == client.generation:
            return
        client.generation = generation
        own = self._context.settled.generation
        if self.acted_on(own) == own:
            self.session.announce_soon()

    def acted_on(self, generation: int) -> int:
        """Return the least Config generation that the clients act on.

        Args:
            generation: Generation of the sidecar, and of clients that report none.
        """
        clients = self.table.clients.values()
        reported = [x.generation for x in clients if x.generation is not None]
        return min([generation, *reported])

    @property
    def handoff_counts(self) -> Mapping[str, int]:
        """How many keys move between clients here, by phase."""
        return self._warm_ups.counts()

    @property
    def warm_ups(self) -> Iterable[WarmUp]:
        """Open warm-ups of clients."""
        return self._warm_ups.by_key.values()

    def _client_for(self, key: Key) -> Client | None:
        """Return the client that a key will probably go to."""
        shared = self.table.subscription_at(key)
        if shared is None:
            return None
        name = self._assignor.foresee(shared.subscription, [key]).get(key)
        client = None if name is None else self.table.clients.get(name)
        is_taking = client and shared.is_taking(client, self._context.now_ms)
        return client if is_taking else None

    def is_reserved(self, key: Key) -> bool:
        """Return whether a client may still use a key under an earlier claim."""
        return key in self.table.unexpired

    def foresee(self, sub: Subscription, keys: Collection[Key]) -> Mapping[Key, str]:
        """Return which client each key will probably be subleased to."""
        return self._assignor.foresee_in_time(sub, keys)

    def on_no_position(self, key: Key, error: PositionError) -> None:
        """Fail the client that a key without a start position would have gone to.

        The key is excluded until a client subscribes again: otherwise it would go to
        the next client and fail that one, until all have failed.
        """
        shared = self.table.subscription_at(key)
        if shared is None:
            return
        name = self._assignor.foresee(shared.subscription, [key]).get(key)
        shared.subscription.exclude(key)
        client = None if name is None else self.table.clients.get(name)
        if client is None:
            shared.has_unreported_failure = True
        else:
            self._fail_client(client, error)

    def _fail_client(self, client: Client, failure: MarshalError) -> None:
        self._publisher.failed([client], failure)
        client.is_leaving = True
        for name in list(client.specs):
            self.remove_subscriber(client, name, reason="failed")

    # --- reports of clients

    def record_position(
        self, client: Client, report: api.Release
    ) -> ClientLease | None:
        """Record a client's position; return its lease, None if the report is stale."""
        lease = client.leases.get(Key(self.group_id, report.topic, report.partition))
        if lease is None or lease.epoch != report.epoch:
            return None
        lease.record_progress(report)
        return lease

    def record_seek(self, lease: ClientLease, report: api.Progress) -> None:
        """Move a partition's position to where its client has sought."""
        holding = lease.holding
        if report.position is None or report.seek_count <= holding.seek_count:
            return
        if isinstance(holding.progress, AtLeastOnce):
            self.session.seek(holding, report.position)
            holding.seek_count = report.seek_count

    def accept_returned(
        self, client: Client, report: api.Release, *, reason: str = ""
    ) -> None:
        """Release a key that a client has stopped using. Idempotent."""
        lease = self.record_position(client, report)
        if lease is None:
            self._accept_late_return(client, report)
            return
        self.table.remove_lease(lease)
        reclaim(lease.holding, is_settled=True)
        if lease.holding.drain is not None:
            return  # the session releases a drained key by itself
        # A client that claimed this single key ends that claim by a later request.
        self._end_single_claim(lease)
        now_ms = self._context.now_ms
        interval_ms = self._context.heartbeat_interval_ms
        if not reason and report.reason not in _ORDERLY:
            backoff_ms = min(interval_ms, BACKOFF_MS_MAX)
            self.table.backoff[lease.key, client.client_id] = now_ms + backoff_ms
        shared = self.table.subscription_at(lease.key)
        if report.reason == TOPIC_GONE and shared is not None:
            shared.subscription.doubt(lease.key.topic)
        if report.reason == STUCK:
            client.excluded_until_ms = now_ms + interval_ms
        if report.reason == OUT_OF_RANGE and shared is not None:
            shared.subscription.exclude(lease.key)
        why = reason or (SILENT if report.reason in _SILENCES else report.reason)
        self._release(lease.holding, reason=why, detail=report.detail)

    def accept_ready(self, client: Client, report: api.ReadyRequest) -> None:
        """Record that a client has warmed up for a partition. Idempotent.

        Raises:
            ClaimRejected: The partition is not, or no longer, offered to this client.
        """
        reason = self._warm_ups.on_ready(client, report)
        if reason is not None:
            self._refusals["ready", reason] += 1
            raise ClaimRejected(
                f"{report.topic}-{report.partition} is not offered to client "
                f"{client.client_id!r} under claim {report.epoch} ({reason}); drop "
                "what was loaded, another event 'warm' may follow",
                reason=reason,
            )

    def _accept_late_return(self, client: Client, report: api.Release) -> None:
        """Free a key that the client had lost before, and has now stopped using."""
        key = Key(self.group_id, report.topic, report.partition)
        reserve = self.table.unexpired.get(key)
        is_own = reserve is not None and reserve.is_of(client)
        if reserve is not None and is_own and reserve.epoch == report.epoch:
            del self.table.unexpired[key]
            self.table.mark_changed()
        else:
            known = self._context.replica_of(key).world.keys.get(key)
            is_old = known is None or known.epoch != report.epoch
            self._refusals["released", OLD_EPOCH if is_old else NOT_OWNER] += 1

    def reserve(self, client: Client, *, until_ms: int) -> None:
        """Keep the place of a stopped client for the next process of its name.

        Its keys are released and claimed again for that process, because only one
        process may use a token.
        """
        client.reserved_until_ms = until_ms
        own_name = self.session.claimant.owner.client_id
        for lease in list(client.leases.values()):
            self.table.remove_lease(lease)
            reclaim(lease.holding, is_settled=True)
            shared = self.table.subscription_at(lease.key)
            if shared is None:
                self._release(lease.holding, reason=LEFT)
                continue
            shared.transfers[lease.key] = Transfer(client.client_id, until_ms)
            self.session.release(lease.holding, reason=MOVED, successor=own_name)
        self.table.mark_changed()

    def record_beat(
        self, client: Client, beat: api.HeartbeatRequest
    ) -> api.Progress | None:
        """Record a heartbeat; return the last progress that matches no lease."""
        client.beat_at_ms = client.seen_ms
        if beat.generation is not None:
            self.acknowledge(client, beat.generation)
        stale = None
        for each in beat.progress:
            lease = client.leases.get(Key(self.group_id, each.topic, each.partition))
            if lease is not None and lease.epoch == each.epoch:
                self.record_seek(lease, each)
                lease.record_progress(each)
            else:
                stale = each
        return stale

    def is_slow_beat(self, client: Client, beat: api.HeartbeatRequest) -> bool:
        """Return whether a heartbeat has a seek, or needs a write to the journal."""
        for each in beat.progress:
            lease = client.leases.get(Key(self.group_id, each.topic, each.partition))
            if lease is not None and each.seek_count > lease.holding.seek_count:
                return True
        return any(lease.must_journal for lease in client.leases.values())

    def journal_deadlines(self, client: Client) -> None:
        """Journal the deadlines of a client's claims, so that they may be sent."""
        late = [
            lease
            for lease in client.leases.values()
            if lease.holding.claim.is_owned and lease.must_journal
        ]
        if late:
            self._journal(late)

    def answer(self, client: Client, now_ms: int) -> api.HeartbeatResponse:
        """Return the deadlines of a client's leases, as far as the journal has them."""
        found = [
            lease.deadline()
            for lease in client.leases.values()
            if lease.holding.claim.is_owned
        ]
        return api.HeartbeatResponse(
            deadlines=tuple(each for each in found if now_ms < each.hard_until_ms),
            now_ms=now_ms,
            topics_with_takers=self._topics_with_takers(client, now_ms),
        )

    def _topics_with_takers(self, client: Client, now_ms: int) -> tuple[str, ...]:
        """Return the topics of a client that another client or host could take.

        Silence of clients, and changes at other hosts, are noticed within ``CHECK_MS``.
        """
        version = self.table.version
        age_ms = now_ms - self._takers_at_ms
        if version != self._takers_version or age_ms >= CHECK_MS:
            self._takers, self._takers_version = self._find_takers(now_ms), version
            self._takers_at_ms = now_ms
        name = client.client_id
        found: set[str] = set()
        for shared, with_room, of_hosts in self._takers:
            if name in shared.subscribers:
                is_beside = any(other != name for other in with_room)
                found.update(shared.subscription.topics if is_beside else of_hosts)
        return tuple(sorted(found))

    def _find_takers(self, now_ms: int) -> list[Takers]:
        # Cached: many clients without room would each be checked ten times a second.
        state = self.table.version, self._taking
        if state != self._with_room_of:
            self._with_room_of = state
            self._with_room = [
                (shared, shared.names_with_room(self.table.clients, now_ms=now_ms))
                for shared in self.table.subscriptions
            ]
        own_name = self.session.claimant.owner.client_id
        return [
            (
                shared,
                with_room,
                [
                    topic
                    for topic in shared.subscription.topics
                    if best_taker(
                        shared.subscription.members,
                        topic,
                        me=own_name,
                        may_be_behind=True,
                    )
                ],
            )
            for shared, with_room in self._with_room
        ]

    def snapshot(self, client: Client) -> tuple[api.Snapshot, LogPosition]:
        """Return a snapshot of a client's leases, and its position in the log."""
        self.journal_deadlines(client)
        return self._publisher.snapshot(client, self._warm_ups)

    # --- the round

    def drive(self, now_ms: int) -> None:
        """Run one round: end leases that are over, assign held keys, send events."""
        if self.session.failure is not None:
            self._fail(self.session.failure)
            return
        clients = self.table.clients.values()
        if now_ms >= self._check_at_ms:
            self._check_at_ms = now_ms + CHECK_MS
            self._expire(now_ms)
            self._remove_departed(now_ms)
            if (leaving := self._departure.due(now_ms)) is not None:
                leaving.is_leaving = True
                self.leave(leaving, awaits_drain=True)
            self._warm_ups.check(now_ms)
            self._publisher.pause(clients)
        if self._has_news(now_ms):
            self._end_leases(now_ms)
            if not self._is_draining:
                self._warm_ups.check(now_ms)
                self._pursue_single_claims()
                self._assign(now_ms)
            self._publisher.drains(self.table.leases.values())
            self._publisher.pause(clients)
        if self._publisher.has_new_layout:
            # Recalls are sent first: a client that has applied the layout has applied
            # all recalls.
            self._publisher.drains(self.table.leases.values())
            self._publisher.layout(clients)
        if not self.table.is_journaled and now_ms >= self._journal_at_ms:
            self._write_journal()
        self._yield_if_blocked(now_ms)

    def _has_news(self, now_ms: int) -> bool:
        """Return whether this round has anything to do."""
        table = self.table
        taking = frozenset(
            name
            for name, client in table.clients.items()
            if not client.is_away(now_ms) and now_ms >= client.excluded_until_ms
        )
        has_news = table.is_dirty or taking != self._taking or bool(table.single_claims)
        has_more = bool(taking - self._taking)
        self._taking, table.is_dirty = taking, False
        for shared in table.subscriptions:
            if has_more:
                shared.retry_unreported()
            has_news = has_news or shared.seen_version != shared.subscription.version
            shared.seen_version = shared.subscription.version
        return has_news

    def _fail(self, failure: MarshalError) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        for lease in list(self.table.leases.values()):
            self.table.remove_lease(lease)
            lease.holding.is_subleased = False
            if lease.holding.claim.is_owned:
                # The client may use the key until its deadline, so the claim is not
                # released, but becomes stale. The journal keeps the deadline.
                self.session.abandon(lease.holding, reason="failed")
            self._publisher.lost(lease, lease.holding.claim.ending or Ending("failed"))
        self._publisher.failed(self.table.clients.values(), failure)
        for client in self.table.clients.values():
            client.close()

    def _end_leases(self, now_ms: int) -> None:
        """End the leases of claims that have ended."""
        for lease in list(self.table.leases.values()):
            claim = lease.holding.claim
            if claim.ending is not None:
                self.table.remove_lease(lease)
                reclaim(lease.holding, is_settled=True)
                self.table.keep_until_expired(lease, now_ms)
                self._send_lost(lease, claim.ending)
            elif claim.lease.hard_until_ms < lease.last_sent_ms:
                # The leader's clock stepped, so the deadline that was sent is too late
                # now: send an earlier one (PROTOCOL S4).
                self._publisher.assigned(lease)

    def _expire(self, now_ms: int) -> None:
        """End leases if the latest deadline sent for them is over (PROTOCOL 12)."""
        due = [x for x in self.table.leases.values() if now_ms >= x.sent_until_ms]
        for lease in due:
            self.table.remove_lease(lease)
            reclaim(lease.holding, is_settled=False)
            self._send_lost(lease, Ending(SILENT))
            self._release(lease.holding, reason=SILENT)
        self.table.drop_expired(now_ms)

    def _send_lost(self, lease: ClientLease, ending: Ending) -> None:
        self._publisher.lost(lease, ending)
        self._end_single_claim(lease)

    def _end_single_claim(self, lease: ClientLease) -> None:
        """Stop claiming a single key, unless the client has asked again since."""
        client, names = lease.client, self.table.single_claims.get(lease.key, [])
        is_last = client.claim_request(lease.key) == lease.request
        if client.client_id in names and is_last:
            names.remove(client.client_id)

    def _remove_departed(self, now_ms: int) -> None:
        """Remove clients that have left, or were silent for too long."""
        grace_ms = self._context.heartbeat_interval_ms
        for client in list(self.table.clients.values()):
            is_done = client.is_leaving and not client.leases
            is_gone = not is_done and client.is_gone(now_ms, grace_ms=grace_ms)
            if (is_done or is_gone) and not self.table.has_unexpired(client):
                if is_gone and client.reserved_until_ms is None:
                    self._context.observe("client_silent", client.fields(self.group_id))
                self._remove(client)

    def _pursue_single_claims(self) -> None:
        """Claim single keys again for the clients that still ask for them."""
        for key, names in list(self.table.single_claims.items()):
            if key in self.session.holdings or self.session.is_leaving([key]):
                continue
            self.session.forget_want(key)
            if names:
                self.session.want(key)
            else:
                del self.table.single_claims[key]

    def _assign(self, now_ms: int) -> None:
        if not self._assignor.is_rested(now_ms):
            self._assignor.keep_places(now_ms)
            self.table.is_dirty = True
            return
        added = self._assignor.assign(now_ms)
        if added and not self._journal(added):
            for lease in added:  # not journaled, so not sent: retry next round
                self.table.remove_lease(lease)
                reclaim(lease.holding, is_settled=True)
            return
        for lease in added:
            self._publisher.assigned(lease)

    def _release(self, holding: Holding, *, reason: str, detail: str = "") -> None:
        """Release a key that no client uses; a pending drain keeps its own reason."""
        if not holding.claim.is_owned:
            return
        drain = holding.drain
        if drain is None:
            self.session.release(holding, reason=reason, detail=detail)
            return
        self.session.release(
            holding, reason=drain.reason, successor=drain.successor, detail=drain.detail
        )

    def _journal(self, leases: Sequence[ClientLease]) -> bool:
        """Journal the deadlines of some leases; return whether they may be sent.

        Soon after all clients were written, only these leases are appended: if a
        thousand clients join, writing all for each new lease would take most of the
        time.
        """
        if self._context.now_ms >= self._journal_at_ms:
            return self._write_journal()
        return self._may_send(self.table.append_to_journal(leases))

    def _write_journal(self) -> bool:
        error = self.table.write_journal()
        self._journal_at_ms = self._context.now_ms + self.table.journal.rest_ms
        return self._may_send(error)

    def finish_journal(self) -> None:
        """Write what the journal's pace has delayed, before the group is closed.

        The journal of a failed group stays, with the deadlines of its clients.
        """
        if self.failure is None and not self.table.is_journaled:
            self._write_journal()

    def _may_send(self, error: OSError | None) -> bool:
        """Return whether deadlines may be sent, after an attempt to journal them."""
        may_send = error is None or self.table.journal.is_emptied
        if error is not None and not self._is_journal_failing:
            about = {"error": error, "clients_continue": may_send}
            self._context.observe("lease_journal_unwritable", about)
        self._is_journal_failing = error is not None
        if may_send:
            self._blocked_since_ms = None
        elif self._blocked_since_ms is None:
            self._blocked_since_ms = self._context.now_ms
        return may_send

    def _yield_if_blocked(self, now_ms: int) -> None:
        """Drain this sidecar while no deadlines may be sent to its clients.

        Without the drain, other hosts would wait for keys that this sidecar renews and
        no client works on. It begins while clients can still hand over their keys.
        """
        if self._is_handing_off:
            return
        drain, since_ms = self.session.self_drain, self._blocked_since_ms
        if since_ms is None and self._is_yielding:
            self._is_yielding = False
            drain.end()
        elif since_ms is not None:
            wait_ms = self._context.heartbeat_interval_ms // 2
            if now_ms - since_ms >= wait_ms:
                self._is_yielding = drain.begin(BLOCKED_MS, why=BLOCKED)

    # --- the end

    def hand_off(self, for_ms: int) -> None:
        """Hand off what other hosts can take; clients continue meanwhile. Idempotent.

        Args:
            for_ms: When the drain ends in the log by itself, if this process dies.
        """
        self._departure.pass_on()
        self._is_handing_off = True
        if not self.is_handed_off:
            self.session.self_drain.begin(for_ms)

    @property
    def is_handed_off(self) -> bool:
        """Whether nothing is left that another host could take."""
        own_name = self.session.claimant.owner.client_id
        topics = {
            holding.key.topic
            for holding in self.session.holdings.values()
            if holding.claim.is_owned
        }
        if self.failure is not None or not topics:
            return True
        return not any(
            best_taker(
                shared.subscription.members, topic, me=own_name, may_be_behind=True
            )
            for shared in self.table.subscriptions
            for topic in topics.intersection(shared.subscription.topics)
        )

    def drain_all(self) -> None:
        """Recall every lease; release at once keys that no client has. Idempotent."""
        self._is_draining = True
        reason = SHUTDOWN
        if self._restarts:
            self.session.restart()
            reason = RESTART
        self._warm_ups.clear()
        for lease in self.table.leases.values():
            self.session.drain(lease.holding, reason=reason)
        for shared in self.table.subscriptions:
            self.session.unsubscribe(shared.subscription, release=True)
        self.table.subscriptions.clear()
        for key in list(self.table.single_claims):
            holding = self.session.holdings.get(key)
            if holding is not None:
                self.session.unwant(holding)
        self.table.single_claims.clear()
        self.table.mark_changed()

    @property
    def is_drained(self) -> bool:
        """Whether no lease is left, and the log shows all releases."""
        return not self.table.leases and not self.session.leaving_count

    def is_idle(self, now_ms: int) -> bool:
        """Return whether the group was empty for a whole heartbeat interval."""
        session, table = self.session, self.table
        is_used = table.clients or table.unexpired or session.holdings
        if is_used or session.leaving_count:
            self._idle_since_ms = None
        elif self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        since_ms = self._idle_since_ms
        limit_ms = self._context.heartbeat_interval_ms
        return since_ms is not None and now_ms - since_ms >= limit_ms
