"""Compares imports with their sources, for readers of both (PROTOCOL 10.4).

The comparison decides nothing: the first import of a key wins, whatever it carries. A
difference means that an importer or a replica is wrong, and that a person should look.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kafka_marshal.protocol.layout import (
    digest_of,
    is_final,
    item_of,
    moving_keys,
    place_of,
)
from kafka_marshal.protocol.placement import Worlds
from kafka_marshal.protocol.records import ImportedKey, LayoutDone, LayoutImport
from kafka_marshal.protocol.state import ACCEPTED, Transitions, WorldState
from kafka_marshal.protocol.types import Key

PENDING_MAX = 100_000
KEPT_MAX = 1_000
"""Maximum number of sources whose keys are kept beyond the end of a change."""


class Divergence(NamedTuple):
    """An import or a LayoutDone that contradicts its source.

    Attributes:
        partition: Coordinating partition of the record.
        offset: Its offset.
        source: The partition that the record names as its source.
        key: The key, None for a LayoutDone.
        why: The difference, for people.
    """

    partition: int
    offset: int
    source: int
    key: Key | None
    why: str


class _Stated(NamedTuple):
    """What a record states about its source, as of an offset of the source."""

    partition: int
    offset: int
    record: LayoutImport | LayoutDone
    item: ImportedKey | None
    generation: int


class _Left(NamedTuple):
    """The moving keys of a source, with None for each key that is not final."""

    to_count: int
    items: Mapping[Key, ImportedKey | None]


class ImportCheck:
    """Collects accepted imports, compares each once its source was read far enough."""

    def __init__(self) -> None:
        self._pending: dict[int, deque[_Stated]] = {}
        self._kept: dict[tuple[int, bytes], _Left] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits for its source to be read."""
        return bool(self._pending)

    def keep(self, state: WorldState) -> None:
        """Keep the moving keys of a partition before a record that may drop them.

        For readers that read a source to its end before they read its target.
        """
        layout = state.layout
        if layout is not None and not layout.sources:
            self._kept[state.partition, layout.op_id] = _left(state)
            if len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]

    def take(self, state: WorldState, transitions: Transitions) -> None:
        """Note the accepted imports of an entry that was folded.

        Args:
            state: The partition of the entry.
            transitions: Its transitions; an import has one for each item, in order.
        """
        record = transitions[0].record if transitions else None
        number = state.partition
        generation = 0 if state.config is None else state.config.generation
        if isinstance(record, LayoutDone):
            if transitions[0].outcome == ACCEPTED:
                offset = transitions[0].offset
                self._add(_Stated(number, offset, record, None, generation))
        elif isinstance(record, LayoutImport):
            # A refused import has one transition for all items.
            for item, each in zip(record.items, transitions, strict=False):
                if each.effect == "imported":
                    self._add(_Stated(number, each.offset, record, item, generation))

    def _add(self, stated: _Stated) -> None:
        found = self._pending.setdefault(
            stated.record.source, deque(maxlen=PENDING_MAX)
        )
        found.append(stated)

    def compare(self, worlds: Worlds) -> Iterator[Divergence]:
        """Yield the differences from sources that were read far enough.

        Call it before a source is folded much further, unless ``keep`` kept its keys:
        the source drops them at the end of the change.

        Args:
            worlds: The partitions whose state is known. Records that name another
                partition as their source are not compared.
        """
        for number, pending in list(self._pending.items()):
            source = worlds.get(number)
            while pending:
                stated = pending[0]
                read_to = stated.record.source_offset
                if source is not None and source.next_offset < read_to:
                    break
                pending.popleft()
                why = None if source is None else self._difference(stated, source)
                if why is not None:
                    key = None if stated.item is None else _key_of(stated.item)
                    yield Divergence(stated.partition, stated.offset, number, key, why)
            if not pending:
                del self._pending[number]

    def _difference(self, stated: _Stated, source: WorldState) -> str | None:
        """Return how a record differs from its source, None if it does not."""
        layout, record = source.layout, stated.record
        left = self._kept.get((source.partition, record.op_id))
        is_open = layout is not None and layout.op_id == record.op_id
        config = source.config
        if config is None or config.generation < stated.generation:
            return "the change had not reached the source"
        if not is_open and left is None:
            return None  # the change has ended in the source: its keys are dropped
        if isinstance(record, LayoutDone):
            found = left if left is not None and not is_open else _left(source)
            return _difference_of_all(record, found, target=stated.partition)
        assert stated.item is not None
        key = _key_of(stated.item)
        if is_open:
            known = source.keys.get(key)
            if known is None:
                return "the source does not know the key"
            item = item_of(key, known) if is_final(source, key) else None
        else:
            assert left is not None
            if key not in left.items:
                return "the source does not know the key"
            item = left.items[key]
        if item is None:
            return "the key may still change in the source"
        if item != stated.item:
            return "the source has left the key in another state"
        return None


def _difference_of_all(record: LayoutDone, left: _Left, *, target: int) -> str | None:
    items = [
        item
        for key, item in sorted(left.items.items())
        if item is not None and place_of(key, partition_count=left.to_count) == target
    ]
    if (len(items), digest_of(items)) == (record.key_count, record.digest):
        return None
    return (
        f"the source has {len(items)} keys that move here; the record has another "
        "count or digest of them"
    )


def _key_of(item: ImportedKey) -> Key:
    return Key(item.group_id, item.topic, item.partition)


def _left(source: WorldState) -> _Left:
    assert source.config is not None  # a change is open
    items = {
        key: item_of(key, source.keys[key]) if is_final(source, key) else None
        for key in moving_keys(source)
    }
    return _Left(source.config.partition_count, items)
