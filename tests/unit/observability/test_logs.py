"""Events as lines of the standard library's logging."""

import logging

import pytest

from kafka_marshal.observability import LoggingObserver, NullObserver
from kafka_marshal.observability.logs import level_of
from kafka_marshal.ports import Event


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


def test_values_of_the_log_are_escaped(caplog):
    caplog.set_level(logging.DEBUG, "kafka_marshal")
    LoggingObserver().observe(Event("ready", {"host": "a b\n\x1b[2J", "none": ""}))
    assert caplog.records[0].getMessage() == r"ready host='a b\n\x1b[2J' none=''"


def test_what_nobody_reads_is_not_formatted(caplog):
    class Costly:
        def __str__(self):
            raise AssertionError

    caplog.set_level(logging.ERROR, "kafka_marshal")
    LoggingObserver().observe(Event("ready", {"what": Costly()}))
    NullObserver().observe(Event("ready", {"what": Costly()}))
    assert caplog.records == []
