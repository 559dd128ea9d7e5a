"""A key that a session wants or holds, as the consumer's thread sees it."""

from collections.abc import Mapping
from enum import Enum

import attrs

from kafka_marshal.ports import READ_UNCOMMITTED, LogRange, Pending
from kafka_marshal.protocol.claiming import Claim
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce
from kafka_marshal.protocol.types import Key, Owner, TopicPartition

from .meters import Tally, Vacancy


class Delivery(Enum):
    """Which guarantee a consumer asks for (PROTOCOL 6)."""

    AT_LEAST_ONCE = "alo"
    AT_MOST_ONCE = "amo"


@attrs.frozen
class StartRule:
    """How a start position is found where the world has none (PROTOCOL 5.6).

    Attributes:
        is_needed: False for claims without consumption: they start anywhere.
        offset_reset: ``earliest``, ``latest`` or ``none``.
        offsets: Where to start instead, of the partitions named.
        isolation_level: Which records are read: ``latest``, and lag, count to the
            end of the log as that level sees it.
    """

    is_needed: bool = True
    offset_reset: str = "earliest"
    offsets: Mapping[TopicPartition, int] = attrs.field(factory=dict)
    isolation_level: str = READ_UNCOMMITTED


@attrs.frozen
class Drain:
    """A holding on its way out: nothing new is handed out.

    Attributes:
        reason: Why it is given up; stands in the release record.
        successor: client_id that should have it next, if any.
        until_ms: Local time at which it is released whatever is in hand; None
            as long as the application is busy with what it was handed.
        detail: Why, in figures; stands in the release record, too.
    """

    reason: str
    successor: str | None
    until_ms: int | None
    detail: str = ""

    def is_due(self, now_ms: int) -> bool:
        """Return whether to release although something is in hand."""
        return self.until_ms is not None and now_ms >= self.until_ms


@attrs.frozen
class Lookup:
    """What Kafka says of a partition: the group's commit and the log's range."""

    committed: int | None
    log_range: LogRange


class Holding:
    """One claim and the delivery under it.

    The engine's thread changes it under the engine's lock; the consumer's
    thread reads ``claim.lease`` without it before every hand-out.
    """

    __slots__ = (
        "claim",
        "delivery",
        "drain",
        "forgotten_count",
        "handed_count",
        "is_lent",
        "lent_count",
        "lookup",
        "lookup_at_ms",
        "predecessor",
        "progress",
        "start_rule",
        "told_mark",
        "topic_id",
        "vacancy",
        "why",
    )

    def __init__(self, claim: Claim, delivery: Delivery, start_rule: StartRule) -> None:
        self.claim = claim
        self.delivery = delivery
        self.start_rule = start_rule
        self.progress: AtLeastOnce | AtMostOnce | None = None
        self.drain: Drain | None = None
        self.lookup: Pending[Lookup] | None = None
        self.lookup_at_ms = 0
        # At most once: what the application was handed, until it asks for more.
        self.lent_count = 0
        # Whether another process uses it, a client of this sidecar: it is not
        # released before that has stopped.
        self.is_lent = False
        # The mark that a batch of beats has told last; it has room for some only.
        self.told_mark: int | None = None
        self.handed_count = 0
        self.forgotten_count = 0
        self.vacancy: Vacancy | None = None
        # Who owned it when it was claimed.
        self.predecessor: Owner | None = None
        # Kafka's id of the topic that the claim is of, as the log has it.
        self.topic_id: bytes | None = None
        # Why it is contended for, for people.
        self.why = ""

    @property
    def key(self) -> Key:
        """What is held."""
        return self.claim.key

    @property
    def position(self) -> int | None:
        """The position that beats carry.

        None under at most once: there, only grants move it (PROTOCOL 6.2).
        """
        progress = self.progress
        return progress.position if isinstance(progress, AtLeastOnce) else None

    @property
    def in_hand_count(self) -> int:
        """Records handed out, or granted, that are not done with yet.

        At least one as long as it is lent: whoever has it is asked, not judged.
        """
        count = 0
        if isinstance(self.progress, AtLeastOnce):
            count = self.progress.in_hand_count
        elif isinstance(self.progress, AtMostOnce):
            count = self.unconfirmed_count + self.progress.outstanding_count
        return max(count, self.is_lent)

    @property
    def is_asking(self) -> bool:
        """Whether a verdict on asked-for offsets is still to come (at most once)."""
        progress = self.progress
        return isinstance(progress, AtMostOnce) and progress.outstanding_count > 0

    @property
    def unconfirmed_count(self) -> int:
        """At most once: offsets granted, and records in hand, not done with yet.

        What a crash now would lose; offsets that hold no record count along.
        """
        if isinstance(self.progress, AtMostOnce):
            return self.progress.unused_count + self.lent_count
        return 0

    @property
    def mark(self) -> int | None:
        """At most once: everything granted below it is done with; else None."""
        progress = self.progress
        return progress.done if isinstance(progress, AtMostOnce) else None

    def take_back(self) -> None:
        """Note that the application is done with all that it was handed.

        Under at least once only commits tell, and nothing changes.
        """
        self.lent_count = 0
        if isinstance(self.progress, AtMostOnce):
            self.progress.take_back()

    def skip(self, first: int, last: int) -> None:
        """Note that no records exist from ``first`` to ``last``.

        At most once, nothing granted up to ``last`` is left to be handed out.
        """
        if isinstance(self.progress, AtMostOnce):
            self.progress.skip_through(last)
        elif self.progress is not None:
            self.progress.skip(first, last)

    @property
    def tally(self) -> Tally:
        """What was done under this claim; at most once, all of it is committed."""
        uncommitted = self.forgotten_count
        if isinstance(self.progress, AtLeastOnce):
            uncommitted += self.progress.in_hand_count
        return Tally(self.handed_count, self.handed_count - uncommitted)

    def forget_hands(self, progress: AtLeastOnce) -> None:
        """Start again at the position: what is in hand is nobody's any more."""
        self.forgotten_count += progress.in_hand_count
        self.progress = AtLeastOnce(progress.position)

    def may_hand_out(self, now_ms: int) -> bool:
        """Return whether a new record may be handed out at this local time."""
        return self.drain is None and self.claim.may_hand_out(now_ms)

    def begin(self, position: int | None, *, grantee: bytes) -> None:
        """Start to use a claim that was won."""
        self.claim.start(position)
        if self.delivery is Delivery.AT_LEAST_ONCE or position is None:
            self.progress = AtLeastOnce(position)
        else:
            self.progress = AtMostOnce(position, grantee=grantee)
