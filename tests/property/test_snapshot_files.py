"""Snapshots in files: a start from any valid file gives the same state (7.4, S5)."""

import tempfile
from pathlib import Path

import attrs
from author import write_log
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kafka_marshal.engine.kept_states import world_of
from kafka_marshal.engine.snapshotter import capture
from kafka_marshal.errors import MarshalError
from kafka_marshal.ports import LogRange
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.snapshots import Snapshot, SnapshotFolder, to_file_bytes

SEEDS = st.integers(0, 2**32 - 1)
TOPIC_ID = b"t" * 16


def through_a_file(state, folder):
    """Save a state in a file; return the state that a start reads from it."""
    folder.save(capture(state, source="a test"))
    (kept,) = folder.find({state.partition: None}, log=None, timeout_ms=0).values()
    assert kept.offset == state.next_offset
    found = world_of(kept, LogRange(0, state.next_offset))
    assert isinstance(found, WorldState), found
    return found


@settings(max_examples=8)
@given(SEEDS)
@example(29)  # an open offer, whose begin was once not saved
def test_a_snapshot_file_and_its_tail_equal_the_whole_log(seed):
    log = write_log(seed)
    with tempfile.TemporaryDirectory() as home:
        folder = SnapshotFolder(Path(home), cluster_id="c", topic_id=TOPIC_ID)
        whole, others = WorldState(0), []
        for entry in log:
            for other in others:
                apply(other, entry)
            apply(whole, entry)
            if whole.halted is None:
                others.append(through_a_file(whole, folder))
    for other in others:
        assert other.halted == whole.halted
        assert other.soft == whole.soft
        if whole.halted is None:
            assert to_bytes(other) == to_bytes(whole)


@settings(max_examples=40)
@given(SEEDS, st.data())
def test_a_snapshot_with_a_flipped_bit_is_refused(seed, data):
    """The checksum of the file is valid, so only the digest differs."""
    state = WorldState(0)
    for entry in write_log(seed):
        apply(state, entry)
    if state.halted is not None:
        return
    kept = capture(state, source="a test")
    at = data.draw(st.integers(0, len(kept.state) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    value = kept.state[:at] + bytes([kept.state[at] ^ bit]) + kept.state[at + 1 :]
    changed = attrs.evolve(kept, state=value)
    assert to_file_bytes(Snapshot("c", TOPIC_ID, changed))
    found = world_of(changed, LogRange(0, state.next_offset))
    assert isinstance(found, str)


@given(st.binary(max_size=400))
def test_a_file_of_random_bytes_gives_no_snapshot(value):
    with tempfile.TemporaryDirectory() as home:
        folder = SnapshotFolder(Path(home), cluster_id="c", topic_id=TOPIC_ID)
        folder.path.mkdir(parents=True)
        folder.file_of(0).write_bytes(value)
        try:
            found = folder.find({0: None}, log=None, timeout_ms=0)
        except MarshalError as error:
            raise AssertionError("a file that is none is nothing") from error
        assert found == {}
