"""Spreads the keys of a group over racks and hosts, with as few moves as possible.

``group_plan.plan`` moves nothing for the sake of spread: it chooses among equals only.
``spread`` does, if a person asks for it. Its result has as few uncovered keys, and as
equal counts, as the result of ``plan``; then the keys of each topic lie as evenly as
possible over racks, then over hosts; then as few keys as possible move. So ``plan``
leaves the result as it is.

Counts of each topic per member are improved along the cycles of a min-cost flow, from
topics over racks, hosts and members to a sink, until there are none, or for
``ARCS_MAX`` arcs in a large group. Keys that some members of their topic must not have
stay where ``plan`` puts them, and so do keys of drained and cordoned members.
"""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop
from typing import NamedTuple

from kafka_marshal.protocol.group_plan import (
    GroupPlan,
    Move,
    PlanInput,
    PlanKey,
    PlanMember,
    cycle_in,
    plan,
    unit_cost,
)
from kafka_marshal.protocol.types import TopicPartition

# Maximum number of arcs to examine: takes a few seconds.
ARCS_MAX = 3_000_000
# Costs of a unit, each far above any sum of those before it.
MOVE = 1
HOST = 1 << 24
RACK = HOST << 36
LEVEL = RACK << 36

SINK = "sink"
MEMBER = "member"
AT_HOST = "host"
IN_RACK = "rack"
TOPIC = "topic"


class Node(NamedTuple):
    """A node of the flow.

    Attributes:
        kind: One of the constants of this module.
        topic: The topic, "" for members and the sink.
        at: Name of the member, or rack and host.
    """

    kind: str
    topic: str = ""
    at: tuple[str, ...] = ()


def spread(given: PlanInput) -> GroupPlan:
    """Return who should have each key, with the best spread.

    Raises:
        ValueError: As ``plan``.
    """
    base = plan(given)
    flow = _Flow(given, base.owners)
    flow.solve()
    owners = flow.owners()
    moves = tuple(
        Move(each.key, None if each.is_free else each.owner, owners[each.key])
        for each in given.keys
        if each.key in owners and (each.is_free or each.owner != owners[each.key])
    )
    return GroupPlan(owners=owners, moves=moves, uncovered=base.uncovered)


class _Flow:
    """Counts per topic and member, improved until no better ones are found."""

    def __init__(self, given: PlanInput, owners: Mapping[TopicPartition, str]) -> None:
        self._owners = dict(owners)
        self._members = {member.name: member for member in given.members}
        pairs = {key for _, key in (*given.failing, *given.barred)}
        takers = {
            name
            for name, member in self._members.items()
            if not (member.is_drained or member.is_cordoned)
        }
        self._free = [
            each
            for each in given.keys
            if owners.get(each.key) in takers and each.key not in pairs
        ]
        topics = sorted({each.key.topic for each in given.keys})
        # Members that may take keys of a topic, by host; such hosts by rack; racks.
        self._takers: dict[Node, list[str]] = {}
        self._hosts: dict[Node, list[Node]] = {}
        self._racks: dict[Node, list[Node]] = {}
        for topic in topics:
            for name in sorted(takers):
                if topic in self._members[name].topics:
                    self._add_taker(topic, name)
        # Number of keys in each rack and on each host; and how many of them may move.
        self._counts: dict[Node, int] = {}
        self._movable: dict[Node, int] = {}
        self._load = dict.fromkeys(self._members, 0)
        # Per member and topic: keys that may move, now and before.
        self._has: dict[str, dict[str, int]] = {name: {} for name in self._members}
        self._held: dict[str, dict[str, int]] = {name: {} for name in self._members}
        self._count_keys(given)

    def _add_taker(self, topic: str, name: str) -> None:
        host, rack = self._host(topic, name), self._rack(topic, name)
        of_topic = self._racks.setdefault(Node(TOPIC, topic), [])
        if rack not in of_topic:
            of_topic.append(rack)
        of_rack = self._hosts.setdefault(rack, [])
        if host not in of_rack:
            of_rack.append(host)
        self._takers.setdefault(host, []).append(name)

    def _host(self, topic: str, name: str) -> Node:
        member = self._members[name]
        return Node(AT_HOST, topic, (member.rack, member.host))

    def _rack(self, topic: str, name: str) -> Node:
        return Node(IN_RACK, topic, (self._members[name].rack,))

    def _count_keys(self, given: PlanInput) -> None:
        movable = {each.key for each in self._free}
        for each in given.keys:
            name, topic = self._owners.get(each.key), each.key.topic
            if name is None:
                continue
            self._load[name] += 1
            for node in (self._host(topic, name), self._rack(topic, name)):
                self._counts[node] = self._counts.get(node, 0) + 1
                if each.key in movable:
                    self._movable[node] = self._movable.get(node, 0) + 1
            if each.key in movable:
                self._has[name][topic] = self._has[name].get(topic, 0) + 1
                if each.owner in self._held:
                    held = self._held[each.owner]
                    held[topic] = held.get(topic, 0) + 1

    # --- improvements

    def solve(self) -> None:
        """Improve the counts."""
        if len({node.at for node in self._takers}) <= 1:
            return  # all members are in one place, or places are unknown
        seen = 0
        while seen <= ARCS_MAX:
            cycle, arcs = self._improvement()
            seen += arcs
            if not cycle:
                return
            for index, node in enumerate(cycle):
                self._shift(node, cycle[(index + 1) % len(cycle)])

    def _improvement(self) -> tuple[list[Node], int]:
        """Return a cycle with a negative cost, [] if there is none; and arcs seen."""
        numbers: dict[Node, int] = {}
        nodes: list[Node] = []

        def number_of(node: Node) -> int:
            number = numbers.setdefault(node, len(nodes))
            if number == len(nodes):
                nodes.append(node)
            return number

        cost = {number_of(Node(SINK)): 0}
        before: dict[int, int] = {}
        frontier = list(cost)
        arcs = 0
        while frontier:
            reached: dict[int, None] = {}
            for number in frontier:
                base = cost[number]
                for target, price in self._arcs(nodes[number]):
                    arcs += 1
                    to = number_of(target)
                    known = cost.get(to)
                    if known is None or base + price < known:
                        cost[to] = base + price
                        before[to] = number
                        reached[to] = None
            found = cycle_in(before)
            if found:
                return [nodes[number] for number in found], arcs
            frontier = list(reached)
        return [], arcs

    def _arcs(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Return where a key could go next, and what that costs."""
        match node.kind:
            case "sink":
                for name, has in self._has.items():
                    if any(has.values()):
                        level = self._level(self._members[name], self._load[name])
                        yield Node(MEMBER, "", (name,)), -level
            case "member":
                yield from self._arcs_of_member(node.at[0])
            case "host":
                for name in self._takers.get(node, ()):
                    is_back = self._number(self._has, name, node.topic) < (
                        self._number(self._held, name, node.topic)
                    )
                    yield Node(MEMBER, "", (name,)), -MOVE if is_back else 0
                if self._movable.get(node, 0):
                    rack = Node(IN_RACK, node.topic, node.at[:1])
                    yield rack, -HOST * (2 * self._counts[node] - 1)
            case "rack":
                for host in self._hosts.get(node, ()):
                    yield host, HOST * (2 * self._counts.get(host, 0) + 1)
                if self._movable.get(node, 0):
                    topic = Node(TOPIC, node.topic)
                    yield topic, -RACK * (2 * self._counts[node] - 1)
            case _:
                for rack in self._racks.get(node, ()):
                    yield rack, RACK * (2 * self._counts.get(rack, 0) + 1)

    def _arcs_of_member(self, name: str) -> Iterator[tuple[Node, int]]:
        for topic, count in self._has[name].items():
            if count:
                is_own = count <= self._number(self._held, name, topic)
                yield self._host(topic, name), MOVE if is_own else 0
        member, load = self._members[name], self._load[name]
        if member.limit is None or load < member.limit:
            yield Node(SINK), self._level(member, load + 1)

    @staticmethod
    def _level(member: PlanMember, count: int) -> int:
        return unit_cost(member, count) * LEVEL

    @staticmethod
    def _number(counts: Mapping[str, Mapping[str, int]], name: str, topic: str) -> int:
        return counts[name].get(topic, 0)

    def _shift(self, node: Node, to: Node) -> None:
        """Move one key along an arc."""
        kinds = (node.kind, to.kind)
        if kinds == (MEMBER, AT_HOST):
            self._change(node.at[0], to.topic, -1)
        elif kinds == (AT_HOST, MEMBER):
            self._change(to.at[0], node.topic, 1)
        elif kinds in {(AT_HOST, IN_RACK), (IN_RACK, TOPIC)}:
            self._counts[node] -= 1
            self._movable[node] -= 1
        elif kinds in {(IN_RACK, AT_HOST), (TOPIC, IN_RACK)}:
            self._counts[to] = self._counts.get(to, 0) + 1
            self._movable[to] = self._movable.get(to, 0) + 1

    def _change(self, name: str, topic: str, by: int) -> None:
        self._has[name][topic] = self._has[name].get(topic, 0) + by
        self._load[name] += by

    # --- which keys

    def owners(self) -> dict[TopicPartition, str]:
        """Return the owner of each key; a member gives up the last keys of a topic."""
        left = {name: dict(has) for name, has in self._has.items()}
        rest: list[PlanKey] = []
        for each in self._free:
            topic = each.key.topic
            own = left.get(each.owner or "", {})
            if own.get(topic, 0):
                own[topic] -= 1
                self._owners[each.key] = each.owner or ""
            else:
                rest.append(each)
        turns: dict[str, list[str]] = {}
        for name, has in left.items():
            for topic, count in has.items():
                turns.setdefault(topic, []).extend([name] * count)
        for names in turns.values():
            heapify(names)
        for each in rest:
            self._owners[each.key] = heappop(turns[each.key.topic])
        return self._owners
