"""Which client has which partition: a pure function, sticky and balanced."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import attrs

from kafka_marshal.protocol.planner import targets
from kafka_marshal.protocol.types import Key


@attrs.frozen
class Seat:
    """One client that wants the partitions of a subscription.

    Attributes:
        name: The client.
        most: Most partitions, or whole topics, that it takes; None = no limit.
    """

    name: str
    most: int | None = None


def place(
    keys: Iterable[Key],
    seats: Sequence[Seat],
    *,
    present: Mapping[Key, str],
    whole_topics: bool = False,
) -> dict[Key, str]:
    """Return who should have which key; what nobody has room for is left out.

    Everybody gets an equal share within its limit. Who has something keeps it up
    to that share, the first by name; what is free goes to whoever has least.

    Args:
        keys: What is to be had.
        seats: Who wants it, each name once.
        present: Who has, or had, what; names that are no seats do not count.
        whole_topics: Whether all partitions of a topic go to one client.
    """
    units: dict[object, list[Key]] = {}
    for key in sorted(keys):
        units.setdefault(key.topic if whole_topics else key, []).append(key)
    names = {seat.name for seat in seats}
    had = {unit: _holder(parts, present, names) for unit, parts in units.items()}
    counts = dict.fromkeys(sorted(names), 0)
    for name in had.values():
        if name is not None:
            counts[name] += 1
    caps = {seat.name: seat.most for seat in seats if seat.most is not None}
    share = targets(sorted(names), counts, count=len(units), caps=caps)
    given = dict.fromkeys(sorted(names), 0)
    placed: dict[object, str] = {}
    for unit, name in had.items():
        if name is not None and given[name] < share[name]:
            placed[unit] = name
            given[name] += 1
    room = [(given[name], name) for name in given if given[name] < share[name]]
    heapify(room)
    for unit in units:
        if unit in placed or not room:
            continue
        count, name = heappop(room)
        placed[unit] = name
        if count + 1 < share[name]:
            heappush(room, (count + 1, name))
    return {key: placed[unit] for unit in placed for key in units[unit]}


def _holder(
    parts: Sequence[Key], present: Mapping[Key, str], names: Collection[str]
) -> str | None:
    """Return who has a partition, or of a topic the first one that is had."""
    for key in parts:
        name = present.get(key)
        if name in names:
            return name
    return None
