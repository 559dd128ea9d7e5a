"""The daemon's log: lines or JSON, and nobody waits for whoever reads it."""

import io
import json
import logging
import threading

import pytest

from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.ports import Event
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.sidecar import logs

EVENT = Event("behind", {"partition": TopicPartition("orders", 3), "lag": 5})


@pytest.fixture(autouse=True)
def _untouched():
    """Whatever a log does to the loggers is undone at its end."""
    loggers = [logging.getLogger(name) for name in logs._LEVELS]
    before = [(each.level, each.propagate, each.handlers[:]) for each in loggers]
    yield
    after = [(each.level, each.propagate, each.handlers[:]) for each in loggers]
    assert after == before


def test_lines_for_people():
    stream = io.StringIO()
    observer, stop = logs.start_logging("text", stream)
    observer.observe(EVENT)
    logging.getLogger(LOGGER_NAME).info("listens on %s", "/run/x")
    logging.getLogger("uvicorn.error").info("not for people")
    stop()
    first, second = stream.getvalue().splitlines()
    assert first.endswith("WARNING behind partition=orders-3 lag=5")
    assert second.endswith("INFO listens on /run/x")


def test_json_has_events_and_plain_lines_alike():
    stream = io.StringIO()
    observer, stop = logs.start_logging("json", stream)
    observer.observe(EVENT)
    try:
        int("x\ny")
    except ValueError:
        logging.getLogger(LOGGER_NAME).exception("a request failed: %s", "beat")
    stop()
    event, failure = map(json.loads, stream.getvalue().splitlines())
    assert (event["event"], event["topic"], event["partition"]) == (
        "behind",
        "orders",
        3,
    )
    assert event["level"] == "warning"
    assert event["timestamp"].endswith("Z")
    assert failure["event"] == "a request failed: beat"
    assert "ValueError" in failure["exception"]


def test_a_stuck_reader_costs_lines_and_no_time(monkeypatch):
    monkeypatch.setattr(logs, "LINES_MAX", 10)
    entered, hold = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text):
            entered.set()
            assert hold.wait(30)
            return super().write(text)

    stream = Stuck()
    _, stop = logs.start_logging("text", stream)
    logger = logging.getLogger(LOGGER_NAME)
    logger.info("first")
    assert entered.wait(30)
    for number in range(50):
        logger.info("line %d", number)
    hold.set()
    deadline = threading.Event()
    while "line 9" not in stream.getvalue():
        assert not deadline.wait(0.01)
    logger.info("last")
    stop()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 13
    assert "40 lines were dropped" in lines[-2]
    assert lines[-1].endswith("last")
