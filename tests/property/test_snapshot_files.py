"""PROTOCOL 7.4 by way of files: any of them is a valid start (S5)."""

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
    """Keep a state in a file, and return what a start would make of it."""
    folder.save(capture(state, source="a test"))
    (kept,) = folder.find({state.partition: None}, log=None, timeout_ms=0).values()
    assert kept.offset == state.next_offset
    found = world_of(kept, LogRange(0, state.next_offset))
    assert isinstance(found, WorldState), found
    return found


@settings(max_examples=8)
@given(SEEDS)
@example(29)  # an open offer, whose begin was not kept
def test_every_file_and_its_tail_are_the_whole(seed):
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
def test_a_changed_file_is_refused_or_unchanged(seed, data):
    """A changed file with a valid checksum has another digest."""
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
def test_any_bytes_are_a_file_or_refused(value):
    with tempfile.TemporaryDirectory() as home:
        folder = SnapshotFolder(Path(home), cluster_id="c", topic_id=TOPIC_ID)
        folder.path.mkdir(parents=True)
        folder.file_of(0).write_bytes(value)
        try:
            found = folder.find({0: None}, log=None, timeout_ms=0)
        except MarshalError as error:
            raise AssertionError("a file that is none is nothing") from error
        assert found == {}
