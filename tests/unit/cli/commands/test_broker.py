"""Signals of ``marshal broker run``, which the integration tests run as a command."""

import signal

import attrs
import pytest

from kafka_marshal.testing import broker
from kafka_marshal_cli.commands.broker import Signals, _Stopped, serve


def test_a_signal_before_the_broker_is_up_aborts_the_start():
    signals = Signals()
    with pytest.raises(_Stopped):
        signals.on_signal(signal.SIGTERM, None)
    signals.on_signal(signal.SIGTERM, None)  # a second signal is ignored


def test_a_download_and_a_start_of_kafka_are_announced(monkeypatch, tmp_path, capsys):
    """The download takes minutes, and the start seconds."""

    def stop(**_):
        raise _Stopped

    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(tmp_path))
    monkeypatch.setattr(broker, "EmbeddedBroker", stop)
    with pytest.raises(_Stopped):
        serve(Signals(), port=0, data_dir=None, prepare=print)
    fetching, starting = capsys.readouterr().err.splitlines()
    assert fetching.startswith("Fetching Apache Kafka")
    assert starting == "Starting Apache Kafka"


def test_the_signal_handler_uses_no_lock():
    """The handler may interrupt the main thread while that holds the lock."""
    signals = Signals(is_serving=True)
    held = attrs.asdict(signals, recurse=False)
    assert {name: type(each) for name, each in held.items()} == dict.fromkeys(
        held, bool
    )
    signals.on_signal(signal.SIGINT, None)
    assert signals.is_stopped
