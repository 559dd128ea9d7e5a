"""Assignment, positions and pauses of a data reader, kept outside of its client."""

from collections.abc import Iterable

from kafka_marshal.errors import InvalidTransition, PositionError, UnknownTopicId
from kafka_marshal.protocol.types import Token, TopicPartition


def outside_error(
    partition: TopicPartition, requested: int, *, what: str, start: int, end: int
) -> PositionError:
    """Return the error for a position outside the log of its partition.

    Args:
        partition: The data partition.
        requested: The position.
        what: What is wrong, such as "is outside its log".
        start: Log start offset, or -1 if unknown.
        end: Log end offset, or -1 if unknown.
    """
    known = "" if start < 0 else f", which has offsets {start} to {end}"
    if requested < start:
        why = (
            f"Records {requested} to {start - 1} were deleted, by retention or with "
            "kafka-delete-records."
        )
    else:
        topic, number = partition
        why = (
            "Its log was cut off, as by an unclean leader election, or the topic was "
            "created again. Compare the positions with: marshal claims list --topic "
            f"{topic}; set this one with: marshal groups reset GROUP --topic "
            f"{topic}:{number} --to-latest --execute, and start again."
        )
    return PositionError(
        f"Position {requested} of {partition} {what}{known}. {why}",
        partition=partition,
        requested=requested,
        log_start=start,
        log_end=end,
    )


def unknown_topic_error(partition: TopicPartition) -> UnknownTopicId:
    """Return the error for a partition whose topic id no broker knows."""
    return UnknownTopicId(
        f"{partition} was not read: its brokers have no topic with the id that its "
        "claim names. The topic was deleted, or deleted and created again, or a "
        "broker does not know it yet.",
        partition=partition,
    )


class Positions:
    """Assigned partitions with their positions and claims.

    Attributes:
        next: Next offset of each partition; None before the first seek.
        tokens: Token for the records of each partition.
        topic_ids: Topic id of each partition; None = any topic of the name.
        paused: Paused partitions.
    """

    __slots__ = ("next", "paused", "tokens", "topic_ids")

    def __init__(self) -> None:
        self.next: dict[TopicPartition, int | None] = {}
        self.tokens: dict[TopicPartition, Token | None] = {}
        self.topic_ids: dict[TopicPartition, bytes | None] = {}
        self.paused: set[TopicPartition] = set()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Make this the exact set; remaining partitions keep their state."""
        wanted = dict.fromkeys(partitions)
        self.next = {each: self.next.get(each) for each in wanted}
        self.tokens = {each: self.tokens.get(each) for each in wanted}
        self.topic_ids = {each: self.topic_ids.get(each) for each in wanted}
        self.paused &= wanted.keys()

    def seek(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        token: Token | None,
        topic_id: bytes | None = None,
    ) -> None:
        """Continue at an offset, under a claim, in the topic of an id.

        Raises:
            InvalidTransition: It is not assigned, or the offset is negative.
        """
        if partition not in self.next:
            raise InvalidTransition(
                f"Cannot seek in {partition}: it is not assigned. Assign it first."
            )
        if offset < 0:
            raise InvalidTransition(
                f"Cannot seek to {offset} in {partition}: an offset is at least 0."
            )
        self.next[partition] = offset
        self.tokens[partition] = token
        self.topic_ids[partition] = topic_id

    def pause(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Pause partitions; return the assigned ones among them."""
        known = [each for each in partitions if each in self.next]
        self.paused.update(known)
        return known

    def resume(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Resume partitions; return those that were paused."""
        known = [each for each in partitions if each in self.paused]
        self.paused.difference_update(known)
        return known

    def require_all(self) -> None:
        """Raise unless every partition has a position.

        Raises:
            InvalidTransition: Names a partition without one.
        """
        if None in self.next.values():
            new = next(each for each, place in self.next.items() if place is None)
            raise InvalidTransition(
                f"Cannot poll: {new} is new and has no position. Seek first."
            )
