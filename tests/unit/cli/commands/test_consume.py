"""Parts of `marshal consume`: commits, signals, events and the summary."""

import json
import signal
import subprocess
import sys

import pytest
from slices import HANG_S
from typer.main import get_group

from kafka_marshal import ClaimLost, Event, Token, TopicPartition
from kafka_marshal.config import MAX_POLL_RECORDS
from kafka_marshal.ports import PlainRecord
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal_cli.commands import consume
from kafka_marshal_cli.commands.consume import (
    EVENTS_MAX,
    EventBuffer,
    Hooks,
    Idle,
    LogFormat,
    Printer,
    Reporting,
    Stopper,
)


def record(offset=0, *, key=None, value=b"v"):
    token = Token(1, 0, 5)
    return PlainRecord("t", 3, offset, 99, 0, key, value, token=token)


class FakeConsumer:
    def __init__(self, count, *, lost=()):
        self.waiting = [record(offset) for offset in range(count)]
        self.committed = []
        self.is_stopped = False
        self._lost = lost

    def poll(self, timeout_ms, most):
        if not self.waiting:
            return {}
        return {TopicPartition("t", 3): [self.waiting.pop(0)]}

    def commit(self, what):
        if what.offset in self._lost:
            raise ClaimLost("gone")
        self.committed.append(what.offset)

    def stop(self):
        self.is_stopped = True


def printer_of(consumer, records_max=0, *, is_amo=False, is_stopped=False):
    hooks = Hooks(lambda: is_stopped, EventBuffer().flush)
    return Printer(consumer, hooks, records_max=records_max, is_amo=is_amo)


def test_records_are_committed_one_by_one(capsys):
    consumer = FakeConsumer(3, lost={1})
    printer = printer_of(consumer)
    printer.run(Idle(1))
    assert (printer.done_count, consumer.committed) == (3, [0, 2])
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert err == "lost: gone\n"


def test_unwritten_records_are_not_committed(monkeypatch, capsys):
    def fail(line):
        raise BrokenPipeError

    consumer = FakeConsumer(3)
    monkeypatch.setattr(consume, "emit", fail)
    monkeypatch.setattr(consume, "discard_stdout", lambda: None)
    printer_of(consumer).run(Idle(None))
    assert consumer.committed == []
    assert "stay uncommitted" in capsys.readouterr().err


def test_printing_ends_after_the_maximum_number_of_records(capsys):
    consumer = FakeConsumer(5)
    printer = printer_of(consumer, 2, is_amo=True)
    printer.run(Idle(None))
    assert (printer.done_count, len(consumer.waiting)) == (2, 3)


def test_at_most_once_granted_records_are_printed_after_a_stop(capsys):
    consumer = FakeConsumer(5)
    printer_of(consumer, is_stopped=True).run(Idle(None))
    assert (consumer.is_stopped, len(consumer.waiting)) == (False, 5)
    printer = printer_of(consumer, is_amo=True, is_stopped=True)
    printer.run(Idle(None))
    assert (consumer.is_stopped, printer.done_count) == (True, 5)


def test_different_signals_only_stop_the_consumer():
    before = signal.getsignal(signal.SIGTERM)
    stopper, reached = Stopper(), []
    stopper.consumer = FakeConsumer(0)
    with stopper.installed():
        signal.raise_signal(signal.SIGTERM)
        assert stopper.is_stopped
        assert stopper.consumer.is_stopped
        signal.raise_signal(signal.SIGHUP)
        reached.append(1)
    assert reached == [1], "the second does not abandon what the first lets end"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_repeated_signal_kills_the_process_and_its_children():
    program = (
        "import signal\n"
        "from kafka_marshal_cli.commands.consume import Stopper\n"
        "stopper = Stopper()\n"
        "class Consumer:\n"
        "    def stop(self): print('stopped', flush=True)\n"
        "stopper.consumer = Consumer()\n"
        "stopper.on_kill = lambda: print('killed', flush=True)\n"
        "with stopper.installed():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stdout.split() == ["stopped", "stopped", "killed"]
    assert done.returncode == -signal.SIGTERM


def test_an_ignored_sighup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopper().installed():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_consumer_exists_ends_the_command(capsys):
    reached = []
    with Stopper().installed():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
    assert reached == []
    assert "stopped before" in capsys.readouterr().err


def test_buffered_events_are_bounded_and_written_on_flush(capsys):
    events = EventBuffer()
    events.observe(Event("claimed", {}))
    for number in range(EVENTS_MAX + 5):
        events.observe(Event("clock_step", {"n": f"{number}\x1b"}))
    events.flush()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == EVENTS_MAX
    assert lines[0] == r"event: clock_step n='5\\x1b'"


def test_events_as_json_include_claims(capsys):
    events = EventBuffer(Reporting(log_format=LogFormat.JSON))
    events.observe(Event("claimed", {"epoch": 5}))
    reporting = Reporting(log_format=LogFormat.JSON)
    consume._on_claimed(reporting, TopicPartition("t", 3), Token(1, 0, 5))
    events.flush()
    (line,) = capsys.readouterr().err.splitlines()
    output = json.loads(line)
    assert (output["event"], output["level"], output["epoch"]) == ("claimed", "info", 5)


def test_info_events_are_written_if_verbose(capsys):
    for is_verbose in (False, True):
        events = EventBuffer(Reporting(is_verbose=is_verbose))
        events.observe(Event("member_joined", {}))
        events.flush()
        assert ("member_joined" in capsys.readouterr().err) == is_verbose


@pytest.mark.parametrize(("count", "words"), [(0, "0 records"), (1, "1 record,")])
def test_the_summary_has_singular_and_plural(count, words):
    assert words in f"{consume.Summary(lambda: count).text(is_confirmed=True)}"


@pytest.mark.parametrize(
    ("held", "is_confirmed", "line"),
    [
        (range(2), True, "consumed 3 records, released t-0, t-1\n"),
        ((), True, "consumed 3 records, held nothing\n"),
        (range(1), False, "consumed 3 records, the log did not confirm the release of"),
    ],
)
def test_the_summary_has_the_count_and_the_released_partitions(
    capsys, held, is_confirmed, line
):
    consumer = FakeConsumer(3)
    consumer.is_close_confirmed = True  # type: ignore[attr-defined]
    assigned = {TopicPartition("t", n) for n in held}
    consumer.assignment = lambda: assigned  # type: ignore[attr-defined]
    summary = consume.Summary(lambda: 3)
    with summary.reported():
        summary.consumer = consumer
        with summary.collected(EventBuffer()):
            pass
        consumer.is_close_confirmed = is_confirmed  # type: ignore[attr-defined]
    assert capsys.readouterr().err.startswith(line)


def test_there_is_no_summary_without_a_consumer(capsys):
    with consume.Summary().reported():
        pass
    assert capsys.readouterr().err == ""


def test_lost_claims_are_reported_and_all_others_if_verbose(capsys):
    place = TopicPartition("t", 3)

    def come_and_go(reporting):
        consume._on_claimed(reporting, place, Token(1, 0, 5))
        consume._on_lost(reporting, place, Ending("taken_over", winner="c2"))
        consume._on_lost(reporting, place, Ending("closed", was_lost=False))
        return capsys.readouterr().err.splitlines()

    assert come_and_go(Reporting()) == ["lost: t-3 (taken_over) to c2"]
    assert come_and_go(Reporting(is_verbose=True)) == [
        "claimed: t-3 token 1.0.5",
        "lost: t-3 (taken_over) to c2",
        "released: t-3 (closed)",
    ]


@pytest.mark.parametrize(
    ("records_max", "batch_max"),
    [(0, MAX_POLL_RECORDS), (10, 1), (2_000, 20), (10**6, MAX_POLL_RECORDS)],
)
def test_at_most_once_a_limit_of_records_reduces_the_batch(records_max, batch_max):
    found = consume._batch_max(None, None, is_amo=True, limit=records_max)
    assert found == batch_max
    found = consume._batch_max(None, None, is_amo=False, limit=records_max)
    assert found == min(MAX_POLL_RECORDS, records_max or MAX_POLL_RECORDS)


def test_options_also_have_the_names_of_kafka_console_consumer():
    command = get_group(consume.app).commands["consume"]
    names = {each.name: each.opts for each in command.params}
    assert names["max_records"] == ["--max-records", "--max-messages"]
    assert names["timeout"] == ["--timeout", "--timeout-ms"]
