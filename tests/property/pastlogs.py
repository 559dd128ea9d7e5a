"""Random logs with checkpoints, in a cluster in memory, for views of the past."""

import random
from itertools import takewhile

from author import Author
from logkit import begin, chunk, claim, finish, ident, release
from naive import Naive

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.protocol.checkpoints import checkpoint_key, is_writer, split
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
)
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import entry_to_object, object_to_entry
from kafka_marshal.protocol.types import LogEntry, TimestampType, TopicPartition
from simulator.fakelog import FakeKafka
from simulator.fakestore import Stored

WRITER = "w"


class RandomLog:
    """The log of one coordinating partition, and its complete checkpoints.

    Attributes:
        entries: All entries ever written.
        checkpoints: Pairs of the offsets of Begin and End.
        begins: Offsets of fences with which the partition began again, also its clocks
            (PROTOCOL 10.2): later states do not show how late earlier entries were.
    """

    def __init__(
        self, partition: int, rng: random.Random, *, length: int, k: int, resizes=False
    ):
        self._rng = rng
        self._naive = Naive(partition)
        self._author = Author(rng.choice, self._naive, k=k, resizes=resizes)
        self._state = WorldState(partition)
        self.entries: list[LogEntry] = []
        self.checkpoints: list[tuple[int, int]] = []
        self.begins: list[int] = []
        while len(self.entries) < length:
            if self._state.config is not None and rng.random() < 0.08:
                self._write_checkpoint()
            else:
                self._write_one()

    def at_offset(self, offset: int) -> WorldState:
        """Replay all entries up to an offset."""
        return self._replay(e for e in self.entries if e.offset <= offset)

    def at_time(self, time_ms: int, *, begin: int = 0) -> WorldState:
        """Replay all entries before the first one that was appended later.

        Args:
            time_ms: The time.
            begin: Entries before this offset do not count as later.
        """
        return self._replay(
            takewhile(
                lambda e: e.offset < begin or not _is_later(e, time_ms), self.entries
            )
        )

    def knows(self, state: WorldState, start: int) -> bool:
        """Return whether a reader can know a state if the log starts at an offset."""
        end = state.next_offset
        return start == 0 or any(
            start <= first and last < end for first, last in self.checkpoints
        )

    def _replay(self, entries) -> WorldState:
        state = WorldState(self._state.partition)
        for entry in entries:
            apply(state, entry)
        return state

    def _write_one(self) -> None:
        line = self._author.write()
        self._naive.apply(line)
        self._take(object_to_entry(line)[1])

    def _write_checkpoint(self) -> None:
        """Write a checkpoint, sometimes an incomplete one."""
        key, number = checkpoint_key(self._state.partition), len(self.entries)
        generation = self._state.config.generation
        self._append(claim(WRITER, key=key, seq=number, generation=generation))
        known = self._state.keys.get(key)
        names = {"client": WRITER, "checkpoint": ident(f"checkpoint {number}")}
        names["epoch"] = 0 if known is None else known.epoch
        first = self._append(begin(**names))
        is_whole = is_writer(self._state, begin(**names))
        value, checksum = to_bytes(self._state), bytes.fromhex(digest(self._state))
        leader_epoch = self._author.leader_epoch
        parts = split(value)
        for at, part in enumerate(parts):
            for _ in range(self._rng.choice((0, 0, 1, 3))):
                self._write_one()
            if self._rng.random() < 0.1:
                return
            self._append(chunk(part, at, **names))
        if self._rng.random() < 0.1:
            checksum, is_whole = ident("damaged"), False
        end = finish(
            first,
            **names,
            leader_epoch=leader_epoch,
            parts=len(parts),
            size=len(value),
            digest=checksum,
        )
        last = self._append(end)
        if is_whole:
            self.checkpoints.append((first, last))
        self._append(release(names["epoch"], client=WRITER, key=key))

    def _append(self, record) -> int:
        self._author.move_time()
        entry = LogEntry(
            offset=self._author.offset,
            leader_epoch=self._author.leader_epoch,
            timestamp_ms=self._author.now,
            timestamp_type=TimestampType.LOG_APPEND_TIME,
            value=encode(record),
        )
        self._author.offset += 1
        line = entry_to_object(self._state.partition, entry)
        if isinstance(record, CheckpointBegin | CheckpointChunk | CheckpointEnd):
            # The naive twin does not know these records; they only move the clock.
            line = {name: line[name] for name in line if name != "payload"}
            line["undecodable"] = {"reason": "a checkpoint", "value": ""}
        self._naive.apply(line)
        self._take(entry)
        return entry.offset

    def _take(self, entry: LogEntry) -> None:
        self.entries.append(entry)
        append_time_ms = self._state.append_time_ms
        apply(self._state, entry)
        if self._state.append_time_ms < append_time_ms:
            self.begins.append(entry.offset)


def _is_later(entry: LogEntry, time_ms: int) -> bool:
    is_dated = entry.timestamp_type == TimestampType.LOG_APPEND_TIME
    return is_dated and entry.timestamp_ms > time_ms


def cluster_of(*logs: RandomLog) -> FakeKafka:
    """Return a cluster that has these logs as its coordinating partitions."""
    kafka = FakeKafka()
    kafka.create_topic(COORDINATION_TOPIC, len(logs), is_log_append_time=True)
    for t, log in enumerate(logs):
        stored = kafka.log(TopicPartition(COORDINATION_TOPIC, t))
        for entry in log.entries:
            if entry.leader_epoch > stored.leader_epoch:
                stored.leader_epoch = entry.leader_epoch
                stored.epochs.append((entry.leader_epoch, entry.offset))
            stored.records.append(
                Stored(
                    offset=entry.offset,
                    leader_epoch=entry.leader_epoch,
                    timestamp_ms=entry.timestamp_ms,
                    timestamp_type=entry.timestamp_type,
                    key=None,
                    value=entry.value,
                    headers=(),
                    landed_ms=0,
                )
            )
            stored.end = entry.offset + 1
    return kafka
