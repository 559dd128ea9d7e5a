"""The daemon's log: text or JSON, never blocked by its reader."""

import io
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.ports import Event
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.sidecar import logs

EVENT = Event("lagging", {"partition": TopicPartition("orders", 3), "lag": 5})


@pytest.fixture(autouse=True)
def _untouched():
    """Check that the end of logging restores all loggers."""
    loggers = [logging.getLogger(name) for name in logs._LEVELS]
    before = [(each.level, each.propagate, each.handlers[:]) for each in loggers]
    yield
    after = [(each.level, each.propagate, each.handlers[:]) for each in loggers]
    assert after == before


def test_the_text_log_has_events_and_messages_of_the_sidecar():
    stream = io.StringIO()
    observer, stop = logs.start_logging("text", stream)
    observer.observe(EVENT)
    logging.getLogger(LOGGER_NAME).info("listens on %s", "/run/x")
    logging.getLogger("uvicorn.error").info("not for people")
    stop()
    first, second = stream.getvalue().splitlines()
    assert first.endswith("WARNING lagging partition=orders-3 lag=5")
    assert second.endswith("INFO listens on /run/x")


def test_the_json_log_has_events_messages_and_exceptions():
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
        "lagging",
        "orders",
        3,
    )
    assert event["level"] == "warning"
    assert event["timestamp"].endswith("Z")
    assert failure["event"] == "a request failed: beat"
    assert "ValueError" in failure["exception"]


def line(name, message="Connection refused", **rest):
    return logging.makeLogRecord({"name": name, "msg": message, **rest})


@pytest.mark.parametrize("name", ["kafka.net.manager", "kafka_marshal.librdkafka"])
def test_lines_of_a_kafka_client_are_logged_at_growing_intervals(name):
    now_s = 1_000.0
    repeats = logs.RepeatFilter(lambda: now_s)
    written = []
    for _ in range(20 * 3_600):
        passed = repeats.passed(line(name, "try %d", args=(7,)))
        if passed is not None:
            written.append((now_s - 1_000, passed.getMessage()))
        now_s += 0.5
    assert [round(at_s) for at_s, _ in written] == [
        *(0, 60, 180, 420, 900, 1_860, 3_780, 7_380),
        *(10_980, 14_580, 18_180, 21_780, 25_380, 28_980, 32_580),
    ]
    assert written[0][1] == "try 7"
    assert "lines of this Kafka client dropped in 60 s" in written[1][1]
    # After a pause, as if the brokers had come back, the next outage begins.
    now_s += logs.PAUSE_S_MIN
    assert repeats.passed(line(name)).getMessage() == "Connection refused"
    assert repeats.passed(line(name)) is None


def test_the_repeat_filter_changes_neither_other_lines_nor_the_record():
    repeats = logs.RepeatFilter(lambda: 0.0)
    for _ in range(3):
        ours = line(LOGGER_NAME)
        assert repeats.passed(ours) is ours
        assert repeats.passed(line("kafkaesque")) is not None
    failed = line("kafka.net", exc_info=(ValueError, ValueError(), None))
    assert repeats.passed(failed).exc_info is None
    assert failed.exc_info is not None
    # Lines of each Kafka client are counted separately.
    assert repeats.passed(line("kafka_marshal.librdkafka")) is not None


def test_the_daemon_logs_one_line_per_kafka_client_in_an_outage():
    stream = io.StringIO()
    _, stop = logs.start_logging("text", stream)
    for number in range(500):
        logging.getLogger("kafka.net.manager").error("failed: %d", number)
        logging.getLogger("kafka_marshal.librdkafka").error("FAIL %d", number)
    logging.getLogger(LOGGER_NAME).info("last")
    stop()
    lines = stream.getvalue().splitlines()
    assert [text.split(" ", 3)[3] for text in lines] == ["failed: 0", "FAIL 0", "last"]


def test_lines_for_a_stalled_log_reader_are_dropped_without_blocking(monkeypatch):
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
    assert "dropped 40 log lines" in lines[-2]
    assert lines[-1].endswith("last")


STUCK = """
import logging, sys
from kafka_marshal.observability.logs import LOGGER_NAME
from kafka_marshal.sidecar import logs
logs.END_S = 0.1
_, stop = logs.start_logging("text")
for number in range(int(sys.argv[1])):
    logging.getLogger(LOGGER_NAME).info("line %d %s", number, "x" * 1_000)
stop()
"""


@pytest.mark.parametrize("count", [500, 2 * logs.LINES_MAX])
def test_the_process_ends_although_the_reader_of_its_log_is_stuck(count):
    """With room in the queue for the end of the log, and without."""
    reads, writes = os.pipe()
    try:
        subprocess.run(
            [sys.executable, "-c", STUCK, str(count)],
            stderr=writes,
            check=True,
            timeout=60,
        )
    finally:
        os.close(reads)
        os.close(writes)


def test_a_line_that_cannot_be_formatted_does_not_end_the_log():
    stream = io.StringIO()
    _, stop = logs.start_logging("text", stream)
    logging.getLogger(LOGGER_NAME).info("%d", "no number")
    logging.getLogger(LOGGER_NAME).info("last")
    stop()
    first, last = stream.getvalue().splitlines()
    assert first.startswith("a line of kafka_marshal cannot be formatted: TypeError")
    assert last.endswith("last")


def test_the_log_continues_after_its_reader_is_gone(capfd):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    _, stop = logs.start_logging("text", Gone())
    logging.getLogger(LOGGER_NAME).info("to nobody")
    stop()
    assert capfd.readouterr().err == ""


def test_without_stderr_the_log_is_written_to_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    _, stop = logs.start_logging("text")
    logging.getLogger(LOGGER_NAME).info("to nobody")
    stop()
