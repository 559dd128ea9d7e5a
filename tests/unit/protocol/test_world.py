import json

import pytest
from logkit import (
    INC,
    KEY,
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    ident,
    messages,
    pause,
    release,
)

from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.text import to_line
from kafka_marshal.protocol.types import Key
from kafka_marshal.protocol.world import (
    claim_to_object,
    state_to_object,
    world_to_object,
)


def test_an_empty_world():
    assert world_to_object([]) == {"schema": 1, "partitions": {}}


def test_partitions_stand_in_order():
    states = [WorldState(10), WorldState(9), WorldState(0)]
    assert list(world_to_object(states)["partitions"]) == ["0", "9", "10"]


def test_a_partition_that_was_never_read():
    state = WorldState(3)
    assert state_to_object(state) == {
        "next_offset": 0,
        "leader_epoch": None,
        "log_time_ms": None,
        "digest": digest(state),
        "config": None,
        "claims": [],
        "pauses": [],
        "counters": {},
    }


def test_a_document_tells_all():
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
            }
        ],
        "pauses": [],
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
def test_freshness_is_told_with_its_age(age, freshness):
    log = Log()
    log.claimed()
    log.append(b"", after=age)
    told = claim_to_object(log.state, KEY, known=log.key())
    assert (told["freshness"], told["age_ms"]) == (freshness, age)


def test_a_released_key_keeps_its_epoch():
    log = Log()
    log.append(release(log.claimed(), 5))
    told = claim_to_object(log.state, KEY, known=log.key())
    assert (told["owner"], told["freshness"], told["age_ms"]) == (None, None, None)
    assert (told["epoch"], told["token"], told["position"]) == (1, "1.0.1", 5)


def test_a_lock_is_told():
    log = Log()
    log.claimed()
    log.key().lock = OP
    assert claim_to_object(log.state, KEY, known=log.key())["locked_by"] == OP.hex()


def test_without_config_there_is_no_token():
    log = Log()
    log.claimed()
    log.state.config = None
    assert claim_to_object(log.state, KEY, known=log.key())["token"] is None


def test_claims_stand_in_order():
    log = Log()
    for group, topic, number in (("h", "a", 0), ("g", "t", 10), ("g", "t", 9)):
        log.claimed(key=Key(group, topic, number))
    claims = state_to_object(log.state)["claims"]
    assert [(one["group_id"], one["partition"]) for one in claims] == [
        ("g", 9),
        ("g", 10),
        ("h", 0),
    ]


def test_refused_claims_make_no_key():
    log = Log()
    log.append(claim(generation=9))
    log.append(beat(0))
    assert state_to_object(log.state)["claims"] == []


def test_pauses_are_told_while_they_last():
    log = Log()
    log.claimed(key=Key("without", "t", 0))
    log.append(pause(START_MS + 10, group="z"))
    log.append(pause(START_MS + 20, group="a"))
    told = state_to_object(log.state)["pauses"]
    assert told == [
        {
            "group_id": name,
            "op_id": OP.hex(),
            "client_id": "admin",
            "until_ms": START_MS + until,
        }
        for name, until in (("a", 20), ("z", 10))
    ]
    log.append(b"", after=10)
    assert [one["group_id"] for one in state_to_object(log.state)["pauses"]] == ["a"]


def test_counters_stand_in_order():
    log = Log()
    log.append(b"")
    log.claimed()
    names = list(state_to_object(log.state)["counters"])
    assert names == ["claimed", "configured", "undecodable"]


def test_a_halt_is_told():
    log = Log()
    log.append(config(2, era=2, level=3))
    document = state_to_object(log.state)
    assert document["halted"] == {"offset": 1, "feature_level": 3}
    assert document["next_offset"] == 1
