"""Random small groups, and the cost of an optimal plan for one.

The optimum comes from a min-cost flow over single keys, which shares nothing with the
planner: a node for each key and each part of a member, an arc for each key that a
member may have.
"""

import itertools
import random

import attrs
import networkx as nx

from kafka_marshal.protocol.group_plan import PlanInput, PlanKey, PlanMember
from kafka_marshal.protocol.types import TopicPartition

# Weights of the objective: each exceeds any sum of the next one.
UNCOVERED, DRAINED, OVER_TARGET, LEVEL, MOVE = 10**12, 10**10, 10**8, 10**4, 1


def uniform_group(chance):
    """Return equal members; some owners of keys are no longer members."""
    names = [f"m{n}" for n in range(chance.randint(1, 6))]
    owners = [*names, "gone", None][:: chance.choice([1, 1, 2])]
    members = [PlanMember(name=name, topics=("t", "u")) for name in names]
    return _group(chance, members, topics=("t", "u"), owners=owners)


def mixed_group(chance):
    """Return members with different topics, limits, targets, weights and places."""
    topics = ("t", "u", "v")[: chance.randint(1, 3)]
    members = []
    for number in range(chance.randint(0, 5)):
        state = chance.choice(["", "", "", "", "drained", "cordoned"])
        few = sorted(chance.sample(topics, chance.randint(1, len(topics))))
        members.append(
            PlanMember(
                name=f"m{number}",
                topics=tuple(few),
                limit=chance.choice([None, None, None, 0, 1, 2, 4]),
                target=chance.choice([None, None, None, 1, 3]),
                weight=chance.choice([1, 1, 1, 2, 3]),
                host=chance.choice(["", "h1", "h2", "h3"]),
                rack=chance.choice(["", "r1", "r2"]),
                is_drained=state == "drained",
                is_cordoned=state == "cordoned",
            )
        )
    owners = [*(member.name for member in members), "gone", None]
    return _group(chance, members, topics=topics, owners=owners, has_pairs=True)


def _group(chance, members, *, topics, owners, has_pairs=False):
    keys = tuple(
        PlanKey(TopicPartition(topic, n), chance.choice(owners), chance.random() < 0.2)
        for topic in topics
        for n in range(chance.randint(0, 5))
    )
    pairs = [(m.name, k.key) for m in members for k in keys if chance.random() < 0.04]
    if not has_pairs:
        pairs = []
    half = len(pairs) // 2
    return PlanInput(
        keys=keys,
        members=tuple(members),
        failing=tuple(pairs[:half]),
        barred=tuple(pairs[half:]),
    )


def may_have(given, each, member):
    """Return whether a member may have a key, by the constraints alone."""
    if each.key.topic not in member.topics:
        return False
    if (member.name, each.key) in given.failing:
        return False
    if each.owner == member.name and not each.is_free:
        return True
    is_taking = not (member.is_drained or member.is_cordoned)
    return is_taking and (member.name, each.key) not in given.barred


def price(given, owners):
    """Return the parts of a plan's cost: uncovered, drained, over, level, moves.

    Raises:
        AssertionError: The plan breaks a constraint.
    """
    loads = dict.fromkeys((m.name for m in given.members), 0)
    by_name = {m.name: m for m in given.members}
    moves = uncovered = 0
    for each in given.keys:
        name = owners.get(each.key)
        if name is None:
            uncovered += 1
            continue
        assert may_have(given, each, by_name[name]), (each, name)
        loads[name] += 1
        moves += name != each.owner
    drained = over = level = 0
    for name, load in loads.items():
        member = by_name[name]
        assert member.limit is None or load <= member.limit, (name, load)
        if member.is_drained:
            drained += load
            continue
        over += max(0, load - (load if member.target is None else member.target))
        parts = [load // member.weight] * member.weight
        for n in range(load % member.weight):
            parts[n] += 1
        level += sum(count * (count - 1) // 2 for count in parts)
    return uncovered, drained, over, level, moves


def optimum(given):
    """Return the cost of an optimal plan, in the same parts."""
    graph = nx.MultiDiGraph()
    count = len(given.keys)
    graph.add_node("source", demand=-count)
    graph.add_node("sink", demand=count)
    for each in given.keys:
        graph.add_edge("source", each.key, capacity=1, weight=0)
        graph.add_edge(each.key, "sink", capacity=1, weight=UNCOVERED)
        for member in given.members:
            if may_have(given, each, member):
                cost = MOVE * (each.owner != member.name)
                graph.add_edge(each.key, member.name, capacity=1, weight=cost)
    for member in given.members:
        _add_member(graph, member, count)
    cost, _ = nx.network_simplex(graph)
    parts = []
    for weight in (UNCOVERED, DRAINED, OVER_TARGET, LEVEL, MOVE):
        part, cost = divmod(cost, weight)
        parts.append(part)
    return tuple(parts)


def _add_member(graph, member, count):
    """Add the arcs of one member: limit, target, then one node for each part."""
    name, limit = member.name, count if member.limit is None else member.limit
    graph.add_edge(name, (name, "in"), capacity=limit, weight=0)
    if member.is_drained:
        graph.add_edge((name, "in"), "sink", capacity=count, weight=DRAINED)
        return
    target = count if member.target is None else member.target
    graph.add_edge((name, "in"), (name, "all"), capacity=target, weight=0)
    graph.add_edge((name, "in"), (name, "all"), capacity=count, weight=OVER_TARGET)
    for part, unit in itertools.product(range(member.weight), range(count)):
        node = (name, "part", part)
        if not unit:
            graph.add_edge((name, "all"), node, capacity=count, weight=0)
        graph.add_edge(node, "sink", capacity=1, weight=unit * LEVEL)


def chance_of(seed):
    """Return the random generator of a seed."""
    return random.Random(seed)


# --- Inputs and results as JSON ---


def to_object(given):
    """Return an input as JSON; defaults of members are left out."""
    plain = {field.name: field.default for field in attrs.fields(PlanMember)}
    members = []
    for member in given.members:
        values = attrs.asdict(member)
        members.append({k: v for k, v in values.items() if v != plain[k]})
    return {
        "keys": [[*each.key, each.owner, each.is_free] for each in given.keys],
        "members": members,
        "failing": [[name, *key] for name, key in given.failing],
        "barred": [[name, *key] for name, key in given.barred],
    }


def from_object(found):
    """Return the input of ``to_object``."""

    def pairs(name):
        return tuple((who, TopicPartition(*key)) for who, *key in found[name])

    return PlanInput(
        keys=tuple(
            PlanKey(TopicPartition(topic, number), owner, is_free)
            for topic, number, owner, is_free in found["keys"]
        ),
        members=tuple(
            PlanMember(**{**each, "topics": tuple(each["topics"])})
            for each in found["members"]
        ),
        failing=pairs("failing"),
        barred=pairs("barred"),
    )


def result_object(planned):
    """Return a result as JSON."""
    return {
        "owners": [[*key, name] for key, name in sorted(planned.owners.items())],
        "moves": [[*each.key, each.source, each.to] for each in planned.moves],
        "uncovered": [[*each.key, each.reason] for each in planned.uncovered],
    }
