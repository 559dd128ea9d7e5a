"""Values of options and arguments: parsed, or refused with the option's name."""

import pytest

from kafka_marshal import ConfigurationError
from kafka_marshal.protocol.types import Key
from kafka_marshal_cli.parsing import (
    Moment,
    counts,
    datetime_ms,
    duration_ms,
    iso_duration_ms,
    key_of,
    moment,
    pairs,
    past_moment,
    properties,
    timeout_ms,
    upcoming_ms,
    without_java,
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
def test_a_duration_is_parsed_to_milliseconds(text, value):
    assert duration_ms("--for", text) == value


@pytest.mark.parametrize(
    "text",
    ["", "-1", "1.5s", "10 m", "m", "10x", "1s2", "\u0661s", "36500d1ms", "9" * 15],
)
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(ConfigurationError, match="--for is") as caught:
        duration_ms("--for", text)
    assert caught.value.setting == "--for"


@pytest.mark.parametrize("text", ["0", "20d1ms", "999999999999d"])
def test_a_timeout_lasts_at_least_1_ms_and_at_most_20_days(text):
    assert timeout_ms("--timeout", "20d") == 1_728_000_000
    with pytest.raises(ConfigurationError, match=f"--timeout is '{text}'"):
        timeout_ms("--timeout", text)


def test_a_duration_without_a_unit_can_be_refused():
    with pytest.raises(ConfigurationError, match="not a duration"):
        duration_ms("--for", "10", is_bare_ms=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("PT10M", 600_000),
        ("P1DT2H", 93_600_000),
        ("pt1.5s", 1_500),
        ("P2D", 172_800_000),
        ("10m", 600_000),
    ],
)
def test_an_iso_duration_is_parsed_to_milliseconds(text, value):
    assert iso_duration_ms("--by-duration", text) == value


@pytest.mark.parametrize(
    "text", ["P", "PT", "P1M", "P1Y", "-PT5M", "10", "", "P36501D"]
)
def test_an_invalid_iso_duration_is_refused(text):
    with pytest.raises(ConfigurationError, match="--by-duration is"):
        iso_duration_ms("--by-duration", text)


def test_a_time_without_a_zone_is_utc():
    assert datetime_ms("--to-datetime", "1970-01-01T00:00:01") == 1_000
    assert datetime_ms("--to-datetime", "1970-01-01T01:00:01.5+01:00") == 1_500
    with pytest.raises(ConfigurationError, match="--to-datetime is"):
        datetime_ms("--to-datetime", "yesterday")


def test_pairs_are_split_at_the_first_equals_sign():
    assert pairs("-C", ["a=1", " b = x=y ", "a=2"]) == {"a": "2", "b": "x=y"}


@pytest.mark.parametrize("text", ["hunter2", "=hunter2"])
def test_an_invalid_pair_is_not_repeated_in_the_error(text):
    with pytest.raises(ConfigurationError, match="name=value") as caught:
        pairs("-C", [text])
    assert "hunter2" not in str(caught.value)


def test_counts_are_pairs_of_names_and_numbers():
    assert counts("--limit", ["span=10", "keys=5"]) == {"span": 10, "keys": 5}
    with pytest.raises(ConfigurationError, match="--limit span is 'x'"):
        counts("--limit", ["span=x"])


def test_a_properties_file_of_librdkafka_is_read(tmp_path):
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


def test_a_properties_file_of_java_is_converted(tmp_path):
    path, ca = tmp_path / "client.properties", tmp_path / "ca"
    ca.write_text("-----BEGIN CERTIFICATE-----")
    path.write_text(
        "sasl.mechanism=SCRAM-SHA-512\n"
        "request.timeout.ms=3000\ndefault.api.timeout.ms=9\nclient.id=tool\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule "
        'required username="u" password="p\\"w";\n'
        f"ssl.truststore.type=PEM\nssl.truststore.location={ca}\n"
    )
    assert without_java(properties(path)) == {
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "u",
        "sasl.password": 'p"w',
        "ssl.ca.location": str(ca),
        "client.id": "tool",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sasl.jaas.config": "org.apache.kafka.OtherLoginModule required;"},
            "^option sasl.jaas.config: OtherLoginModule is not supported",
        ),
        (
            {"ssl.truststore.location": "/none", "ssl.truststore.type": "JKS"},
            "^option ssl.truststore.location: /none cannot be read",
        ),
    ],
)
def test_an_unusable_java_login_or_truststore_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        without_java(options)
    assert caught.value.setting == next(iter(options))


def test_a_line_that_is_no_property_is_refused(tmp_path):
    path = tmp_path / "client.properties"
    path.write_text("secret\n")
    with pytest.raises(ConfigurationError, match="line 1 is not name=value"):
        properties(path)


def test_a_missing_properties_file_is_refused(tmp_path):
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
def test_a_moment_is_an_offset_a_time_or_an_age(text, found):
    assert moment("--at", text, now_ms=NOW) == found


@pytest.mark.parametrize(
    "text", ["yesterday", "-", "-5", "2026-13-01", "-P5M", "-36501d"]
)
def test_an_invalid_moment_is_refused(text):
    with pytest.raises(ConfigurationError, match=f"--at is '{text}'; .* like -5m$"):
        moment("--at", text, now_ms=NOW)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("12", Moment(text="12", offset=12)),
        ("3:100", Moment(text="3:100", offsets={3: 100})),
        (" 3:100,0:7", Moment(text="3:100,0:7", offsets={3: 100, 0: 7})),
        ("-5m", Moment(text="1970-01-12T13:41:40.000Z", time_ms=NOW - 300_000)),
        ("-0s", Moment(text="1970-01-12T13:46:40.000Z", time_ms=NOW)),
    ],
)
def test_a_past_moment_is_offsets_or_a_time(text, found):
    assert past_moment("--at", text, now_ms=NOW) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3:", "write an offset"),
        ("3:1,", "write an offset"),
        ("3:1,0:7,3:2", "two offsets of one partition"),
        ("a:1", "write an offset"),
        ("1970-01-12T13:46:40.001Z", "in the future"),
    ],
)
def test_a_future_moment_or_a_bad_offset_is_refused(text, why):
    with pytest.raises(ConfigurationError, match=why):
        past_moment("--at", text, now_ms=NOW)


def test_an_offset_without_its_partition_can_be_refused():
    found = past_moment("--since", "12", now_ms=NOW)
    with pytest.raises(ConfigurationError, match=r"--since is 12, .* write 0:12 for"):
        found.require_partition()
    Moment(text="3:1", offsets={3: 1}).require_partition()


def test_a_bare_offset_applies_to_the_given_partition():
    bare = Moment(text="12", offset=12)
    assert bare.of_partition(3).offsets == {3: 12}
    assert bare.of_partition(None) is bare
    other = Moment(text="3:1", offsets={3: 1})
    assert other.of_partition(2) is other


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", 7_201_000),
        (" 1h30m ", 5_401_000),
        ("1970-01-01T00:00:05Z", 5_000),
        ("1970-01-01T01:00:05+01:00", 5_000),
        ("1970-01-02", 86_400_000),
    ],
)
def test_an_upcoming_time_is_a_duration_or_a_date(text, expected):
    assert upcoming_ms("--until", text, now_ms=1_000) == expected


@pytest.mark.parametrize("text", ["", "soon", "5", "-5m", "2h?"])
def test_an_invalid_upcoming_time_is_refused(text):
    with pytest.raises(ConfigurationError, match="--until"):
        upcoming_ms("--until", text, now_ms=1_000)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("g", "payments", 3), Key("g", "payments", 3)),
        (("g", "payments:3", None), Key("g", "payments", 3)),
        (("marshal", "/checkpoint:0", None), Key("marshal", "/checkpoint", 0)),
    ],
)
def test_a_key_is_parsed_from_its_words(words, key):
    group, topic, partition = words
    assert key_of(group, topic, partition=partition) == key


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (("g", "payments", None), "PARTITION"),
        (("g", "payments:x", None), "PARTITION"),
        (("g", ":0", None), "TOPIC"),
        (("g", "payments:0:1", None), "TOPIC"),
        (("g", "pay ments", 1), "TOPIC"),
        (("g h", "payments", 1), "GROUP"),
    ],
)
def test_an_invalid_key_is_refused_with_the_wrong_argument(words, setting):
    group, topic, partition = words
    with pytest.raises(ConfigurationError) as caught:
        key_of(group, topic, partition=partition)
    assert caught.value.setting == setting
