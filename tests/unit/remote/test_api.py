"""Messages between a sidecar and its clients: encoding and validation."""

import msgspec
import pytest

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.planner import fair
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.remote import api

EVENTS = [
    api.Assignment(
        subscription="1",
        topic="orders",
        partition=3,
        epoch=17,
        token="0.2.17",
        client_id="host-a",
        incarnation="ab" * 16,
        secret="5e" * 16,
        position=None,
        is_anchored=False,
        soft_until_ms=5_000,
        hard_until_ms=9_000,
    ),
    api.Releasing(topic="orders", partition=3, epoch=17, reason="surplus"),
    api.Lost(topic="orders", partition=3, epoch=17, reason="taken_over"),
    api.Paused(is_paused=True, until_wall_ms=1, reason="deploy"),
    api.Layout(generation=2),
    api.Failed(failure=api.Failure(error="LogUnreadable", message="gone")),
    api.Snapshot(
        assigned=(),
        releasing=(),
        paused=api.Paused(is_paused=False),
        subscriptions=(),
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_encoding(event):
    wire = msgspec.json.encode(event)
    assert msgspec.json.decode(wire, type=api.EventBody) == event


def test_unknown_fields_of_an_event_are_ignored():
    wire = b'{"type":"lost","topic":"t","partition":0,"epoch":1,"reason":"x","new":1}'
    assert msgspec.json.decode(wire, type=api.EventBody).was_lost


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (api.PauseRequest, b'{"for_ms": 9, "topic": ["orders"]}'),
        (api.ResumeRequest, b'{"op_id": "0a"}'),
        (api.ResetRequest, b'{"all_topics": true, "to_latest": true, "exceute": true}'),
        (api.ResetRequest, b'{"offsets": [{"topic": "t", "partition": 0, "to": 1}]}'),
        (api.UndoRequest, b'{"op_id": "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a", "dry": 1}'),
        (api.FinishRequest, b'{"topics": []}'),
    ],
)
def test_an_action_on_a_group_with_an_unknown_field_is_refused(kind, body):
    """Without the misspelled field it could act on more than was meant."""
    with pytest.raises(msgspec.ValidationError, match=r"unknown|missing"):
        msgspec.json.decode(body, type=kind)


def test_an_event_id_names_the_process_the_event_and_the_log_entry():
    assert api.frame_id("0123456789abcdef", 7, t=3, offset=4711) == "01234567.7.3.4711"
    frame = api.Frame("01234567.7.3.4711", api.Paused(is_paused=False))
    assert frame.is_of("0123456789abcdef")
    assert not frame.is_of("1123456789abcdef")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (api.RegisterRequest, {"instance": "AB" * 16, "beat_ms": 1}),
        (api.RegisterRequest, {"instance": "ab" * 16 + "\n", "beat_ms": 1}),
        (api.RegisterRequest, {"instance": "ab" * 16, "beat_ms": -1}),
        (api.SubscriptionSpec, {"topics": ["a/b"]}),
        (api.SubscriptionSpec, {"topics": ["a\n"]}),
        (api.SubscriptionSpec, {"delivery": "exactly once"}),
        (api.HeartbeatRequest, {"timeout_ms": api.WAIT_MS_MAX + 1}),
        (api.HeartbeatRequest, {"generation": -1}),
        (api.HeartbeatRequest, {"progress": [{"topic": "t", "partition": -1}]}),
        (api.Children, {"pids": [0]}),
        (api.LeaveRequest, {"reason": "boredom"}),
    ],
    ids=str,
)
def test_invalid_requests_are_refused_when_decoded(kind, body):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(body), type=kind)


@pytest.mark.parametrize("field", api.SubscriptionSpec.__struct_fields__)
def test_a_subscription_has_the_defaults_of_a_consumer(field):
    bare = api.SubscriptionSpec.of(ConsumerConfig(topics=("t",)))
    assert getattr(bare, field) == getattr(api.SubscriptionSpec(topics=("t",)), field)


def test_a_subscription_has_the_settings_of_its_consumer():
    config = ConsumerConfig(
        pattern="t-.*",
        delivery="amo",
        policy="greedy",
        claims_max=3,
        auto_offset_reset="latest",
        isolation_level="read_committed",
        metadata_refresh_ms=500,
        release_behind=False,
        starts={TopicPartition("t-1", 0): 7},
        max_handling_ms=0,
    )
    sent = msgspec.json.encode(api.SubscriptionSpec.of(config))
    assert msgspec.json.decode(sent, type=api.SubscriptionSpec).config() == config


def test_a_sidecar_checks_the_settings_that_it_receives():
    with pytest.raises(ConfigurationError, match="at least 1") as caught:
        api.SubscriptionSpec(topics=("t",), metadata_refresh_ms=0).config()
    assert caught.value.setting == "metadata_refresh_ms"


def test_a_policy_that_is_a_function_cannot_be_sent():
    with pytest.raises(ConfigurationError, match="given by name"):
        api.SubscriptionSpec.of(ConsumerConfig(topics=("t",), policy=fair))
