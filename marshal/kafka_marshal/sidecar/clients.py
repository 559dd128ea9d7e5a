"""One client of a sidecar: its process, its subscriptions and its leases."""

from collections.abc import Mapping, Sequence

import attrs

from kafka_marshal.engine import Holding
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.types import Key, OffsetRange
from kafka_marshal.remote import api
from kafka_marshal.sidecar.events import EventBuffer
from kafka_marshal.sidecar.lease_journal import (
    AddedLease,
    JournaledClient,
    JournaledLease,
)
from kafka_marshal.sidecar.process_monitor import Peer, Watched

AWAY_BEATS = 3
AWAY_MS_MIN = 1_000
GRACE_MS_MAX = 30_000
CLAIM_REQUESTS_MAX = 10_000


class DelegatedGrants(AtMostOnce):
    """The grants (at most once) of a claim that a client uses.

    The client requests and processes offsets. This class records which granted offsets
    the client has not reported as done, and which it has not even received.
    """

    __slots__ = ("_late",)

    def __init__(self, start: int, *, grantee: bytes) -> None:
        super().__init__(start, grantee=grantee)
        self._late: list[OffsetRange] = []

    def record_grant(self, granted: OffsetRange, *, is_late: bool) -> None:
        """Record offsets that were granted under the client's claim.

        Args:
            granted: The offsets.
            is_late: Whether the client no longer waited for them. If it repeats its
                request, they are recorded again, as not late.
        """
        if is_late:
            self._late.append(granted)
        elif granted in self._late:
            self._late.remove(granted)
            return
        self._take(granted)

    def record_done(self, mark: int | None, *, grantee: bytes | None) -> None:
        """Record that everything granted below a mark is done, and by whom."""
        self.reporter = grantee or self.reporter
        if mark is not None and mark > self.done:
            self.done = mark
            self.skip_through(mark - 1)

    def settle(self) -> None:
        """Keep only grants that the client has not received, to be reported as lost.

        The client keeps its own account of all others.
        """
        self.drop_grants()
        for each in self._late:
            self._take(each)


@attrs.define(eq=False, kw_only=True)
class ClientLease:
    """A client's lease of one partition.

    Attributes:
        key: The partition.
        client: The client.
        holding: The sidecar's claim of the partition.
        epoch: Epoch of that claim.
        name: Name of the client's subscription; "" for a claim without consumption.
        sent_until_ms: Latest hard deadline ever sent to the client.
        last_sent_ms: Hard deadline sent last.
        journaled_until_ms: Latest hard deadline that the journal covers.
        request: Number of the client's request for a claim without consumption, None
            without one.
        releasing: The event that asked the client to give it back.
    """

    key: Key
    client: "Client"
    holding: Holding
    epoch: int
    name: str
    request: int | None = None
    sent_until_ms: int = 0
    last_sent_ms: int = 0
    journaled_until_ms: int = 0
    releasing: api.Releasing | None = None

    @property
    def must_journal(self) -> bool:
        """Whether the claim's deadline is later than the latest in the journal."""
        return self.journaled_until_ms < self.holding.claim.lease.hard_until_ms

    @property
    def _unsafe_until_ms(self) -> int:
        """The latest deadline that was sent, or may be sent now."""
        return max(self.sent_until_ms, self.holding.claim.lease.hard_until_ms)

    def journal_entry(self) -> JournaledLease:
        """Return its entry in the journal."""
        return JournaledLease(
            topic=self.key.topic,
            partition=self.key.partition,
            epoch=self.epoch,
            until_ms=self._unsafe_until_ms,
        )

    def added_entry(self) -> AddedLease:
        """Return the line to append to the journal."""
        return AddedLease(
            client_id=self.client.client_id,
            instance=self.client.instance,
            lease=self.journal_entry(),
        )

    def note_journaled(self) -> None:
        """Record that the journal has the entry of this lease."""
        self.journaled_until_ms = max(self.journaled_until_ms, self._unsafe_until_ms)

    def deadline(self) -> api.Lease:
        """Return the deadlines to send, and record them as sent."""
        lease = self.holding.claim.lease
        hard_ms = min(lease.hard_until_ms, self.journaled_until_ms)
        self.sent_until_ms = max(self.sent_until_ms, hard_ms)
        self.last_sent_ms = hard_ms
        return api.Lease(
            topic=self.key.topic,
            partition=self.key.partition,
            epoch=self.epoch,
            soft_until_ms=min(lease.soft_until_ms, hard_ms),
            hard_until_ms=hard_ms,
        )

    def record_grant(self, granted: OffsetRange, *, is_late: bool) -> None:
        """Record offsets that were granted under this claim."""
        if isinstance(self.holding.progress, DelegatedGrants):
            self.holding.progress.record_grant(granted, is_late=is_late)

    def record_progress(self, report: api.Progress | api.Release) -> None:
        """Record the progress that the client reports."""
        seek_count = self.holding.seek_count
        if isinstance(report, api.Progress) and report.seek_count < seek_count:
            return  # sent before the last seek
        progress = self.holding.progress
        if isinstance(progress, DelegatedGrants):
            grantee = report.grantee and bytes.fromhex(report.grantee)
            progress.record_done(report.done, grantee=grantee or None)
        elif isinstance(progress, AtLeastOnce) and report.position is not None:
            progress.position = max(report.position, progress.position or 0)
        if isinstance(report, api.Progress):
            self.holding.handed_count = max(report.handed, self.holding.handed_count)
            if isinstance(progress, AtLeastOnce):
                progress.tracked_count = report.uncommitted_count


def mark_subleased(holding: Holding) -> None:
    """Mark a claim as used by a client: the session must not end it by itself."""
    progress = holding.progress
    if isinstance(progress, AtMostOnce) and not isinstance(progress, DelegatedGrants):
        account = DelegatedGrants(progress.next_first, grantee=progress.grantee)
        account.is_anchored = progress.is_anchored
        holding.progress = account
    holding.is_subleased = True


def reclaim(holding: Holding, *, is_settled: bool) -> None:
    """Record that a client has stopped using a claim, or may not use it any more.

    Args:
        holding: The claim.
        is_settled: Whether the client keeps its own account of its grants. If so, only
            grants that it has not received are reported as lost; otherwise, all that
            it has not reported as done.
    """
    holding.is_subleased = False
    progress = holding.progress
    if isinstance(progress, DelegatedGrants) and is_settled:
        progress.settle()
        if holding.drain is not None:
            # Nobody finishes the grants that are left, so a drain must not wait.
            holding.drain = attrs.evolve(holding.drain, until_ms=0)
    elif isinstance(progress, AtLeastOnce):
        progress.tracked_count = 0


@attrs.define(eq=False, kw_only=True)
class Client:
    """One client.

    Attributes:
        client_id: Its name in the group, known to this sidecar only.
        instance: Identifies its process among the processes of this name, in hex.
        beat_ms: Time between its heartbeats.
        peer: Its process.
        events: Its event buffer.
        seen_ms: Local time of its last request.
        beat_at_ms: Local time of its last heartbeat, None before the first.
        specs: Its subscriptions, by name.
        lookups: Names of subscriptions whose topics are being looked up, by request.
        leases: Its leases.
        watched: Its process and its children in the death watch.
        children: Processes that work for it.
        is_leaving: Whether it gets no more leases and is removed once it has none.
        awaits_drain: Whether it continues to work until then, so that its partitions
            may be handed off warm.
        excluded_until_ms: Until when it gets nothing new, because it was stuck.
        claim_requests: Last request for each key claimed without consumption: its
            number, and whether it ended the claim.
        generation: Config generation that it acts on (PROTOCOL 10.7), None if it never
            reported one.
        reserved_until_ms: Until when its place is reserved for the next process of its
            name; None unless it has announced a restart.
    """

    client_id: str
    instance: str
    beat_ms: int
    peer: Peer
    events: EventBuffer
    seen_ms: int
    beat_at_ms: int | None = None
    specs: dict[str, api.SubscriptionSpec] = attrs.field(factory=dict)
    lookups: dict[object, str] = attrs.field(factory=dict)
    leases: dict[Key, ClientLease] = attrs.field(factory=dict)
    watched: Watched | None = None
    children: tuple[int, ...] = ()
    is_leaving: bool = False
    awaits_drain: bool = False
    reserved_until_ms: int | None = None
    excluded_until_ms: int = 0
    claim_requests: dict[Key, tuple[int, bool]] = attrs.field(factory=dict)
    generation: int | None = None

    def is_away(self, now_ms: int) -> bool:
        """Return whether it missed several heartbeats, or has announced a restart."""
        if self.reserved_until_ms is not None:
            return True
        limit_ms = max(AWAY_BEATS * self.beat_ms, AWAY_MS_MIN)
        return now_ms - self.seen_ms > limit_ms

    def end_lookups(self, name: str) -> None:
        """Let no request begin a subscription that was in progress until now.

        A client that gives such a request up, and ends the subscription, would get
        partitions nevertheless.
        """
        for request in [each for each, of in self.lookups.items() if of == name]:
            del self.lookups[request]

    def accept_claim_request(
        self, key: Key, number: int | None, *, is_on: bool
    ) -> bool:
        """Record a request to claim a key, or to end that; return if it is current.

        Requests may overtake each other, and one that the client gave up on may still
        arrive: a request that ends an earlier claim must not end a later one.
        """
        if number is None:
            return True
        request = (number, not is_on)
        if request < self.claim_requests.get(key, request):
            return False
        self.claim_requests.pop(key, None)
        self.claim_requests[key] = request
        if len(self.claim_requests) > CLAIM_REQUESTS_MAX:
            del self.claim_requests[next(iter(self.claim_requests))]
        return True

    def claim_request(self, key: Key) -> int | None:
        """Return the number of the last request for a key, None without one."""
        number, _ = self.claim_requests.get(key, (None, False))
        return number

    def mark_away(self, now_ms: int) -> None:
        """Mark the client as away."""
        self.seen_ms = now_ms - max(AWAY_BEATS * self.beat_ms, AWAY_MS_MIN) - 1

    def is_gone(self, now_ms: int, *, grace_ms: int) -> bool:
        """Return whether it was silent for so long that its place is not kept.

        Deadlines that were sent to it are kept separately, as unexpired leases.
        """
        if self.reserved_until_ms is not None:
            return now_ms >= self.reserved_until_ms
        is_silent = now_ms - self.seen_ms > min(grace_ms, GRACE_MS_MAX)
        return is_silent and not self.leases

    def fields(self, group_id: str) -> dict[str, object]:
        """Return the fields of an event about it."""
        return {
            "group": group_id,
            "client": self.client_id,
            "pid": self.peer.pid,
            "partitions": len(self.leases),
        }

    def close(self) -> None:
        """Stop watching its process and close its events."""
        if self.watched is not None:
            self.watched.close()
        self.events.close()

    def state(self, now_ms: int) -> str:
        """Return its state in one word, as the API shows it."""
        if self.reserved_until_ms is not None:
            return "restarting"
        if self.is_leaving:
            return "leaving"
        return "silent" if self.is_away(now_ms) else "ready"

    def journal_entry(
        self, kept: Mapping[Key, JournaledLease], claims: Sequence[Key]
    ) -> JournaledClient:
        """Return its entry in the journal.

        Args:
            kept: Its unexpired leases, besides the current ones.
            claims: Keys that it claims without consumption.
        """
        keys = dict(kept)
        keys |= {key: lease.journal_entry() for key, lease in self.leases.items()}
        return JournaledClient(
            client_id=self.client_id,
            instance=self.instance,
            beat_ms=self.beat_ms,
            pid=self.peer.pid,
            started=self.peer.started,
            children=self.children,
            specs=dict(self.specs),
            keys=tuple(keys.values()),
            claims=tuple((key.topic, key.partition) for key in claims),
            claim_requests=tuple(self.claim_request(key) for key in claims),
            generation=self.generation,
        )
