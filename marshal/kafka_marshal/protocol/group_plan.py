"""Who should hold each partition of a group: one pure function over the whole group.

``plan`` depends on its input alone: no clock, no random numbers, no floats. In this
order, it

1. covers as many keys as possible;
2. leaves as few as possible with drained members;
3. keeps soft targets where they suffice, then gives equal shares by weight;
4. moves as few keys as possible;
5. spreads the keys of a topic over racks, then hosts;
6. decides by name.

5 and 6 choose among equals and never cause a move. The policies in ``planner`` plan for
one member by its view; this function plans for all members.

Keys that the same members may take form a cohort. If there is one cohort, shares alone
decide, and the result is optimal. Otherwise the function starts with the present
holders, and improves that along the cycles of a min-cost flow, until there are none, or
for ``IMPROVEMENTS_MAX`` arcs in a large group; coverage is always optimal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

import attrs
import msgspec

from kafka_marshal.protocol.types import TopicPartition

PLANNER_VERSION = 1
"""Equal inputs have equal results under one version: golden vectors compare them."""

NO_MEMBERS = "no members"
TOPICS = "topics"
LIMITS = "limits"
FAILING = "failing"

# Maximum number of arcs to examine for balance and fewer moves: takes a few seconds.
IMPROVEMENTS_MAX = 5_000_000
# Hosts of a rack that are compared for one key, those with the fewest keys first.
HOSTS_MAX = 4


# Thousands are created at each plan: not tracked by the garbage collector.
class PlanKey(msgspec.Struct, frozen=True, gc=False):
    """One partition and its present holder.

    Attributes:
        key: The partition.
        owner: Member that holds it, or the last owner of a free key; None = nobody.
            A name that no member has counts as None.
        is_free: Whether it is free or stale, so that somebody must claim it.
    """

    key: TopicPartition
    owner: str | None = None
    is_free: bool = False


@attrs.frozen(kw_only=True)
class PlanMember:
    """One live member.

    Attributes:
        name: client_id, unique.
        topics: Topics that it subscribes to, sorted.
        limit: Maximum number of keys that it may hold, None = any number.
        target: Number of keys beyond which others are preferred, None = none.
        weight: How many members it counts as.
        host: Its machine, "" = unknown.
        rack: Its rack, "" = unknown.
        is_drained: Whether it gives up what others can take, and takes nothing.
        is_cordoned: Whether it takes nothing, and keeps its share of what it holds.
    """

    name: str
    topics: tuple[str, ...]
    limit: int | None = None
    target: int | None = None
    weight: int = 1
    host: str = ""
    rack: str = ""
    is_drained: bool = False
    is_cordoned: bool = False


@attrs.frozen(kw_only=True)
class PlanInput:
    """All that a plan depends on.

    Attributes:
        keys: Every partition of the group, sorted.
        members: The live members, sorted by name.
        failing: Pairs of a member and a key that it cannot serve: it must not have it.
        barred: Pairs of a member and a key that it must not get; it may keep it.
    """

    keys: tuple[PlanKey, ...]
    members: tuple[PlanMember, ...]
    failing: tuple[tuple[str, TopicPartition], ...] = ()
    barred: tuple[tuple[str, TopicPartition], ...] = ()


@attrs.frozen(order=True)
class Move:
    """A key that changes hands: ``source`` is None if it was free."""

    key: TopicPartition
    source: str | None
    to: str


@attrs.frozen(order=True)
class Uncovered:
    """A key that no member can have, and why.

    Attributes:
        reason: ``no members``: no member takes keys. ``topics``: no such member
            subscribes to the topic. ``failing``: all subscribers are failing or barred.
            ``limits``: the others are full.
    """

    key: TopicPartition
    reason: str


@attrs.frozen(kw_only=True)
class GroupPlan:
    """The result of ``plan``.

    Attributes:
        owners: Who should have each key; uncovered keys are missing.
        moves: Keys that must change hands or be claimed, in order.
        uncovered: The other keys, in order.
    """

    owners: Mapping[TopicPartition, str]
    moves: tuple[Move, ...]
    uncovered: tuple[Uncovered, ...]


def plan(given: PlanInput) -> GroupPlan:
    """Return who should have each key, by the objective of this module.

    Raises:
        ValueError: Keys or members are not sorted, or not unique.
    """
    cohorts = _Cohorts(given)
    is_one = len(cohorts.takers) == 1
    counts = _share_one(cohorts) if is_one else _Flow(cohorts).solve()
    owners = _place(cohorts, counts)
    moves: list[Move] = []
    uncovered: list[Uncovered] = []
    for each in given.keys:
        to = owners.get(each.key)
        if to is None:
            uncovered.append(Uncovered(each.key, cohorts.why_uncovered(each.key)))
        elif each.is_free or to != each.owner:
            moves.append(Move(each.key, None if each.is_free else each.owner, to))
    return GroupPlan(owners=owners, moves=tuple(moves), uncovered=tuple(uncovered))


class _Cohorts:
    """The input, with members by number and keys grouped by who may take them.

    Attributes:
        members: The members, racks and hosts in turn, then by name: among equals, the
            first is chosen. The number of a member is its index here.
        takers: Per cohort, the members that may take its keys, in order.
        keys: Per cohort, its keys, in order.
        holders: Per cohort, who holds each of its keys and may keep it; -1 = nobody.
        held: Per cohort, how many of its keys each member has.
    """

    def __init__(self, given: PlanInput) -> None:
        self.members = _interleaved(given.members)
        self.takers: list[tuple[int, ...]] = []
        self.keys: list[list[TopicPartition]] = []
        self.holders: list[list[int]] = []
        self.held: list[dict[int, int]] = []
        self._check_order(given)
        self._failing = _by_key(given.failing)
        self._barred = _by_key(given.barred)
        self._kinds: dict[tuple[str, ...], list[int]] = {}
        for number, member in enumerate(self.members):
            self._kinds.setdefault(member.topics, []).append(number)
        self._sets = {topics: frozenset(topics) for topics in self._kinds}
        self._subscribed: dict[str, tuple[int, ...]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._group(given.keys)

    @staticmethod
    def _check_order(given: PlanInput) -> None:
        keys, members = given.keys, given.members
        for index in range(1, len(keys)):
            if keys[index - 1].key >= keys[index].key:
                raise ValueError(f"{keys[index].key} is out of order or repeated")
        for index in range(1, len(members)):
            if members[index - 1].name >= members[index].name:
                name = members[index].name
                raise ValueError(f"member {name!r} is out of order or repeated")

    def _group(self, keys: Iterable[PlanKey]) -> None:
        names = {member.name: number for number, member in enumerate(self.members)}
        cohort_of: dict[str, int] = {}
        for each in keys:
            key = each.key
            if key in self._failing or key in self._barred:
                cohort = self._cohort(self._takers_of(key))
            else:
                found = cohort_of.get(key.topic)
                if found is None:
                    found = self._cohort(self._takers_of(key))
                    cohort_of[key.topic] = found
                cohort = found
            holder = -1 if each.owner is None else names.get(each.owner, -1)
            if holder >= 0 and not self._may_keep(holder, each):
                holder = -1
            self.keys[cohort].append(key)
            self.holders[cohort].append(holder)
            if holder >= 0:
                held = self.held[cohort]
                held[holder] = held.get(holder, 0) + 1

    def _cohort(self, takers: tuple[int, ...]) -> int:
        number = self._numbers.setdefault(takers, len(self.takers))
        if number == len(self.takers):
            self.takers.append(takers)
            self.keys.append([])
            self.holders.append([])
            self.held.append({})
        return number

    def _subscribers(self, topic: str) -> tuple[int, ...]:
        """Return the members that may take keys of a topic."""
        found = self._subscribed.get(topic)
        if found is None:
            numbers = sorted(
                number
                for topics, numbers in self._kinds.items()
                if topic in self._sets[topics]
                for number in numbers
                if self.can_take(number)
            )
            found = self._subscribed[topic] = tuple(numbers)
        return found

    def can_take(self, number: int) -> bool:
        """Return whether a member takes any keys."""
        member = self.members[number]
        return not (member.is_drained or member.is_cordoned)

    def _takers_of(self, key: TopicPartition) -> tuple[int, ...]:
        numbers = self._subscribers(key.topic)
        out = self._failing.get(key, set()) | self._barred.get(key, set())
        if not out:
            return numbers
        return tuple(n for n in numbers if self.members[n].name not in out)

    def _may_keep(self, number: int, each: PlanKey) -> bool:
        member = self.members[number]
        if each.key.topic not in self._sets[member.topics]:
            return False
        if member.name in self._failing.get(each.key, ()):
            return False
        if not each.is_free:
            return True
        # The last owner of a free key must claim it, like any other taker.
        return self.can_take(number) and member.name not in self._barred.get(
            each.key, ()
        )

    def why_uncovered(self, key: TopicPartition) -> str:
        """Return why no member can have a key."""
        if not any(self.can_take(number) for number in range(len(self.members))):
            return NO_MEMBERS
        if not self._subscribers(key.topic):
            return TOPICS
        return LIMITS if self._takers_of(key) else FAILING


def _interleaved(members: Sequence[PlanMember]) -> list[PlanMember]:
    """Return the members in an order that takes racks in turn, then hosts."""
    hosts: dict[tuple[str, str], int] = {}
    rows = []
    for member in members:
        place = member.rack, member.host
        nth = hosts.get(place, 0)
        hosts[place] = nth + 1
        rows.append((nth, member.name, member))
    if len(hosts) <= 1:
        return list(members)
    racks: dict[str, int] = {}
    ranked = []
    for _, name, member in sorted(rows, key=lambda row: row[:2]):
        nth = racks.get(member.rack, 0)
        racks[member.rack] = nth + 1
        ranked.append((nth, name, member))
    return [member for *_, member in sorted(ranked, key=lambda row: row[:2])]


def _by_key(
    pairs: Iterable[tuple[str, TopicPartition]],
) -> dict[TopicPartition, set[str]]:
    found: dict[TopicPartition, set[str]] = {}
    for name, key in pairs:
        found.setdefault(key, set()).add(name)
    return found


# --- How many keys of each cohort each member gets -----------------------------------

# Costs of a unit, each far above any sum of those before it.
MOVE = 1
LEVEL = 1 << 20
OVER_TARGET = LEVEL << 40
DRAINED = OVER_TARGET << 1
UNCOVERED = OVER_TARGET << 2


def unit_cost(member: PlanMember, count: int) -> int:
    """Return the cost of the last of ``count`` keys of a member, without moves.

    A member of weight n counts as n members with equal parts of its keys. The costs
    of a member never fall, so that equal counts have the lowest sum.
    """
    if member.is_drained:
        return DRAINED
    cost = (count - 1) // member.weight * LEVEL
    if member.target is not None and count > member.target:
        cost += OVER_TARGET
    return cost


def _share_one(cohorts: _Cohorts) -> list[dict[int, int]]:
    """Return the counts if all keys may go to the same members.

    The cheapest units of all members are taken. Among equals, units that their members
    hold already come first, then units of the members that hold most.
    """
    members, held = cohorts.members, cohorts.held[0]
    takers = set(cohorts.takers[0])
    room: dict[int, int] = {}
    for number in sorted(takers | set(held)):
        most = len(cohorts.keys[0]) if number in takers else held[number]
        limit = members[number].limit
        room[number] = most if limit is None else min(limit, most)
    left = len(cohorts.keys[0])
    counts = _common_level(cohorts, room, left)
    left -= sum(counts.values())

    def unit(number: int) -> tuple[int, bool, int, int]:
        member, has, count = members[number], held.get(number, 0), counts[number]
        part = count % member.weight
        height = (has - part + member.weight - 1) // member.weight
        return unit_cost(member, count + 1), count >= has, -height, number

    heap = [unit(number) for number in counts if counts[number] < room[number]]
    heapify(heap)
    for _ in range(left):
        if not heap:
            break
        number = heap[0][-1]
        counts[number] += 1
        if counts[number] < room[number]:
            heapreplace(heap, unit(number))
        else:
            heappop(heap)
    return [counts]


def _common_level(
    cohorts: _Cohorts, room: Mapping[int, int], count: int
) -> dict[int, int]:
    """Return equal counts within limits and targets, of at most ``count`` in all."""
    rows = []
    for number, most in room.items():
        member = cohorts.members[number]
        soft = most if member.target is None else min(most, member.target)
        rows.append((number, member.weight, 0 if member.is_drained else soft))
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(weight * middle, most) for _, weight, most in rows) <= count:
            low = middle
        else:
            high = middle - 1
    return {number: min(weight * low, most) for number, weight, most in rows}


class _Flow:
    """Counts per cohort and member, improved until no better ones are found.

    The member number ``_nobody`` stands for having no owner: its keys are uncovered.
    """

    def __init__(self, cohorts: _Cohorts) -> None:
        self._members = cohorts.members
        self._held = cohorts.held
        self._takers = cohorts.takers
        self._nobody = len(cohorts.members)
        self._load = [0] * (self._nobody + 1)
        # Members whose keys may move; at the end only uncovered keys may.
        self._givers: Sequence[int] = range(self._nobody + 1)
        self._counts: list[dict[int, int]] = []
        self._members_of = [
            sorted({*takers, *held})
            for takers, held in zip(cohorts.takers, cohorts.held, strict=True)
        ]
        self._taking = [frozenset(takers) for takers in cohorts.takers]
        self._cohorts_of: list[list[int]] = [[] for _ in range(self._nobody + 1)]
        for cohort, numbers in enumerate(self._members_of):
            for number in [*numbers, self._nobody]:
                self._cohorts_of[number].append(cohort)
        self._keep(cohorts)

    def solve(self) -> list[dict[int, int]]:
        """Return the counts."""
        self._cover()
        self._level()
        seen = 0
        while True:
            cycle, arcs = self._improvement()
            if not cycle:
                break
            self._apply(cycle)
            seen += arcs
            if seen > IMPROVEMENTS_MAX:
                self._givers = [self._nobody]
        for counts in self._counts:
            counts.pop(self._nobody, None)
        return self._counts

    def _keep(self, cohorts: _Cohorts) -> None:
        """Leave all keys where they are, within limits."""
        for keys, held in zip(cohorts.keys, cohorts.held, strict=True):
            counts: dict[int, int] = {}
            left = len(keys)
            for number, has in held.items():
                limit = self._members[number].limit
                room = has if limit is None else limit - self._load[number]
                counts[number] = min(has, room)
                self._load[number] += counts[number]
                left -= counts[number]
            counts[self._nobody] = left
            self._load[self._nobody] += left
            self._counts.append(counts)

    def _next(self, number: int) -> int | None:
        """Return the cost of another key of a member, None if it is full."""
        if number == self._nobody:
            return UNCOVERED
        member, load = self._members[number], self._load[number]
        if member.limit is not None and load >= member.limit:
            return None
        return unit_cost(member, load + 1)

    def _last(self, number: int) -> int:
        """Return the cost of a member's last key."""
        if number == self._nobody:
            return UNCOVERED
        return unit_cost(self._members[number], self._load[number])

    def _taker(self, heap: list[tuple[int, int]]) -> tuple[int, int] | None:
        """Return cost and number of the taker with the cheapest next key."""
        while heap:
            cost, number = heap[0]
            now = self._next(number)
            if now == cost:
                return heap[0]
            if now is None:
                heappop(heap)
            else:
                heapreplace(heap, (now, number))
        return None

    def _heap(self, cohort: int) -> list[tuple[int, int]]:
        heap = []
        for number in self._takers[cohort]:
            cost = self._next(number)
            if cost is not None:
                heap.append((cost, number))
        heapify(heap)
        return heap

    def _shift(self, cohort: int, source: int, to: int) -> None:
        counts = self._counts[cohort]
        counts[source] -= 1
        counts[to] = counts.get(to, 0) + 1
        self._load[source] -= 1
        self._load[to] += 1

    def _cover(self) -> None:
        """Give keys without a holder to takers, keys with the fewest takers first."""
        order = sorted(
            range(len(self._takers)), key=lambda cohort: len(self._takers[cohort])
        )
        for cohort in order:
            heap = self._heap(cohort)
            while self._counts[cohort][self._nobody]:
                found = self._taker(heap)
                if found is None:
                    break
                self._shift(cohort, self._nobody, found[1])

    def _level(self) -> None:
        """Move keys from the members that have most to takers that have fewer."""
        heaps = [self._heap(cohort) for cohort in range(len(self._takers))]
        givers = [
            (-self._last(number), -number)
            for number in range(self._nobody)
            if self._load[number]
        ]
        heapify(givers)
        while givers:
            cost, negative = heappop(givers)
            number = -negative
            best = self._cheapest(number, heaps)
            if best is None or best[0] >= -cost:
                continue
            self._shift(best[2], number, best[1])
            if self._load[number]:
                heappush(givers, (-self._last(number), -number))

    def _cheapest(
        self, number: int, heaps: Sequence[list[tuple[int, int]]]
    ) -> tuple[int, int, int] | None:
        """Return cost, taker and cohort of the best move of one of a member's keys."""
        found = []
        for cohort in self._cohorts_of[number]:
            if self._counts[cohort].get(number, 0):
                taker = self._taker(heaps[cohort])
                if taker is not None:
                    found.append((*taker, cohort))
        return min(found, default=None)

    # --- cycles of the residual graph: nodes are a sink, members, nobody and cohorts

    def _improvement(self) -> tuple[list[int], int]:
        """Return a cycle of nodes with a negative cost, and how many arcs were seen.

        Uses Bellman-Ford from the sink. A cycle is found as soon as the predecessors of
        nodes form one.
        """
        sink = -1
        cost = {sink: 0}
        before: dict[int, int] = {}
        frontier = [sink]
        arcs = 0
        while frontier:
            reached: dict[int, None] = {}
            for node in frontier:
                base = cost[node]
                for to, price in self._arcs(node):
                    arcs += 1
                    known = cost.get(to)
                    if known is None or base + price < known:
                        cost[to] = base + price
                        before[to] = node
                        reached[to] = None
            cycle = cycle_in(before)
            if cycle:
                return cycle, arcs
            frontier = list(reached)
        return [], arcs

    def _arcs(self, node: int) -> Iterator[tuple[int, int]]:
        """Return where a key could go next, and what that costs."""
        nobody = self._nobody
        if node < 0:
            for number in self._givers:
                if self._load[number]:
                    yield number, -self._last(number)
        elif node <= nobody:
            for cohort in self._cohorts_of[node]:
                count = self._counts[cohort].get(node, 0)
                if count:
                    is_back = node != nobody and count > self._held[cohort].get(node, 0)
                    yield nobody + 1 + cohort, -MOVE if is_back else 0
            price = self._next(node)
            if price is not None:
                yield -1, price
        else:
            cohort = node - nobody - 1
            counts, held = self._counts[cohort], self._held[cohort]
            for number in self._members_of[cohort]:
                if counts.get(number, 0) < held.get(number, 0):
                    yield number, 0
                elif number in self._taking[cohort]:
                    yield number, MOVE
            yield nobody, 0

    def _apply(self, cycle: list[int]) -> None:
        """Move one key along each cohort of a cycle."""
        count = len(cycle)
        for index, node in enumerate(cycle):
            if node > self._nobody:
                source, to = cycle[index - 1], cycle[(index + 1) % count]
                self._shift(node - self._nobody - 1, source, to)


def cycle_in(before: Mapping[int, int]) -> list[int]:
    """Return the nodes of a cycle in the order of its arcs, [] if there is none."""
    done: set[int] = set()
    for start in before:
        path: dict[int, None] = {}
        node = start
        while node in before and node not in path and node not in done:
            path[node] = None
            node = before[node]
        if node in path:
            nodes = list(path)
            return nodes[nodes.index(node) :][::-1]
        done.update(path)
    return []


# --- Which keys ----------------------------------------------------------------------


def _place(
    cohorts: _Cohorts, counts: Sequence[Mapping[int, int]]
) -> dict[TopicPartition, str]:
    """Choose the keys that stay, and give the others to members that lack keys."""
    spread = _Spread(cohorts.members)
    for keys, holders in zip(cohorts.keys, cohorts.holders, strict=True):
        for key, number in zip(keys, holders, strict=True):
            if number >= 0:
                spread.add(key.topic, number)
    placed = [
        _stays(cohorts, cohort, counts[cohort], spread)
        for cohort in range(len(cohorts.keys))
    ]
    owners: dict[TopicPartition, str] = {}
    for cohort, keys in enumerate(cohorts.keys):
        held = cohorts.held[cohort]
        lacks = {
            number: count - held.get(number, 0)
            for number, count in counts[cohort].items()
            if count > held.get(number, 0)
        }
        queue = _Queue(spread, lacks)
        for key, holder in zip(keys, placed[cohort], strict=True):
            to = queue.take(key.topic) if holder < 0 else holder
            if to is not None:
                owners[key] = cohorts.members[to].name
    return owners


def _stays(
    cohorts: _Cohorts, cohort: int, counts: Mapping[int, int], spread: "_Spread"
) -> list[int]:
    """Return who keeps each key of a cohort; -1 = it is given to another member.

    A member gives up keys of the topics with the most keys in its rack, then on its
    host; among these keys, and if neither is known, the last ones. If some keys of the
    cohort stay uncovered, it always gives up the last ones: the next plan asks for them
    again, and the spread is different by then.
    """
    holders = list(cohorts.holders[cohort])
    mine: dict[int, list[int]] = {
        number: []
        for number, has in cohorts.held[cohort].items()
        if has > counts.get(number, 0)
    }
    if mine:
        for index, number in enumerate(holders):
            if number in mine:
                mine[number].append(index)
    keys = cohorts.keys[cohort]
    is_covered = sum(counts.values()) == len(keys)
    for number, indexes in mine.items():
        surplus = len(indexes) - counts.get(number, 0)
        given: Iterable[int] = indexes[len(indexes) - surplus :]
        if is_covered:
            given = spread.most_crowded(keys, indexes, number=number, count=surplus)
        for index in given:
            holders[index] = -1
            spread.remove(keys[index].topic, number)
    return holders


class _Spread:
    """How many keys of each topic lie on each host and rack.

    Attributes:
        load: How many keys each member has so far.
        places: Rack and host of each member.
    """

    def __init__(self, members: Sequence[PlanMember]) -> None:
        self.load = [0] * len(members)
        self.places = [(member.rack, member.host) for member in members]
        self._is_known = any(member.host or member.rack for member in members)
        self._counts: dict[tuple[str, object], int] = {}

    def add(self, topic: str, number: int, *, count: int = 1) -> None:
        """Count a key."""
        self.load[number] += count
        if self._is_known:
            place = self.places[number]
            for at in ((topic, place[0]), (topic, place)):
                self._counts[at] = self._counts.get(at, 0) + count

    def remove(self, topic: str, number: int) -> None:
        """Stop counting a key."""
        self.add(topic, number, count=-1)

    def count(self, topic: str, place: object) -> int:
        """Return how many keys of a topic lie in a rack, or on a host of a rack."""
        return self._counts.get((topic, place), 0)

    def most_crowded(
        self,
        keys: Sequence[TopicPartition],
        indexes: Sequence[int],
        *,
        number: int,
        count: int,
    ) -> Iterator[int]:
        """Yield the keys that a member gives up; the caller removes each at once."""
        if not self._is_known:
            yield from indexes[len(indexes) - count :]
            return
        place = self.places[number]
        by_topic: dict[str, list[int]] = {}
        for index in indexes:
            by_topic.setdefault(keys[index].topic, []).append(index)

        def row(topic: str) -> tuple[int, int, int, str]:
            rack, host = self.count(topic, place[0]), self.count(topic, place)
            return -rack, -host, -by_topic[topic][-1], topic

        heap = [row(topic) for topic in by_topic]
        heapify(heap)
        for _ in range(count):
            topic = heap[0][-1]
            yield by_topic[topic].pop()
            if by_topic[topic]:
                heapreplace(heap, row(topic))
            else:
                heappop(heap)


class _Queue:
    """The members that lack keys of one cohort, by rack and host."""

    def __init__(self, spread: _Spread, lacks: Mapping[int, int]) -> None:
        self._spread = spread
        self._lacks = dict(lacks)
        self._hosts: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for number in lacks:
            place = spread.places[number]
            self._hosts.setdefault(place, []).append((spread.load[number], number))
        self._racks: dict[str, list[tuple[int, int, tuple[str, str]]]] = {}
        for place, members in self._hosts.items():
            heapify(members)
            self._racks.setdefault(place[0], []).append((*members[0], place))
        for hosts in self._racks.values():
            heapify(hosts)

    def take(self, topic: str) -> int | None:
        """Return the member that gets a key, None if no member lacks keys any more.

        It is in the rack, then on the host, with the fewest keys of the topic. Among
        equals, the member with the fewest keys gets it.
        """
        if not self._racks:
            return None
        count, racks = self._spread.count, self._racks
        rack = min(racks, key=lambda rack: (count(topic, rack), racks[rack][0]))
        hosts = racks[rack]
        looked = [heappop(hosts) for _ in range(min(HOSTS_MAX, len(hosts)))]
        best = min(looked, key=lambda entry: (count(topic, entry[2]), entry))
        for entry in looked:
            if entry is not best:
                heappush(hosts, entry)
        place = best[2]
        members = self._hosts[place]
        _, number = heappop(members)
        self._spread.add(topic, number)
        self._lacks[number] -= 1
        if self._lacks[number]:
            heappush(members, (self._spread.load[number], number))
        if members:
            heappush(hosts, (*members[0], place))
        elif not hosts:
            del racks[rack]
        return number
