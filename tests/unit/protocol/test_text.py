import base64
import json

import pytest
from logkit import (
    CREATE_TIME,
    INC,
    KEY,
    LOG_APPEND_TIME,
    OP,
    SECRET,
    all_records,
    batch,
    beat,
    claim,
    config,
    hashed,
    ident,
    member,
    resume,
)
from msgspec.structs import replace

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import Undecodable, encode
from kafka_marshal.protocol.text import (
    entry_to_object,
    object_to_entry,
    object_to_record,
    record_to_object,
    to_line,
    transition_to_object,
)
from kafka_marshal.protocol.transition import Transition
from kafka_marshal.protocol.types import LogEntry, TimestampType


def entry(value, **changes):
    fields = {
        "offset": 12,
        "leader_epoch": 0,
        "timestamp_ms": 1_000,
        "timestamp_type": LOG_APPEND_TIME,
        "value": value,
    }
    return LogEntry(**fields | changes)


def line(**changes):
    return entry_to_object(3, entry(encode(beat(1, 2)))) | changes


# --- Writing ---


def test_a_line_is_this():
    record = replace(claim(resume_hash=hashed(SECRET)), tags=b"\x80")
    assert to_line(entry_to_object(3, entry(encode(record)))) == (
        '{"partition":3,"offset":12,"leader_epoch":0,"timestamp_ms":1000,'
        '"timestamp_type":"LogAppendTime","payload":{"type":"ClaimingPartition",'
        '"version":0,"data":{"client_id":"c1","group_id":"g",'
        f'"incarnation":"{INC.hex()}","seq":0,"generation":1,"topic":"t",'
        '"partition":0,"topic_id":null,'
        f'"resume_hash":"{hashed(SECRET).hex()}","expected_epoch":null,'
        '"resume":null,"tags":"80"}}}'
    )


def test_config_is_written_with_its_own_names():
    data = record_to_object(config(span=5))["data"]
    assert data["K"] == 1
    assert data["limits"]["span"] == 5
    assert "partition_count" not in data
    assert "tags" not in data


def test_nested_fields_are_written_out():
    data = record_to_object(resume(7))["data"]
    assert data["resume"] == {
        "incarnation": INC.hex(),
        "epoch": 7,
        "secret": SECRET.hex(),
    }
    assert record_to_object(batch((1, 2), (3, None)))["data"]["beats"] == [
        [1, 2],
        [3, None],
    ]
    assert record_to_object(member())["data"]["labels"] == {}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        pytest.param(None, None, id="tombstone"),
        pytest.param(b"", "", id="nothing"),
        pytest.param(b"\xff\x00", "/wA=", id="bytes"),
    ],
)
def test_an_undecodable_value_is_written_as_it_is(value, written):
    told = entry_to_object(3, entry(value))
    assert told["undecodable"]["value"] == written
    assert "payload" not in told
    partition, back = object_to_entry(told)
    assert (partition, back.value) == (3, value)
    assert back.undecodable == told["undecodable"]["reason"]
    assert entry_to_object(3, back) == told


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(LOG_APPEND_TIME, "LogAppendTime", id="log append"),
        pytest.param(CREATE_TIME, "CreateTime", id="create"),
        pytest.param(TimestampType.NONE, "NoTimestampType", id="none"),
    ],
)
def test_timestamp_types_have_names(kind, name):
    told = entry_to_object(3, entry(b"", timestamp_type=kind))
    assert told["timestamp_type"] == name
    assert object_to_entry(told)[1].timestamp_type == kind


@pytest.mark.parametrize(
    ("transition", "expected"),
    [
        pytest.param(
            Transition(
                5, "accepted", "granted", None, KEY, 2, {"first": 1, "last": 2}, None
            ),
            '{"partition":3,"offset":5,"transition":"accepted","effect":"granted",'
            '"reason":null,"key":{"group_id":"g","topic":"t","partition":0},'
            '"epoch":2,"detail":{"first":1,"last":2}}',
            id="with key",
        ),
        pytest.param(
            Transition(5, "ignored", None, "not_owner", None, None, None, None),
            '{"partition":3,"offset":5,"transition":"ignored","effect":null,'
            '"reason":"not_owner","key":null,"epoch":null,"detail":null}',
            id="without key",
        ),
    ],
)
def test_transitions(transition, expected):
    assert to_line(transition_to_object(3, transition)) == expected


# --- Reading ---


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("tagged", [False, True])
def test_every_record_reads_back(record, tagged):
    if tagged:
        record = replace(record, tags=b"\x80")
    told = json.loads(to_line(record_to_object(record)))
    assert object_to_record(told) == record
    value = encode(record)
    whole = json.loads(to_line(entry_to_object(3, entry(value))))
    assert object_to_entry(whole) == (3, entry(value))


def test_what_is_absent_may_be_left_out():
    told = record_to_object(claim())
    for name in ("topic_id", "resume_hash", "expected_epoch", "resume"):
        del told["data"][name]
    del told["version"]
    assert object_to_record(told) == claim()
    told = record_to_object(config())
    told["data"]["limits"] = {}
    told["data"]["tags"] = None
    assert object_to_record(told) == config()


def test_the_timestamp_type_may_be_left_out():
    told = line()
    del told["timestamp_type"]
    assert object_to_entry(told)[1].timestamp_type == LOG_APPEND_TIME


def test_a_leader_epoch_may_be_missing():
    assert object_to_entry(line(leader_epoch=None))[1].leader_epoch is None


DEEP = json.loads("[" * 900 + "]" * 900)
HUGE = 10**6_000


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"partition": None}, id="no partition"),
        pytest.param({"partition": "3"}, id="a partition that is text"),
        pytest.param({"partition": -1}, id="a negative partition"),
        pytest.param({"partition": True}, id="a partition that is true"),
        pytest.param({"offset": None}, id="no offset"),
        pytest.param({"offset": -1}, id="a negative offset"),
        pytest.param({"offset": 2**63}, id="an offset too high"),
        pytest.param({"offset": HUGE}, id="an offset of thousands of digits"),
        pytest.param({"offset": DEEP}, id="an offset too deep to be told"),
        pytest.param({"offset": 1.0}, id="a float"),
        pytest.param({"leader_epoch": "0"}, id="a leader epoch that is text"),
        pytest.param({"timestamp_ms": None}, id="no timestamp"),
        pytest.param({"timestamp_ms": -(2**63) - 1}, id="a timestamp too low"),
        pytest.param({"timestamp_type": None}, id="no timestamp type"),
        pytest.param({"timestamp_type": 1}, id="a type that is a number"),
        pytest.param({"timestamp_type": []}, id="a type that is a list"),
        pytest.param({"timestamp_type": "logappendtime"}, id="another spelling"),
        pytest.param({"undecodable": None}, id="undecodable is null"),
        pytest.param({"undecodable": []}, id="undecodable is a list"),
        pytest.param({"undecodable": {"reason": 5}}, id="a reason that is a number"),
        pytest.param({"undecodable": {"reason": DEEP}}, id="a reason too deep"),
        pytest.param({"undecodable": {"value": 5}}, id="bytes that are a number"),
        pytest.param({"undecodable": {"value": "/w"}}, id="padding is missing"),
        pytest.param({"undecodable": {"value": "/wA=!"}}, id="no base64"),
        pytest.param({"undecodable": {"value": "ä"}}, id="no ASCII"),
    ],
)
def test_lines_that_cannot_be_read(change):
    with pytest.raises(MalformedRecord):
        object_to_entry(line(**change))


@pytest.mark.parametrize("value", [None, 5, "x", [], [{}], True])
def test_a_line_is_an_object(value):
    with pytest.raises(MalformedRecord, match="JSON object"):
        object_to_entry(value)


def test_a_line_needs_a_value():
    told = line()
    del told["payload"]
    with pytest.raises(MalformedRecord, match="payload or undecodable"):
        object_to_entry(told)


def test_undecodable_needs_neither_reason_nor_value():
    found = object_to_entry(line(undecodable={}))[1]
    assert (found.value, found.undecodable) == (None, "undecodable")


def test_a_reason_is_kept_short():
    for value in (None, "/wA="):
        told = {"reason": "r" * 999, "value": value}
        found = object_to_entry(line(undecodable=told))[1]
        assert len(found.undecodable) == 200


def test_undecodable_wins_over_a_payload():
    value = base64.b64encode(encode(beat(1))).decode()
    told = line(undecodable={"reason": "old reader", "value": value})
    found = object_to_entry(told)[1]
    assert (found.value, found.undecodable) == (encode(beat(1)), "old reader")


def payload(**changes):
    return record_to_object(beat(1, 2)) | changes


def data(record=None, **changes):
    told = record_to_object(beat(1, 2) if record is None else record)
    return told | {"data": told["data"] | changes}


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(None, id="null"),
        pytest.param([], id="a list"),
        pytest.param({}, id="empty"),
        pytest.param(payload(data=None), id="no data"),
        pytest.param(payload(data=[]), id="data is a list"),
        pytest.param(payload(more=1), id="an unknown member"),
        pytest.param(payload(type="heartbeat"), id="an unknown type"),
        pytest.param(payload(type=1), id="a type that is a number"),
        pytest.param(payload(type=[]), id="a type that is a list"),
        pytest.param(payload(version=1), id="an unknown version"),
        pytest.param(payload(version="0"), id="a version that is text"),
        pytest.param(payload(version=False), id="a version that is false"),
        pytest.param(data(more=1), id="an unknown field"),
        pytest.param(data(config(), partition_count=1), id="the library's name for K"),
        pytest.param(data(client_id=None), id="a missing field"),
        pytest.param(data(client_id="a b"), id="a bad name"),
        pytest.param(data(client_id="\ud800"), id="a lone surrogate"),
        pytest.param(data(client_id=DEEP), id="a name too deep"),
        pytest.param(data(incarnation="00"), id="bytes too short"),
        pytest.param(data(incarnation="0g" * 16), id="no hex"),
        pytest.param(data(incarnation=5), id="bytes that are a number"),
        pytest.param(data(tags="zz"), id="tags that are no hex"),
        pytest.param(data(tags="00" * 1025), id="tags too long"),
        pytest.param(data(seq=HUGE), id="a huge number"),
        pytest.param(data(seq=2**64), id="a number beyond 64 bits"),
        pytest.param(data(seq=1.0), id="a float"),
        pytest.param(data(rewind=None), id="rewind is not optional"),
        pytest.param(data(claim(), resume=5), id="resume is a number"),
        pytest.param(data(claim(), resume={"no": 1}), id="resume of other fields"),
        pytest.param(data(config(), limits=None), id="no limits"),
        pytest.param(data(config(), limits=[]), id="limits are a list"),
        pytest.param(data(batch((1, 1)), beats=[]), id="no beats"),
    ],
)
def test_a_payload_that_the_codec_cannot_produce_is_undecodable(told):
    record = object_to_record(told)
    assert isinstance(record, Undecodable)
    assert 0 < len(record.reason) <= 200
    found = object_to_entry(line(payload=told))[1]
    assert (found.value, found.undecodable) == (b"", record.reason)


def test_more_than_a_frame_is_undecodable():
    told = data(batch((1, 1)), beats=[[2**62, 2**62]] * 3_000)
    assert object_to_record(told) == Undecodable("frame too long")


def test_hex_is_read_in_both_cases():
    assert object_to_record(data(incarnation=INC.hex().upper())) == beat(1, 2)


def test_ids_have_one_spelling():
    told = record_to_object(claim(topic_id=ident("topic")))
    assert told["data"]["topic_id"] == ident("topic").hex()
    assert record_to_object(all_records()[4])["data"]["op_id"] == OP.hex()
