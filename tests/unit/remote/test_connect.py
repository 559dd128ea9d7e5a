"""``Marshal`` by a sidecar: what is checked before anything is claimed."""

import asyncio
import os
from functools import partial

import pytest
from enginekit import world
from fakesidecar import FakeSidecar, H, RequestsBy
from prometheus_client import CollectorRegistry

from kafka_marshal import Marshal
from kafka_marshal.aio import AsyncMarshal
from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    InvalidTransition,
)
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.remote import connect
from kafka_marshal.remote.transport import Connection
from kafka_marshal.testing.node import Recorder


@pytest.fixture
def sidecar(monkeypatch):
    """A sidecar that every ``Marshal`` of the test reaches, over a data topic ``t``."""
    sidecar = FakeSidecar()
    sidecar.settings = []  # type: ignore[attr-defined]

    def open_data(settings):
        sidecar.settings.append(settings)  # type: ignore[attr-defined]
        return world(records=(10,)).kafka.data_log()

    plain = partial(Connection.open, requests=RequestsBy(sidecar), transport=sidecar)
    monkeypatch.setattr(Connection, "open", plain)
    monkeypatch.setattr(connect, "open_data_log", open_data)
    return sidecar


def opened(**rest):
    told = {"group_id": "g", "client_id": "c", "sidecar": "unix:/run/s.sock"}
    return Marshal(**(told | {"observer": Recorder()} | rest))


def test_a_whole_life(sidecar):
    with opened() as marshal:
        stream = sidecar.stream()
        assert (marshal.client_id, marshal.group_id) == ("c", "g")
        assert marshal.coordination_topic == "__marshal"
        with marshal.consumer("t", claims_max=3) as consumer:
            assert consumer.poll() == {}
        stream.end()
    wants = [body for m, p, body in sidecar.asked if m == "PUT" and "subscr" in p]
    assert (wants[0]["topics"], wants[0]["claims_max"]) == (["t"], 3)
    assert len(sidecar.named("DELETE", "/clients/c")) == 1
    with pytest.raises(InvalidTransition, match="closed"):
        marshal.consumer("t")


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        pytest.param(None, ("broker:9092",), id="the-sidecars"),
        pytest.param("other:9092", ("other:9092",), id="its-own"),
    ],
)
def test_data_is_read_from_the_given_servers(sidecar, servers, expected):
    options = {"security_protocol": "SSL"}
    with opened(bootstrap_servers=servers, options=options):
        sidecar.stream().end()
    (settings,) = sidecar.settings
    assert settings.bootstrap_servers == expected
    assert settings.options["security_protocol"] == "SSL"


@pytest.mark.parametrize(
    ("rest", "setting"),
    [
        pytest.param({"sidecar": "tcp:1"}, "sidecar", id="address"),
        pytest.param(
            {"sidecar": "http://127.0.0.1:1"}, "sidecar_token_file", id="token"
        ),
        pytest.param({"coordination_topic": "x"}, "coordination_topic", id="topic"),
        pytest.param({"heartbeat_interval_ms": 7}, "heartbeat_interval_ms", id="h"),
        pytest.param({"bootstrap_servers": ""}, "bootstrap_servers", id="servers"),
        pytest.param({"group_id": "a b"}, "group_id", id="name"),
        pytest.param({"mirror_offsets": False}, "mirror_offsets", id="mirror"),
        pytest.param({"person": "alice"}, "person", id="person"),
        pytest.param(
            {"sidecar": None, "sidecar_instance": b"i" * 16}, "sidecar", id="instance"
        ),
        pytest.param(
            {"sidecar": None, "sidecar_token_file": "f"}, "sidecar", id="no-sidecar"
        ),
    ],
)
def test_what_cannot_be_is_found_before_anybody_registers(sidecar, rest, setting):
    with pytest.raises(ConfigurationError) as caught:
        opened(**rest)
    assert caught.value.setting == setting
    assert sidecar.named("PUT", "/clients/c") == []


def test_what_is_expected_and_true_is_fine(sidecar):
    with opened(coordination_topic="__marshal", heartbeat_interval_ms=H):
        sidecar.stream().end()


def test_nobody_there(sidecar):
    sidecar.is_dead = True
    with pytest.raises(CoordinationError, match="marshal sidecar status"):
        opened()


def test_policies_go_by_name(sidecar):
    with opened() as marshal:
        stream = sidecar.stream()
        with pytest.raises(ConfigurationError, match="given by name") as caught:
            marshal.consumer("t", policy=lambda _view: None)
        assert caught.value.setting == "policy"
        stream.end()


def test_a_child_opens_its_own(sidecar, monkeypatch):
    marshal = opened()
    stream = sidecar.stream()
    consumer = marshal.consumer("t")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(InvalidTransition, match="parent process"):
        marshal.consumer("t")
    marshal.close()
    assert sidecar.named("DELETE", "/clients/c") == []
    monkeypatch.undo()
    consumer.close(timeout_ms=0)
    stream.end()
    marshal.session.commands  # noqa: B018 - nothing was torn down
    marshal._backend.close()


def test_metrics(sidecar):
    registry = CollectorRegistry()
    with opened() as marshal:
        stream = sidecar.stream()
        MarshalCollector(marshal, registry=registry)
        value = partial(registry.get_sample_value, labels={"group": "g"})
        assert value("marshal_up") == 1
        assert value("marshal_group_members") is None
        stream.end()


def test_settings_are_checked_as_without_a_sidecar(sidecar):
    with opened() as marshal:
        with pytest.raises(ConfigurationError, match="neither 'alo'"):
            marshal.consumer("t", delivery="exactly once")
        with pytest.raises(ConfigurationError, match="is the coordination topic"):
            marshal.consumer("__marshal")
        marshal.consumer("t", delivery="amo").close()
        sidecar.stream().end()
    (wants,) = [body for m, p, body in sidecar.asked if m == "PUT" and "subscr" in p]
    assert wants["delivery"] == "amo"


def test_settings_are_checked_on_an_event_loop(sidecar):
    async def work():
        async with AsyncMarshal(
            group_id="g", client_id="c", sidecar="unix:/run/s.sock"
        ) as marshal:
            with pytest.raises(ConfigurationError, match="neither 'alo'"):
                await marshal.consumer("t", delivery="exactly once").assignment()
            with pytest.raises(ConfigurationError, match="is the coordination topic"):
                await marshal.consumer("__marshal").assignment()
            sidecar.stream().end()

    asyncio.run(asyncio.wait_for(work(), 10))


def test_asyncio(sidecar):
    async def work():
        async with AsyncMarshal(
            group_id="g", client_id="c", sidecar="unix:/run/s.sock"
        ) as marshal:
            async with marshal.consumer("t") as consumer:
                assert await consumer.poll() == {}
            sidecar.stream().end()

    asyncio.run(asyncio.wait_for(work(), 10))
