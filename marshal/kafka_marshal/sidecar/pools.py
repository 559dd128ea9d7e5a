"""What clients want together: one subscription of the session serves them all."""

from collections.abc import Callable, Iterable, Mapping

import attrs
import msgspec

from kafka_marshal.engine import StartRule, Subscription
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.policies import Plan, Policy, View, find_policy
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.remote.api import Wants
from kafka_marshal.sidecar.clients import Client
from kafka_marshal.sidecar.placing import Seat
from kafka_marshal.subscribing import Settings, to_delivery

# What every client may have of its own.
OWN = frozenset({"claims_max"})


@attrs.define
class Member:
    """One client of a pool.

    Attributes:
        name: What it calls its subscription.
        claims_max: Most partitions, or whole topics, that it takes; 0 = no limit.
        is_parked: Whether it has ended that and keeps what it has for its next.
    """

    name: str
    claims_max: int
    is_parked: bool = False


@attrs.frozen
class Moving:
    """A partition on its way to another client.

    Attributes:
        to: The client.
        until_ms: Local time after which it is nobody's any more.
    """

    to: str
    until_ms: int


class Resuming:
    """A policy, and besides it all that an earlier life of the sidecar still holds.

    What that had lent is promised to its clients, whatever share is ours now.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.counts_topics = counts_topics(policy)
        self.__name__ = getattr(policy, "__name__", type(policy).__name__)

    def __call__(self, view: View) -> Plan:
        """Return what the policy advises, and what is to be resumed."""
        plan = self._policy(view)
        before = [key.key for key in view.keys if key.is_ours_before]
        # Types are promises, and others may not keep them.
        if not before or not isinstance(plan, Plan):
            return plan
        mine = {key.key for key in view.keys if key.is_mine}
        more = [key for key in before if key not in mine and key not in plan.claim]
        return attrs.evolve(plan, claim=(*more, *plan.claim))


def counts_topics(policy: Policy) -> bool:
    """Return whether a policy deals in whole topics, and limits count these."""
    return policy is find_policy("topic") or bool(
        getattr(policy, "counts_topics", False)
    )


def settings_of(wants: Wants) -> Settings:
    """Return what a client asks for as the settings of a consumer, checked.

    The client judges by itself whether its application comes back: it sees it.

    Raises:
        ConfigurationError: A setting is impossible.
    """
    return Settings(
        topics=wants.topics,
        pattern=wants.pattern,
        delivery=to_delivery(wants.delivery),
        policy=wants.policy,
        claims_max=wants.claims_max,
        auto_offset_reset=wants.auto_offset_reset,
        isolation_level=wants.isolation_level,
        metadata_refresh_ms=wants.metadata_refresh_ms,
        max_handling_ms=0,
        release_behind=wants.release_behind,
        has_on_topics=False,
    )


def start_rule_of(wants: Wants) -> StartRule:
    """Return where to start what the group has no position of."""
    offsets = {
        TopicPartition(each.topic, each.partition): each.offset for each in wants.starts
    }
    return StartRule(
        offset_reset=wants.auto_offset_reset,
        offsets=offsets,
        isolation_level=wants.isolation_level,
    )


@attrs.define(eq=False)
class Pool:
    """Clients that want the same on the same terms.

    Attributes:
        wants: What they want; limits are each one's own.
        subscription: What the session pursues for them.
        members: The clients, by name.
        moving: What is on its way between two of them.
        seen_version: Version of the subscription when it was last looked at.
        is_untold: Whether a key has no position to begin at, and nobody was there
            to be told so.
    """

    wants: Wants
    subscription: Subscription
    members: dict[str, Member] = attrs.field(factory=dict)
    moving: dict[Key, Moving] = attrs.field(factory=dict)
    seen_version: int = -1
    is_untold: bool = False

    def is_for(self, wants: Wants) -> bool:
        """Return whether somebody who wants that belongs here.

        Raises:
            ConfigurationError: It wants some of these topics on other terms.
        """
        if self.wants.pattern is not None or wants.pattern is not None:
            is_same = self.wants.pattern == wants.pattern
        else:
            is_same = set(self.wants.topics) == set(wants.topics)
        shared = sorted(set(wants.topics) & set(self.subscription.topics))
        if not (is_same or shared):
            return False
        for field in msgspec.structs.fields(Wants):
            ours, theirs = getattr(wants, field.name), getattr(self.wants, field.name)
            if field.name == "topics":
                ours, theirs = sorted(ours), sorted(theirs)
            if field.name not in OWN and ours != theirs:
                raise self._differs(field.name, ours, theirs)
        return True

    def _differs(
        self, setting: str, ours: object, theirs: object
    ) -> ConfigurationError:
        names = ", ".join(sorted(self.members)[:3])
        return ConfigurationError(
            f"{setting} is {ours!r} here and {theirs!r} for the clients of this "
            f"sidecar that consume the same topics already ({names}); one "
            "subscription serves them all: give the same settings, or use another "
            "group",
            setting=setting,
        )

    def admit(self, client: Client, name: str, *, claims_max: int) -> None:
        """Take a client in, or take it in anew; it tries what others could not."""
        self.subscription.want_all()
        self.members[client.client_id] = Member(name, claims_max)

    def try_untold(self) -> None:
        """Try what nobody could be told of: somebody has come since."""
        if self.is_untold:
            self.is_untold = False
            self.subscription.want_all()

    def is_wanted(self, clients: Mapping[str, Client]) -> bool:
        """Return whether anybody is left who wants it."""
        here = (clients.get(name) for name in self.members)
        return any(client is not None and not client.is_leaving for client in here)

    def settle(self, clients: Mapping[str, Client]) -> bool:
        """Have the session want what the members want; return whether that changed."""
        there = [
            member
            for client_id, member in self.members.items()
            if client_id in clients and not clients[client_id].is_leaving
        ]
        limits = [member.claims_max for member in there]
        claims_max = 0 if 0 in limits else sum(limits)
        sub = self.subscription
        before = (sub.claims_max, sub.weight)
        sub.claims_max, sub.weight = claims_max, max(1, len(there))
        return before != (sub.claims_max, sub.weight)

    @property
    def counts_topics(self) -> bool:
        """Whether whole topics are dealt in."""
        return self.subscription.counts_topics

    def seats(
        self,
        clients: Mapping[str, Client],
        *,
        present: Mapping[Key, str],
        now_ms: int,
    ) -> list[Seat]:
        """Return who is to have a share, and how much of it.

        Who is silent keeps what it has and is given nothing.
        """
        seats = []
        for client_id, member in self.members.items():
            client = clients.get(client_id)
            if client is None or client.is_leaving:
                continue
            most = member.claims_max or None
            if not self.is_taking(client, now_ms):
                had = self._count(
                    key for key, who in present.items() if who == client_id
                )
                most = had if most is None else min(most, had)
            seats.append(Seat(client_id, most))
        return seats

    def is_taking(self, client: Client, now_ms: int) -> bool:
        """Return whether a member can be given something now."""
        member = self.members.get(client.client_id)
        is_here = member is not None and not member.is_parked
        is_well = not client.is_away(now_ms) and now_ms >= client.rests_until_ms
        return is_here and is_well and not client.is_leaving

    def has_room_beside(
        self, client: Client, clients: Mapping[str, Client], *, now_ms: int
    ) -> bool:
        """Return whether another member here could be given something now."""
        for name, member in self.members.items():
            other = clients.get(name)
            if other is None or other is client or not self.is_taking(other, now_ms):
                continue
            has = self._count(
                k for k in other.loans if k.topic in self.subscription.topics
            )
            if not member.claims_max or has < member.claims_max:
                return True
        return False

    def _count(self, keys: Iterable[Key]) -> int:
        return len({key.topic for key in keys} if self.counts_topics else set(keys))

    def forget_moving(
        self, is_settled: Callable[[Key, str], bool], now_ms: int
    ) -> None:
        """Forget what should have arrived by now, or has."""
        self.moving = {
            key: each
            for key, each in self.moving.items()
            if now_ms < each.until_ms and not is_settled(key, each.to)
        }
