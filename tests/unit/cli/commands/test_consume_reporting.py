"""Metrics and events of long-running commands."""

import json
import re
import sys
import urllib.request

import pytest
from enginekit import owning, world
from scraping import Client

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.ports import Event
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.types import Key
from kafka_marshal_cli.commands.consume import REPORTING, LogFormat, Reporting

AT_MS = 1_700_000_000_250
ENDED = Event(
    "claim_ended",
    {"key": Key("g", "t", 0), "epoch": 4, "ending": Ending("taken_over", "b\x1b", 9)},
)
GIVEN = {name: default for name, (_, default) in REPORTING.options.items()}


def test_without_options_no_metrics_are_served(capsys):
    reporting = REPORTING.build(GIVEN)
    assert reporting == Reporting()
    with reporting.exported(None):
        pass
    assert capsys.readouterr().err == ""


def test_metrics_are_served_until_the_block_ends(capsys):
    client = Client(owning(world()))
    reporting = REPORTING.build(GIVEN | {"metrics_port": 0})
    with reporting.exported(client):
        output = capsys.readouterr().err
        (port,) = re.findall(r"^metrics: port (\d+) of 127\.0\.0\.1", output)
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    assert 'marshal_up{group="g"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_a_metrics_port_without_the_extra_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert REPORTING.build(GIVEN) == Reporting()
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[metrics\]"):
        REPORTING.build(GIVEN | {"metrics_port": 9464})


def test_an_event_as_text_is_one_printable_line():
    line = Reporting().line(ENDED, AT_MS)
    assert line.startswith("event: claim_ended key=")
    assert line.isprintable()


def test_an_event_as_json_has_the_fields_of_its_claim():
    line = Reporting(log_format=LogFormat.JSON).line(ENDED, AT_MS)
    assert line.isprintable()
    assert json.loads(line) == {
        "timestamp": "2023-11-14T22:13:20.250+00:00",
        "level": "info",
        "event": "claim_ended",
        "group": "g",
        "topic": "t",
        "partition": 0,
        "epoch": 4,
        "reason": "taken_over",
        "was_lost": True,
        "winner": r"b\x1b",
        "at_offset": 9,
    }
