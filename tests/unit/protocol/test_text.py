import base64
import json

import pytest
from logkit import (
    CREATE_TIME,
    INC,
    KEY,
    LOCK,
    LOG_APPEND_TIME,
    OP,
    SECRET,
    START_MS,
    H,
    Log,
    all_records,
    batch,
    beat,
    claim,
    config,
    direct,
    growth,
    hashed,
    ident,
    layout_import,
    member,
    messages,
    offer,
    pause,
    planned,
    ready,
    release,
    resume,
    schedule,
    scope_of,
    settings,
    target_log,
)
from msgspec.structs import replace

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import Undecodable, encode
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import Transition, WorldState
from kafka_marshal.protocol.text import (
    abbreviated,
    claim_to_object,
    entry_to_object,
    object_to_entry,
    object_to_record,
    record_to_object,
    scope_texts,
    state_to_object,
    to_line,
    transition_to_object,
    world_to_object,
)
from kafka_marshal.protocol.types import Key, LogEntry, TimestampType


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


def test_the_line_of_a_claim_has_this_text():
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


def test_a_config_is_written_with_the_field_names_of_the_protocol():
    data = record_to_object(config(span=5))["data"]
    assert data["K"] == 1
    assert data["limits"]["span"] == 5
    assert "partition_count" not in data
    assert "tags" not in data


def test_nested_fields_are_written_as_objects_and_arrays():
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
def test_an_undecodable_value_is_written_as_base64_and_read_back(value, written):
    document = entry_to_object(3, entry(value))
    assert document["undecodable"]["value"] == written
    assert "payload" not in document
    partition, back = object_to_entry(document)
    assert (partition, back.value) == (3, value)
    assert back.undecodable == document["undecodable"]["reason"]
    assert entry_to_object(3, back) == document


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(LOG_APPEND_TIME, "LogAppendTime", id="log append"),
        pytest.param(CREATE_TIME, "CreateTime", id="create"),
        pytest.param(TimestampType.NONE, "NoTimestampType", id="none"),
    ],
)
def test_timestamp_types_are_written_by_name(kind, name):
    document = entry_to_object(3, entry(b"", timestamp_type=kind))
    assert document["timestamp_type"] == name
    assert object_to_entry(document)[1].timestamp_type == kind


@pytest.mark.parametrize(
    ("transition", "expected"),
    [
        pytest.param(
            Transition(
                offset=5,
                outcome="accepted",
                effect="granted",
                reason=None,
                key=KEY,
                epoch=2,
                detail={"first": 1, "last": 2},
                record=None,
            ),
            '{"partition":3,"offset":5,"transition":"accepted","effect":"granted",'
            '"reason":null,"key":{"group_id":"g","topic":"t","partition":0},'
            '"epoch":2,"detail":{"first":1,"last":2}}',
            id="with key",
        ),
        pytest.param(
            Transition(
                offset=5,
                outcome="ignored",
                effect=None,
                reason="not_owner",
                key=None,
                epoch=None,
                detail=None,
                record=None,
            ),
            '{"partition":3,"offset":5,"transition":"ignored","effect":null,'
            '"reason":"not_owner","key":null,"epoch":null,"detail":null}',
            id="without key",
        ),
    ],
)
def test_the_line_of_a_transition_has_this_text(transition, expected):
    assert to_line(transition_to_object(3, transition)) == expected


# --- Reading ---


@pytest.mark.parametrize("record", all_records(), ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("tagged", [False, True])
def test_every_record_reads_back(record, tagged):
    if tagged:
        record = replace(record, tags=b"\x80")
    document = json.loads(to_line(record_to_object(record)))
    assert object_to_record(document) == record
    value = encode(record)
    whole = json.loads(to_line(entry_to_object(3, entry(value))))
    assert object_to_entry(whole) == (3, entry(value))


def test_optional_fields_may_be_left_out():
    document = record_to_object(claim())
    for name in ("topic_id", "resume_hash", "expected_epoch", "resume"):
        del document["data"][name]
    del document["version"]
    assert object_to_record(document) == claim()
    document = record_to_object(config())
    document["data"]["limits"] = {}
    document["data"]["tags"] = None
    assert object_to_record(document) == config()


def test_the_timestamp_type_may_be_left_out():
    document = line()
    del document["timestamp_type"]
    assert object_to_entry(document)[1].timestamp_type == LOG_APPEND_TIME


def test_a_leader_epoch_may_be_null():
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
def test_an_invalid_line_is_refused(change):
    with pytest.raises(MalformedRecord):
        object_to_entry(line(**change))


@pytest.mark.parametrize("value", [None, 5, "x", [], [{}], True])
def test_a_line_that_is_no_json_object_is_refused(value):
    with pytest.raises(MalformedRecord, match="JSON object"):
        object_to_entry(value)


def test_a_line_needs_a_payload_or_undecodable():
    document = line()
    del document["payload"]
    with pytest.raises(MalformedRecord, match="payload or undecodable"):
        object_to_entry(document)


def test_undecodable_needs_neither_reason_nor_value():
    found = object_to_entry(line(undecodable={}))[1]
    assert (found.value, found.undecodable) == (None, "undecodable")


def test_the_reason_of_an_undecodable_line_is_truncated():
    for value in (None, "/wA="):
        undecodable = {"reason": "r" * 999, "value": value}
        found = object_to_entry(line(undecodable=undecodable))[1]
        assert len(found.undecodable) == 200


def test_undecodable_wins_over_a_payload():
    value = base64.b64encode(encode(beat(1))).decode()
    document = line(undecodable={"reason": "old reader", "value": value})
    found = object_to_entry(document)[1]
    assert (found.value, found.undecodable) == (encode(beat(1)), "old reader")


def payload(**changes):
    return record_to_object(beat(1, 2)) | changes


def data(record=None, **changes):
    document = record_to_object(beat(1, 2) if record is None else record)
    return document | {"data": document["data"] | changes}


@pytest.mark.parametrize(
    "document",
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
def test_a_payload_that_the_codec_cannot_produce_is_undecodable(document):
    record = object_to_record(document)
    assert isinstance(record, Undecodable)
    assert 0 < len(record.reason) <= 200
    found = object_to_entry(line(payload=document))[1]
    assert (found.value, found.undecodable) == (b"", record.reason)


def test_a_payload_longer_than_a_frame_is_undecodable():
    document = data(batch((1, 1)), beats=[[2**62, 2**62]] * 3_000)
    assert object_to_record(document) == Undecodable("frame too long")


def test_hex_is_read_in_both_cases():
    assert object_to_record(data(incarnation=INC.hex().upper())) == beat(1, 2)


def test_ids_are_written_in_hex():
    document = record_to_object(claim(topic_id=ident("topic")))
    assert document["data"]["topic_id"] == ident("topic").hex()
    assert record_to_object(all_records()[4])["data"]["op_id"] == OP.hex()


# --- world


def test_a_world_without_states_has_no_partitions():
    assert world_to_object([]) == {"schema": 1, "partitions": {}}


def test_partitions_are_sorted_by_number():
    states = [WorldState(10), WorldState(9), WorldState(0)]
    assert list(world_to_object(states)["partitions"]) == ["0", "9", "10"]


def test_the_document_of_a_state_without_entries_is_empty():
    state = WorldState(3)
    assert state_to_object(state) == {
        "next_offset": 0,
        "leader_epoch": None,
        "log_time_ms": None,
        "digest": digest(state),
        "config": None,
        "claims": [],
        "pauses": [],
        "scheduled": [],
        "fences": [],
        "directives": [],
        "settings": [],
        "plans": [],
        "counters": {},
    }


def test_the_document_of_a_state_has_every_field():
    log = Log(era=7, span=100)
    epoch = log.claimed()
    log.append(messages(epoch, 5, 9), after=3)
    log.append(b"?", epoch=2)
    document = state_to_object(log.state)
    assert document == {
        "next_offset": 4,
        "leader_epoch": 2,
        "log_time_ms": START_MS + 3,
        "digest": digest(log.state),
        "config": {
            "generation": 1,
            "format_id": ident("format").hex(),
            "era": 7,
            "cluster_id": "cluster",
            "heartbeat_interval_ms": H,
            "K": 1,
            "feature_level": 1,
            "limits": {
                "span": 100,
                "max_pause_ms": None,
                "keys": None,
                "groups": None,
                "beats": None,
                "forget_ms": None,
                "locks": None,
                "operations": None,
            },
        },
        "claims": [
            {
                "group_id": "g",
                "topic": "t",
                "partition": 0,
                "owner": {"client_id": "c1", "incarnation": INC.hex()},
                "epoch": 1,
                "token": "7.0.1",
                "position": 10,
                "granted": 10,
                "freshness": "fresh",
                "age_ms": 3,
                "locked_by": None,
                "offer": None,
            }
        ],
        "pauses": [],
        "scheduled": [],
        "fences": [],
        "directives": [],
        "settings": [],
        "plans": [],
        "counters": {"claimed": 1, "configured": 1, "granted": 1, "undecodable": 1},
    }
    assert json.loads(to_line(document)) == document


@pytest.mark.parametrize(
    ("age", "freshness"),
    [
        pytest.param(H - 1, "fresh", id="H - 1"),
        pytest.param(H, "unknown", id="H"),
        pytest.param(2 * H, "unknown", id="2H"),
        pytest.param(2 * H + 1, "stale", id="2H + 1"),
    ],
)
def test_a_claim_shows_its_freshness_and_age(age, freshness):
    log = Log()
    log.claimed()
    log.append(b"", after=age)
    document = claim_to_object(log.state, KEY, known=log.key())
    assert (document["freshness"], document["age_ms"]) == (freshness, age)


def test_a_released_key_shows_epoch_token_and_position_without_owner():
    log = Log()
    log.append(release(log.claimed(), 5))
    document = claim_to_object(log.state, KEY, known=log.key())
    assert (document["owner"], document["freshness"], document["age_ms"]) == (
        None,
        None,
        None,
    )
    assert (document["epoch"], document["token"], document["position"]) == (
        1,
        "1.0.1",
        5,
    )


def test_a_locked_key_shows_the_operation_of_its_lock():
    log = Log()
    log.claimed()
    log.key().lock = LOCK
    assert claim_to_object(log.state, KEY, known=log.key())["locked_by"] == OP.hex()


def test_an_offered_key_shows_its_offer():
    log = Log(level=2)
    log.append(offer(log.claimed()))
    shown = {"successor": "c2", "until_ms": START_MS + H, "ready": None}
    assert claim_to_object(log.state, KEY, known=log.key())["offer"] == shown
    log.append(ready(log.key().epoch))
    shown["ready"] = ident("c2").hex()
    assert claim_to_object(log.state, KEY, known=log.key())["offer"] == shown


def test_without_config_there_is_no_token():
    log = Log()
    log.claimed()
    log.state.config = None
    assert claim_to_object(log.state, KEY, known=log.key())["token"] is None


def test_claims_are_sorted_by_group_and_number():
    log = Log()
    for group, topic, number in (("h", "a", 0), ("g", "t", 10), ("g", "t", 9)):
        log.claimed(key=Key(group, topic, number))
    claims = state_to_object(log.state)["claims"]
    assert [(one["group_id"], one["partition"]) for one in claims] == [
        ("g", 9),
        ("g", 10),
        ("h", 0),
    ]


def test_a_refused_claim_is_not_listed():
    log = Log()
    log.append(claim(generation=9))
    log.append(beat(0))
    assert state_to_object(log.state)["claims"] == []


def test_active_pauses_are_reported():
    log = Log()
    log.claimed(key=Key("without", "t", 0))
    log.append(pause(START_MS + 10, group="z"))
    log.append(pause(START_MS + 20, group="a"))
    document = state_to_object(log.state)["pauses"]
    assert document == [
        {
            "group_id": name,
            "op_id": OP.hex(),
            "client_id": "admin",
            "until_ms": START_MS + until,
            "scope": None,
        }
        for name, until in (("a", 20), ("z", 10))
    ]
    log.append(b"", after=10)
    assert [one["group_id"] for one in state_to_object(log.state)["pauses"]] == ["a"]


def test_scheduled_pauses_are_reported():
    log = Log(level=2)
    for name, begin, op in (("z", 9, "1"), ("a", 8, "2"), ("a", 7, "3")):
        log.append(schedule(START_MS + begin, START_MS + 20, group=name, op=ident(op)))
    document = state_to_object(log.state)
    assert document["pauses"] == []
    assert document["scheduled"] == [
        {
            "group_id": name,
            "op_id": ident(op).hex(),
            "client_id": "admin",
            "begin_ms": START_MS + begin,
            "until_ms": START_MS + 20,
            "scope": None,
        }
        for name, begin, op in (("a", 7, "3"), ("a", 8, "2"), ("z", 9, "1"))
    ]


def test_pauses_with_a_scope_are_listed_after_that_of_their_group():
    log = Log(level=2)
    scope = {"t": (0, 3), "u": ()}
    log.append(schedule(0, START_MS + 20, op=ident("b"), scope=scope))
    log.append(schedule(0, START_MS + 20, op=ident("a"), scope={"t": ()}))
    log.append(schedule(START_MS + 9, START_MS + 20, op=ident("c"), scope={"t": ()}))
    log.append(pause(START_MS + 20))
    document = state_to_object(log.state)
    whole = [{"topic": "t", "partitions": []}]
    parts = [{"topic": "t", "partitions": [0, 3]}, {"topic": "u", "partitions": []}]
    assert [(each["op_id"], each["scope"]) for each in document["pauses"]] == [
        (OP.hex(), None),
        (ident("a").hex(), whole),
        (ident("b").hex(), parts),
    ]
    assert [each["scope"] for each in document["scheduled"]] == [whole]


def test_a_scope_is_shown_as_topics_with_their_partitions():
    scope = scope_of({"invoices": (0, 3), "orders": ()})
    assert scope_texts(scope) == ("invoices:0,3", "orders")
    assert scope_texts(None) == ()


def test_counters_are_sorted():
    log = Log()
    log.append(b"")
    log.claimed()
    names = list(state_to_object(log.state)["counters"])
    assert names == ["claimed", "configured", "undecodable"]


def test_a_halt_is_reported():
    log = Log()
    log.append(config(2, era=2, level=3))
    document = state_to_object(log.state)
    assert document["halted"] == {"offset": 1, "feature_level": 3}
    assert document["next_offset"] == 1


def test_directives_are_listed():
    log = Log(level=2)
    log.append(direct(host="m1", group="marshal"))
    (row,) = state_to_object(log.state)["directives"]
    assert (row["group_id"], row["client"], row["host"]) == ("marshal", None, "m1")


def test_the_settings_of_groups_are_listed():
    log = Log(level=2)
    log.append(settings(handoff_ms=7))
    names = ("policy", "planner_version_max", "debounce_ms", "handoffs_max", "grace_ms")
    assert state_to_object(log.state)["settings"] == [
        {"group_id": "g", "generation": 1, "handoff_ms": 7, **dict.fromkeys(names)}
    ]


def test_the_plan_generations_of_groups_are_listed():
    log = Log(level=2)
    log.append(planned())
    log.append(planned(1), after=5)
    assert state_to_object(log.state)["plans"] == [
        {"group_id": "g", "generation": 2, "log_time_ms": log.now_ms}
    ]


def test_a_plan_is_written_and_read_back():
    record = planned(3, ("c2", 0, (0, 2)), ("c3", 1, (1,)), topics=(("t", 3), ("u", 2)))
    payload = record_to_object(record)
    assert payload["data"]["moves"] == [
        {"client_id": "c2", "keys": [[0, [0, 2]]]},
        {"client_id": "c3", "keys": [[1, [1]]]},
    ]
    assert payload["data"]["input_digest"] == OP.hex()
    assert object_to_record(payload) == record


def test_a_state_shows_an_open_change_of_the_partition_count():
    log = target_log()
    log.append(layout_import())
    assert state_to_object(log.state)["layout"] == {
        "op_id": OP.hex(),
        "from_count": 1,
        "offset": 0,
        "sources": [{"partition": 0, "imported_count": 1, "done_ms": None}],
    }
    assert "layout" not in state_to_object(Log().state)


def test_growths_are_listed_if_a_state_has_any():
    log = Log(level=2)
    assert "growths" not in state_to_object(log.state)
    log.append(growth(2, 1, topic_id=ident("topic")))
    log.append(growth(2, 1, topic_id=ident("topic"), ends=(7,)))
    log.append(growth(8, 4, topic="u"))
    row = {"topic": "t", "old_count": 1, "new_count": 2, "ends": [7]}
    assert state_to_object(log.state)["growths"] == [
        row | {"topic_id": ident("topic").hex(), "offset": 1},
        row
        | {"topic": "u", "old_count": 4, "new_count": 8, "ends": None}
        | {"topic_id": None, "offset": 3},
    ]


def test_byte_strings_in_lists_are_written_in_hex():
    (record,) = (r for r in all_records() if type(r).__name__ == "LayoutImport")
    payload = record_to_object(record)
    (item,) = payload["data"]["items"]
    assert item["retired_topic_ids"] == [ident("before").hex()]
    assert object_to_record(payload) == record
    item["retired_topic_ids"] = [5]
    assert isinstance(object_to_record(payload), Undecodable)


def test_a_long_list_is_abbreviated_with_a_count():
    assert abbreviated([1, 2]) == "1, 2"
    assert abbreviated(range(7)) == "0, 1, 2, 3, 4 and 2 more"
