"""How much faster native functions are than the Python functions that they repeat.

Both get the same input in turns, and are timed by the CPU time of the thread. Runs of
heartbeats are folded, from objects and from a fetch; fetches are read as entries of the
coordination log; record batches become columns. For comparison with columns,
kafka-python makes records from the same batches. If nothing was compiled, only Python
is measured.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import crc32c
from fold import T, cpu_s, heartbeats
from kafka import TopicPartition as KafkaTopicPartition
from kafka.consumer.fetcher import Fetcher
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from support import alternate, arguments, document, figure, ratios, write_document

from kafka_marshal.kafka_io import columns
from kafka_marshal.kafka_io.columns import Batch, to_columns
from kafka_marshal.kafka_io.entries import EntryRecords, to_runs
from kafka_marshal.kafka_io.fetched_batches import FetchData
from kafka_marshal.kafka_io.record_batches import APPEND_TIME
from kafka_marshal.native import compiled
from kafka_marshal.protocol import fold_beats
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry, OffsetRange

HEADER_BYTES = DefaultRecordBatch.HEADER_STRUCT.size
BATCH_RECORDS = 500
CLIENTS = (10, 100)
KEYS_EACH = 10
RUN = 5_000  # entries of a poll
BATCH_ENTRIES = 50
SIZES = (100, 1_000)
Side = Callable[[], float]
Run = Sequence[LogEntry]


def folding(begun: WorldState, runs: Sequence[Run], *, is_native: bool) -> float:
    """Fold heartbeats in runs, each as long as a poll."""
    state = deepcopy(begun)

    def fold() -> None:
        for run in runs:
            assert fold_beats.fold_beats(state, run, start=0) == len(run)

    with patch.object(fold_beats, "compiled", compiled if is_native else None):
        return cpu_s(fold)


def fetched(fetch: bytes, *, is_native: bool) -> Iterator[Run]:
    """Yield the entries of a fetch in runs."""
    place = KafkaTopicPartition("__marshal", T)
    part = (
        EntryRecords(FetchData(place=place, data=memoryview(fetch)))
        if is_native
        else Fetcher.PartitionRecords(0, place, MemoryRecords(fetch))
    )
    while part:
        yield from to_runs(part.take(RUN))


def fold_fetch(begun: WorldState, fetch: bytes) -> float:
    """Fold heartbeats from the bytes of a fetch, without making objects."""
    state = deepcopy(begun)

    def fold() -> None:
        for run in fetched(fetch, is_native=True):
            assert fold_beats.fold_beats(state, run, start=0) == len(run)

    return cpu_s(fold)


def reading(fetch: bytes, *, is_native: bool) -> float:
    """Read a fetch in runs, and access each entry."""

    def read() -> None:
        for run in fetched(fetch, is_native=is_native):
            for entry in run:
                assert entry.value

    return cpu_s(read)


def fetch_of(entries: Sequence[LogEntry]) -> bytes:
    """Encode entries in batches as large as in a busy coordinating partition."""
    found = []
    for start in range(0, len(entries), BATCH_ENTRIES):
        builder = new_builder()
        batch = entries[start : start + BATCH_ENTRIES]
        for at, entry in enumerate(batch):
            builder.append(at, timestamp=0, key=None, value=entry.value, headers=[])
        found.append(sealed(builder.build(), batch[0]))
    return b"".join(found)


def sealed(batch: bytearray, first: LogEntry) -> bytes:
    """Return a batch as the broker stores it: with offset, append time and checksum."""
    struct.pack_into(">q", batch, 0, first.offset)
    struct.pack_into(">i", batch, 12, first.leader_epoch)
    struct.pack_into(">h", batch, 21, APPEND_TIME)
    struct.pack_into(">q", batch, 35, first.timestamp_ms)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(bytes(batch[21:])))
    return bytes(batch)


def new_builder() -> DefaultRecordBatchBuilder:
    """Return kafka-python's builder of a record batch."""
    return DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=10**9,
    )


def written(size: int, count: int) -> bytearray:
    """Return one record batch."""
    builder = new_builder()
    for at in range(count):
        key = b"key-%08d" % at
        builder.append(at, timestamp=at, key=key, value=bytes(size), headers=[])
    found: bytearray = builder.build()
    return found


def decoding(batches: Sequence[Batch], *, is_native: bool) -> float:
    """Decode batches into columns, in slices of about a megabyte."""
    size = max(1, 2**20 // len(batches[0].data))
    groups = [batches[at : at + size] for at in range(0, len(batches), size)]
    span = OffsetRange(0, OFFSET_MAX)

    def decode() -> None:
        for group in groups:
            assert to_columns(group, span, with_headers=False) is not None

    with patch.object(columns, "compiled", compiled if is_native else None):
        return cpu_s(decode)


def parsing(whole: bytearray, count: int) -> float:
    """Make kafka-python's records, from as many batches."""

    def parse() -> None:
        for _ in range(count):
            for record in DefaultRecordBatch(whole):
                assert record.value

    return cpu_s(parse)


def compared(
    what: str, count: int, sides: dict[str, Side], rounds: int
) -> Iterator[dict[str, Any]]:
    """Run the sides; yield the rate of each, and its ratio to Python's."""
    took = alternate(sides, rounds)
    for name in sides:
        rates = [count / seconds for seconds in took[name]]
        yield figure(f"{what}: {name}", "records/s", rates)
    for name in sides:
        if name != "Python":
            times = ratios(took["Python"], took[name])
            yield figure(f"{what}: {name}, of Python", "ratio", times)


def both(work: Callable[..., float]) -> dict[str, Side]:
    """Return the sides of a function."""
    sides = {"Python": partial(work, is_native=False)}
    if compiled is not None:
        sides["native"] = partial(work, is_native=True)
    return sides


def measure(records: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield all figures."""
    for clients in CLIENTS:
        claims, beats = heartbeats(records, clients=clients, keys_each=KEYS_EACH)
        begun = WorldState(T)
        for entry in claims:
            apply(begun, entry)
        runs = [beats[at : at + RUN] for at in range(0, len(beats), RUN)]
        sides = both(partial(folding, begun, runs))
        if compiled is not None:
            sides["native, of a fetch"] = partial(fold_fetch, begun, fetch_of(beats))
        what = f"fold heartbeats of {clients * KEYS_EACH} keys"
        yield from compared(what, records, sides, rounds)
    # Each heartbeat is in a batch of its own, as clients send them.
    single = written(100, 1)
    fetch = b"".join(base.to_bytes(8, "big") + single[8:] for base in range(records))
    yield from compared(
        "entries of a fetch", records, both(partial(reading, fetch)), rounds
    )
    for size in SIZES:
        whole = written(size, BATCH_RECORDS)
        data = bytes(whole)[HEADER_BYTES:]
        batches = [
            Batch(base=base, size=BATCH_RECORDS, first_ms=0, append_ms=None, data=data)
            for base in range(0, records, BATCH_RECORDS)
        ]
        sides = both(partial(decoding, batches))
        sides["kafka-python's records"] = partial(parsing, whole, len(batches))
        yield from compared(f"columns of {size} bytes", records, sides, rounds)


def main() -> None:
    """Run the benchmark and print its document."""
    options = arguments(__doc__ or "").parse_args()
    rounds = options.rounds or (2 if options.quick else 5)
    records = 5_000 if options.quick else 200_000
    settings = {"rounds": rounds, "records": records, "batch_records": BATCH_RECORDS}
    figures = list(measure(records, rounds))
    write_document(
        document("native", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
