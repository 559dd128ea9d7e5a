"""How fast the log is decoded and folded, on one core.

Two logs are folded in turns: full Heartbeat records, and BatchHeartbeats. Full ones
are folded twice: in runs, as members fold the entries of a poll, and one by one, by
``apply``. For comparison, the same bytes are only decoded, by msgspec alone and by the
codec: a fold in Python cannot take less time than decoding. Time is the CPU time of the
thread, so that other processes have little influence.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
from support import (
    alternate,
    arguments,
    at_least,
    document,
    figure,
    ratios,
    write_document,
)

from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    LIMIT_DEFAULTS,
    BatchHeartbeat,
    ClaimingPartition,
    Config,
    Fields,
    Heartbeat,
    Limits,
    Record,
)
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.types import LogEntry, TimestampType

K = 8
T = 3
H_MS = 60_000
CLIENTS = 10
KEYS_PER_CLIENT = 10
BEATS_PER_RECORD = 1_000
RUN = 5_000  # entries of a poll
HEADER_BYTES = 3
GROUP = "payments-enrichment"
TOPIC = "eu-west-1.payments.transactions"
START_MS = 1_700_000_000_000


class Log:
    """The log of one coordinating partition: claims, then the measured records."""

    def __init__(self) -> None:
        """Begin with the Config."""
        self.entries: list[LogEntry] = []
        limits = Limits(**dict.fromkeys(LIMIT_DEFAULTS))
        self.write(
            Config(
                generation=1,
                format_id=bytes(16),
                era=1,
                cluster_id="cluster",
                heartbeat_interval_ms=H_MS,
                partition_count=K,
                feature_level=1,
                limits=limits,
            )
        )

    def write(self, record: Record) -> int:
        """Append a record, one millisecond after the last; return its offset."""
        offset = len(self.entries)
        kind = int(TimestampType.LOG_APPEND_TIME)
        entry = LogEntry(
            offset=offset,
            leader_epoch=0,
            timestamp_ms=START_MS + offset,
            timestamp_type=kind,
            value=encode(record),
        )
        self.entries.append(entry)
        return offset


def incarnation(client: int) -> bytes:
    """Return sixteen bytes that look random."""
    return blake2b(b"%d" % client, digest_size=16).digest()


def partitions_of_t(count: int) -> list[int]:
    """Return data partitions that this partition coordinates."""
    found: list[int] = []
    partition = 0
    while len(found) < count:
        if coordinating_partition(TOPIC, partition, partition_count=K) == T:
            found.append(partition)
        partition += 1
    return found


def claimed(clients: int, keys_each: int) -> tuple[Log, list[list[tuple[int, int]]]]:
    """Return a log of claims, with (partition, epoch) of each client's keys."""
    log = Log()
    numbers = iter(partitions_of_t(clients * keys_each))
    held = []
    for client in range(clients):
        mine = []
        for seq in range(keys_each):
            partition = next(numbers)
            record = ClaimingPartition(
                client_id=f"worker-{client:04}",
                group_id=GROUP,
                incarnation=incarnation(client),
                seq=seq,
                generation=1,
                topic=TOPIC,
                partition=partition,
                topic_id=bytes(16),
                resume_hash=bytes(32),
                expected_epoch=None,
                resume=None,
            )
            mine.append((partition, log.write(record)))
        held.append(mine)
    return log, held


def heartbeats(
    records: int, *, clients: int = CLIENTS, keys_each: int = KEYS_PER_CLIENT
) -> tuple[list[LogEntry], list[LogEntry]]:
    """Return the claims of a fleet, and full Heartbeats of it."""
    log, held = claimed(clients, keys_each)
    keys = [(c, *key) for c, mine in enumerate(held) for key in mine]
    claims = len(log.entries)
    for number in range(records):
        client, partition, epoch = keys[number % len(keys)]
        log.write(
            Heartbeat(
                client_id=f"worker-{client:04}",
                group_id=GROUP,
                incarnation=incarnation(client),
                seq=number,
                topic=TOPIC,
                partition=partition,
                epoch=epoch,
                position=50_000_000 + number,
                rewind=False,
            )
        )
    return log.entries[:claims], log.entries[claims:]


def batches(beats: int) -> tuple[list[LogEntry], list[LogEntry]]:
    """Return the claims of two clients and their BatchHeartbeats."""
    log, held = claimed(2, BEATS_PER_RECORD)
    claims = len(log.entries)
    for number in range(beats // BEATS_PER_RECORD):
        client = number % len(held)
        position = 50_000_000 + number
        mine = tuple((epoch, position) for _, epoch in held[client])
        name = f"worker-{client:04}"
        log.write(
            BatchHeartbeat(
                client_id=name,
                group_id=GROUP,
                incarnation=incarnation(client),
                seq=number,
                beats=mine,
            )
        )
    return log.entries[:claims], log.entries[claims:]


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread for some work, in seconds."""
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1e9


def folding(
    claims: Sequence[LogEntry], entries: Sequence[LogEntry], *, run: int = 1
) -> float:
    """Fold the claims, then time the fold of the entries, without the digest after it.

    ``run`` is the number of entries of a poll; 1 for ``apply`` alone.
    """
    replica = Replica(T, now_ms=START_MS)
    state = replica.world
    for entry in claims:
        apply(state, entry)
    polls = [entries[at : at + run] for at in range(0, len(entries), run)]

    def fold() -> None:
        for entry in entries:
            apply(state, entry)

    def fold_polls() -> None:
        for poll in polls:
            for _ in replica.fold_run(poll, START_MS):
                pass

    took_s = cpu_s(fold if run == 1 else fold_polls)
    renewed = state.soft.counters.get("renewed", 0)
    assert renewed >= len(entries), f"only {renewed} beats were accepted"
    assert digest(state)
    return took_s


def decoding(entries: Sequence[LogEntry]) -> float:
    """Time the codec alone."""

    def work() -> None:
        for entry in entries:
            decode(entry.value)

    return cpu_s(work)


def parsing(entries: Sequence[LogEntry], kind: type[Fields]) -> float:
    """Time msgspec alone, which every fold of these records needs."""
    decoder = msgspec.msgpack.Decoder(kind)
    values = [(entry.value or b"")[HEADER_BYTES:] for entry in entries]

    def work() -> None:
        for value in values:
            decoder.decode(value)

    return cpu_s(work)


def measure(records: int, beats: int, rounds: int) -> list[dict[str, object]]:
    """Run everything and return the figures."""
    single, batched = heartbeats(records), batches(beats)
    took = alternate(
        {
            "fold": lambda: folding(*single),
            "runs": lambda: folding(*single, run=RUN),
            "codec": lambda: decoding(single[1]),
            "parse": lambda: parsing(single[1], Heartbeat),
            "batch fold": lambda: folding(*batched),
            "batch parse": lambda: parsing(batched[1], BatchHeartbeat),
        },
        rounds,
    )

    def rates(name: str, count: int) -> list[float]:
        return [count / seconds for seconds in took[name]]

    count = len(batched[1]) * BEATS_PER_RECORD
    return [
        figure(
            "decode and fold, full Heartbeats, in runs",
            "records/s",
            rates("runs", records),
            target=at_least(2_000_000),
        ),
        figure(
            "decode and fold, full Heartbeats",
            "records/s",
            rates("fold", records),
            target=at_least(2_000_000),
        ),
        figure("codec alone", "records/s", rates("codec", records)),
        figure("msgspec alone", "records/s", rates("parse", records)),
        figure(
            "time in msgspec, of decode and fold",
            "ratio",
            ratios(took["parse"], took["fold"]),
        ),
        figure(
            "decode and fold, BatchHeartbeats",
            "beats/s",
            rates("batch fold", count),
            target=at_least(2_500_000),
        ),
        figure(
            "msgspec alone, BatchHeartbeats", "beats/s", rates("batch parse", count)
        ),
        figure(
            "time in msgspec, of decode and fold, BatchHeartbeats",
            "ratio",
            ratios(took["batch parse"], took["batch fold"]),
        ),
    ]


def main() -> None:
    """Run the benchmark and print its document."""
    options = arguments(__doc__ or "").parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    records = 5_000 if options.quick else 200_000
    beats = 20_000 if options.quick else 2_000_000
    settings = {
        "rounds": rounds,
        "records": records,
        "beats": beats,
        "beats_per_record": BEATS_PER_RECORD,
        "keys": CLIENTS * KEYS_PER_CLIENT,
    }
    figures = measure(records, beats, rounds)
    write_document(
        document("fold", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
