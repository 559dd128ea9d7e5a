"""The loop in ``native/beats.c`` folds the same heartbeats as Python, or fewer.

Values are written byte by byte here, in every form that MessagePack has for them, and
then damaged. Each run is folded as objects and, where a broker could have sent it, as
packed entries. Where nothing was compiled, the tests are skipped.
"""

import struct
from copy import deepcopy

import msgspec
import pytest
from batchkit import packed
from hypothesis import given, settings
from hypothesis import strategies as st
from logkit import CREATE_TIME, KEY, LOG_APPEND_TIME, START_MS, Log, beat, fence, ident
from slices import slice_of

from kafka_marshal.native import compiled
from kafka_marshal.protocol import fold_beats as module
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.fold_beats import NO_EPOCH, Beat, fold_beats
from kafka_marshal.protocol.hashing import CHECKPOINT_GROUP, CHECKPOINT_TOPIC
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.types import OFFSET_MAX, Key, LogEntry

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled here")

EDGES = [
    *(0, 1, 2, 3, 4, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, OFFSET_MAX - 1, OFFSET_MAX, OFFSET_MAX + 1, 2**64 - 1),
]
INTEGERS = (">B", ">BB", ">BH", ">BI", ">BQ", ">Bb", ">Bh", ">Bi", ">Bq", ">Bd")
HEADS = (None, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3, 0xCB)
LENGTHS = {"bin": (0xC4, 0xC5, 0xC6), "str": (0xD9, 0xDA, 0xDB)}
OTHER = Key("g", "t", 1)
CHECKPOINT = Key(CHECKPOINT_GROUP, CHECKPOINT_TOPIC, 0)
OWNERS = {1: ("c1", KEY), 2: ("c2", OTHER), 3: ("c3", CHECKPOINT)}


def integer(number, form):
    """Write a number in one of ten forms, or in the shortest one that can hold it."""
    for index in (form, 0, 1, 2, 3, 4):
        try:
            if HEADS[index] is None:
                if number < 0x80:
                    return bytes([number])
                continue
            return struct.pack(INTEGERS[index], HEADS[index], number)
        except struct.error:
            continue
    return b"\xc0"


def text(data, form, *, kind="str"):
    """Write bytes with a length in one of four forms."""
    if form == 0 and kind == "str" and len(data) < 32:
        return bytes([0xA0 | len(data)]) + data
    form = max(form, 1) - 1
    try:
        return (
            struct.pack((">BB", ">BH", ">BI")[form], LENGTHS[kind][form], len(data))
            + data
        )
    except struct.error:
        return b"\xc0"


forms = st.integers(0, 3)
number_forms = st.one_of(st.just(0), st.integers(0, 9))
numbers = st.sampled_from(EDGES)


@st.composite
def values(draw):
    """Draw the value of a heartbeat, or a value that is almost one."""
    epoch = draw(st.sampled_from([1, 1, 1, 2, 2, 3, 7]))
    client, key = OWNERS.get(epoch, ("c1", KEY))
    client = draw(st.sampled_from([client] * 8 + ["c2", "", "\N{SNOWMAN}"]))
    tags = draw(st.none() | st.sampled_from([b"", b"a" * 31, b"b" * 1024, b"c" * 1025]))
    fields = [
        text(client.encode(), draw(forms)),
        text(key.group_id.encode(), draw(forms)),
        text(ident(client), draw(forms), kind="bin"),
        integer(draw(numbers), draw(number_forms)),
        text(key.topic.encode(), draw(forms)),
        integer(key.partition, draw(number_forms)),
        integer(epoch, draw(number_forms)),
        draw(st.just(b"\xc0") | st.builds(integer, numbers, number_forms)),
        draw(st.sampled_from([b"\xc2"] * 9 + [b"\xc3"])),
    ]
    if tags is not None:
        kind = draw(st.sampled_from(["bin", "bin", "str"]))
        fields.append(text(tags, draw(forms), kind=kind))
    if draw(st.integers(0, 15)) == 0:
        at = draw(st.integers(0, len(fields) - 1))
        fields[at] = draw(
            st.sampled_from([b"", b"\xc0", b"\xc3", b"\x80", b"\x90", b"\xff"])
        )
    array = draw(st.sampled_from([b""] * 9 + [b"\xdc\x00"]))
    count = len(fields) if array else 0x90 | len(fields)
    value = b"\x01\x01\x00" + array + bytes([count]) + b"".join(fields)
    return draw(damaged(value))


def damaged(value):
    """Return a strategy: the value unchanged, cut, longer, or with another byte."""
    sound = st.just(value)
    other = st.one_of(
        st.integers(0, len(value)).map(lambda size: value[:size]),
        st.binary(max_size=3).map(lambda more: value + more),
        st.tuples(st.integers(0, len(value) - 1), st.integers(0, 255)).map(
            lambda at: value[: at[0]] + bytes([at[1]]) + value[at[0] + 1 :]
        ),
        st.just(None),
    )
    return st.integers(0, 7).flatmap(lambda which: other if which == 0 else sound)


def usually(value, *others):
    return st.sampled_from([value] * 20 + [*others])


entries = st.tuples(
    values(),
    usually(1, 0, 5, -1, 2**62),  # step of the offset
    st.sampled_from([0, 0, 1, 3, -2]) | usually(0, OFFSET_MAX, 2**64, -2_000_000),
    usually(LOG_APPEND_TIME, CREATE_TIME, -1),
    usually(0, 1, None),
    usually(None, "as an earlier reader found"),
)


def begun(*, is_fenced):
    """Return the state of a log with three owned keys."""
    log = Log(level=2)
    assert [log.claimed(c, key=key) for c, key in OWNERS.values()] == list(OWNERS)
    if is_fenced:
        log.one(fence(client="c2"))
    return log.state


def listed(state, drawn):
    offset, now_ms, found = state.next_offset - 1, START_MS, []
    for value, step, after_ms, kind, epoch, undecodable in drawn:
        offset, now_ms = offset + step, now_ms + after_ms
        entry = LogEntry(
            offset=offset,
            leader_epoch=epoch,
            timestamp_ms=now_ms,
            timestamp_type=kind,
            value=value,
            undecodable=undecodable,
        )
        found.append(entry)
    return found


def sendable(entry):
    """Return the entry with only values that a broker can send."""
    kind = LOG_APPEND_TIME if entry.timestamp_type == LOG_APPEND_TIME else CREATE_TIME
    return msgspec.structs.replace(
        entry,
        leader_epoch=entry.leader_epoch or 0,
        offset=min(max(0, entry.offset), OFFSET_MAX - 1),
        timestamp_ms=max(-OFFSET_MAX, min(entry.timestamp_ms, OFFSET_MAX)),
        timestamp_type=kind,
        undecodable=None,
    )


def compare(state, entries, *, except_epoch=NO_EPOCH, start=0):
    """Fold with both loops; return where the Python and the compiled loop stopped.

    Either loop must fold packed entries as far as the same entries as objects.
    """
    sent = [sendable(each) for each in entries]
    assert list(packed(sent)) == sent
    found = compare_lists(state, sent, except_epoch=except_epoch, start=start)
    assert (
        compare_lists(state, packed(sent), except_epoch=except_epoch, start=start)
        == found
    )
    if sent == entries:
        return found
    return compare_lists(state, entries, except_epoch=except_epoch, start=start)


def compare_lists(state, entries, *, except_epoch, start):
    in_python, in_c = deepcopy(state), deepcopy(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compiled", None)
        most = fold_beats(
            deepcopy(state), entries, start=start, except_epoch=except_epoch
        )
        patch.setattr(module, "compiled", compiled)
        folded: list[Beat] = []
        stop = fold_beats(
            in_c, entries, start=start, except_epoch=except_epoch, beats=folded
        )
        assert (
            fold_beats(deepcopy(state), entries, start=start, except_epoch=except_epoch)
            == stop
        )
        assert start <= stop <= most
        patch.setattr(module, "compiled", None)
        expected: list[Beat] = []
        assert stop == fold_beats(
            in_python,
            entries[:stop],
            start=start,
            except_epoch=except_epoch,
            beats=expected,
        )
    assert folded == expected
    assert in_c == in_python
    assert to_bytes(in_c) == to_bytes(in_python)
    assert list(in_c.dirty) == list(in_python.dirty)
    return most, stop


@given(
    drawn=st.lists(entries, max_size=12),
    start=st.integers(0, 2),
    except_epoch=st.sampled_from([NO_EPOCH, NO_EPOCH, 1, 2]),
    is_fenced=st.booleans(),
)
@settings(max_examples=slice_of(quick=200, full=4_000))
def test_compiled_and_python_loops_agree_on_hostile_values(
    drawn, start, except_epoch, is_fenced
):
    state = begun(is_fenced=is_fenced)
    run = listed(state, drawn)
    compare(state, run, except_epoch=except_epoch, start=min(start, len(run)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2]),
            st.none() | st.integers(0, OFFSET_MAX),
            st.integers(0, OFFSET_MAX),
        ),
        max_size=30,
    )
)
def test_heartbeats_of_this_release_are_folded_by_both_loops(beats):
    state = begun(is_fenced=False)
    written = [
        encode(
            beat(
                epoch, position, client=OWNERS[epoch][0], key=OWNERS[epoch][1], seq=seq
            )
        )
        for epoch, position, seq in beats
    ]
    run = listed(state, [(v, 1, 2, LOG_APPEND_TIME, 0, None) for v in written])
    assert compare(state, run) == (len(run), len(run))


@pytest.mark.parametrize("number", [n for n in EDGES if n <= OFFSET_MAX])
@pytest.mark.parametrize("form", range(5))
def test_each_msgpack_form_of_an_integer_is_read(number, form):
    state = begun(is_fenced=False)
    value = (
        encode(beat(1, 9)).removesuffix(b"\x09\xc2") + integer(number, form) + b"\xc2"
    )
    run = listed(state, [(value, 1, 0, LOG_APPEND_TIME, 0, None)])
    assert compare(state, run) == (1, 1)


@pytest.mark.parametrize("size", range(len(encode(beat(1, 300)))))
def test_no_loop_folds_a_truncated_heartbeat(size):
    state = begun(is_fenced=False)
    value = encode(beat(1, 300))[:size]
    assert compare(state, listed(state, [(value, 1, 0, 1, 0, None)])) == (0, 0)


def test_heartbeats_of_400_keys_are_folded_by_both_loops():
    log = Log()
    keys = [Key("g", "t", number) for number in range(400)]
    epochs = [log.claimed(key=key) for key in keys]
    values = [encode(beat(e, 5, key=key)) for e, key in zip(epochs, keys, strict=True)]
    run = listed(log.state, [(v, 1, 0, 1, 0, None) for v in values * 2])
    assert compare(log.state, run) == (800, 800)


def test_an_error_leaves_the_state_as_it_was():
    state = begun(is_fenced=False)
    run = listed(state, [(encode(beat(1, 5)), 1, 3, 1, 0, None)])
    before = to_bytes(state)
    with pytest.raises(AttributeError):
        fold_beats(state, [*run, object()], start=0)
    assert to_bytes(state) == before
    with pytest.raises(TypeError):
        compiled.fold_beats(state, run)
