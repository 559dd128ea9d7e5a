"""Which office a process gets for a connection."""

import sys

import pytest

from kafka_marshal import tickets
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.tickets import open_office
from kafka_marshal.tickets.log import LogOffice
from kafka_marshal.tickets.sidecar import SidecarOffice


def test_a_process_has_one_office_per_connection():
    here = {"bootstrap_servers": "localhost:1"}
    try:
        assert open_office(here, sidecar=None) is open_office(dict(here))
        assert open_office(here) is not open_office(here | {"client.id": "x"})
        before = open_office(here)
        tickets.close_offices()
        assert open_office(here) is not before
    finally:
        tickets.close_offices()


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
def test_a_wrong_connection_is_told_before_anything_is_connected(connection, named):
    with pytest.raises(ConfigurationError) as told:
        open_office(connection)
    assert told.value.setting == named


def test_a_sidecar_is_asked_where_there_is_one():
    here = {"bootstrap_servers": "localhost:1"}
    try:
        assert isinstance(open_office(here), LogOffice)
        beside = open_office(here, sidecar="unix:/run/nobody.sock")
        assert isinstance(beside, SidecarOffice)
    finally:
        tickets.close_offices()


@pytest.mark.parametrize(
    ("sidecar", "named"),
    [
        pytest.param("run/nobody.sock", "sidecar", id="no address"),
        pytest.param("http://127.0.0.1:1", "sidecar_token_file", id="no token"),
    ],
)
def test_a_wrong_sidecar_is_told_before_anything_is_connected(sidecar, named):
    with pytest.raises(ConfigurationError) as told:
        open_office({"bootstrap_servers": "localhost:1"}, sidecar=sidecar)
    assert told.value.setting == named


def test_a_missing_extra_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[remote\]"):
        open_office({"bootstrap_servers": "localhost:1"}, sidecar="unix:/run/n.sock")
