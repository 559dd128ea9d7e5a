"""What a reader of data partitions is to read: its own account beside a client's."""

from collections.abc import Iterable

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.types import Token, TopicPartition


class Places:
    """Assigned partitions, where each goes on, and under which claim.

    Attributes:
        next: The next offset of every assigned partition; None until the first
            seek.
        tokens: What records of each carry.
        paused: Which of them are not to be handed out.
    """

    __slots__ = ("next", "paused", "tokens")

    def __init__(self) -> None:
        self.next: dict[TopicPartition, int | None] = {}
        self.tokens: dict[TopicPartition, Token | None] = {}
        self.paused: set[TopicPartition] = set()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Make this the exact set; what stays keeps its place."""
        wanted = dict.fromkeys(partitions)
        self.next = {each: self.next.get(each) for each in wanted}
        self.tokens = {each: self.tokens.get(each) for each in wanted}
        self.paused &= wanted.keys()

    def seek(
        self, partition: TopicPartition, offset: int, *, token: Token | None
    ) -> None:
        """Go on at an offset, under a claim.

        Raises:
            InvalidTransition: It is not assigned, or no offset.
        """
        if partition not in self.next:
            raise InvalidTransition(
                f"Cannot seek in {partition}: it is not assigned. Assign it first."
            )
        if offset < 0:
            raise InvalidTransition(f"Cannot seek to {offset} in {partition}.")
        self.next[partition] = offset
        self.tokens[partition] = token

    def pause(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Note a pause; return what of these is assigned."""
        known = [each for each in partitions if each in self.next]
        self.paused.update(known)
        return known

    def resume(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Note the end of a pause; return what of these was paused."""
        known = [each for each in partitions if each in self.paused]
        self.paused.difference_update(known)
        return known

    def require_all(self) -> None:
        """Refuse to poll while one has no place.

        Raises:
            InvalidTransition: Names one that was never sought.
        """
        if None in self.next.values():
            new = next(each for each, place in self.next.items() if place is None)
            raise InvalidTransition(
                f"Cannot poll: {new} is new and has no place. Seek first."
            )
