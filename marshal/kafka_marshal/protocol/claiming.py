"""The claim of one key as a sans-IO state machine (PROTOCOL 5).

The caller owns time and IO. It passes in the local time, the records sent and the
verdicts of the fold; the machine answers whether to send a claim and whether the
claim may still be used. Its states::

    WAITING --send_claim--> CLAIMING --won--> STARTING --start--> HELD
       ^                       |                 |                 |
       +------- refused -------+                 +---- ENDED <-----+

A claim rests on one kind of evidence only: an own record, read back, with the
fold's verdict (PROTOCOL 1.4). Losing is an ordinary outcome, so verdicts never
raise. A call that the state does not allow raises ``InvalidTransition``.
"""

from enum import Enum
from hashlib import blake2b, sha256

import attrs
import msgspec

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.lease import NO_LEASE, Freshness, Lease
from kafka_marshal.protocol.records import ClaimingPartition, Resume, SenderArgs
from kafka_marshal.protocol.state import ACCEPTED, KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key, Owner, Token

CLAIMS_IN_FLIGHT_MAX = 64


class Phase(Enum):
    """The state of a claim."""

    WAITING = "waiting"
    CLAIMING = "claiming"
    STARTING = "starting"
    HELD = "held"
    ENDED = "ended"


class Claimant:
    """A client_id in a group, with the incarnation of this process.

    Attributes:
        owner: client_id and incarnation, as the log names them.
        group_id: The group.
        master: Secret of this process from which the secrets of keys derive.
        person: Person for whom it claims, named in its claims; None if there is none.
    """

    def __init__(
        self, owner: Owner, group_id: str, *, master: bytes, person: str | None = None
    ) -> None:
        self.owner = owner
        self.person = person
        self.group_id = group_id
        self.master = master
        self._seq = 0

    def next_seq(self) -> int:
        """Return the next sequence number of this incarnation."""
        self._seq += 1
        return self._seq

    def sender(self, seq: int) -> SenderArgs:
        """Return the fields that each of its records begins with (PROTOCOL 3.6)."""
        return {
            "client_id": self.owner.client_id,
            "group_id": self.group_id,
            "incarnation": self.owner.incarnation,
            "seq": seq,
        }


def key_secret(master: bytes, key: Key) -> bytes:
    """Return the 16-byte secret by which a later process may resume ``key``.

    The secret is derived, so that a process stores only ``master``. A resume publishes
    the secret of its key, never that of another key (PROTOCOL 4.4).
    """
    name = f"{key.group_id}\0{key.topic}\0{key.partition}".encode()
    return blake2b(name, key=master, digest_size=16).digest()


def grant_secret(resume_hash: bytes, key: Key, *, epoch: int) -> bytes:
    """Return the 16-byte secret of one claim, for grant requests to a sidecar.

    The secret is derived from the claim's record, so that the sidecar of any host can
    check it. Clients of a sidecar, which do not read the log, receive it (PROTOCOL 12).

    Args:
        resume_hash: From the claim's record.
        key: The claimed key.
        epoch: Epoch of the claim.
    """
    name = f"{key.group_id}\0{key.topic}\0{key.partition}\0{epoch}".encode()
    return blake2b(name, key=resume_hash, digest_size=16, person=b"grant").digest()


@attrs.frozen
class PreviousLife:
    """An earlier process of the same client_id, from its identity directory."""

    incarnation: bytes
    master: bytes


@attrs.frozen
class Ending:
    """Why a claim ended.

    Attributes:
        reason: For example ``released``, ``taken_over``, ``lease_expired``.
        winner: client_id of the new owner, if known.
        at_offset: Log offset of the record that ended it, if one did.
        was_lost: Whether the claim was lost rather than released.
    """

    reason: str
    winner: str | None = None
    at_offset: int | None = None
    was_lost: bool = True


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """When a waiting process expects to win a key (PROTOCOL 4.11): a hint only.

    Attributes:
        known: The key's state, None if it was never claimed.
        wait_ms: Time until a claim could be accepted; 0 = now; None = only a record
            can end the wait (the key is locked, or owned by this claimant).
        is_named: Whether the last release names this claimant as successor, so that
            no other claimant can win the key yet.
    """

    known: KeyState | None
    wait_ms: int | None
    is_named: bool = False


def estimate(
    world: WorldState, key: Key, *, elapsed_ms: int, claimant: Owner
) -> Estimate:
    """Estimate when ``key`` can be claimed.

    Log time does not advance while the log is idle, so the local time since the last
    entry is added to it, also for the begin and the end of pauses. The fold judges the
    claim by the true time, that of its append.
    """
    known = world.keys.get(key)
    wait_ms = 0
    append_ms = world.append_time_ms + elapsed_ms
    paused_until_ms = world.estimated_pause_end(key, append_ms)
    if paused_until_ms is not None:
        wait_ms = paused_until_ms - append_ms
    if world.quiet_until_ms is not None:
        wait_ms = max(wait_ms, world.quiet_until_ms - world.now_ms - elapsed_ms)
    if known is None:
        return Estimate(None, max(0, wait_ms))
    now_ms = world.now_ms + elapsed_ms
    remaining_ms = known.remaining_ms(now_ms)
    is_ours = known.owner == claimant and remaining_ms > 0
    if known.lock is not None or is_ours:
        return Estimate(known, None)
    is_named = False
    if known.handoff is not None:
        successor, deadline_ms = known.handoff
        is_named = successor == claimant.client_id and now_ms < deadline_ms
        if successor != claimant.client_id:
            wait_ms = max(wait_ms, deadline_ms - now_ms)
    if known.owner is not None:
        wait_ms = max(wait_ms, remaining_ms)
    return Estimate(known, max(0, wait_ms), is_named)


def resumable(
    known: KeyState | None,
    lives: tuple[PreviousLife, ...],
    *,
    client_id: str,
    log_time_ms: int,
) -> PreviousLife | None:
    """Return the earlier process that may resume a key, if the log would allow it."""
    if known is None or known.owner is None or known.owner.client_id != client_id:
        return None
    if known.freshness(log_time_ms) is not Freshness.FRESH:
        return None
    for life in lives:
        if life.incarnation == known.owner.incarnation:
            return life
    return None


@attrs.frozen(kw_only=True)
class Sublease:
    """A claim that another process won and renews for this process.

    Attributes:
        claimant: The process that won the claim; its master secret is not known here.
        epoch: Offset of the winning record.
        token: Fencing token.
        secret: Sent with grant requests.
        lease: Local deadlines.
        heartbeat_interval_ms: Heartbeat interval of the Config in force.
    """

    claimant: Claimant
    epoch: int
    token: Token
    secret: bytes
    lease: Lease
    heartbeat_interval_ms: int


class Claim:
    """One key that a claimant wants, holds or has lost.

    Only its own methods set its attributes.

    Attributes:
        key: The claimed key.
        phase: Where the claim stands.
        epoch: Offset of the winning record, None before it is won.
        token: Fencing token, None before it is won.
        secret: Sent with grant requests to a sidecar; empty before it is won.
        lease: Local deadlines; meaningless before it is won.
        start_position: First position to process, None while unknown.
        ending: Why the claim ended, None before.
        retry_at_ms: Local time before which no new attempt is made.
        attempt_at_ms: Local time of the next attempt, None if none is due.
    """

    __slots__ = (
        "_base_ms",
        "_sent_ms",
        "attempt_at_ms",
        "claimant",
        "ending",
        "epoch",
        "heartbeat_interval_ms",
        "key",
        "lease",
        "phase",
        "refusal",
        "retry_at_ms",
        "secret",
        "start_position",
        "token",
    )

    def __init__(self, claimant: Claimant, key: Key) -> None:
        self.claimant = claimant
        self.key = key
        self.phase = Phase.WAITING
        self.epoch: int | None = None
        self.token: Token | None = None
        self.secret = b""
        self.lease = NO_LEASE
        self.start_position: int | None = None
        self.ending: Ending | None = None
        self.refusal: Transition | None = None
        self.heartbeat_interval_ms = 0
        self.retry_at_ms = 0
        self.attempt_at_ms: int | None = None
        self._base_ms = -1
        self._sent_ms: dict[int, int] = {}

    @property
    def is_owned(self) -> bool:
        """Whether this claimant owns the key, as far as the log is read."""
        phase = self.phase  # read for every holding in every round
        return phase is Phase.HELD or phase is Phase.STARTING

    @property
    def base_ms(self) -> int:
        """Local time that the lease counts from; meaningless before it is won."""
        return self._base_ms

    @property
    def is_verdict_pending(self) -> bool:
        """Whether a claim was sent and its verdict is pending."""
        return self.phase is Phase.CLAIMING

    def may_hand_out(self, now_ms: int) -> bool:
        """Return whether a record may be handed out at this local time."""
        return self.phase is Phase.HELD and now_ms < self.lease.soft_until_ms

    def is_valid(self, now_ms: int) -> bool:
        """Return whether work under this claim may continue at this local time."""
        return self.is_owned and now_ms < self.lease.hard_until_ms

    # --- acquiring

    def wants_to_claim(
        self, now_ms: int, wait_ms: int | None, *, jitter_ms: int, answer_ms: int
    ) -> bool:
        """Return whether to send a claim now (PROTOCOL 5.1).

        Args:
            now_ms: Local time.
            wait_ms: From ``estimate``.
            jitter_ms: A delay drawn by the caller, used once per opportunity.
            answer_ms: How long to wait for a verdict before sending another claim; the
                first may still be written to the log, and then counts.
        """
        if self.phase is Phase.CLAIMING:
            if now_ms - max(self._sent_ms.values(), default=0) < answer_ms:
                return False
            self.phase = Phase.WAITING
        if self.phase is not Phase.WAITING:
            return False
        if wait_ms is None or wait_ms > 0:
            # ``wait_ms`` is newer than the refusal: the owner may release the key long
            # before the time that the refusal named.
            self.attempt_at_ms = None
            self.retry_at_ms = 0
            return False
        if self.attempt_at_ms is None:
            self.attempt_at_ms = max(now_ms + jitter_ms, self.retry_at_ms)
        return now_ms >= self.attempt_at_ms

    def claim_record(
        self,
        seq: int,
        generation: int,
        *,
        topic_id: bytes | None = None,
        expected_epoch: int | None = None,
        resume: Resume | None = None,
    ) -> ClaimingPartition:
        """Return the claiming record to append."""
        return ClaimingPartition(
            **self.claimant.sender(seq),
            generation=generation,
            topic=self.key.topic,
            partition=self.key.partition,
            topic_id=topic_id,
            resume_hash=self._resume_hash(),
            expected_epoch=expected_epoch,
            resume=resume,
        )

    def _resume_hash(self) -> bytes:
        return sha256(key_secret(self.claimant.master, self.key)).digest()

    def claim_sent(self, seq: int, now_ms: int) -> None:
        """Record that a claim was sent."""
        if self.phase is not Phase.WAITING:
            raise InvalidTransition(f"claim of {self.key} sent while {self.phase}")
        self.phase = Phase.CLAIMING
        self.attempt_at_ms = None
        self._sent_ms[seq] = now_ms
        if len(self._sent_ms) > CLAIMS_IN_FLIGHT_MAX:
            del self._sent_ms[next(iter(self._sent_ms))]

    def on_claim_verdict(
        self,
        transition: Transition,
        *,
        seq: int,
        now_ms: int,
        heartbeat_interval_ms: int,
        token: Token | None,
    ) -> bool:
        """Apply the fold's verdict on an own claim.

        Returns:
            Whether the claim is usable now. An accepted claim that is read back too
            late to be used is a ghost: the caller releases it (PROTOCOL 5.3).
        """
        sent_ms = self._sent_ms.pop(seq, None)
        if transition.outcome != ACCEPTED:
            self._refused(transition, now_ms)
            return False
        lease = Lease.since(sent_ms or 0, heartbeat_interval_ms)
        contending = self.phase in {Phase.WAITING, Phase.CLAIMING}
        if sent_ms is None or not contending or now_ms >= lease.hard_until_ms:
            return False
        self.phase = Phase.STARTING
        self.epoch = transition.offset
        self.token = token
        self.secret = grant_secret(self._resume_hash(), self.key, epoch=self.epoch)
        self.lease = lease
        self._base_ms = sent_ms
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.refusal = None
        return True

    def _refused(self, transition: Transition, now_ms: int) -> None:
        if self.phase is not Phase.CLAIMING:
            return
        self.refusal = transition
        if transition.reason == "duplicate":
            return  # an earlier claim of this process stands, with its own verdict
        self.phase = Phase.WAITING
        detail = transition.detail or {}
        self.retry_at_ms = now_ms + detail.get("remaining_ms", 0)

    # --- by another process

    def assign(self, sublease: Sublease) -> None:
        """Start to use a claim that another process won for this one.

        Raises:
            InvalidTransition: This claim was sent here, was won or has ended.
        """
        if self.phase is not Phase.WAITING:
            raise InvalidTransition(f"{self.key} assigned while {self.phase}")
        self.phase = Phase.STARTING
        self._take(sublease)

    def reassign(self, sublease: Sublease) -> None:
        """Continue under a later claim of the process that won the present one.

        Raises:
            InvalidTransition: No claim is held, or ``sublease`` is not a later one.
        """
        # Epochs of two coordinating partitions do not compare (PROTOCOL 10).
        is_later = self.token is None or sublease.token > self.token
        if not self.is_owned or not is_later:
            raise InvalidTransition(
                f"{self.key} reassigned to {sublease.token} while {self.phase} "
                f"at {self.token}"
            )
        self._take(sublease)

    def _take(self, sublease: Sublease) -> None:
        self.claimant = sublease.claimant
        self.epoch = sublease.epoch
        self.token = sublease.token
        self.secret = sublease.secret
        self.lease = sublease.lease
        self.heartbeat_interval_ms = sublease.heartbeat_interval_ms

    def renew_until(self, lease: Lease) -> None:
        """Set the deadlines that the claiming process sent last."""
        if self.is_owned:
            self.lease = lease

    def limit(self, lease: Lease) -> None:
        """Lower each deadline to that of ``lease`` if that is earlier (PROTOCOL S4)."""
        if self.is_owned:
            self.lease = Lease(
                min(self.lease.soft_until_ms, lease.soft_until_ms),
                min(self.lease.hard_until_ms, lease.hard_until_ms),
            )

    # --- holding

    def start(self, position: int | None) -> None:
        """Start to use the claim at ``position`` (None if no position is needed)."""
        if self.phase is not Phase.STARTING:
            raise InvalidTransition(f"{self.key} started while {self.phase}")
        self.start_position = position
        self.phase = Phase.HELD

    def on_beat_verdict(
        self, transition: Transition, *, sent_ms: int, heartbeat_interval_ms: int | None
    ) -> None:
        """Apply the fold's verdict on an own heartbeat (PROTOCOL 5.2).

        The lease counts from the time of **sending**. Only a heartbeat that is read
        back as ``renewed`` extends it, and no heartbeat shortens it. An ignored
        heartbeat of the current epoch ends the claim at once.

        Args:
            transition: The verdict.
            sent_ms: Local time at which the heartbeat was sent.
            heartbeat_interval_ms: The interval by which the fold renewed the key; None
                if the key kept a longer lease (PROTOCOL 4.5).
        """
        if not self.is_owned:
            return
        if transition.outcome != ACCEPTED:
            self.end(Ending("beat_ignored", at_offset=transition.offset))
        elif transition.effect == "renewed" and heartbeat_interval_ms is not None:
            self._renew(sent_ms, heartbeat_interval_ms)

    def _renew(self, sent_ms: int, heartbeat_interval_ms: int) -> None:
        lease = Lease.since(sent_ms, heartbeat_interval_ms)
        # Clients of a sidecar rely on the deadline sent to them: it never moves back.
        is_later = lease.hard_until_ms >= self.lease.hard_until_ms
        if sent_ms > self._base_ms and is_later:
            self._base_ms = sent_ms
            self.heartbeat_interval_ms = heartbeat_interval_ms
            self.lease = lease

    def surplus_ms(self, now_ms: int, *, log_elapsed_ms: int) -> int:
        """Return how much more log time than local time passed since the last renewal.

        The renewal was appended after it was sent, and the last entry was appended
        before it was read. So a positive difference proves that the leader's clock
        stepped forward (PROTOCOL S4).
        """
        return max(0, log_elapsed_ms - (now_ms - self._base_ms))

    def shorten(self, surplus_ms: int) -> None:
        """Shorten the lease by a forward step of the log's clock (PROTOCOL S4)."""
        if self.is_owned:
            self._base_ms -= surplus_ms
            self.lease = Lease.since(self._base_ms, self.heartbeat_interval_ms)

    def on_foreign(self, transition: Transition) -> None:
        """Apply an accepted record of another process about this key."""
        record = transition.record
        if not self.is_owned or not isinstance(record, ClaimingPartition):
            return
        ours = record.client_id == self.claimant.owner.client_id
        reason = "identity_conflict" if ours else "taken_over"
        self.end(Ending(reason, record.client_id, transition.offset))

    def check_lease(self, now_ms: int) -> bool:
        """End the claim if its hard deadline has passed; return whether it did."""
        if self.is_owned and now_ms >= self.lease.hard_until_ms:
            self.end(Ending("lease_expired"))
            return True
        return False

    def end(self, ending: Ending) -> None:
        """End the claim: nothing is handed out under it any more. Idempotent."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            self.ending = ending
            self.lease = NO_LEASE
