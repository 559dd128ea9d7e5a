"""Hosts in addresses."""

import pytest

from kafka_marshal.addresses import bracketed


@pytest.mark.parametrize(
    ("host", "expected"),
    [("broker-1", "broker-1"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")],
)
def test_only_an_ipv6_host_has_brackets(host, expected):
    assert bracketed(host) == expected
