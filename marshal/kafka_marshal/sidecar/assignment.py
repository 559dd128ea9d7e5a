"""Assigns the partitions that a sidecar holds for a group to its clients.

The group planner computes an assignment of the held partitions. The assignor compares
that with the lease table, gives out free partitions and recalls those that should move.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from kafka_marshal.engine import Context, Holding, Session, Subscription
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.group_plan import PlanInput, PlanKey, PlanMember, plan
from kafka_marshal.protocol.layout import MOVING
from kafka_marshal.protocol.types import Key, TopicPartition
from kafka_marshal.sidecar.clients import Client, ClientLease, mark_subleased
from kafka_marshal.sidecar.lease_table import (
    LeaseTable,
    SharedSubscription,
    Transfer,
)
from kafka_marshal.sidecar.warming import WarmUps

# --- The assignment --------------------------------------------------------------


def assign(
    keys: Iterable[Key],
    members: Mapping[str, int | None],
    *,
    present: Mapping[Key, str],
    whole_topics: bool = False,
) -> dict[Key, str]:
    """Return which client should have which key, as the group planner decides.

    Keys that no client has room for are left out.

    Args:
        keys: The keys to assign.
        members: The clients, each with its limit; None is no limit.
        present: The client that has, or had, each key; names of others are ignored.
        whole_topics: Whether all partitions of a topic go to one client.
    """
    units: dict[TopicPartition, list[Key]] = {}
    for key in sorted(keys):
        unit = key.topic_partition
        if whole_topics:
            unit = TopicPartition(key.topic, 0)
        units.setdefault(unit, []).append(key)
    topics = tuple(sorted({unit.topic for unit in units}))
    planned = plan(
        PlanInput(
            keys=tuple(
                PlanKey(unit, _holder(parts, present, members))
                for unit, parts in units.items()
            ),
            members=tuple(
                PlanMember(name=name, topics=topics, limit=most)
                for name, most in sorted(members.items())
            ),
        )
    )
    return {key: name for unit, name in planned.owners.items() for key in units[unit]}


def _holder(
    parts: Sequence[Key], present: Mapping[Key, str], names: Collection[str]
) -> str | None:
    """Return the member that has the first of these keys that any member has."""
    for key in parts:
        name = present.get(key)
        if name in names:
            return name
    return None


# --- The assignor ----------------------------------------------------------------


MOVED = "moved"
SURPLUS = "surplus"


class Assignor:
    """Gives out held partitions and recalls those that should move.

    Used under the engine's lock. A check of all keys is followed by a pause of at least
    the same length: otherwise thousands of moving keys would leave no time for anything
    else.
    """

    __slots__ = (
        "_assigns_at_ms",
        "_context",
        "_foresees_at_ms",
        "_session",
        "_table",
        "_warm_ups",
    )

    def __init__(
        self,
        context: Context,
        session: Session,
        *,
        table: LeaseTable,
        warm_ups: WarmUps,
    ) -> None:
        self._context = context
        self._session = session
        self._table = table
        self._warm_ups = warm_ups
        self._assigns_at_ms = self._foresees_at_ms = 0

    def is_rested(self, now_ms: int) -> bool:
        """Return whether the pause is over and all keys may be assigned again."""
        return now_ms >= self._assigns_at_ms

    def assign(self, now_ms: int) -> list[ClientLease]:
        """Give out available keys, and recall keys that another client should have.

        Returns:
            The new leases; their events are not sent yet.
        """
        table = self._table
        added: list[ClientLease] = []
        held: dict[int, list[Holding]] = {}
        self.keep_places(now_ms)
        # A copy: releasing surplus keys changes what is held.
        for holding in list(self._session.holdings.values()):
            if holding.claim.phase is not Phase.HELD:
                continue
            if holding.drain is not None and holding.drain.reason != MOVED:
                continue
            shared = table.subscription_at(holding.key)
            if shared is not None:
                held.setdefault(id(shared), []).append(holding)
            elif holding.key in table.single_claims and holding.key not in table.leases:
                added += self._sublease_single_claim(holding, now_ms)
        for shared in table.subscriptions:
            added += self._assign_shared(shared, held.get(id(shared), []), now_ms)
        self._assigns_at_ms = self._session.next_check_ms(now_ms)
        return added

    def keep_places(self, now_ms: int) -> None:
        """Reserve keys that this host claims again for the clients that have them now.

        The host does so with keys that move while the number of coordinating partitions
        changes (PROTOCOL 10.3). Call it before clients are asked to release them.
        """
        until_ms = now_ms + 2 * self._context.heartbeat_interval_ms
        for key, lease in self._table.leases.items():
            drain = lease.holding.drain
            if drain is None or drain.reason != MOVING:
                continue
            shared = self._table.subscription_at(key)
            if shared is not None:
                shared.transfers[key] = Transfer(lease.client.client_id, until_ms)

    def _sublease_single_claim(
        self, holding: Holding, now_ms: int
    ) -> list[ClientLease]:
        table = self._table
        for name in table.single_claims[holding.key]:
            client = table.clients.get(name)
            # A silent client is skipped; if it is back in time, it gets the key.
            if client is None or client.is_leaving or client.is_away(now_ms):
                continue
            if table.is_available(holding.key, client):
                return [self._sublease(holding, client, name="")]
        return []

    def _assign_shared(
        self, shared: SharedSubscription, held: list[Holding], now_ms: int
    ) -> Iterator[ClientLease]:
        table = self._table
        shared.drop_finished_transfers(self._is_settled, now_ms)
        present = self._present(shared, [holding.key for holding in held])
        members = shared.members(table.clients, present=present, now_ms=now_ms)
        wanted = assign(
            {*present, *(holding.key for holding in held)},
            members,
            present=present,
            whole_topics=shared.counts_topics,
        )
        taking = {
            name: client
            for name in members
            if shared.is_taking(client := table.clients[name], now_ms)
        }
        for holding in sorted(held, key=lambda each: each.key):
            key = holding.key
            name, lease = wanted.get(key), table.leases.get(key)
            if holding.drain is not None:
                continue
            if lease is None:
                # A client that has warmed up comes first. From that client, the key may
                # move again, also warm.
                name = self._warm_ups.warmed_by(key, among=taking) or name
            if lease is not None:
                to = None if name is None else taking.get(name)
                if name == lease.client.client_id:
                    self._warm_ups.withdraw(key)
                elif to is None or self._warm_ups.permits(lease, to, now_ms=now_ms):
                    self._move(shared, lease, to=name, now_ms=now_ms)
            elif name is None:
                # Kept while a client is silent, which may have room once it is back.
                if len(taking) == len(members) and key not in table.unexpired:
                    self._session.release(holding, reason=SURPLUS)
            elif name in taking and table.is_available(key, taking[name]):
                member = shared.subscribers[name]
                yield self._sublease(holding, taking[name], name=member.name)

    def _is_settled(self, key: Key, to: str) -> bool:
        """Return whether a key has arrived at a client, or went to another owner."""
        lease = self._table.leases.get(key)
        known = self._context.replica_of(key).world.keys.get(key)
        owner = None if known is None else known.owner
        is_elsewhere = owner not in {None, self._session.claimant.owner}
        if lease is None or lease.client.client_id != to:
            return is_elsewhere
        drain = lease.holding.drain
        return is_elsewhere or drain is None or drain.reason != MOVING

    def _present(
        self, shared: SharedSubscription, keys: Iterable[Key]
    ) -> dict[Key, str]:
        """Return the client that has each key, or is about to get it."""
        table = self._table
        present = {}
        for key in keys:
            lease, former = table.leases.get(key), table.unexpired.get(key)
            if lease is not None:
                present[key] = lease.client.client_id
            elif former is not None:
                present[key] = former.client_id
            elif (standby := self._warm_ups.standbys.client_for(key)) is not None:
                present[key] = standby
        places = {
            key: name
            for key, name in self._warm_ups.places().items()
            if key.topic in shared.subscription.topics
        }
        return present | places | {k: each.to for k, each in shared.transfers.items()}

    def _move(
        self,
        shared: SharedSubscription,
        lease: ClientLease,
        *,
        to: str | None,
        now_ms: int,
    ) -> None:
        """Recall a key that another client should have, or that exceeds all limits."""
        if to is None:
            self._session.drain(lease.holding, reason=SURPLUS)
            return
        until_ms = now_ms + 2 * self._context.heartbeat_interval_ms
        shared.transfers[lease.key] = Transfer(to, until_ms)
        own_name = self._session.claimant.owner.client_id
        self._session.drain(lease.holding, reason=MOVED, successor=own_name)

    def _sublease(self, holding: Holding, client: Client, *, name: str) -> ClientLease:
        epoch = holding.claim.epoch
        assert epoch is not None
        key = holding.key
        lease = ClientLease(
            key=key,
            client=client,
            holding=holding,
            epoch=epoch,
            name=name,
            request=None if name else client.claim_request(key),
        )
        mark_subleased(holding)
        self._table.add_lease(lease)
        return lease

    def foresee_in_time(
        self, sub: Subscription, keys: Collection[Key]
    ) -> Mapping[Key, str]:
        """Return the client that each key will probably go to, if known in time.

        Used for the reasons of claims, which ask about moving keys one by one. A key
        without transfer is left out until the pause after the last computation is over.
        """
        found = {
            key: shared.transfers[key].to
            for shared in self._table.subscriptions
            for key in keys
            if key in shared.transfers
        }
        now_ms = self._context.now_ms
        if len(found) < len(keys) and now_ms >= self._foresees_at_ms:
            found |= self.foresee(sub, keys)
            self._foresees_at_ms = self._session.next_check_ms(now_ms)
        return found

    def foresee(self, sub: Subscription, keys: Iterable[Key]) -> Mapping[Key, str]:
        """Return which client each key will probably go to."""
        table = self._table
        shared = next((p for p in table.subscriptions if p.subscription is sub), None)
        if shared is None:
            return {}
        ours = [key for key in table.leases if key.topic in sub.topics]
        present = self._present(shared, [*keys, *ours])
        now_ms = self._context.now_ms
        members = shared.members(table.clients, present=present, now_ms=now_ms)
        return assign(
            {*keys, *present},
            members,
            present=present,
            whole_topics=shared.counts_topics,
        )
