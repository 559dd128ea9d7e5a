"""PROTOCOL 3: records, their bytes and their text.

``vectors.json`` is frozen: bytes that are valid or invalid once stay so for ever.
"""

import json
from pathlib import Path

import msgspec
import pytest
from logkit import (
    INC,
    KEY,
    START_MS,
    H,
    Log,
    all_records,
    batch,
    beat,
    claim,
    config,
    member,
    messages,
    pause,
    release,
)
from msgspec.structs import replace

from kafka_marshal.protocol import rationalizer
from kafka_marshal.protocol.applied import applied_of
from kafka_marshal.protocol.codec import (
    Undecodable,
    decode,
    decode_tags,
    encode,
    person_of,
)
from kafka_marshal.protocol.records import KINDS, Heartbeat
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.text import (
    entry_to_object,
    object_to_entry,
    object_to_record,
    record_to_object,
    transition_to_object,
    world_to_object,
)
from kafka_marshal.protocol.types import LogEntry

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda v: v["payload"]["type"])
def test_3_1_valid_bytes_are_frozen(vector):
    value = bytes.fromhex(vector["hex"])
    record = decode(value)
    assert record_to_object(record) == vector["payload"]
    assert encode(record) == value
    assert object_to_record(vector["payload"]) == record


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda v: v["why"])
def test_3_1_invalid_bytes_are_frozen(vector):
    assert isinstance(decode(bytes.fromhex(vector["hex"])), Undecodable)


def test_3_1_every_record_type_has_valid_and_invalid_vectors():
    valid = {vector["payload"]["type"] for vector in VECTORS["valid"]}
    invalid = {vector["why"].partition(":")[0] for vector in VECTORS["invalid"]}
    assert {kind.name for kind in KINDS} == valid
    assert {kind.name for kind in KINDS} <= invalid


def test_3_1_unreadable_tags_count_as_absent_and_do_not_affect_the_digest():
    one = Log()
    other = Log()
    one.append(replace(claim(), tags=b"\xc1"))
    other.append(claim())
    assert decode_tags(b"\xc1") is None
    assert digest(one.state) == digest(other.state)


def test_3_1_tags_are_an_optional_last_element():
    tags = msgspec.msgpack.encode({"cause": "deploy"})
    assert decode(encode(replace(beat(0), tags=tags))).tags == tags
    assert isinstance(decode(encode(beat(0))[:3] + b"\x90"), Undecodable)


@pytest.mark.parametrize("level", [3, 7, 2**31 - 1])
def test_3_3_an_accepted_config_above_the_known_level_halts(level):
    log = Log()
    transition = log.one(config(2, era=2, level=level), after=3)
    assert transition.outcome == "halted"
    assert log.state.halted == (1, level)
    assert (log.state.now_ms, log.state.next_offset) == (START_MS + 3, 1)
    assert log.append(beat(0), after=9) == ()
    assert (log.state.now_ms, log.state.next_offset) == (START_MS + 3, 1)


def test_3_3_a_refused_config_above_the_known_level_does_not_halt():
    log = Log()
    assert log.outcome_of(config(3, era=2, level=3)) == "config"
    assert log.state.halted is None


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("020100", id="frame version"),
        pytest.param("010700", id="type"),
        pytest.param("01010190", id="record version"),
        pytest.param("018101009090", id="plan"),
    ],
)
def test_3_3_unknown_frames_and_records_do_not_halt(value):
    log = Log()
    assert log.outcome_of(bytes.fromhex(value)) == "undecodable"
    assert log.state.halted is None


def test_3_3_a_record_above_the_level_in_force_is_ignored(monkeypatch):
    log = Log()
    fold, _ = rationalizer._HANDLERS[Heartbeat]
    monkeypatch.setitem(rationalizer._HANDLERS, Heartbeat, (fold, 2))
    transition = log.one(beat(0))
    assert (transition.outcome, transition.reason) == ("ignored", "level")


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [
        ("a" * 200, True),
        ("a" * 201, False),
        ("", False),
        ("a\n", False),
        ("a/b", False),
        (".", False),
        ("..", False),
        ("...", True),
        (".a", True),
    ],
)
def test_3_5_only_valid_client_and_group_ids_are_read(name, is_valid):
    for field in ("client_id", "group_id"):
        document = record_to_object(beat(0))
        document["data"][field] = name
        assert isinstance(object_to_record(document), Heartbeat) == is_valid


@pytest.mark.parametrize(
    ("topic", "is_valid"),
    [
        ("a" * 249, True),
        ("a" * 250, False),
        (".", False),
        ("..", False),
        ("t\n", False),
    ],
)
def test_3_5_only_valid_topic_names_are_read(topic, is_valid):
    document = record_to_object(beat(0))
    document["data"]["topic"] = topic
    assert isinstance(object_to_record(document), Heartbeat) == is_valid


def test_3_5_a_frame_of_more_than_48_kib_is_too_long():
    header = bytes([1, 1, 0])
    assert "frame too long" not in decode(header.ljust(48 * 1024, b"\x90")).reason
    assert decode(header.ljust(48 * 1024 + 1, b"\x90")).reason == "frame too long"


def test_3_6_position_zero_is_a_position():
    log = Log()
    log.append(beat(log.claimed(), 0))
    assert log.key().position == 0
    log.append(beat(1, None))
    assert log.key().position == 0


def test_3_6_proposed_last_offset_is_inclusive():
    log = Log()
    transition = log.one(messages(log.claimed(), 5, 5))
    assert transition.detail == {"first": 5, "last": 5}
    assert log.key().position == 6


def test_3_6_a_batch_has_the_effect_of_its_single_heartbeats():
    one, other = Log(), Log()
    for log in (one, other):
        log.claimed()
        log.claimed(key=KEY._replace(partition=1))
    transitions = one.append(batch((1, 5), (2, None), (1, 7)), after=5)
    other.append(beat(1, 5), after=5)
    other.append(beat(2, None, key=KEY._replace(partition=1)))
    other.append(beat(1, 7))
    assert [t.effect for t in transitions] == ["renewed"] * 3
    assert one.state.keys == other.state.keys


def test_3_6_a_batch_counts_for_its_own_group_only():
    log = Log()
    log.claimed()
    (transition,) = log.append(batch((1, 5), group="other"))
    assert (transition.reason, transition.key) == ("not_owner", None)


def test_3_6_a_batch_above_the_limit_is_refused_as_one_transition():
    log = Log(beats=1)
    log.claimed()
    (transition,) = log.append(batch((1, 5), (1, 6)))
    assert (transition.outcome, transition.reason) == ("refused", "limits")


def test_3_6_an_empty_batch_is_undecodable():
    value = bytes([1, 6, 0]) + msgspec.msgpack.encode(["c1", "g", INC, 0, []])
    assert isinstance(decode(value), Undecodable)


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
def test_3_7_the_text_form_of_an_entry_is_read_back_as_its_bytes(record):
    entry = LogEntry(
        offset=12,
        leader_epoch=0,
        timestamp_ms=1_000,
        timestamp_type=1,
        value=encode(record),
    )
    document = entry_to_object(3, entry)
    assert list(document) == [
        *("partition", "offset", "leader_epoch", "timestamp_ms", "timestamp_type"),
        "payload",
    ]
    assert list(document["payload"]) == ["type", "version", "data"]
    assert object_to_entry(document) == (3, entry)


def test_3_7_an_undecodable_value_is_never_decoded_again():
    value = encode(config())
    entry = LogEntry(
        offset=0,
        leader_epoch=0,
        timestamp_ms=0,
        timestamp_type=1,
        value=value,
        undecodable="an old reader",
    )
    document = entry_to_object(0, entry)
    assert set(document["undecodable"]) == {"reason", "value"}
    assert object_to_entry(document) == (0, entry)


def test_3_7_text_that_the_codec_cannot_produce_is_undecodable():
    document = record_to_object(beat(0))
    document["data"]["epoch"] = -1
    assert isinstance(object_to_record(document), Undecodable)


def test_3_7_dump_then_replay_gives_the_same_digest():
    log = Log()
    epoch = log.claimed()
    for what in (beat(epoch, 5), b"?", None, pause(START_MS + H), release(epoch)):
        log.append(what, after=3)
    again = Log(configured=False)
    for entry in log.entries:
        document = json.loads(json.dumps(entry_to_object(0, entry)))
        rationalizer.apply(again.state, object_to_entry(document)[1])
    assert digest(again.state) == digest(log.state)


def test_3_8_a_transition_document_has_exactly_these_fields():
    log = Log()
    log.claimed()
    document = transition_to_object(0, log.one(claim("c2")))
    assert document == {
        "partition": 0,
        "offset": 2,
        "transition": "refused",
        "effect": None,
        "reason": "held",
        "key": {"group_id": "g", "topic": "t", "partition": 0},
        "epoch": 1,
        "detail": {"remaining_ms": 2 * H + 1},
    }


def test_3_8_the_world_document_has_exactly_these_fields():
    log = Log()
    log.claimed()
    document = world_to_object([log.state])
    assert list(document) == ["schema", "partitions"]
    assert list(document["partitions"]["0"]) == [
        *("next_offset", "leader_epoch", "log_time_ms", "digest", "config"),
        *(
            "claims",
            "pauses",
            "scheduled",
            "fences",
            "directives",
            "settings",
            "plans",
            "counters",
        ),
    ]
    assert list(document["partitions"]["0"]["claims"][0]) == [
        *("group_id", "topic", "partition", "owner", "epoch", "token", "position"),
        *("granted", "freshness", "age_ms", "locked_by", "offer"),
    ]


def test_3_9_the_person_in_tags_does_not_affect_the_digest():
    tags = msgspec.msgpack.encode({"by": "ada"})
    named, plain = Log(), Log()
    for log, record in (
        (named, replace(pause(10**6), tags=tags)),
        (plain, pause(10**6)),
    ):
        log.append(record)
    assert person_of(replace(pause(1), tags=tags)) == "ada"
    assert digest(named.state) == digest(plain.state)


def test_3_10_applied_and_began_do_not_affect_the_digest():
    tags = msgspec.msgpack.encode({"applied": [7, None, 9], "began": [0, None, 3]})
    stated, plain = Log(), Log()
    stated.append(replace(member(), tags=tags))
    plain.append(member())
    (known,) = stated.state.soft.members.values()
    announced = applied_of(known.record)
    assert (announced.applied, announced.began) == ({0: 7, 2: 9}, {0: 0, 2: 3})
    assert digest(stated.state) == digest(plain.state)
    assert applied_of(replace(member(), tags=b"\xc1")).applied == {}
