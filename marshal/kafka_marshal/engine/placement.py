"""Finds the coordinating partition of each key while their number changes.

PROTOCOL 10. A key that moves belongs to its source until its target knows the key, or
has nothing left to import from that source. Until then, nobody can claim it.
"""

from collections.abc import Mapping

from kafka_marshal.protocol.hashing import RESERVED_TOPICS, home_partition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.lost_changes import (
    lost_by,
    lost_configs,
    unclaimed,
)
from kafka_marshal.protocol.placement import newest
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key

from .replica import Replica

KEPT_MAX = 1_000_000
"""Keys whose partitions are kept, so that they are not hashed again."""


class Placement:
    """Places the keys and groups of one engine. Used under its lock.

    Attributes:
        from_count: The previous count while a change is open in any partition; None
            otherwise: then placing a key takes one look-up.
        is_torn: Whether partitions show two changes of one generation; then nobody
            claims.
        has_layouts: Whether any partition has a layout, maybe one of an earlier change,
            or has lost a layout or a Config.
        lost: Partitions in use that lack the newest Config (PROTOCOL 10.9).
        read: The newest Config that was ever read; all partitions may have lost it.
    """

    __slots__ = (
        "_before",
        "_count",
        "_generation",
        "_now",
        "_replicas",
        "from_count",
        "has_layouts",
        "is_torn",
        "lost",
        "read",
    )

    def __init__(self, replicas: Mapping[int, Replica]) -> None:
        self._replicas = replicas
        self._count = 0
        self._generation = 0
        self.lost: frozenset[int] = frozenset()
        self.read: Config | None = None
        self.from_count: int | None = None
        self.is_torn = False
        self.has_layouts = False
        self._now: dict[Key, int] = {}
        self._before: dict[Key, int] = {}

    def follow(self, config: Config) -> bool:
        """Place keys by a Config; return whether a change began, went on or ended.

        Called whenever a Config or a layout of any partition may have changed.
        """
        worlds = [each.world for each in self._replicas.values()]
        laid = [world for world in worlds if world.layout is not None]
        known = {world.partition: world for world in worlds}
        read = newest(config, worlds)
        if self.read is None or _rank(self.read) < _rank(read):
            self.read = read
        self.lost = unclaimed(known, self.read)
        is_due = self.lost and (lost_by(known) or lost_configs(known, self.read))
        self.has_layouts = bool(laid or is_due)
        before = self.counts
        self._generation = config.generation
        self.from_count = None
        for world in laid:
            layout = world.layout
            if layout is not None and self._is_fenced(world):
                self.from_count = layout.from_count
        if self._count != config.partition_count:
            self._count = config.partition_count
            self._now.clear()
        if before != self.counts:
            self._before.clear()
            return True
        return False

    @property
    def counts(self) -> tuple[int, int | None]:
        """The count by which keys are placed, and ``from_count``."""
        return self._count, self.from_count

    def partition_of(self, key: Key) -> int:
        """Return the partition that knows a key, else the one for its next claim."""
        place = self._now.get(key)
        if place is None:
            if key.topic in RESERVED_TOPICS:
                return key.partition
            place = _note(self._now, key, self._count)
        if self.from_count is None:
            return place
        source = self._source_of(key, place)
        if source is None or self._has_moved(key, source, place):
            return place
        replica = self._replicas.get(source)
        is_there = replica is not None and key in replica.world.keys
        return source if is_there else place

    def awaits_import(self, key: Key) -> bool:
        """Return whether nobody can claim a key until it is imported (PROTOCOL 10.3).

        Or until its target has nothing left to import from the source. Also while its
        partition lacks the newest change, which it may have lost (10.9): a claim would
        get a lower token than claims under that change.
        """
        is_settled = self.from_count is None and not self.lost
        if is_settled or key.topic in RESERVED_TOPICS:
            return False
        place = self._now.get(key)
        if place is None:
            place = _note(self._now, key, self._count)
        if place in self.lost:
            return True
        if self.from_count is None:
            return False
        replica = self._replicas.get(place)
        if replica is None or not self._is_fenced(replica.world):
            return True
        source = self._source_of(key, place)
        return source is not None and not self._has_moved(key, source, place)

    def is_known_elsewhere(self, key: Key, partition: int) -> bool:
        """Return whether a key claimed in a partition is known where it moves to.

        Then that claim is over, although the log of its partition may not show the end:
        it went back, or is read late (PROTOCOL 10.9).
        """
        if key.topic in RESERVED_TOPICS:
            return False
        place = self._now.get(key)
        if place is None:
            place = _note(self._now, key, self._count)
        replica = self._replicas.get(place)
        if place == partition or replica is None:
            return False
        return self._is_fenced(replica.world) and key in replica.world.keys

    def homes_of(self, group_id: str) -> tuple[int, ...]:
        """Return the homes of a group: by the Config, then by the count before it."""
        home = home_partition(group_id, partition_count=self._count)
        if self.from_count is None:
            return (home,)
        before = home_partition(group_id, partition_count=self.from_count)
        return (home,) if before == home else (home, before)

    def _source(self, key: Key) -> int:
        assert self.from_count is not None
        source = self._before.get(key)
        if source is None:
            source = _note(self._before, key, self.from_count)
        return source

    def _source_of(self, key: Key, place: int) -> int | None:
        """Return where a key comes from, None if it stays."""
        source = self._source(key)
        return None if source == place else source

    def _has_moved(self, key: Key, source: int, place: int) -> bool:
        replica = self._replicas.get(place)
        if replica is None or not self._is_fenced(replica.world):
            return False  # its state is older than the change
        world = replica.world
        return key in world.keys or _has_all(world, source)

    def _is_fenced(self, world: WorldState) -> bool:
        config = world.config
        return config is not None and config.generation >= self._generation


def _note(places: dict[Key, int], key: Key, count: int) -> int:
    """Compute the partition of a key, and keep it; the table stays within its limit."""
    if len(places) >= KEPT_MAX:
        places.clear()
    place = places[key] = place_of(key, partition_count=count)
    return place


def _rank(config: Config) -> tuple[int, int]:
    """Return the sort key of a Config: its generation, then its era."""
    return config.generation, config.era


def _has_all(target: WorldState, source: int) -> bool:
    """Return whether a target has nothing left to import from a source."""
    if target.layout is None:
        return True
    found = target.layout.source(source)
    return found is not None and found.done_ms is not None
