"""Value objects that all modules of the core share.

All are plain data. Times are integers in milliseconds, offsets are integers,
identities are bytes or strings. The core has no floats, because not every machine
would fold them to the same state.
"""

import re
from enum import IntEnum
from typing import NamedTuple, Self

import attrs
import msgspec

OFFSET_MAX = 2**63 - 1
PARTITION_MAX = 2**31 - 1

_TOKEN = re.compile(r"([0-9]{1,10})\.([0-9]{1,10})\.([0-9]{1,20})")
_WHOLE = re.compile(r"[0-9]{1,19}")


def whole_number(text: str, *, most: int = OFFSET_MAX) -> int | None:
    """Return the number written as up to 19 ASCII digits, None for all other text.

    ``int()`` also takes signs, spaces, underscores and digits of Unicode, and raises
    for too many digits.
    """
    found = int(text) if _WHOLE.fullmatch(text) else most + 1
    return found if found <= most else None


def may_be_same_topic(one: bytes | None, other: bytes | None) -> bool:
    """Return whether two ids may be of the same topic; None is an unknown id."""
    return None in {one, other} or one == other


def encodable(text: str) -> str:
    """Return a text with a question mark for each character that UTF-8 cannot encode.

    Texts from the environment may have such characters, for bytes that are not UTF-8.
    """
    return text.encode(errors="replace").decode()


SHARED_TEXTS_MAX = 65_536
_shared_texts: dict[str, str] = {}


def shared(text: str) -> str:
    """Return an equal text, the same object for the same recent text.

    The names of many keys then take the memory of one, and compare faster. Python 3.12
    never frees what ``sys.intern`` returns, and the log may have any number of names.
    """
    known = _shared_texts.get(text)
    if known is None:
        if len(_shared_texts) >= SHARED_TEXTS_MAX:
            _shared_texts.clear()
        known = _shared_texts[text] = text
    return known


class TimestampType(IntEnum):
    """Who set a Kafka record's timestamp (wire values of Kafka)."""

    NONE = -1
    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class TopicPartition(NamedTuple):
    """A partition of a data topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        """Return ``topic-partition``, the form that Kafka's tools print."""
        return f"{self.topic}-{self.partition}"


class Key(NamedTuple):
    """What is claimed: one data partition within one group. Sorts by fields."""

    group_id: str
    topic: str
    partition: int

    @property
    def topic_partition(self) -> TopicPartition:
        """The data partition without its group."""
        return TopicPartition(self.topic, self.partition)


class Owner(NamedTuple):
    """A claimant: one process start (incarnation) of one client_id."""

    client_id: str
    incarnation: bytes


class Token(NamedTuple):
    """Fencing token of a claim: strictly grows per key (PROTOCOL 4.10)."""

    era: int
    leader_epoch: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the dotted form.

        Raises:
            ValueError: The text is not a token, or a number is out of range.
        """
        found = _TOKEN.fullmatch(text)
        if found is None:
            raise ValueError(f"not a fencing token like 1763718000.0.42: {text[:80]!r}")
        token = cls(*map(int, found.groups()))
        try:
            bytes(token)
        except OverflowError as error:
            raise ValueError(f"fencing token out of range: {text}") from error
        return token

    def __str__(self) -> str:
        """Return the dotted form ``era.leader_epoch.offset``."""
        return f"{self.era}.{self.leader_epoch}.{self.offset}"

    def __bytes__(self) -> bytes:
        """Return 16 bytes, big-endian u32 u32 u64; they order like the tuple."""
        return (
            self.era.to_bytes(4, "big")
            + self.leader_epoch.to_bytes(4, "big")
            + self.offset.to_bytes(8, "big")
        )


@attrs.frozen(order=True)
class OffsetRange:
    """Offsets of a partition from ``first`` up to ``end``, which is not included.

    Records of the log and messages of the sidecar have the last offset instead; see
    ``through``.
    """

    first: int
    end: int

    @classmethod
    def through(cls, first: int, last: int) -> Self:
        """Return the range whose last offset is ``last``."""
        return cls(first, last + 1)

    @property
    def last(self) -> int:
        """Last offset; below ``first`` if the range is empty."""
        return self.end - 1

    @property
    def count(self) -> int:
        """Number of offsets, 0 if the end is not above the first one."""
        return max(0, self.end - self.first)


def lag_of(position: int | None, end: int | None, *, is_owned: bool) -> int | None:
    """Return the offsets from a position to the end of its log, None if unknown.

    Args:
        position: Next offset to process; with at-most-once delivery, to be granted.
        end: End of the partition's log, looked up at another moment.
        is_owned: Whether the partition has a live owner. An owner beyond the end has
            advanced since the look-up. Without one, the end is of a topic that was
            created again.
    """
    if position is None or end is None or (end < position and not is_owned):
        return None
    return max(0, end - position)


class TokenAfterSeek(Token):
    """The token of a claim, in records that were fetched after a seek (PROTOCOL 6.6).

    It equals the token of the claim, so that sinks see no difference. Only a commit
    looks at the number of seeks: it distinguishes hand-outs of one offset.
    """

    seek_count: int

    @classmethod
    def of(cls, token: Token, seek_count: int) -> Self:
        """Return a claim's token for records fetched after ``seek_count`` seeks."""
        made = cls(*token)
        made.seek_count = seek_count
        return made


def seek_count_of(token: Token | None) -> int:
    """Return the number of seeks before a record with this token was fetched."""
    return token.seek_count if isinstance(token, TokenAfterSeek) else 0


class LogEntry(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One entry of a coordinating partition, as a reader receives it.

    Attributes:
        offset: Offset in the coordinating partition.
        leader_epoch: Leader epoch of the batch, or None when the broker sent none.
        timestamp_ms: The record's timestamp in epoch milliseconds.
        timestamp_type: A ``TimestampType`` value.
        value: The record's bytes; None is a tombstone, which never decodes.
        undecodable: Reason why an earlier reader could not decode the value.
            Set only for entries that come from a text dump, which are never
            decoded again (PROTOCOL 3.7).
    """

    offset: int
    leader_epoch: int | None
    timestamp_ms: int
    timestamp_type: int
    value: bytes | None
    undecodable: str | None = None
