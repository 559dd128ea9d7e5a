"""Events as lines of the standard library's logging and of structlog."""

import io
import json
import logging
import sys

import pytest
import structlog
from enginekit import H, owning, pause_for, world

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.observability import (
    FanOut,
    LoggingObserver,
    NullObserver,
    StructuredObserver,
)
from kafka_marshal.observability.logs import (
    HIDDEN,
    ITEMS_MAX,
    TEXT_CHARS_MAX,
    escaped,
    flat,
    level_of,
    to_line,
)
from kafka_marshal.ports import Event
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.types import Key, Token, TopicPartition
from simulator.node import Recorder


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("claimed", logging.INFO),
        ("clock_step", logging.WARNING),
        ("session_failed", logging.ERROR),
        ("something_new", logging.INFO),
    ],
)
def test_each_event_has_its_level(caplog, name, level):
    caplog.set_level(logging.DEBUG, "kafka_marshal")
    LoggingObserver().observe(Event(name, {"epoch": 3}))
    (line,) = caplog.records
    assert (line.name, line.levelno) == ("kafka_marshal", level)
    assert line.getMessage() == f"{name} epoch=3"
    assert level_of(name) == level


def test_a_log_record_has_the_fields_of_the_event_as_json(caplog):
    """Formatters that write JSON need fields, not only the text."""
    caplog.set_level(logging.INFO, "kafka_marshal")
    key = Key("billing", "payments", 3)
    LoggingObserver().observe(Event("claimed", {"key": key, "epoch": 7}))
    assert json.loads(json.dumps(caplog.records[0].kafka_marshal)) == {
        "event": "claimed",
        "group": "billing",
        "topic": "payments",
        "partition": 3,
        "epoch": 7,
    }


def test_control_characters_of_event_fields_are_escaped(caplog):
    caplog.set_level(logging.DEBUG, "kafka_marshal")
    LoggingObserver().observe(Event("ready", {"host": "a b\n\x1b[2J", "none": ""}))
    assert caplog.records[0].getMessage() == r"ready host='a b\n\x1b[2J' none=''"


def test_an_event_below_the_log_level_is_not_formatted(caplog):
    class Costly:
        def __str__(self):
            raise AssertionError

    caplog.set_level(logging.ERROR, "kafka_marshal")
    LoggingObserver().observe(Event("ready", {"what": Costly()}))
    NullObserver().observe(Event("ready", {"what": Costly()}))
    assert caplog.records == []


# --- text from the log


@pytest.mark.parametrize("text", ["", "payments-0", "größer 日本", 'a "b" \\c'])
def test_printable_text_is_not_escaped(text):
    assert escaped(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a\nb", r"a\nb", id="line"),
        pytest.param("\x1b[31m", r"\x1b[31m", id="terminal"),
        pytest.param("a\u202eb", r"a\u202eb", id="direction"),
        pytest.param("日\u2028", r"日\u2028", id="separator"),
        pytest.param("\x00\x7f\x9b", r"\x00\x7f\x9b", id="control"),
        pytest.param("\ud800", r"\ud800", id="surrogate"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert escaped(text) == shown
    assert escaped(text).isprintable()


def test_escaped_text_is_cut_to_its_limit():
    assert len(escaped("x" * 10_000)) == TEXT_CHARS_MAX
    assert len(escaped("\x1b" * 10_000)) == TEXT_CHARS_MAX * len(r"\x1b")


# --- several observers

EVENT = Event("ready", {"partition_count": 8})


class Broken:
    def __init__(self):
        self.count = 0

    def observe(self, event):
        self.count += 1
        raise OSError("full")


def test_added_observers_are_called_until_they_are_removed():
    first, second, third = Recorder(), Recorder(), Recorder()
    fan = FanOut(first, second)
    fan.add(third)
    fan.observe(EVENT)
    assert first.events == second.events == third.events == [EVENT]
    fan.remove(second)
    fan.remove(second)
    fan.observe(EVENT)
    assert [len(each.events) for each in (first, second, third)] == [2, 1, 2]


def test_an_observer_added_twice_gets_each_event_once():
    shared = Recorder()
    fan = FanOut(shared)
    fan.add(shared)
    fan.observe(EVENT)
    assert shared.events == [EVENT]
    fan.remove(shared)
    fan.observe(EVENT)
    assert shared.events == [EVENT, EVENT]


def test_an_observer_that_raises_is_not_called_again():
    broken, sound = Broken(), Recorder()
    fan = FanOut(broken, sound)
    fan.observe(EVENT)
    fan.observe(EVENT)
    assert broken.count == 1
    assert sound.events == [EVENT, EVENT]


# --- structlog


class Lines:
    """structlog, rendering JSON into memory."""

    def __init__(self):
        self.file = io.StringIO()
        self.logger = structlog.wrap_logger(
            structlog.WriteLogger(self.file),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.JSONRenderer(),
            ],
        )

    def __call__(self):
        return [json.loads(line) for line in self.file.getvalue().splitlines()]


@pytest.fixture
def lines():
    return Lines()


def logged(lines, name, **fields):
    StructuredObserver(lines.logger).observe(Event(name, fields))
    return lines()[-1]


# --- Names ---


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"key": Key("g", "t", 3), "lag": 5}, "stuck key=g/t-3 lag=5"),
        ({"ending": Ending("released")}, "stuck ending=released"),
        (
            {"ending": Ending("taken_over", "b", 40)},
            "stuck ending='taken_over by b'",
        ),
        ({"partition": TopicPartition("t", 1)}, "stuck partition=t-1"),
        ({"text": "a\nb"}, r"stuck text='a\nb'"),
    ],
)
def test_a_line_shows_keys_and_endings_as_short_text(fields, line):
    assert to_line("stuck", fields) == line


def test_a_claim_event_is_logged_with_flat_fields(lines):
    line = logged(
        lines,
        "claimed",
        key=Key("g", "t", 3),
        client="a",
        epoch=12,
        token=Token(1, 0, 12),
        effect="claimed",
    )
    assert line == {
        "event": "claimed",
        "level": "info",
        "group": "g",
        "topic": "t",
        "partition": 3,
        "client": "a",
        "epoch": 12,
        "token": "1.0.12",
        "effect": "claimed",
    }


def test_an_ending_is_logged_with_reason_and_winner(lines):
    line = logged(lines, "claim_ended", ending=Ending("taken_over", "b", 40))
    assert line == {
        "event": "claim_ended",
        "level": "info",
        "reason": "taken_over",
        "was_lost": True,
        "winner": "b",
        "at_offset": 40,
    }


def test_an_error_is_logged_with_its_type(lines):
    line = logged(lines, "log_poll_failed", error=CoordinationError("no\nanswer"))
    assert line["level"] == "warning"
    assert line["error"] == r"no\nanswer"
    assert (line["error_type"], line["retriable"]) == ("CoordinationError", True)
    plain = logged(lines, "identity_unavailable", error=OSError("full"))
    assert (plain["error"], plain["error_type"]) == ("full", "OSError")


def test_a_partition_and_ranges_are_logged_with_flat_fields(lines):
    line = logged(
        lines,
        "grant_lost",
        partition=TopicPartition("t", 1),
        ranges=[(1, 4), (7, 9)],
    )
    assert (line["topic"], line["partition"]) == ("t", 1)
    assert line["ranges"] == [[1, 4], [7, 9]]


def test_structured_events_have_the_levels_of_the_plain_log(lines):
    levels = [logged(lines, name)["level"] for name in ("ready", "session_failed")]
    assert levels == ["info", "error"]


def test_a_field_cannot_replace_event_or_level(lines):
    line = logged(lines, "ready", event="claimed", level="debug")
    assert (line["event"], line["level"]) == ("ready", "info")
    assert (line["event_"], line["level_"]) == ("claimed", "debug")


# --- Safety ---


def test_control_characters_in_nested_fields_are_escaped(lines):
    bad = "x\r\n\x1b]0;title\x07\u202e{}"
    fields = flat(
        {"host": bad, "list": [bad], "map": {bad: bad}, "key": Key(bad, bad, 0)}
    )
    texts = json.dumps(fields, ensure_ascii=False)
    assert texts.isprintable()
    logged(lines, "topic_changed", host=bad)
    assert len(lines.file.getvalue().splitlines()) == 1


def test_secrets_in_nested_fields_are_hidden():
    secret = "hunter2"
    fields = flat(
        {
            "sasl_plain_password": secret,
            "secret": secret.encode(),
            "options": {"ssl_key_PASSWORD": secret, "user": "billing"},
            "token": Token(1, 2, 3),
        }
    )
    assert secret not in json.dumps(fields)
    assert secret.encode().hex() not in json.dumps(fields)
    assert fields["options"] == {"ssl_key_PASSWORD": HIDDEN, "user": "billing"}
    assert fields["token"] == "1.2.3"


def test_field_values_become_plain_json_values_of_limited_size():
    deep = [[[[["bottom"]]]]]
    fields = flat(
        {
            "many": list(range(10_000)),
            "map": {number: number for number in range(10_000)},
            "bytes": b"\x00\xff",
            "long": "x" * 10_000,
            "deep": deep,
            "flag": True,
            "nothing": None,
            "part": 0.5,
            "kind": H.__class__,
        }
    )
    assert len(fields["many"]) == len(fields["map"]) == ITEMS_MAX
    assert fields["bytes"] == "00ff"
    assert len(fields["long"]) < 1_000
    assert fields["deep"] == [[["[['bottom']]"]]]
    assert (fields["flag"], fields["nothing"], fields["part"]) == (True, None, 0.5)
    assert fields["kind"] == "<class 'int'>"
    json.dumps(fields)


# --- Use ---


def test_every_event_of_a_run_is_logged_as_flat_json(lines):
    cluster = world()
    node = owning(cluster)
    observer = StructuredObserver(lines.logger)
    pause_for(cluster, H)
    node.cut(is_cut=True)
    cluster.run(3 * H)
    for event in node.observer.events:
        observer.observe(event)
    found = lines()
    assert [line["event"] for line in found] == [e.name for e in node.observer.events]
    assert {"ready", "claimed", "claim_ended"} <= {line["event"] for line in found}
    for line in found:
        assert all(isinstance(v, str | int | bool | None) for v in line.values())


def test_the_default_logger_uses_the_configuration_of_structlog():
    with structlog.testing.capture_logs() as captured:
        StructuredObserver().observe(Event("ready", {"partition_count": 8}))
    assert captured == [{"event": "ready", "log_level": "info", "partition_count": 8}]


def test_structured_logs_without_structlog_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "structlog", None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[logs\]"):
        StructuredObserver()
