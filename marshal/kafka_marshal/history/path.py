"""The past of a key over the coordinating partitions that it was in (PROTOCOL 10).

Each change of the partition count may move a key: its earlier records stay in the log
of the partition that it came from. Pure functions of the chains of these partitions.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter

import attrs

from kafka_marshal.history.chain import (
    CLAIMS_MAX,
    EVENTS_MAX,
    KeyChain,
    KeyEvent,
    Move,
)
from kafka_marshal.history.rows import Interval, PauseRow
from kafka_marshal.protocol.placement import counts_of, partition_of, place_under
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key

Chains = Mapping[int, tuple[KeyChain, WorldState]]
"""The chain of a key, and the world at its end, by coordinating partition."""


def places_of(key: Key, chains: Chains) -> set[int]:
    """Return the partitions that a key is or was in, as far as these chains show.

    Where none of them has a Config, partition 0 has the first one.
    """
    found, has_config = set[int](), False
    for chain, world in chains.values():
        has_config = has_config or world.config is not None
        found.update(place_under(key, count) for count in counts_of({0: world}))
        for move in chain.moves:
            found.update((move.source, move.target))
    return found if has_config else {0}


def counts_in(chains: Chains) -> set[int]:
    """Return the partition counts that these chains show."""
    return {count for _, world in chains.values() for count in counts_of({0: world})}


@attrs.frozen(kw_only=True)
class KeyPath:
    """The joined past of a key; ``KeyPast``.

    Attributes:
        key: The key.
        world: The partition that the key is shown from, at the moment of the view.
        events: The last events, oldest first; at most ``EVENTS_MAX``.
        events_count: Number of all events.
        claims: The last claims, by token; at most ``CLAIMS_MAX``.
        claims_count: Number of all claims.
        refused_count: Number of refused or ignored records about the key.
        began_at: Offset of the checkpoint at which the earliest partition begins, None
            at the start of its log.
        pause: The active pause of the key that lasts longest, None without one.
    """

    key: Key
    world: WorldState
    events: Sequence[KeyEvent]
    events_count: int
    claims: Sequence[Interval]
    claims_count: int
    refused_count: int
    began_at: int | None
    pause: PauseRow | None


def joined(key: Key, chains: Chains, *, at: int | None = None) -> KeyPath:
    """Return the past of a key from the chains of its partitions.

    Args:
        key: The key.
        chains: The chains.
        at: The partition of the view, None for the one that knows the key.
    """
    worlds = {t: world for t, (_, world) in chains.items()}
    place = partition_of(worlds, key) if at is None else at
    found = worlds.get(place or 0, next(iter(worlds.values())))
    shown = {
        t: chain
        for t, (chain, _) in chains.items()
        if t == found.partition or _is_part(chain)
    }
    moves = sorted({move for chain in shown.values() for move in chain.moves})
    numbers = {op_id: index + 1 for index, op_id in enumerate(_operations(moves))}
    events = sorted(
        (pair for chain in shown.values() for pair in _placed(chain, numbers)),
        key=lambda pair: pair[0],
    )
    claims = sorted(
        (claim for chain in shown.values() for claim in chain.claims),
        key=attrgetter("token"),
    )
    first = events[0][1].partition if events else found.partition
    return KeyPath(
        key=key,
        world=found,
        events=[event for _, event in events][-EVENTS_MAX:],
        events_count=sum(chain.events_count for chain in shown.values()),
        claims=claims[-CLAIMS_MAX:],
        claims_count=sum(chain.claims_count for chain in shown.values()),
        refused_count=sum(chain.refused_count for chain in shown.values()),
        began_at=chains[first][0].began_at,
        pause=chains[found.partition][0].pause,
    )


def _operations(moves: Sequence[Move]) -> list[bytes]:
    """Return the operations of moves, each once, in order of their generations."""
    return list(dict.fromkeys(move.op_id for move in moves))


def _is_part(chain: KeyChain) -> bool:
    """Return whether a partition shows anything but that it knew nothing."""
    return any(event.what != "restored" or event.client_id for event in chain.events)


def _placed(
    chain: KeyChain, numbers: Mapping[bytes, int]
) -> Iterator[tuple[tuple[int, int], KeyEvent]]:
    """Yield the events of a partition with their places in the order of all.

    Clocks of leaders differ, so times compare only what the key was between two moves:
    what its target shows after the import is later than all that its source does.
    """
    times = accumulate((event.at_ms for event in chain.events), max)
    for event, at_ms in zip(chain.events, times, strict=True):
        stay = 0
        if event.move is not None:
            stay = numbers[event.move.op_id] - (not event.is_moved)
        yield (stay, at_ms), event
