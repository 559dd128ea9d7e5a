"""What differs between two worlds, key by key. Pure.

A world here is the state of each coordinating partition, whatever it was read from:
a live log, a dump or a file of snapshots.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.text import record_to_object

Worlds = Mapping[int, WorldState]
"""Coordinating partition to its state."""

_HEADER = (
    "next_offset",
    "leader_epoch",
    "epoch_time_ms",
    "log_time_ms",
    "append_time_ms",
)


def difference(one: Worlds, other: Worlds) -> list[dict[str, Any]]:
    """Return every field in which two worlds differ, in order.

    Each row names the partition, what it is about (``header``, ``config``, ``key``,
    ``group`` or ``partition``), its name, the field, and both values; a value is
    null where one of them has no such thing.
    """
    rows: list[dict[str, Any]] = []
    for number in sorted(one.keys() | other.keys()):
        a, b = one.get(number), other.get(number)
        if a is None or b is None:
            ours = None if a is None else digest(a)
            theirs = None if b is None else digest(b)
            rows.append(_row(number, "partition", found=("digest", ours, theirs)))
        elif digest(a) != digest(b):
            rows += _of_states(a, b)
    return rows


def _of_states(a: WorldState, b: WorldState) -> Iterator[dict[str, Any]]:
    number = a.partition
    for each in _fields(
        {name: getattr(a, name) for name in _HEADER},
        {name: getattr(b, name) for name in _HEADER},
    ):
        yield _row(number, "header", found=each)
    for each in _fields(_config(a), _config(b)):
        yield _row(number, "config", found=each)
    for key in sorted(a.keys.keys() | b.keys.keys()):
        name = f"{key.group_id}/{key.topic}/{key.partition}"
        for each in _fields(_key(a.keys.get(key)), _key(b.keys.get(key))):
            yield _row(number, "key", name=name, found=each)
    for group_id in sorted(a.groups.keys() | b.groups.keys()):
        ours, theirs = a.groups.get(group_id), b.groups.get(group_id)
        for each in _fields(_group(ours), _group(theirs)):
            yield _row(number, "group", name=group_id, found=each)


def _row(
    number: int, what: str, *, name: str = "", found: tuple[str, Any, Any]
) -> dict[str, Any]:
    field, one, other = found
    return {
        "partition": number,
        "what": what,
        "name": name,
        "field": field,
        "one": one,
        "other": other,
    }


def _fields(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterable[tuple[str, Any, Any]]:
    for field in [*one, *(name for name in other if name not in one)]:
        a, b = one.get(field), other.get(field)
        if a != b:
            yield field, a, b


def _config(state: WorldState) -> Mapping[str, Any]:
    config = state.config
    return {} if config is None else record_to_object(config)["data"]


def _key(known: KeyState | None) -> Mapping[str, Any]:
    if known is None:
        return {}
    fields = attrs.asdict(known, recurse=False)
    return {name: _plain(value) for name, value in fields.items()}


def _group(group: GroupState | None) -> Mapping[str, Any]:
    if group is None:
        return {}
    pause = None if group.pause is None else attrs.astuple(group.pause)
    # Whether there is a group at all counts, too: it may have nothing but keys.
    return {"known": True, "pause": _plain(pause), "over": _plain(group.over)}


def _plain(value: object) -> Any:  # noqa: ANN401 - whatever JSON can hold
    match value:
        case bytes():
            return value.hex()
        case tuple() | list():
            return [_plain(each) for each in value]
    return value
