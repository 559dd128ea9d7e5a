"""The grant clients of a process."""

import sys

import pytest

from kafka_marshal import grants
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.grants import open_grant_client
from kafka_marshal.grants.log import LogGrantClient
from kafka_marshal.grants.sidecar import SidecarGrantClient


def test_a_process_has_one_grant_client_per_connection():
    here = {"bootstrap_servers": "localhost:1"}
    try:
        assert open_grant_client(here, sidecar=None) is open_grant_client(dict(here))
        assert open_grant_client(here) is not open_grant_client(
            here | {"client.id": "x"}
        )
        before = open_grant_client(here)
        grants.close_grant_clients()
        assert open_grant_client(here) is not before
    finally:
        grants.close_grant_clients()


@pytest.mark.parametrize(
    ("connection", "named"),
    [
        pytest.param({}, "bootstrap_servers", id="no address"),
        pytest.param(
            {"bootstrap_servers": "b:1", "max.poll.records": "1"},
            "max.poll.records",
            id="no option of a connection",
        ),
    ],
)
def test_a_wrong_connection_option_raises_without_connecting(connection, named):
    with pytest.raises(ConfigurationError) as caught:
        open_grant_client(connection)
    assert caught.value.setting == named


def test_a_sidecar_address_selects_the_sidecar_client():
    here = {"bootstrap_servers": "localhost:1"}
    try:
        assert isinstance(open_grant_client(here), LogGrantClient)
        beside = open_grant_client(here, sidecar="unix:/run/nobody.sock")
        assert isinstance(beside, SidecarGrantClient)
    finally:
        grants.close_grant_clients()


@pytest.mark.parametrize(
    ("sidecar", "named"),
    [
        pytest.param("run/nobody.sock", "sidecar", id="no address"),
        pytest.param("http://127.0.0.1:1", "sidecar_token_file", id="no token"),
    ],
)
def test_a_wrong_sidecar_option_raises_without_connecting(sidecar, named):
    with pytest.raises(ConfigurationError) as caught:
        open_grant_client({"bootstrap_servers": "localhost:1"}, sidecar=sidecar)
    assert caught.value.setting == named


def test_a_sidecar_without_the_remote_extra_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[remote\]"):
        open_grant_client(
            {"bootstrap_servers": "localhost:1"}, sidecar="unix:/run/n.sock"
        )
