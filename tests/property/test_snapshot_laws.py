"""A changed snapshot is refused, or it is the canonical snapshot of some state."""

import msgspec
import pytest
from author import write_log
from hypothesis import given
from hypothesis import strategies as st
from logkit import (
    KEY,
    START_MS,
    H,
    Log,
    all_records,
    config,
    decide,
    fence,
    fold,
    ident,
    pause,
    release,
    resolve,
    stage,
)

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.types import OFFSET_MAX, LogEntry

FRAMES = [encode(record) for record in all_records()]


def amid_set_positions():
    """Return a state with a replaced position, a lock, an open verdict and a fence."""
    log = Log(level=2)
    log.append(release(log.claimed(topic_id=ident("topic")), 5))
    for op in (ident("op"), ident("other")):
        log.append(pause(START_MS + 9_000, op=op))
        log.append(stage((0, 2), op=op))
        log.append(decide(op=op))
        if op == ident("op"):
            log.append(resolve(commit=True, op=op))
    log.append(fence())
    known, group = log.key(KEY), log.state.groups["g"]
    assert None not in (known.previous, known.lock, group.unresolved)
    return log.state


SAVED = [to_bytes(fold(write_log(seed))) for seed in range(12)]
SAVED.append(to_bytes(amid_set_positions()))


def read(value):
    """Return the state; None if the bytes are refused with ``MalformedRecord``."""
    try:
        return from_bytes(value)
    except MalformedRecord:
        return None


@given(
    st.sampled_from(SAVED),
    st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 4_000),
)
def test_a_damaged_snapshot_is_refused_or_canonical(value, changes, cut):
    damaged = bytearray(value)
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    for one in (bytes(damaged), bytes(damaged[:cut])):
        state = read(one)
        if state is not None:
            assert to_bytes(state) == one
            assert len(digest(state)) == 32
            goes_on(state)


def goes_on(state):
    """Fold a record of each type into the state; none may raise."""
    epoch = (state.leader_epoch or 0) + 1
    for value in FRAMES:
        if state.halted is None and state.next_offset < OFFSET_MAX:
            apply(
                state,
                LogEntry(
                    offset=state.next_offset,
                    leader_epoch=epoch,
                    timestamp_ms=10**9,
                    timestamp_type=1,
                    value=value,
                ),
            )


def test_a_snapshot_at_the_end_of_log_time_is_read():
    log = Log(configured=False)
    log.append(config(), at=OFFSET_MAX)
    log.append(release(log.claimed(), successor="c2"))
    assert log.key(KEY).handoff == ("c2", OFFSET_MAX + H // 2)
    assert read(to_bytes(log.state)) == log.state


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**63) | st.text(max_size=3)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)  # fmt: skip


def places(value, path=()):
    """Yield the path to every element of nested lists."""
    yield path
    if isinstance(value, list):
        for at, each in enumerate(value):
            yield from places(each, (*path, at))


@given(st.sampled_from(SAVED), st.integers(0, 10_000), anything)
def test_a_snapshot_with_another_element_is_refused_or_canonical(value, at, other):
    tree = msgspec.msgpack.decode(value)
    every = list(places(tree))
    path = every[at % len(every)]
    if not path:
        tree = other
    else:
        inner = tree
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = other
    changed = msgspec.msgpack.encode(tree)
    state = read(changed)
    if state is not None:
        assert to_bytes(state) == changed
        assert len(digest(state)) == 32
        goes_on(state)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_as_a_snapshot(value):
    assert read(value) is None


@pytest.mark.parametrize("value", SAVED)
def test_an_undamaged_snapshot_is_read(value):
    assert read(value) is not None
