"""The choice of a transport, its log line, and the logs that it opens."""

import logging
import sys
from types import SimpleNamespace

import pytest

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.kafka_io import transport as module
from kafka_marshal.kafka_io.settings import TRANSPORTS, ConnectionConfig
from kafka_marshal.kafka_io.transport import (
    choose,
    open_coordination_log,
    open_data_log,
    open_offsets,
)


def settings(transport="auto", servers="127.0.0.1:1", **options):
    return ConnectionConfig(servers, options=options, transport=transport)


@pytest.fixture
def without(monkeypatch):
    """Make confluent-kafka impossible to import."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)


def test_auto_chooses_the_fast_transport_if_it_is_installed():
    choice = choose(settings())
    assert (choice.name, choice.reason) == ("fast", "confluent-kafka is installed")


@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_the_transport_in_the_settings_is_used(transport):
    assert choose(settings(transport)).name == transport


@pytest.mark.usefixtures("without")
def test_the_fast_transport_requires_the_fast_extra():
    choice = choose(settings())
    assert choice.name == "kafka-python"
    assert "kafka-marshal[fast]" in choice.reason
    assert choose(settings("kafka-python")).name == "kafka-python"
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[fast\]") as caught:
        choose(settings("fast"))
    assert caught.value.setting == "transport"


def test_an_unsupported_option_excludes_the_fast_transport():
    choice = choose(settings(proxy_url="socks5://a:1"))
    assert choice.name == "kafka-python"
    assert "proxy_url" in choice.reason
    with pytest.raises(ConfigurationError) as caught:
        choose(settings("fast", proxy_url="socks5://a:1"))
    assert caught.value.setting == "proxy_url"


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigurationError, match="carrier pigeon") as caught:
        settings("carrier pigeon")
    assert caught.value.setting == "transport"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_chosen_transport_is_logged(transport, caplog):
    with (
        caplog.at_level(logging.DEBUG, logger=module._LOGGER.name),
        pytest.raises(CoordinationError),
    ):
        open_coordination_log(settings(transport), timeout_ms=50)
    choice = choose(settings(transport))
    assert f"transport {choice.name}: {choice.reason}" in caplog.text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_data_logs_open_without_a_connection(transport):
    open_data_log(settings(transport)).close(1_000)
    open_offsets(settings(transport)).close(1_000)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_directory_of_certificates_needs_librdkafka_alone(transport, tmp_path):
    given = settings(transport, security_protocol="SSL", ssl_cafile=str(tmp_path))
    with pytest.raises(ConfigurationError, match="ssl_cafile"):
        open_data_log(given)
    if transport != "kafka-python":
        open_offsets(given).close(1_000)
        return
    with pytest.raises(ConfigurationError, match="ssl_cafile"):
        open_offsets(given)


@pytest.mark.parametrize(("follows", "wait_ms"), [(True, 250), (False, 20)])
def test_a_reader_that_does_not_follow_has_a_short_fetch_wait(
    follows, wait_ms, monkeypatch
):
    """Before it reads at other offsets, it has to wait for the fetch in progress."""
    from confluent_kafka import KafkaException

    from kafka_marshal.kafka_io.fast import coordination
    from kafka_marshal.kafka_io.fast.clients import Client

    given = []

    def fail(*_, **__):
        raise KafkaException

    def new_consumer(_, config):
        given.append(config)
        handle = SimpleNamespace(list_topics=fail, close=lambda: None)
        return Client(handle=handle)

    monkeypatch.setattr(coordination, "new_consumer", new_consumer)
    with pytest.raises(CoordinationError):
        open_coordination_log(settings("fast"), timeout_ms=50, follows=follows)
    assert given[-1]["fetch.wait.max.ms"] == wait_ms
