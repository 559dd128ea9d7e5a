"""The operations of a sidecar: each request calls one method of the service."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kafka_marshal.arguments import require_name
from kafka_marshal.clock import boot_id
from kafka_marshal.config import Membership
from kafka_marshal.deadline import Deadline
from kafka_marshal.engine.proxy_grants import OnVerdict, PendingGrant
from kafka_marshal.engine.waits import await_news
from kafka_marshal.errors import (
    ClaimLost,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
)
from kafka_marshal.protocol.codec import is_topic
from kafka_marshal.protocol.granting import GrantRequest, GrantVerdict
from kafka_marshal.protocol.handoffs import offered_since_ms, phase_of
from kafka_marshal.protocol.placement import standing_of
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import world_to_object
from kafka_marshal.protocol.types import Key, OffsetRange
from kafka_marshal.remote import api
from kafka_marshal.remote.answers import (
    AsOf,
    FenceNow,
    Handoff,
    LocalClient,
    OwnersNow,
)
from kafka_marshal.remote.grants import encode_verdict
from kafka_marshal.runtime import Runtime
from kafka_marshal.sidecar.clients import Client
from kafka_marshal.sidecar.config import HANDOFF_MS
from kafka_marshal.sidecar.events import EventCursor
from kafka_marshal.sidecar.flush import Flush
from kafka_marshal.sidecar.grants import Grants, NumberedRequest, numbered_request
from kafka_marshal.sidecar.group import LEFT, LocalGroup
from kafka_marshal.sidecar.health import Lifecycle, State
from kafka_marshal.sidecar.http_errors import UNKNOWN
from kafka_marshal.sidecar.process_monitor import Caller, DeathWatch, Peer
from kafka_marshal.sidecar.registry import ClientRegistry
from kafka_marshal.sidecar.warming import handoff_row
from kafka_marshal.views.plan import plan_object, view_plan
from kafka_marshal.views.plan_simulation import group_topics
from kafka_marshal.views.world import World

LOOKUP_MS_MAX = 10_000
CLAIM_MS_MAX = 1_000
SUBSCRIPTIONS_MAX = 100
CLAIMS_MAX = 1_000
NAME_CHARS_MAX = 200
OPEN = frozenset({State.RECOVERY, State.RUNNING})


class SidecarService:
    """Holds the claims of many local clients: one session per group on one engine.

    Thread-safe. Every wait has a deadline.

    Args:
        runtime: The engine with its connections, ready.
        client_id: Name of this sidecar in the log.
        state_dir: Directory of identities and journals. None keeps neither: after a
            restart the sidecar waits until its claims are stale.
        version: Release of the package, for display.
        states: Lifecycle of the sidecar; read only.
        watch: Reports the death of clients' processes.
        bootstrap_servers: Addresses of the cluster, for clients.
        member: Labels and role of the sidecar as a member of its groups.
        handoff_ms: How long a group's last client, if it leaves for good, continues to
            work while other hosts take over.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        client_id: str,
        state_dir: Path | None,
        version: str,
        states: Lifecycle,
        watch: DeathWatch,
        bootstrap_servers: Sequence[str] = (),
        member: Membership | None = None,
        handoff_ms: int = HANDOFF_MS,
    ) -> None:
        require_name("client_id", client_id)
        self._runtime = runtime
        self._engine = runtime.engine
        self._context = runtime.engine.context
        self._client_id = client_id
        self._version = version
        self._states = states
        self._servers = tuple(bootstrap_servers)
        self._boot_id = boot_id()
        self._registry = ClientRegistry(
            runtime,
            client_id=client_id,
            state_dir=state_dir,
            watch=watch,
            boot_id=self._boot_id,
            member=member or Membership(),
            handoff_ms=handoff_ms,
        )
        engine = runtime.engine
        self._grants = Grants(
            engine.context, engine.proxy_grants, data=runtime.ports.data
        )
        self._is_admitting = True
        self._is_draining = False
        self._is_closed = False

    @property
    def groups(self) -> tuple[LocalGroup, ...]:
        """The groups; used by tests under the engine's lock."""
        return tuple(self._registry.groups.values())

    # --- the sidecar

    def info(self) -> api.Info:
        """Return what a client needs before it registers."""
        context = self._context
        return api.Info(
            level=api.API_LEVEL,
            version=self._version,
            state=self._states.state.value,
            client_id=self._client_id,
            incarnation=self._registry.incarnation,
            boot_id=self._boot_id,
            cluster_id=context.settled.cluster_id,
            coordination_topic=self._runtime.description.name,
            bootstrap_servers=self._servers,
            heartbeat_interval_ms=context.heartbeat_interval_ms,
            client_beat_ms_max=self._beat_ms_max,
            span=context.settled.limit("span"),
            now_ms=context.now_ms,
        )

    @property
    def _beat_ms_max(self) -> int:
        sixth_ms = self._context.heartbeat_interval_ms // api.BEATS_PER_H
        return max(1, min(sixth_ms, api.BEAT_MS_MAX))

    def _require_open(self) -> None:
        if self._engine.failure is not None:
            raise self._engine.failure
        state = self._states.state
        if not self._is_admitting or self._is_closed or state not in OPEN:
            raise CoordinationError(
                f"this sidecar admits no clients now ({state.value}); try again in a "
                "moment"
            )

    def restore(self, *, timeout_ms: int) -> int:
        """Restore the clients in the journals of a previous process.

        Called once in state ``RECOVERY``, before clients are admitted.

        Returns:
            How many clients are expected back.

        Raises:
            IdentityConflict: Another sidecar of this name runs on this machine.
        """
        return self._registry.restore(timeout_ms=timeout_ms)

    def close_idle(self) -> None:
        """Leave the groups that no client has used for a heartbeat interval."""
        with self._engine.changed:
            if self._is_admitting:
                self._registry.close_idle()

    # --- clients

    def register(
        self,
        group_id: str,
        client_id: str,
        *,
        registration: api.RegisterRequest,
        peer: Peer,
    ) -> api.RegisterResponse:
        """Register a process. Idempotent.

        Raises:
            ConfigurationError: Its heartbeat interval is too long.
            IdentityConflict: Another process of that name is alive.
            CoordinationError: The sidecar is shutting down, or not ready yet.
        """
        require_name("group_id", group_id)
        require_name("client_id", client_id)
        with self._engine.changed:
            self._require_open()
            most_ms = self._beat_ms_max
            if not 1 <= registration.beat_ms <= most_ms:
                raise ConfigurationError(
                    f"beat_ms is {registration.beat_ms}; it must be 1 to {most_ms}, a "
                    "sixth of the log's heartbeat interval and at most a second, so "
                    "that a silent client is noticed before its deadlines",
                    setting="beat_ms",
                )
            was_known = self._registry.register(
                group_id, client_id, registration=registration, peer=peer
            )
            return api.RegisterResponse(info=self.info(), was_known=was_known)

    def children(self, who: Caller, request: api.Children) -> None:
        """Replace the processes that work for a client.

        Raises:
            ConfigurationError: The client's own process is unknown, as over TCP.
        """
        with self._engine.changed:
            _, client = self._find(who)
            if client.watched is None and request.pids:
                raise ConfigurationError(
                    "children are only watched for clients of the Unix socket, whose "
                    "own process is known",
                    setting="pids",
                )
            client.children = request.pids
            if client.watched is not None:
                client.watched.replace(request.pids)

    def leave(self, who: Caller, request: api.LeaveRequest) -> api.LeaveResponse:
        """Remove a client, or answer that it must wait for a drain.

        ``restart`` reserves its place for another process of its name, for a heartbeat
        interval. With ``downscale``, a client that still has leases continues to work
        and asks again once it has none; a group's last client hands its partitions off
        to other hosts.

        Raises:
            DeadlineExceeded: The log did not show the releases in time; it still may.
        """
        with self._engine.changed:
            group, client = self._find(who)
            is_restart = not request.release or request.reason == "restart"
            if is_restart:
                interval_ms = self._context.heartbeat_interval_ms
                for each in request.returned:
                    group.record_position(client, each)
                group.reserve(client, until_ms=self._context.now_ms + interval_ms)
            else:
                for each in request.returned:
                    group.accept_returned(client, each, reason=LEFT)
                group.leave(client, awaits_drain=request.reason == "downscale")
            self._engine.act(group.session)
            if client.leases and request.reason == "downscale":
                return api.LeaveResponse(action="wait_for_drain")
        self._await_released(group, request.returned, request.timeout_ms)
        return api.LeaveResponse(action="shutdown_now")

    def feed(self, who: Caller, after: str | None) -> EventCursor:
        """Return the events of a client after the id ``after``.

        An older cursor of the same client is closed.
        """
        with self._engine.changed:
            _, client = self._find(who)
            return client.events.open(self._engine.lock, after=after)

    def clients(self) -> list[LocalClient]:
        """Return the registered clients, by group and name."""
        with self._engine.changed:
            now_ms = self._context.now_ms
            return [
                group.describe(client, now_ms)
                for _, group in sorted(self._registry.groups.items())
                for _, client in sorted(group.table.clients.items())
            ]

    def _find(self, who: Caller) -> tuple[LocalGroup, Client]:
        """Return the calling client and its group, and record the contact.

        Raises:
            ClaimLost: It is not registered (``unknown``, ``gone``).
        """
        if self._engine.failure is not None:
            raise self._engine.failure
        group = self._registry.groups.get(who.group_id)
        if group is None:
            raise ClaimLost(
                f"no client of group {who.group_id!r} is registered at this sidecar; "
                "register first",
                reason=UNKNOWN,
            )
        client = group.find(who.client_id, who.instance)
        client.seen_ms = self._context.now_ms
        return group, client

    # --- subscriptions and claims without consumption

    def subscribe(
        self, who: Caller, name: str, *, spec: api.SubscriptionSpec
    ) -> api.SubscribeResponse:
        """Consume topics for a client. Idempotent.

        Raises:
            ConfigurationError: A setting is invalid, or differs from that of the other
                clients of these topics.
            ClaimLost: The client is not registered (``unknown``, ``gone``).
        """
        if not 1 <= len(name) <= NAME_CHARS_MAX:
            raise ConfigurationError(
                f"name must have 1 to {NAME_CHARS_MAX} characters", setting="name"
            )
        with self._engine.changed:
            self._require_open()
            group, client = self._find(who)
            if len(client.specs) >= SUBSCRIPTIONS_MAX and name not in client.specs:
                raise ConfigurationError(
                    f"client {client.client_id!r} has {SUBSCRIPTIONS_MAX} "
                    "subscriptions, the most; end some of them",
                    setting="name",
                )
        shared = self._registry.subscribe(
            group, client, name=name, spec=spec, timeout_ms=LOOKUP_MS_MAX
        )
        with self._engine.changed:
            self._engine.act(group.session)
            topics = shared.subscription.topics.items()
            return api.SubscribeResponse(
                topics={topic: info.partition_count for topic, info in topics},
                counts_topics=shared.counts_topics,
            )

    def unsubscribe(
        self, who: Caller, name: str, *, release: api.ReleaseRequest, keep: bool
    ) -> None:
        """End a subscription; with ``keep`` the client keeps its leases.

        Raises:
            DeadlineExceeded: The log did not show the releases in time.
        """
        with self._engine.changed:
            group, client = self._find(who)
            for each in release.returned:
                group.accept_returned(client, each, reason=LEFT)
            client.end_lookups(name)
            if keep:
                group.detach(client, name)
            else:
                group.remove_subscriber(client, name)
            self._engine.act(group.session)
        self._await_released(group, release.returned, release.timeout_ms)

    def claim(
        self, who: Caller, topic: str, *, partition: int, request: int | None = None
    ) -> None:
        """Claim one partition without consuming it. Idempotent.

        Args:
            who: The client.
            topic: Data topic.
            partition: Data partition.
            request: Increasing number of the request: an older one that arrives late is
                ignored.

        Raises:
            ConfigurationError: It is not a valid data partition.
            InvalidTransition: Clients of this sidecar consume it.
        """
        if not is_topic(topic) or partition < 0:
            raise ConfigurationError(
                f"{topic!r} partition {partition} is not a valid data partition",
                setting="topic",
            )
        with self._engine.changed:
            self._require_open()
            group, client = self._find(who)
            key = Key(who.group_id, topic, partition)
            others = [
                other
                for other, names in group.table.single_claims.items()
                if other != key and client.client_id in names
            ]
            if len(others) >= CLAIMS_MAX:
                raise ConfigurationError(
                    f"client {client.client_id!r} claims {CLAIMS_MAX} partitions one "
                    "by one, the most; consume their topics instead",
                    setting="partition",
                )
            if client.accept_claim_request(key, request, is_on=True):
                group.add_single_claim(client, key)
                self._engine.act(group.session)

    def unclaim(
        self, who: Caller, topic: str, *, partition: int, request: int | None = None
    ) -> None:
        """End the claim of one partition that the client has stopped using. Idempotent.

        If a later request overtook this one, the claim that was won for this request is
        ended nevertheless: the client has not used it, and the key is claimed again.
        """
        key = Key(who.group_id, topic, partition)
        with self._engine.changed:
            group, client = self._find(who)
            is_last = client.accept_claim_request(key, request, is_on=False)
            lease = client.leases.get(key)
            is_won = is_last or (lease is not None and lease.request == request)
            if lease is not None and not lease.name and is_won:
                returned = api.Release(
                    topic=topic,
                    partition=partition,
                    epoch=lease.epoch,
                    position=lease.holding.position,
                    reason="released",
                )
                group.accept_returned(client, returned)
            if is_last:
                group.remove_single_claim(key, client)
            self._engine.act(group.session)

    # --- heartbeats and releases

    def beat(self, who: Caller, beat: api.HeartbeatRequest) -> api.HeartbeatResponse:
        """Record a heartbeat with positions; return the new deadlines.

        Raises:
            ClaimLost: The client is not registered; or a flush names a claim that it no
                longer has.
            DeadlineExceeded: The log did not show a flush in time.
        """
        with self._engine.changed:
            if beat.flush:
                flush = self.begin_flush(who, beat)
                self._await(lambda: flush.is_over, beat.timeout_ms, what="positions")
                return self.end_flush(who, flush)
            group, client = self._find(who)
            group.record_beat(client, beat)
            group.journal_deadlines(client)
            return group.answer(client, self._context.now_ms)

    def beat_at_once(
        self, who: Caller, beat: api.HeartbeatRequest
    ) -> api.HeartbeatResponse | None:
        """Record a heartbeat as ``beat`` does, but only if that needs no wait.

        It never waits and writes no file, so that the event loop may call it.

        Returns:
            None if nothing was recorded, because the engine is busy, the client waits
            for the log, has sought, or its deadlines must be journaled first.

        Raises:
            ClaimLost: The client is not registered.
        """
        changed = self._engine.changed
        if beat.flush or not changed.acquire(blocking=False):
            self._registry.note_contact(who)
            return None
        try:
            group, client = self._find(who)
            if group.is_slow_beat(client, beat):
                return None
            group.record_beat(client, beat)
            # ``seen_ms`` is the present time: nothing has waited since it was set.
            return group.answer(client, client.seen_ms)
        finally:
            changed.release()

    def begin_flush(self, who: Caller, beat: api.HeartbeatRequest) -> Flush:
        """Send the positions that a client reports to the log; do not wait.

        Called under the engine's lock.

        Raises:
            ClaimLost: As ``beat``.
        """
        group, client = self._find(who)
        stale = group.record_beat(client, beat)
        if stale is not None:
            raise self._stale(_key(who, stale))
        session, leases = group.session, group.table.leases
        named = [leases.get(_key(who, each)) for each in beat.progress]
        sought = tuple(x.holding for x in named if x is not None and x.holding.rewind)
        return Flush(group, beat.progress, tuple(session.beat_now()), sought)

    def end_flush(self, who: Caller, flush: Flush) -> api.HeartbeatResponse:
        """Return the new deadlines after a flush, under the engine's lock.

        Raises:
            ClaimLost: As ``beat``.
        """
        group = flush.group
        client = group.find(who.client_id, who.instance)
        for each in flush.progress:
            lease = group.table.leases.get(_key(who, each))
            if (
                lease is None
                or lease.epoch != each.epoch
                or not lease.holding.claim.is_owned
            ):
                raise self._stale(_key(who, each))
        group.journal_deadlines(client)
        return group.answer(client, self._context.now_ms)

    def _stale(self, key: Key) -> ClaimLost:
        known = self._context.replica_of(key).world.keys.get(key)
        owner = None if known is None else known.owner
        name = "nobody" if owner is None else repr(owner.client_id)
        return ClaimLost(
            f"{key.topic_partition} is no longer held under that claim; by the log it "
            f"is held by {name}",
            winner=None if owner is None else owner.client_id,
            at_offset=None if known is None else known.epoch,
            reason="stale_token",
        )

    def release(self, who: Caller, request: api.ReleaseRequest) -> None:
        """Release what a client has stopped using. Idempotent.

        Raises:
            DeadlineExceeded: The log did not show the releases in time.
        """
        with self._engine.changed:
            group, client = self._find(who)
            for each in request.returned:
                group.accept_returned(client, each)
            self._engine.act(group.session)
        self._await_released(group, request.returned, request.timeout_ms)

    def ready(self, who: Caller, report: api.ReadyRequest) -> None:
        """Record that a client has warmed up for a partition. Idempotent.

        Raises:
            ClaimRejected: The partition is not, or no longer, offered to this client.
            ClaimLost: The client is not registered (``unknown``, ``gone``).
        """
        with self._engine.changed:
            try:
                group, client = self._find(who)
            except ClaimLost as error:
                self._registry.refusals["ready", error.reason] += 1
                raise
            group.accept_ready(client, report)
            self._engine.act(group.session)

    def refusals(self) -> dict[tuple[str, str], int]:
        """Return how many reports were refused or had no effect, by request, reason."""
        with self._engine.changed:
            return dict(self._registry.refusals)

    def _await_released(
        self, group: LocalGroup, returned: Iterable[api.Release], timeout_ms: int
    ) -> None:
        if timeout_ms <= 0:
            return
        keys = [Key(group.group_id, each.topic, each.partition) for each in returned]
        with self._engine.changed:
            self._await(
                lambda: not group.session.is_leaving(keys), timeout_ms, what="releases"
            )

    def _await(
        self, is_done: Callable[[], bool], timeout_ms: int, *, what: str
    ) -> None:
        await_news(
            self._engine,
            is_done,
            timeout_ms=timeout_ms,
            fault=f"did not show the {what}",
            hope=f"; the {what} may still arrive",
        )

    # --- the log

    def grant(self, group_id: str, message: api.GrantRequest) -> api.GrantResponse:
        """Request offsets at most once, and wait for the fold's verdict.

        Raises:
            ConfigurationError: It requests no offsets, or some that are not written.
            ClaimRejected: It does not show the secret of the claim.
            CoordinationError: The claim is not read yet, or the cluster did not
                return the end of the data log.
            DeadlineExceeded: There was no verdict in time. Offsets granted later are
                reported as lost; if the request is numbered, at the claim's end.
        """
        numbered = numbered_request(group_id, message)
        request = numbered.request
        deadline = self.deadline(message.timeout_ms)
        with self._engine.changed:
            self._await_claim(request, message.timeout_ms)
            is_over = self._grants.is_over(request)
            if not is_over:
                self._grants.require_secret(numbered)
        if not is_over:
            self._grants.require_end(request, timeout_ms=deadline.left_ms)
        with self._engine.changed:
            pending = self.begin_grant(numbered)
            return encode_verdict(self._await_verdict(pending, deadline.left_ms))

    def grant_at_once(
        self,
        group_id: str,
        message: api.GrantRequest,
        *,
        on_verdict: OnVerdict,
    ) -> PendingGrant | None:
        """Begin a grant without waiting, so that the event loop may call it.

        Raises the errors of ``grant``; nothing was appended in that case.

        Args:
            group_id: The group.
            message: The request.
            on_verdict: Called once, on the engine's thread, under its lock; not called
                if there is a verdict already.

        Returns:
            The request in flight, to be passed to ``await_grant``. None if nothing was
            done, because the engine is busy, or the request must wait before it can be
            appended.
        """
        numbered = numbered_request(group_id, message)
        changed = self._engine.changed
        if not changed.acquire(blocking=False):
            return None
        try:
            if not self._grants.is_sendable(numbered.request):
                return None
            pending = self.begin_grant(numbered)
            pending.waiting_count += 1
            if pending.verdict is None:
                pending.on_verdict.append(on_verdict)
            return pending
        finally:
            changed.release()

    def await_grant(
        self, pending: PendingGrant, deadline: Deadline
    ) -> api.GrantResponse:
        """Wait for the verdict on a request in flight; raises as ``grant`` does."""
        with self._engine.changed:
            pending.waiting_count -= 1
            return encode_verdict(self._await_verdict(pending, deadline.left_ms))

    def deadline(self, timeout_ms: int) -> Deadline:
        """Return the deadline of a request that has just arrived."""
        return Deadline(timeout_ms, self._context.ports.clock.now_ms)

    def begin_grant(self, numbered: NumberedRequest) -> PendingGrant:
        """Request offsets without waiting; raises the errors of ``grant``.

        The end of the data log is not checked, because that needs a wait.
        """
        key, epoch = numbered.request.key, numbered.request.epoch

        def note(granted: OffsetRange, *, is_late: bool) -> None:
            group = self._registry.groups.get(key.group_id)
            lease = None if group is None else group.table.leases.get(key)
            if lease is not None and lease.epoch == epoch:
                lease.record_grant(granted, is_late=is_late)
            elif is_late:
                self._engine.proxy_grants.report_lost(key, granted)

        with self._engine.changed:
            if self._engine.failure is not None:
                raise self._engine.failure
            return self._grants.send(numbered, note=note)

    def _await_claim(self, request: GrantRequest, timeout_ms: int) -> None:
        """Wait up to ``CLAIM_MS_MAX`` for another host's claim that is not read yet."""
        timeout_ms = min(timeout_ms, CLAIM_MS_MAX)
        with suppress(DeadlineExceeded):
            self._await(
                lambda: self._grants.has_read(request), timeout_ms, what="claim"
            )

    def _await_verdict(self, pending: PendingGrant, timeout_ms: int) -> GrantVerdict:
        def is_answered() -> bool:
            pending.raise_refusal()
            return pending.verdict is not None

        pending.waiting_count += 1
        try:
            self._await(is_answered, timeout_ms, what="verdict")
        finally:
            pending.waiting_count -= 1
            if pending.verdict is None and not pending.waiting_count:
                self._engine.proxy_grants.give_up(pending)
        assert pending.verdict is not None
        return pending.verdict

    def world(self, *, timeout_ms: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the world document and its pauses, never older than this call.

        The document is that of PROTOCOL 3.8. The pauses have the fields that
        ``marshal groups describe`` prints.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
        """
        self._engine.catch_up(timeout_ms)
        with self._engine.changed:
            replicas = self._context.replicas.values()
            world = world_to_object(replica.world for replica in replicas)
            return world, self._context.pauses()

    def owners(self, group_id: str, topic: str, *, timeout_ms: int) -> OwnersNow:
        """Return the owner of each partition of a topic that was ever claimed.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
        """
        self._engine.catch_up(timeout_ms)
        owners = {}
        with self._engine.changed:
            worlds = self._worlds()
            known = (key for world in worlds.values() for key in world.keys)
            for key in sorted({k for k in known if k[:2] == (group_id, topic)}):
                world = standing_of(worlds, key)
                owner = None if world is None else world.keys[key].owner
                owners[key.partition] = None if owner is None else owner.client_id
            return OwnersNow(as_of=self._as_of(worlds), owners=owners)

    def _worlds(self) -> dict[int, WorldState]:
        """Return the states of the coordinating partitions; under the lock only."""
        return {n: each.world for n, each in sorted(self._context.replicas.items())}

    def _as_of(self, worlds: Mapping[int, WorldState]) -> AsOf:
        offsets = {str(number): each.next_offset for number, each in worlds.items()}
        return AsOf(time_ms=self._context.ports.clock.wall_ms(), offsets=offsets)

    def catch_up(self, keys: Collection[Key], *, timeout_ms: int) -> None:
        """Wait until ``fence`` of these keys returns nothing older than this call.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
        """
        self._engine.catch_up_keys(keys, timeout_ms)

    def fence(self, key: Key) -> FenceNow:
        """Return the newest claim of a key, as far as the log is read.

        It is the claim in the coordinating partition that has the key now.
        """
        with self._engine.changed:
            worlds = self._worlds()
            as_of = self._as_of(worlds)
            world = standing_of(worlds, key)
            known = None if world is None else world.keys[key]
            token = None if world is None else world.token(key)
        owner = None if known is None else known.owner
        return FenceNow(
            as_of=as_of,
            token=None if token is None else str(token),
            epoch=None if known is None else known.epoch,
            client_id=None if owner is None else owner.client_id,
            incarnation=None if owner is None else owner.incarnation.hex(),
            position=None if known is None else known.position,
        )

    def plan(
        self, group_id: str, *, timeout_ms: int
    ) -> tuple[dict[int, int], dict[str, Any]]:
        """Return the Plan of a group, never older than this call, as plain data.

        Returns:
            Next offset of each coordinating partition, and the fields that
            ``marshal plan show`` prints.

        Raises:
            DeadlineExceeded: The log was not read to its end in time.
            CoordinationError: The number of partitions could not be looked up.
        """
        self._engine.catch_up(timeout_ms)
        with self._engine.changed:
            topics = group_topics(self._view(), group_id)
        known = self._runtime.ports.data.describe(sorted(topics), LOOKUP_MS_MAX)
        counts = {topic: info.partition_count for topic, info in known.items()}
        with self._engine.changed:
            world = self._view()
            found = view_plan(world, group_id, partition_counts=counts)
            handoffs = world.handoffs(group_id)
            offsets = {each.partition: each.next_offset for each in world.partitions}
        # Building the document takes long, so it is done without the lock.
        return offsets, plan_object(found, handoffs)

    def _view(self) -> World:
        """Return a view of the present states; under the lock only."""
        now_ms = self._context.now_ms
        replicas = sorted(self._context.replicas.items())
        elapsed = {number: replica.elapsed_ms(now_ms) for number, replica in replicas}
        return World([replica.world for _, replica in replicas], elapsed)

    def handoffs(self, group_id: str) -> list[Handoff]:
        """Return a group's open handoffs, in the log and between clients here."""
        with self._engine.changed:
            context, group = self._context, self._registry.groups.get(group_id)
            warm_ups = {} if group is None else {x.key: x for x in group.warm_ups}
            leases = {} if group is None else group.table.leases
            found = []
            for replica in context.replicas.values():
                world, keys = replica.world, replica.world.keys
                log_ms = replica.log_ms(context.now_ms)
                for key in [k for k in keys if k.group_id == group_id]:
                    known, lease = keys[key], leases.get(key)
                    row = handoff_row(
                        key,
                        known=known,
                        warm_up=warm_ups.get(key),
                        phase=phase_of(known, log_ms),
                        since_ms=offered_since_ms(world, key),
                        ahead_ms=context.ports.clock.wall_ms() - context.now_ms,
                        has=None if lease is None else lease.client.client_id,
                    )
                    found += [] if row is None else [row]
            return sorted(found, key=lambda row: (row.topic, row.partition))

    # --- shutdown

    def start_handoff(self, *, for_ms: int) -> None:
        """Hand off what other hosts can take; admit no more clients. Idempotent.

        Clients keep their partitions until a successor takes them, warm if it warms up.

        Args:
            for_ms: When the drain ends in the log by itself, if this process dies.
        """
        with self._engine.changed:
            self._is_admitting = False
            for group in self._registry.groups.values():
                group.hand_off(for_ms)
                self._engine.act(group.session)

    @property
    def is_handed_off(self) -> bool:
        """Whether nothing is left that another host could take."""
        with self._engine.changed:
            return all(group.is_handed_off for group in self._registry.groups.values())

    def start_drain(self) -> None:
        """Recall every lease and give out nothing new. Idempotent."""
        with self._engine.changed:
            self._is_admitting = False
            if self._is_draining:
                return
            self._is_draining = True
            for group in self._registry.groups.values():
                group.drain_all()
                self._engine.act(group.session)

    @property
    def is_drained(self) -> bool:
        """Whether no lease is left, and the log shows all releases."""
        with self._engine.changed:
            return all(group.is_drained for group in self._registry.groups.values())

    def close(self, *, timeout_ms: int) -> None:
        """Release claims that no client uses, and leave every group. Idempotent.

        Claims still in use are not released: their leases expire, or a restart resumes
        them.
        """
        with self._engine.changed:
            if self._is_closed:
                return
            self._is_closed = True
            groups = list(self._registry.groups.values())
            pending: list[tuple[LocalGroup, list[int]]] = []
            for group in groups:
                group.drain_all()
                pending.append((group, group.session.begin_close(release=True)))
            try:
                self._await(lambda: all(map(_is_over, pending)), timeout_ms, what="end")
            except (CoordinationError, DeadlineExceeded):
                self._context.observe("close_unconfirmed", {})
            for group in groups:
                for client in group.table.clients.values():
                    client.events.close()
                self._registry.close(group)


def _is_over(pending: tuple[LocalGroup, list[int]]) -> bool:
    group, seqs = pending
    session = group.session
    return not session.leaving_count and not session.is_pending(seqs, late=False)


def _key(who: Caller, progress: api.Progress) -> Key:
    return Key(who.group_id, progress.topic, progress.partition)
