"""What a session wants: its consumers' topics, and keys asked for one by one."""

from collections.abc import Iterable

import attrs

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.types import Key

from .context import Context
from .subscription import POLICY_MS_MIN, Subscription, policy_interval_ms

KEYS_PER_MS = 20
LOOKS_PER_REST = 2


@attrs.define
class Wishes:
    """Everything that one client_id pursues in this process.

    Attributes:
        subs: What its consumers want.
        explicit: Keys that were asked for without a policy.
    """

    subs: list[Subscription] = attrs.field(factory=list)
    explicit: dict[Key, None] = attrs.field(factory=dict)

    @property
    def soon_ms(self) -> int:
        """Time until policies are asked again after something has moved."""
        return max(POLICY_MS_MIN, self._look_ms)

    def rest_ms(self, context: Context) -> int:
        """Return the time until they are asked though nothing seems to have moved."""
        return max(policy_interval_ms(context), LOOKS_PER_REST * self._look_ms)

    @property
    def _look_ms(self) -> int:
        """A time that grows as a look at all that is wanted does."""
        count = 0
        for sub in self.subs:
            for info in sub.topics.values():
                count += info.partition_count
        return count // KEYS_PER_MS

    def taken_beside(self, sub: Subscription) -> set[str]:
        """Return the topics that are consumed otherwise."""
        taken = {key.topic for key in self.explicit}
        return taken.union(*(s.topics for s in self.subs if s is not sub))

    def add(self, sub: Subscription, *, client_id: str) -> None:
        """Add a consumer's wishes; what else takes is left out of a pattern's.

        Raises:
            InvalidTransition: A topic is consumed already.
        """
        taken = self.taken_beside(sub)
        for topic in list(sub.topics):
            if topic in taken and sub.matches is not None:
                sub.drop_topic(topic)
            elif topic in taken:
                raise InvalidTransition(
                    f"topic {topic!r} is already consumed by client {client_id!r} in "
                    "this process; close that consumer first or use another client_id"
                )
        self.subs.append(sub)

    def sub_of(self, key: Key) -> Subscription | None:
        """Return the consumer that wants a key."""
        for sub in self.subs:
            if key.topic in sub.topics:
                return sub
        return None

    def topic_id(self, key: Key) -> bytes | None:
        """Return Kafka's id of a key's topic, as last looked up."""
        sub = self.sub_of(key)
        return None if sub is None else sub.topics[key.topic].topic_id

    def seen_ms(self, key: Key) -> int:
        """Return when the last look began that found a key's topic as it is known."""
        sub = self.sub_of(key)
        return 0 if sub is None else sub.seen_ms(key.topic)

    def bump(self, key: Key) -> None:
        """Let the consumer of a key look at what it holds."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.version += 1

    def bump_all(self) -> None:
        """Let every consumer look at what it holds."""
        for sub in self.subs:
            sub.version += 1

    def doubt(self, topics: Iterable[str]) -> None:
        """Have topics looked up at once, by whichever consumer wants them."""
        for sub in self.subs:
            for topic in topics:
                sub.doubt(topic)

    def hold_back(self, key: Key, *, until_ms: int) -> None:
        """Take nothing from others for the consumer of a key, until then."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.backoff.hold(until_ms)

    def note_loss(self, key: Key) -> None:
        """Note that a key was lost, or given up against its policy's will."""
        sub = self.sub_of(key)
        if sub is not None:
            sub.note_loss(key)
