"""Records are read back as they were written; any bytes decode without an error."""

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logkit import all_records, config
from msgspec.structs import replace

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import Undecodable, decode, decode_tags, encode
from kafka_marshal.protocol.records import (
    KINDS,
    DataGrowth,
    Directive,
    ImportedDirective,
    ImportedKey,
    ImportedPrevious,
    ImportedSettings,
    Limits,
    Plan,
    PlannedMember,
    PlannedTopic,
    Resume,
    ScopedTopic,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.text import (
    object_to_entry,
    object_to_record,
    record_to_object,
    to_line,
)
from kafka_marshal.protocol.types import OFFSET_MAX, PARTITION_MAX

edges = st.sampled_from([0, 1, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**32, OFFSET_MAX])
offsets = edges | st.integers(0, OFFSET_MAX)
partitions = st.sampled_from([0, 1, PARTITION_MAX]) | st.integers(0, PARTITION_MAX)
counts = st.integers(1, PARTITION_MAX)
names = st.just("a" * 200) | st.from_regex(
    r"[A-Za-z0-9._:-]{1,30}", fullmatch=True
).filter(lambda name: name not in {".", ".."})
topics = st.from_regex(r"[A-Za-z0-9_-]{1,30}", fullmatch=True)
ids = st.binary(min_size=16, max_size=16)
texts = st.text(max_size=40).filter(lambda text: text.isprintable())
maybe = st.none().__or__
FIELDS = {
    "client_id": names,
    "group_id": names,
    "incarnation": ids,
    "seq": offsets,
    "topic": topics | st.sampled_from(["/checkpoint", "/planner", "t" * 249]),
    "topics": st.lists(topics, max_size=3).map(tuple),
    "partition": partitions,
    "epoch": offsets,
    "position": maybe(offsets),
    "rewind": st.booleans(),
    "generation": counts,
    "topic_id": maybe(ids),
    "resume_hash": maybe(st.binary(min_size=32, max_size=32)),
    "expected_epoch": maybe(offsets),
    "resume": maybe(st.builds(Resume, ids, offsets, ids)),
    "successor": maybe(names),
    "reason": maybe(texts),
    "client": maybe(names),
    "action": st.sampled_from(["drain", "cordon"]),
    "policy": maybe(names),
    "planner_version_max": maybe(counts),
    "debounce_ms": maybe(offsets),
    "handoff_ms": maybe(counts),
    "handoffs_max": maybe(counts),
    "grace_ms": maybe(offsets),
    "fenced": names,
    "fenced_incarnation": ids,
    "grantee": ids,
    "first": offsets,
    "proposed_last_offset": offsets,
    "op_id": ids,
    "plan_digest": ids,
    "key_count": counts,
    "commit": st.booleans(),
    "decided": maybe(offsets),
    "msg_expire_time": offsets,
    "begin_time": offsets,
    "within_ms": counts,
    "scope": maybe(
        st.dictionaries(
            topics, st.sets(partitions, max_size=4), min_size=1, max_size=3
        ).map(
            lambda scope: tuple(
                ScopedTopic(name, tuple(sorted(scope[name]))) for name in sorted(scope)
            )
        )
    ),
    "beats": st.lists(st.tuples(offsets, maybe(offsets)), min_size=1, max_size=9).map(
        tuple
    ),
    "format_id": ids,
    "era": st.integers(0, 2**32 - 1),
    "cluster_id": texts,
    "heartbeat_interval_ms": counts,
    "partition_count": counts,
    "feature_level": counts,
    "limits": st.builds(
        Limits, **dict.fromkeys(Limits.__struct_fields__, maybe(counts))
    ),
    "host": texts,
    "capacity": offsets,
    "load": offsets,
    "labels": st.dictionaries(texts, texts, max_size=3),
    "draining": st.booleans(),
    "feature_level_max": counts,
    "plan_generation": maybe(offsets),
    "number": offsets,
    "part_count": counts,
    "size_bytes": counts,
    "digest": ids,
    "data": st.binary(min_size=1, max_size=64),
    "follows": offsets,
    "slice_count": counts,
    "planner_version": counts,
    "vector": st.lists(st.tuples(offsets, offsets), max_size=3).map(tuple),
    "input_digest": ids,
    "moves": st.lists(
        st.builds(
            PlannedMember,
            names,
            st.lists(
                st.tuples(offsets, st.lists(partitions, max_size=3).map(tuple)),
                max_size=3,
            ).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    "from_count": counts,
    "config": st.builds(
        lambda generation, era, k: encode(config(generation, era=era, k=k)),
        counts,
        st.integers(0, 2**32 - 1),
        counts,
    ),
    "source": partitions,
    "source_offset": offsets,
    "items": st.lists(
        st.builds(
            ImportedKey,
            group_id=names,
            topic=topics,
            partition=partitions,
            position=maybe(offsets),
            granted=maybe(offsets),
            topic_id=maybe(ids),
            retired_topic_ids=st.lists(ids, max_size=4).map(tuple),
            previous=maybe(
                st.builds(ImportedPrevious, ids, maybe(offsets), maybe(offsets))
            ),
            successor=maybe(names),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    "settings": st.lists(
        st.builds(
            ImportedSettings,
            group_id=names,
            generation=counts,
            policy=maybe(names),
            planner_version_max=maybe(counts),
            debounce_ms=maybe(offsets),
            handoff_ms=maybe(counts),
            handoffs_max=maybe(counts),
            grace_ms=maybe(offsets),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    "directives": st.lists(
        st.builds(
            ImportedDirective,
            group_id=names,
            op_id=ids,
            client_id=names,
            incarnation=ids,
            seq=offsets,
            until_ms=offsets,
            client=names,
            host=st.none(),
            action=st.sampled_from(("drain", "cordon")),
        ),
        max_size=3,
    ).map(tuple),
    "old_count": st.just(3),
    "new_count": st.integers(2, 9).map(lambda times: 3 * times),
    "ends": maybe(st.lists(offsets, min_size=3, max_size=3).map(tuple)),
    "checkpoint_id": ids,
    "begin_offset": offsets,
    "begin_leader_epoch": partitions,
    "tags": st.just(msgspec.UNSET) | st.binary(max_size=64),
}
staged_topics = st.lists(
    st.builds(
        StagedTopic,
        topics,
        maybe(ids),
        st.dictionaries(partitions, offsets, min_size=1, max_size=3).map(
            lambda positions: tuple(positions.items())
        ),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda topic: topic.topic,
).map(tuple)
planned_topics = st.lists(st.builds(PlannedTopic, topics, counts), max_size=3).map(
    tuple
)
SPECIAL = {
    (StagePosition, "topics"): staged_topics,
    (Plan, "topics"): planned_topics,
    (DataGrowth, "topic"): topics,  # reserved topics are not valid here
}
records = st.one_of(
    st.builds(
        kind.record,
        **{
            name: SPECIAL[kind.record, name]
            if (kind.record, name) in SPECIAL
            else FIELDS[name]
            for name in kind.record.__struct_fields__
        },
    )
    for kind in KINDS
    if kind.record is not Directive
) | st.builds(
    lambda subject, record: replace(record, **subject),
    st.builds(dict, client=names, host=st.none())
    | st.builds(dict, client=st.none(), host=texts.filter(bool)),
    st.builds(
        Directive,
        **{name: FIELDS[name] for name in Directive.__struct_fields__},
    ),
)


@given(records)
def test_an_encoded_record_decodes_to_the_same_record(record):
    assert decode(encode(record)) == record


@given(records)
def test_a_record_written_as_json_reads_as_the_same_record(record):
    document = json.loads(to_line(record_to_object(record)))
    assert object_to_record(document) == record


@given(st.binary(max_size=300))
def test_any_bytes_decode_to_a_record_or_an_undecodable(value):
    found = decode(value)
    if isinstance(found, Undecodable):
        assert 0 < len(found.reason) <= 200
    else:
        assert decode(encode(found)) == found
    decode_tags(value)


@given(
    st.sampled_from([encode(record) for record in all_records()]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
)
def test_damaged_bytes_decode_to_a_record_or_an_undecodable(value, changes, cut):
    damaged = bytearray(value)
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    for one in (bytes(damaged), bytes(damaged[:cut])):
        found = decode(one)
        assert isinstance(found, Undecodable) or decode(encode(found)) == found


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from([kind.record for kind in KINDS]),
    st.lists(anything, max_size=14),
)
def test_any_msgpack_array_decodes_to_a_record_or_an_undecodable(record, fields):
    number = next(kind.number for kind in KINDS if kind.record is record)
    try:
        payload = msgspec.msgpack.encode(fields)
    except OverflowError:
        return
    header = bytes([1, number, 0]) if number < 128 else b"\x01\x80\x01\x00"
    found = decode(header + payload)
    assert isinstance(found, Undecodable) or decode(encode(found)) == found


@given(
    st.sampled_from([record_to_object(record) for record in all_records()]),
    st.lists(st.tuples(st.integers(0, 20), anything), max_size=2),
)
def test_any_json_fields_read_as_a_record_or_an_undecodable(document, changes):
    data = dict(document["data"])
    for at, value in changes:
        data[list(data)[at % len(data)]] = value
    found = object_to_record(document | {"data": data})
    assert isinstance(found, Undecodable) or decode(encode(found)) == found


@given(anything, st.dictionaries(st.sampled_from(["reason", "value"]), anything))
def test_any_line_reads_as_an_entry_or_raises_malformed_record(value, undecodable):
    head = {"partition": 0, "offset": 0, "leader_epoch": 0, "timestamp_ms": 0}
    for line in (value, head | {"payload": value}, head | {"undecodable": undecodable}):
        with suppress(MalformedRecord):
            object_to_entry(line)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_field_of_a_record_has_a_strategy(kind):
    assert set(kind.record.__struct_fields__) <= set(FIELDS)
