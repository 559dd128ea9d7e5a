"""One client of a sidecar: who it is, what it wants, what it was lent."""

from collections.abc import Mapping, Sequence

import attrs

from kafka_marshal.engine import Holding
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce, Grant
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.sidecar.events import EventBuffer
from kafka_marshal.sidecar.lease_journal import JournaledClient, JournaledLease
from kafka_marshal.sidecar.process_monitor import Peer, Watched

AWAY_BEATS = 3
AWAY_MS_MIN = 1_000
GRACE_MS_MAX = 30_000
CLAIM_REQUESTS_MAX = 10_000


class DelegatedGrants(AtMostOnce):
    """At most once, as far as the sidecar knows: what its client was granted.

    The client asks and processes; this counts what it has not said to be done with.
    """

    __slots__ = ()

    def record_grant(self, first: int, last: int) -> None:
        """Note that a range was granted to whoever works for the client."""
        self._take(Grant(first, last))

    def record_done(self, mark: int | None) -> None:
        """Note that everything granted below a mark is done with."""
        if mark is not None and mark > self.done:
            self.done = mark
            self.skip_through(mark - 1)

    def settle(self) -> None:
        """Leave the account of what is left to the client, which knows better."""
        self._grants.clear()


@attrs.define(eq=False)
class ClientLease:
    """One partition that a client has.

    Attributes:
        key: What it has.
        client: Who has it.
        holding: The claim that it has it under.
        epoch: Epoch of that claim.
        name: Subscription of the client that it serves; "" = asked for by itself.
        told_ms: Largest deadline that the client was told.
        last_ms: The one that it was told last.
        filed_ms: Largest deadline that the file of promises allows to tell.
        releasing: What it was told when it was asked to give it back.
    """

    key: Key
    client: "Client"
    holding: Holding
    epoch: int
    name: str
    sent_until_ms: int = 0
    last_sent_ms: int = 0
    journaled_until_ms: int = 0
    releasing: api.Releasing | None = None

    def deadline(self) -> api.Deadline:
        """Return until when the client may use it, and note that it was told."""
        lease = self.holding.claim.lease
        hard_ms = min(lease.hard_until_ms, self.journaled_until_ms)
        self.sent_until_ms = max(self.sent_until_ms, hard_ms)
        self.last_sent_ms = hard_ms
        return api.Deadline(
            topic=self.key.topic,
            partition=self.key.partition,
            epoch=self.epoch,
            soft_until_ms=min(lease.soft_until_ms, hard_ms),
            hard_until_ms=hard_ms,
        )

    def record_grant(self, first: int, last: int) -> None:
        """Take that offsets were granted under this claim."""
        if isinstance(self.holding.progress, DelegatedGrants):
            self.holding.progress.record_grant(first, last)

    def take(self, said: api.Standing | api.Returned) -> None:
        """Take what the client says of how far it is."""
        progress = self.holding.progress
        if isinstance(progress, DelegatedGrants):
            progress.record_done(said.done)
        elif isinstance(progress, AtLeastOnce) and said.position is not None:
            progress.position = max(said.position, progress.position or 0)
        if isinstance(said, api.Standing):
            self.holding.handed_count = max(said.handed, self.holding.handed_count)
            if isinstance(progress, AtLeastOnce):
                progress.tracked_count = said.in_hand


def mark_lent(holding: Holding) -> None:
    """Take that a claim is used by a client from now on: it is not ours to end."""
    progress = holding.progress
    if isinstance(progress, AtMostOnce) and not isinstance(progress, DelegatedGrants):
        account = DelegatedGrants(progress.next_first, grantee=progress.grantee)
        account.is_anchored = progress.is_anchored
        holding.progress = account
    holding.is_lent = True


def reclaim(holding: Holding, *, is_settled: bool) -> None:
    """Take that a client has stopped to use a claim, or will be stopped.

    Args:
        holding: The claim.
        is_settled: Whether the client has its own account of what it was granted;
            without it, what it did not say to be done with is reported as lost.
    """
    holding.is_lent = False
    progress = holding.progress
    if isinstance(progress, DelegatedGrants) and is_settled:
        progress.settle()
    elif isinstance(progress, AtLeastOnce):
        progress.tracked_count = 0


@attrs.define(eq=False)
class Client:
    """One client.

    Attributes:
        client_id: Its name in the group, known to this sidecar only.
        instance: Which process of that name, in hex.
        beat_ms: Time between its beats.
        peer: Its process.
        ring: Its events.
        seen_ms: Local time of its last sign of life.
        beat_at_ms: Local time of its last beat, None before the first.
        wants: What it consumes, by name.
        loans: What it has.
        watched: Its process and its children, as the death watch knows them.
        children: Processes that work for it.
        is_leaving: Whether it takes nothing any more and goes once it has nothing.
        rests_until_ms: Until when it takes nothing new: it was wedged.
        wishes: Last wish of each key that it asked for alone: its number, and
            whether it is over.
        kept_until_ms: Until when its place is kept for a restart, whatever the
            instance; None where nobody said so.
    """

    client_id: str
    instance: str
    beat_ms: int
    peer: Peer
    events: EventBuffer
    seen_ms: int
    beat_at_ms: int | None = None
    wants: dict[str, api.Wants] = attrs.field(factory=dict)
    leases: dict[Key, ClientLease] = attrs.field(factory=dict)
    watched: Watched | None = None
    children: tuple[int, ...] = ()
    is_leaving: bool = False
    reserved_until_ms: int | None = None
    excluded_until_ms: int = 0
    claim_requests: dict[Key, tuple[int, bool]] = attrs.field(factory=dict)

    def is_away(self, now_ms: int) -> bool:
        """Return whether it was silent for several beats, or said that it goes."""
        if self.reserved_until_ms is not None:
            return True
        limit_ms = max(AWAY_BEATS * self.beat_ms, AWAY_MS_MIN)
        return now_ms - self.seen_ms > limit_ms

    def accept_claim_request(
        self, key: Key, number: int | None, *, is_on: bool
    ) -> bool:
        """Take that a key is wanted, or no more; return whether that is news.

        Requests overtake each other, and one that was given up on may still come:
        the end of a wish must not end the next one, nor its begin outlive its end.
        """
        if number is None:
            return True
        said = (number, not is_on)
        if said < self.claim_requests.get(key, said):
            return False
        self.claim_requests.pop(key, None)
        self.claim_requests[key] = said
        if len(self.claim_requests) > CLAIM_REQUESTS_MAX:
            del self.claim_requests[next(iter(self.claim_requests))]
        return True

    def mark_away(self, now_ms: int) -> None:
        """Take that it was not heard of for as long as it takes to be away."""
        self.seen_ms = now_ms - max(AWAY_BEATS * self.beat_ms, AWAY_MS_MIN) - 1

    def is_gone(self, now_ms: int, *, grace_ms: int) -> bool:
        """Return whether it is silent for so long that its place is not kept.

        What it was promised is another matter: that is kept by itself.
        """
        if self.reserved_until_ms is not None:
            return now_ms >= self.reserved_until_ms
        is_silent = now_ms - self.seen_ms > min(grace_ms, GRACE_MS_MAX)
        return is_silent and not self.leases

    def close(self) -> None:
        """Watch it no more, and end its events."""
        if self.watched is not None:
            self.watched.close()
        self.events.close()

    def state(self, now_ms: int) -> str:
        """Return what it does, in one word."""
        if self.reserved_until_ms is not None:
            return "restarting"
        if self.is_leaving:
            return "leaving"
        return "silent" if self.is_away(now_ms) else "ready"

    def journal_entry(
        self, kept: Mapping[Key, JournaledLease], claims: Sequence[Key]
    ) -> JournaledClient:
        """Return what the file has to say of it.

        Args:
            kept: What is promised to it besides its loans.
            claims: What it claims one by one.
        """
        keys = dict(kept)
        for key, lease in self.leases.items():
            until_ms = max(lease.sent_until_ms, lease.holding.claim.lease.hard_until_ms)
            keys[key] = JournaledLease(key.topic, key.partition, lease.epoch, until_ms)
        return JournaledClient(
            self.client_id,
            self.instance,
            self.beat_ms,
            self.peer.pid,
            self.peer.started,
            self.children,
            dict(self.wants),
            tuple(keys.values()),
            tuple((key.topic, key.partition) for key in claims),
        )
