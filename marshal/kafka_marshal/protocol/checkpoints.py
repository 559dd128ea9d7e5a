"""Splits, assembles and compares the checkpoints in the log (PROTOCOL 7.2).

A checkpoint is evidence of a state; it never overrides the state of a reader. After
folding a Begin, a reader has the state that the checkpoint holds, so a comparison costs
one digest and no copy of a state.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import decode
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, CHECKPOINT_TOPIC
from kafka_marshal.protocol.records import (
    CHUNK_BYTES_MAX,
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
)
from kafka_marshal.protocol.snapshot import digest, from_bytes
from kafka_marshal.protocol.state import SKIPPED, Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry

OPEN_MAX = 4
"""Maximum number of unfinished checkpoints that a reader remembers: the newest."""


def checkpoint_key(partition: int) -> Key:
    """Return the key whose owner writes a partition's checkpoints (PROTOCOL 2.3)."""
    return Key(CHECKPOINT_GROUP, CHECKPOINT_TOPIC, partition)


def split(value: bytes) -> list[bytes]:
    """Split canonical bytes into the parts that records carry."""
    return [
        value[at : at + CHUNK_BYTES_MAX] for at in range(0, len(value), CHUNK_BYTES_MAX)
    ]


def parts_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of ``split``, each as soon as its bytes are available."""
    rest = b""
    for piece in pieces:
        parts = split(rest + piece)
        rest = parts.pop() if parts else b""
        yield from parts
    yield from split(rest)


def is_writer(world: WorldState, record: CheckpointBegin | CheckpointEnd) -> bool:
    """Return whether the sender owns ``/checkpoint`` in this state."""
    known = world.keys.get(checkpoint_key(world.partition))
    if known is None:
        return False
    sender = (record.client_id, record.incarnation)
    return known.owner == sender and known.epoch == record.epoch


class Comparison(NamedTuple):
    """A complete checkpoint, and the reader's own state at its Begin.

    Attributes:
        checkpoint_id: Its id.
        begin_offset: Offset of its Begin.
        client_id: Its writer.
        ours: Digest of the reader's state at the Begin.
        theirs: Digest in its End.
    """

    checkpoint_id: bytes
    begin_offset: int
    client_id: str
    ours: str
    theirs: str

    @property
    def is_equal(self) -> bool:
        """Whether the writer and this reader had the same state at the Begin."""
        return self.ours == self.theirs


class _Seen(NamedTuple):
    """A Begin whose End was not read yet, with the reader's own digest at the Begin."""

    begin: CheckpointBegin
    offset: int
    digest: str
    news_count: int
    append_ms: int


class Watch:
    """Follows the checkpoints of one coordinating partition as it is folded.

    Attributes:
        last_offset: Offset of the Begin of the last complete checkpoint, or None.
        last_ms: Latest append time at that Begin, epoch ms.
        news_count: Number of entries since that Begin, except checkpoints and records
            about ``/checkpoint``.
    """

    __slots__ = ("_open", "last_ms", "last_offset", "news_count")

    def __init__(self) -> None:
        self.last_offset: int | None = None
        self.last_ms: int | None = None
        self.news_count = 0
        self._open: dict[bytes, _Seen] = {}

    def on_entry(
        self, world: WorldState, transitions: tuple[Transition, ...]
    ) -> Comparison | None:
        """Apply the transitions of an entry, right after it was folded."""
        if not transitions:
            return None
        first = transitions[0]
        if first.outcome != SKIPPED:
            self.news_count += first.key is None or first.key.topic != CHECKPOINT_TOPIC
            return None
        record = first.record
        if isinstance(record, CheckpointBegin) and is_writer(world, record):
            self._open[record.checkpoint_id] = _Seen(
                begin=record,
                offset=first.offset,
                digest=digest(world),
                news_count=self.news_count,
                append_ms=world.append_time_ms,
            )
            if len(self._open) > OPEN_MAX:
                del self._open[next(iter(self._open))]
        elif isinstance(record, CheckpointEnd):
            return self._on_end(record)
        return None

    def pass_beats(self, count: int) -> None:
        """Count heartbeats that were folded in a run; none is about ``/checkpoint``."""
        self.news_count += count

    def _on_end(self, end: CheckpointEnd) -> Comparison | None:
        seen = self._open.pop(end.checkpoint_id, None)
        if seen is None:
            return None
        begin, offset, ours, news_count, append_ms = seen
        if (begin.incarnation, begin.epoch) != (end.incarnation, end.epoch):
            return None
        if offset != end.begin_offset:
            return None
        self.last_offset = offset
        self.last_ms = append_ms
        self.news_count -= news_count
        theirs = end.digest.hex()
        return Comparison(
            checkpoint_id=end.checkpoint_id,
            begin_offset=offset,
            client_id=end.client_id,
            ours=ours,
            theirs=theirs,
        )


class Assembly:
    """Assembles the checkpoint of one End from the entries before it."""

    __slots__ = ("_begin", "_parts", "end")

    def __init__(self, end: CheckpointEnd) -> None:
        self.end = end
        self._begin: CheckpointBegin | None = None
        self._parts: list[bytes] = []

    def take(self, entry: LogEntry) -> None:
        """Add the next entry from ``end.begin_offset`` on; skip unrelated ones."""
        record = decode(entry.value) if entry.undecodable is None else None
        if not isinstance(record, CheckpointBegin | CheckpointChunk):
            return
        name = (record.checkpoint_id, record.incarnation, record.epoch)
        if name != (self.end.checkpoint_id, self.end.incarnation, self.end.epoch):
            return
        if isinstance(record, CheckpointBegin):
            place = (entry.offset, entry.leader_epoch)
            if place == (self.end.begin_offset, self.end.begin_leader_epoch):
                self._begin = record
        elif self._begin is not None and record.number == len(self._parts):
            self._parts.append(record.data)  # a repeated part is skipped

    def state(self, partition: int) -> bytes | str:
        """Return the canonical bytes, or why there is no checkpoint of a partition."""
        end, value = self.end, b"".join(self._parts)
        begin = self._begin
        if begin is None:
            return "its Begin is not at the offset that its End names"
        if (len(self._parts), len(value)) != (end.part_count, end.size_bytes):
            return (
                f"{len(self._parts)} chunks of {len(value)} bytes in all were found, "
                f"not {end.part_count} of {end.size_bytes} bytes"
            )
        try:
            world = from_bytes(value)
        except MalformedRecord as error:
            return str(error)
        if (world.partition, world.next_offset) != (partition, end.begin_offset + 1):
            return "its state is of another coordinating partition or offset"
        if bytes.fromhex(digest(world)) != end.digest:
            return "its state has another digest than its End names"
        if not is_writer(world, begin):
            return "in its state, its writer does not own /checkpoint"
        return value
