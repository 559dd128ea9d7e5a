"""How much memory one key takes in a process that follows the log.

A world is folded from claims and heartbeats, and the growth of Python's memory is
divided by the number of keys. Measured for simple keys, for keys with all that a key
can have, and after a digest was requested, which stores a hash of each key.
"""

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

from support import arguments, at_most, document, figure, show_progress, write_document

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    LIMIT_DEFAULTS,
    ClaimingMessages,
    ClaimingPartition,
    Config,
    Heartbeat,
    Limits,
    Record,
)
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState, why_to_tags
from kafka_marshal.protocol.types import LogEntry, TimestampType

H_MS = 60_000
KEYS_PER_CLIENT = 100
GROUP = "payments-enrichment"
TOPIC = "eu-west-1.payments.transactions"
WHY = "share 100 of 100000 among 1000; never claimed before"
START_MS = 1_700_000_000_000
KIB = 1_024


def records(keys: int, *, is_amo: bool) -> Iterator[Record]:
    """Yield the claims of a fleet, a heartbeat of each and, if at most once, grants."""
    limits = dict.fromkeys(LIMIT_DEFAULTS) | {"keys": 2 * keys}
    yield Config(
        generation=1,
        format_id=bytes(16),
        era=1,
        cluster_id="cluster",
        heartbeat_interval_ms=H_MS,
        partition_count=1,
        feature_level=1,
        limits=Limits(**limits),
    )
    for partition in range(keys):
        client = partition // KEYS_PER_CLIENT
        name, incarnation = f"worker-{client:05}", client.to_bytes(16, "big")
        who = {
            "client_id": name,
            "group_id": GROUP,
            "incarnation": incarnation,
            "seq": partition,
            "topic": TOPIC,
            "partition": partition,
        }
        secret = partition.to_bytes(32, "big")
        topic_id = b"\1" * 16
        epoch = 1 + partition * (3 if is_amo else 2)
        position = 5_000_000_000 + partition
        why = why_to_tags(f"fair: {partition % 100} held, {WHY}")
        yield ClaimingPartition(
            **who,
            generation=1,
            topic_id=topic_id,
            resume_hash=secret,
            expected_epoch=None,
            resume=None,
            tags=why,
        )
        yield Heartbeat(**who, epoch=epoch, position=position, rewind=False)
        if is_amo:
            yield ClaimingMessages(
                **who,
                epoch=epoch,
                grantee=incarnation,
                first=position,
                proposed_last_offset=position + 499,
            )


def folded(entries: Sequence[bytes], *, has_digest: bool) -> WorldState:
    """Fold encoded records, ten milliseconds apart."""
    state = WorldState(0)
    kind = int(TimestampType.LOG_APPEND_TIME)
    for offset, value in enumerate(entries):
        apply(
            state,
            LogEntry(
                offset=offset,
                leader_epoch=0,
                timestamp_ms=START_MS + offset,
                timestamp_type=kind,
                value=value,
            ),
        )
    state.dirty.clear()  # as after a digest, which is measured separately
    if has_digest:
        state.dirty.update(dict.fromkeys(state.keys))
        digest(state)
    return state


def bytes_per_key(keys: int, *, is_amo: bool, has_digest: bool) -> float:
    """Return by how much the memory of the process grows per key in a fold."""
    entries = [encode(record) for record in records(keys, is_amo=is_amo)]
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    state = folded(entries, has_digest=has_digest)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(state.keys) == keys
    known = next(iter(state.keys.values()))
    assert (known.granted is not None) == is_amo
    return (after - before) / keys


def main() -> None:
    """Run the benchmark and print its document."""
    options = arguments(__doc__ or "").parse_args()
    sizes = (1_000, 3_000) if options.quick else (10_000, 30_000, 100_000)
    kinds = {
        "state per key": {"is_amo": False, "has_digest": False},
        "state per key, at most once": {"is_amo": True, "has_digest": False},
        "state per key, with digest": {"is_amo": False, "has_digest": True},
    }
    figures = []
    for name, kind in kinds.items():
        show_progress(name)
        taken = [bytes_per_key(keys, **kind) for keys in sizes]
        figures.append(figure(name, "bytes", taken, target=at_most(KIB)))
    settings = {"keys": sizes, "keys_per_client": KEYS_PER_CLIENT}
    write_document(
        document("state_size", figures, settings=settings, is_quick=options.quick),
        options.out,
    )


if __name__ == "__main__":
    main()
