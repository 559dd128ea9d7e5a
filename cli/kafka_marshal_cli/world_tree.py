"""A world as a tree of directories and files, which ``marshal shell`` walks.

A node is made when it is visited, and a file's value is computed when it is read, so a
world with 100,000 keys costs no more than an index of their names. Names are those of
the protocol, without control characters; a slash in a name is written ``%2F``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, cast

import attrs
import msgspec

from kafka_marshal import Key, World
from kafka_marshal.protocol.placement import by_partition, leading
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import MemberState, Staging, WorldState
from kafka_marshal.protocol.text import record_to_object
from kafka_marshal_cli import presenters

Json = Any
"""Any JSON value."""


@attrs.frozen
class File:
    """A file, which has one value.

    Attributes:
        read: Returns the value.
    """

    read: Callable[[], Json]


@attrs.frozen
class Directory:
    """A directory, which has named nodes.

    Attributes:
        names: Returns the names, in order.
        child: Returns the node with a name; None if no node has it.
    """

    names: Callable[[], Sequence[str]]
    child: Callable[[str], "Node | None"]


Node = File | Directory


def tree_of(world: World, *, topic: str) -> Directory:
    """Return the root of a world's tree.

    Args:
        world: The world. It must not change.
        topic: Name of the coordination topic, or of the file that was read.
    """
    index = _Index(world)
    states = {str(state.partition): state for state in world.partitions}
    return _directory(
        {
            "config": File(partial(_config_of, world)),
            "groups": _nodes(index.groups, partial(_group, index)),
            "partitions": _nodes(states, lambda t: _partition(world, states[t])),
            "topic": File(lambda: _topic(world, topic)),
        }
    )


def path_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the path of a row of ``log_states.difference``."""
    where: tuple[str, ...] = ("partitions", str(row["partition"]))
    match row["what"]:
        case "key":
            group_id, _, rest = row["name"].partition("/")
            topic, _, partition = rest.rpartition("/")
            where = ("groups", group_id, "keys", _segment(topic), partition)
        case "group":
            where = ("groups", row["name"], "partitions", str(row["partition"]))
        case "config":
            where = (*where, "config")
    return (*where, row["field"])


def to_json_value(value: object) -> Json:
    """Return a value of a state as JSON: bytes as hex, records as objects."""
    if isinstance(value, bytes):
        return value.hex()
    if attrs.has(type(value)):
        fields = attrs.asdict(cast("attrs.AttrsInstance", value), recurse=False)
        return to_json_value(fields)
    if isinstance(value, msgspec.Struct):
        return to_json_value(msgspec.structs.asdict(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_json_value(value._asdict())
    if isinstance(value, Mapping):
        return {name: to_json_value(each) for name, each in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [to_json_value(each) for each in value]
    return value


Claims = dict[str, dict[str, dict[str, WorldState]]]
"""The state that judges each key, by group, topic and partition."""

Members = dict[str, dict[str, dict[str, tuple[WorldState, MemberState]]]]
"""The last announcement of each member, by group, client and incarnation."""


class _Index:
    """The names in a world, each kind collected when it is first needed."""

    def __init__(self, world: World) -> None:
        self.world = world

    @cached_property
    def claims(self) -> Claims:
        found: Claims = {}
        for key, state in self.world.standing().items():
            topics = found.setdefault(key.group_id, {})
            topics.setdefault(key.topic, {})[str(key.partition)] = state
        return found

    @cached_property
    def members(self) -> Members:
        found: Members = {}
        for state, member in self.world.members():
            record = member.record
            clients = found.setdefault(record.group_id, {})
            process = record.incarnation.hex()
            clients.setdefault(record.client_id, {})[process] = state, member
        return found

    @cached_property
    def groups(self) -> set[str]:
        names = {name for state in self.world.partitions for name in state.groups}
        return names | self.claims.keys() | self.members.keys()


def _directory(nodes: Mapping[str, Node]) -> Directory:
    return Directory(lambda: sorted(nodes), nodes.get)


def _nodes(names: Iterable[str], child: Callable[[str], Node]) -> Directory:
    """Return a directory whose nodes are made when they are visited.

    Args:
        names: The names, without order; a set or mapping.
        child: Returns the node of one of them.
    """
    return Directory(
        cache(lambda: sorted(map(_segment, names), key=_order)),
        lambda name: child(_name(name)) if _name(name) in names else None,
    )


def _files(values: Callable[[], Mapping[str, Json]], names: Iterable[str]) -> Directory:
    """Return a directory with a file for each value; all are computed together."""
    computed = cache(values)

    def file(name: str) -> File:
        return File(lambda: computed()[name])

    return _directory({name: file(name) for name in names})


def _segment(name: str) -> str:
    return name.replace("/", "%2F")


def _name(segment: str) -> str:
    return segment.replace("%2F", "/")


def _order(name: str) -> tuple[int, str]:
    return (int(name), name) if name.isdecimal() else (-1, name)


def _topic(world: World, name: str) -> Json:
    as_of = presenters.as_of(world)
    return {"name": name, "cluster_id": world.cluster_id, "as_of": as_of}


def _config_of(world: World) -> Json:
    """Return the Config, or null if the partitions have none or disagree.

    While the partition count changes, return the Config of the partitions that the
    change has reached.
    """
    found = {state.config for state in world.partitions if state.config is not None}
    is_changing = any(state.layout is not None for state in world.partitions)
    first = leading(by_partition(world.partitions))
    if first is None or first.config is None or (len(found) > 1 and not is_changing):
        return None
    return record_to_object(first.config)["data"]


def _group(index: _Index, group_id: str) -> Directory:
    world = index.world
    topics = index.claims.get(group_id, {})
    clients = index.members.get(group_id, {})
    states = {str(s.partition): s for s in world.partitions if group_id in s.groups}

    def of_topic(topic: str) -> Directory:
        partitions = topics[topic]
        return _nodes(
            partitions,
            lambda p: _key(world, partitions[p], Key(group_id, topic, int(p))),
        )

    def of_client(client_id: str) -> Directory:
        processes = clients[client_id]
        return _nodes(processes, lambda name: _member(world, *processes[name]))

    def of_partition(number: str) -> File:
        return File(lambda: to_json_value(states[number].groups[group_id]))

    return _directory(
        {
            "keys": _nodes(topics, of_topic),
            "members": _nodes(clients, of_client),
            "partitions": _nodes(states, of_partition),
            "pause": File(lambda: _pause(world, group_id)),
            "verdict": File(lambda: _verdict(states.values(), group_id)),
        }
    )


def _pause(world: World, group_id: str) -> Json:
    """Return the pause that most coordinating partitions have, null without one."""
    every = world.pauses(group_id)
    rows = [row for row in every if row["state"] == "paused"]
    return max(rows, key=lambda row: row["partitions_count"], default=None)


def _verdict(states: Iterable[WorldState], group_id: str) -> Json:
    """Return the last committed set position, which only the home partition has."""
    found = (state.groups[group_id].verdict for state in states)
    return to_json_value(next((each for each in found if each is not None), None))


def _key(world: World, state: WorldState, key: Key) -> Directory:
    known = state.keys[key]
    hard = [field.name for field in attrs.fields(type(known))]
    shown = ("token", "freshness", "age_ms", "freshness_estimate", "age_estimate_ms")
    more = ("coordinating_partition", "why")

    def values() -> Mapping[str, Json]:
        row = presenters.claim_row(world, key, state=state)
        return {**{name: row[name] for name in shown + more}, **to_json_value(known)}

    return _files(values, [*shown, *more, *hard])


def _member(world: World, state: WorldState, member: MemberState) -> File:
    def read() -> Json:
        row = presenters.member_row(world, member, state=state)
        about = {name: row[name] for name in ("state", "silent_estimate_ms")}
        place = {"since_offset": member.since_offset, "offset": member.offset}
        return {**about, **place, **record_to_object(member.record)["data"]}

    return File(read)


_HEADER = (
    *("next_offset", "leader_epoch", "log_time_ms", "epoch_time_ms", "append_time_ms"),
    *("eras", "quiet_until_ms", "layout", "growths", "halted"),
)
# Named after the record Reset, whose parts are collected there.
_STAGING = "reset"


def header_of(state: WorldState) -> dict[str, Json]:
    """Return the fields of a state besides its Config, keys and groups."""
    found = {name: _value_of(state, name) for name in _HEADER}
    return {**found, _STAGING: _staging(state.staging)}


def _partition(world: World, state: WorldState) -> Directory:
    def config() -> Json:
        config = state.config
        return None if config is None else record_to_object(config)["data"]

    missing = world.log_start_missing
    files: dict[str, Callable[[], Json]] = {
        "config": config,
        "counters": lambda: dict(sorted(state.soft.counters.items())),
        "digest": lambda: digest(state),
        "groups_count": lambda: len(state.groups),
        "is_known": lambda: state.partition not in missing,
        "keys_count": lambda: len(state.keys),
        "members_count": lambda: len(state.soft.members),
        _STAGING: lambda: _staging(state.staging),
        "undecodable": lambda: to_json_value(state.soft.undecodable),
    }
    for name in _HEADER:
        files[name] = partial(_value_of, state, name)
    return _directory({name: File(read) for name, read in files.items()})


def _value_of(state: WorldState, name: str) -> Json:
    return to_json_value(getattr(state, name))


def _staging(staging: Staging | None) -> Json:
    """Return an unfinished Reset, with the number of its parts instead of the parts."""
    if staging is None:
        return None
    found: dict[str, Json] = to_json_value(staging._replace(parts=()))
    return found | {"parts": len(staging.parts)}
