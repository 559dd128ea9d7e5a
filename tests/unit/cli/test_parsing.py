"""What people type: understood, or refused by name."""

import pytest

from kafka_marshal import ConfigurationError
from kafka_marshal_cli.parsing import (
    duration_ms,
    limits,
    moment,
    pairs,
    properties,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1500", 1_500),
        ("500ms", 500),
        ("10s", 10_000),
        ("10m", 600_000),
        ("2h", 7_200_000),
        ("1h30m", 5_400_000),
        (" 1D ", 86_400_000),
    ],
)
def test_duration(text, value):
    assert duration_ms("--for", text) == value


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5s", "10 m", "m", "10x", "1s2", "\u0661s"]
)
def test_no_duration(text):
    with pytest.raises(ConfigurationError, match="--for is") as caught:
        duration_ms("--for", text)
    assert caught.value.setting == "--for"


def test_a_plain_number_may_be_refused():
    with pytest.raises(ConfigurationError, match="not a duration"):
        duration_ms("--for", "10", is_bare_ms=False)


def test_pairs():
    assert pairs("-C", ["a=1", " b = x=y ", "a=2"]) == {"a": "2", "b": "x=y"}


@pytest.mark.parametrize("text", ["hunter2", "=hunter2"])
def test_an_invalid_pair_is_not_repeated_in_the_error(text):
    with pytest.raises(ConfigurationError, match="name=value") as caught:
        pairs("-C", [text])
    assert "hunter2" not in str(caught.value)


def test_limits():
    assert limits(["span=10", "keys=5"]) == {"span": 10, "keys": 5}
    with pytest.raises(ConfigurationError, match="span is 'x'"):
        limits(["span=x"])


def test_properties_of_librdkafka(tmp_path):
    path = tmp_path / "client.properties"
    path.write_text(
        "# a comment\n! another\n\n"
        "security.protocol = SASL_SSL\n"
        "sasl.mechanisms: PLAIN\n"
        "sasl.username u\n"
        "sasl.password=p=w\n"
        "ssl.ca.location=/a/\\\n  b.pem\n"
    )
    assert properties(path) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": "u",
        "sasl.password": "p=w",
        "ssl.ca.location": "/a/b.pem",
    }


def test_properties_of_java(tmp_path):
    path = tmp_path / "client.properties"
    path.write_text(
        "sasl.mechanism=SCRAM-SHA-512\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule "
        'required username="u" password="p\\"w";\n'
        "ssl.truststore.type=PEM\nssl.truststore.location=/ca\n"
    )
    assert properties(path) == {
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "u",
        "sasl.password": 'p"w',
        "ssl.ca.location": "/ca",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sasl.jaas.config=OAuthBearerLoginModule required;", "PLAIN and SCRAM"),
        ("secret\n", "line 1 is not name=value"),
    ],
)
def test_bad_properties(tmp_path, text, message):
    path = tmp_path / "client.properties"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        properties(path)


def test_a_properties_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        properties(tmp_path / "none")


NOW = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", (0, None)),
        ("12", (12, None)),
        ("1970-01-01T00:00:01Z", (None, 1_000)),
        ("1970-01-01T00:00:01", (None, 1_000)),
        ("1970-01-01T01:00:01.5+01:00", (None, 1_500)),
        ("-5m", (None, NOW - 300_000)),
        ("-PT5M", (None, NOW - 300_000)),
        ("-P1DT2H", (None, NOW - 93_600_000)),
    ],
)
def test_moment(text, found):
    assert moment("--at", text, now_ms=NOW) == found


@pytest.mark.parametrize("text", ["yesterday", "-", "-5", "2026-13-01"])
def test_no_moment(text):
    with pytest.raises(ConfigurationError, match="--at"):
        moment("--at", text, now_ms=NOW)
