"""Snapshots of a host on a real broker: verified, then used at a start."""

import pytest
from domain import Recorder, opened
from kafka import TopicPartition as Place

from kafka_marshal import LogUnreadable
from kafka_marshal.engine.snapshotter import ENTRIES_MIN
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.views import world

TS = range(2)


@pytest.fixture(scope="module")
def domain(broker, unique, transport):
    with opened(broker, unique, transport=transport, partitions=len(TS)) as domain:
        yield domain


def start(domain, home):
    """Start an engine, and close it; return its events."""
    seen = Recorder()
    options = {"state_dir": home, "checkpoint_interval_ms": 0}
    domain.marshal("g", "one", observer=seen, **options).close()
    return seen


def restored(seen):
    return {event.fields["partition"] for event in seen.named("restored")}


def test_an_engine_starts_from_valid_snapshots_of_its_host(
    domain, tmp_path, monkeypatch
):
    for t in TS:
        for _ in range(ENTRIES_MIN):
            domain._producer.send(domain.topic, b"noise", partition=t)
    domain._producer.flush(timeout=60)
    home = tmp_path / "state"
    seen = start(domain, home)
    assert restored(seen) == set()
    files = sorted(home.rglob("*.snapshot"))
    assert [path.name for path in files] == ["0.snapshot", "1.snapshot"]
    seen = start(domain, home)
    assert restored(seen) == set(TS)
    whole = [digest(world) for world in domain.world(state_dir="").partitions]
    view = domain.world(state_dir=home)
    assert [digest(world) for world in view.partitions] == whole
    assert view.to_object() == domain.world(state_dir="").to_object()

    # A damaged snapshot is ignored: the log is read from its start.
    for path in files:
        value = bytearray(path.read_bytes())
        value[len(value) // 2] ^= 1
        path.write_bytes(value)
    seen = start(domain, home)
    assert restored(seen) == set()

    # Without the start of the log, only an engine with a snapshot can start.
    seen = start(domain, home)
    assert restored(seen) == set(TS)
    befores = {Place(domain.topic, t): ENTRIES_MIN for t in TS}
    domain.kafka.delete_records(befores)
    seen = start(domain, home)
    assert restored(seen) == set(TS)
    assert domain.world(state_dir=home).config().partition_count == len(TS)
    with pytest.raises(LogUnreadable, match="begins above offset 0"):
        start(domain, "")
    # A state that was folded without the log's start is not stored.
    monkeypatch.setattr(world, "KEEP_ENTRIES_MIN", 1)
    bare = tmp_path / "bare"
    assert domain.world(state_dir=bare).log_start_missing == tuple(TS)
    assert list(bare.rglob("*.snapshot")) == []
    domain.world(state_dir=home)
    assert len(list(home.rglob("*.snapshot"))) == len(TS)
