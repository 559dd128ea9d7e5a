"""A key that a session wants or holds, with the delivery under its claim."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kafka_marshal.config import Delivery
from kafka_marshal.errors import InvalidTransition
from kafka_marshal.ports import READ_UNCOMMITTED, LogRange, Pending
from kafka_marshal.protocol.claiming import Claim
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.state import KeyState
from kafka_marshal.protocol.types import Key, Owner, TopicPartition

from .awaited_ends import AwaitedEnds
from .meters import Tally, Vacancy

if TYPE_CHECKING:
    from .warm_fetches import WarmRecords


@attrs.frozen
class StartRule:
    """How to find a start position if the log has none (PROTOCOL 5.6).

    Attributes:
        is_needed: False for claims without consumption, which need no position.
        offset_reset: ``earliest``, ``latest`` or ``none``.
        offsets: Start offsets of single partitions; they override ``offset_reset``.
        isolation_level: Which records are read: ``latest`` and lag refer to the end
            of the log at that level.
    """

    is_needed: bool = True
    offset_reset: str = "earliest"
    offsets: Mapping[TopicPartition, int] = attrs.field(factory=dict)
    isolation_level: str = READ_UNCOMMITTED


@attrs.frozen
class Drain:
    """The planned release of a holding; no more records are handed out.

    Attributes:
        reason: Reason in the release record.
        successor: client_id that should claim it next, if any.
        until_ms: Local time at which it is released even with uncommitted records;
            None as long as the application processes records.
        detail: Figures for the reason in the release record.
    """

    reason: str
    successor: str | None
    until_ms: int | None
    detail: str = ""

    def is_due(self, now_ms: int) -> bool:
        """Return whether to release now even with uncommitted records."""
        return self.until_ms is not None and now_ms >= self.until_ms


@attrs.frozen(kw_only=True)
class OfferedKey:
    """A key whose owner offers it, to a successor that warms up first.

    Attributes:
        key: The key.
        epoch: Epoch of the owner's claim.
        owner: client_id of the owner.
        position: The next offset to process by the log, None if unknown.
        until_ms: End of the offer, local time.
        topic_id: Kafka's id of the topic by the owner's claim, None if unknown.
    """

    key: Key
    epoch: int
    owner: str
    position: int | None
    until_ms: int
    topic_id: bytes | None = None


@attrs.frozen
class Rewind:
    """A position that was set by ``seek`` and is not confirmed yet (PROTOCOL 6.6).

    Attributes:
        seqs: Sequence numbers to wait for: the record that sets the position, and
            earlier records that may still land.
        first_seq: Sequence number of the first record of this seek.
    """

    seqs: tuple[int, ...]
    first_seq: int = 0


@attrs.frozen
class Lookup:
    """The information that Kafka returned about a partition.

    Attributes:
        committed: The group's commit, None if there is none.
        log_range: The range of its log.
        growths: End of coordinating partition 0 at that time: if a growth of the topic
            added this partition, its record lies below that end (PROTOCOL 9.10). None
            if the records read so far are known to include it.
    """

    committed: int | None
    log_range: LogRange
    growths: AwaitedEnds | None


Found = Mapping[TopicPartition, Lookup | Exception]


class StartLookup:
    """The look-up of one start position: waits for a request, then for its answer."""

    __slots__ = ("may_use_commit", "partition", "request")

    def __init__(self, partition: TopicPartition, *, may_use_commit: bool) -> None:
        self.partition = partition
        self.may_use_commit = may_use_commit
        # Shared by all partitions of a topic that are looked up together.
        self.request: Pending[Found] | None = None

    def done(self) -> bool:
        """Return whether there is an outcome."""
        return self.request is not None and self.request.done()

    def outcome(self) -> Lookup | BaseException:
        """Return the result or the error. Call it only once the look-up is done."""
        if self.request is None:
            return InvalidTransition(f"{self.partition} has not been looked up yet.")
        error = self.request.exception()
        return error if error is not None else self.request.result(0)[self.partition]


NOWHERE = -1
"""The coordinating partition of a claim that is not won."""


class Holding:
    """One claim and the delivery under it.

    It is changed under the engine's lock. The consumer's thread checks the lease under
    that lock before every hand-out, and reads it without the lock to choose what to
    fetch.
    """

    __slots__ = (
        "claim",
        "coordinator",
        "delivery",
        "drain",
        "first_seq",
        "forgotten_count",
        "handed_count",
        "is_subleased",
        "lookup",
        "lookup_at_ms",
        "lookup_error",
        "predecessor",
        "progress",
        "rewind",
        "seek_count",
        "sent_mark",
        "set_by",
        "start_rule",
        "topic_id",
        "unfinished_count",
        "vacancy",
        "warm_records",
        "why",
    )

    def __init__(self, claim: Claim, delivery: Delivery, start_rule: StartRule) -> None:
        self.claim = claim
        # Coordinating partition of the claim; NOWHERE in a client of a sidecar.
        self.coordinator = NOWHERE
        self.delivery = delivery
        self.start_rule = start_rule
        self.progress: AtLeastOnce | AtMostOnce | None = None
        self.drain: Drain | None = None
        self.lookup: StartLookup | None = None
        self.lookup_at_ms = 0
        # The last look-up error: if a permission is missing, each look-up has the same
        # error, which counts once.
        self.lookup_error = ""
        # At most once: records handed out since the application's last poll.
        self.unfinished_count = 0
        # Whether a client of this sidecar uses the key: then it is not released before
        # that client has stopped.
        self.is_subleased = False
        # The unconfirmed seek: while it is set, nothing is handed out.
        self.rewind: Rewind | None = None
        self.seek_count = 0
        # Sequence number of the first heartbeat under the claim.
        self.first_seq = 0
        # The mark last sent in a batch of heartbeats, which has limited room.
        self.sent_mark: int | None = None
        self.handed_count = 0
        self.forgotten_count = 0
        self.vacancy: Vacancy | None = None
        # The owner at the time of the claim.
        self.predecessor: Owner | None = None
        # The topic id that the log has for the claim.
        self.topic_id: bytes | None = None
        # The op_id, in hex, of the last operation that set the position before the
        # claim; empty if there was none, None if unknown.
        self.set_by: str | None = None
        # Records fetched before the claim, until the consumer's thread takes them.
        self.warm_records: WarmRecords | None = None
        # The policy's reason for the claim, for people.
        self.why = ""

    @property
    def key(self) -> Key:
        """The key of the claim."""
        return self.claim.key

    def note_key(self, known: KeyState) -> None:
        """Record the log's state of the key when the claim is won."""
        self.topic_id, previous = known.topic_id, known.previous
        self.set_by = "" if previous is None else previous.op_id.hex()

    @property
    def position(self) -> int | None:
        """The position that heartbeats carry.

        None with at-most-once delivery: only grants move the position (PROTOCOL 6.2).
        """
        progress = self.progress
        return progress.position if isinstance(progress, AtLeastOnce) else None

    @property
    def uncommitted_count(self) -> int:
        """Number of records handed out or granted, and not finished.

        At least one while a client of this sidecar uses the key, as only that client
        knows the number, and until a seek is confirmed, as no release may overtake it.
        """
        count = 0
        if isinstance(self.progress, AtLeastOnce):
            count = self.progress.uncommitted_count
        elif isinstance(self.progress, AtMostOnce):
            count = self.unconfirmed_count + self.progress.outstanding_count
        return max(count, int(self.is_subleased or self.rewind is not None))

    @property
    def has_requests(self) -> bool:
        """Whether a verdict on requested offsets is pending (at most once)."""
        progress = self.progress
        return isinstance(progress, AtMostOnce) and progress.outstanding_count > 0

    @property
    def unconfirmed_count(self) -> int:
        """At most once: number of granted offsets and handed-out records, not finished.

        A crash now would lose these. Offsets without a record count, too.
        """
        if isinstance(self.progress, AtMostOnce):
            return self.granted_count + self.unfinished_count
        return 0

    @property
    def granted_count(self) -> int:
        """At most once: offsets granted and not handed out."""
        progress = self.progress
        return progress.unused_count if isinstance(progress, AtMostOnce) else 0

    @property
    def mark(self) -> int | None:
        """At most once: the offset below which every grant is finished; else None."""
        progress = self.progress
        return progress.done if isinstance(progress, AtMostOnce) else None

    @property
    def marked_grantee(self) -> bytes | None:
        """The process that the mark is about, None if that is this one."""
        progress = self.progress
        return progress.reporter if isinstance(progress, AtMostOnce) else None

    def take_back(self) -> None:
        """Record that the application has finished all records of earlier polls.

        With at-least-once delivery this changes nothing: only a commit shows that.
        """
        self.unfinished_count = 0
        if isinstance(self.progress, AtMostOnce):
            self.progress.mark_processed()

    def put_back(self, first: int) -> None:
        """Undo the hand-out from ``first`` on: the application did not receive it."""
        progress = self.progress
        if isinstance(progress, AtLeastOnce):
            self.handed_count -= progress.put_back(first)
        elif progress is not None:
            progress.put_back(first)
            # Records of earlier polls are finished since this poll began.
            self.handed_count -= self.unfinished_count
            self.unfinished_count = 0

    def skip(self, first: int, last: int) -> None:
        """Record that no records exist from ``first`` to ``last``.

        With at-most-once delivery, grants up to ``last`` are used up.
        """
        if isinstance(self.progress, AtMostOnce):
            self.progress.skip_through(last)
        elif self.progress is not None:
            self.progress.skip(first, last)

    @property
    def tally(self) -> Tally:
        """The records of this claim; at most once, all of them count as committed."""
        uncommitted = self.forgotten_count
        if isinstance(self.progress, AtLeastOnce):
            uncommitted += self.progress.uncommitted_count
        return Tally(self.handed_count, self.handed_count - uncommitted)

    def forget_hands(self, progress: AtLeastOnce) -> None:
        """Start again at the position: uncommitted records count as forgotten."""
        self.forgotten_count += progress.uncommitted_count
        self.progress = AtLeastOnce(progress.position)

    def seek(self, position: int) -> None:
        """Move the position anywhere; uncommitted records count as forgotten.

        At-least-once delivery only. The caller sets ``rewind`` and has the log record
        it.
        """
        if isinstance(self.progress, AtLeastOnce):
            self.forgotten_count += self.progress.uncommitted_count
        self.progress = AtLeastOnce(position)
        self.rewind = None
        self.seek_count += 1

    def may_work(self, now_ms: int) -> bool:
        """Return whether new work may begin at this local time."""
        return self.drain is None and self.claim.may_hand_out(now_ms)

    def may_hand_out(self, now_ms: int) -> bool:
        """Return whether a new record may be handed out at this local time."""
        return self.rewind is None and self.may_work(now_ms)

    def begin(self, position: int | None, *, grantee: bytes) -> None:
        """Start the use of a won claim."""
        self.claim.start(position)
        if self.delivery is Delivery.AT_LEAST_ONCE or position is None:
            self.progress = AtLeastOnce(position)
        else:
            self.progress = AtMostOnce(position, grantee=grantee)
