"""Options: their meaning, and the errors for invalid ones."""

import json
import pickle
import re
from pathlib import Path

import pytest

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.oauth import ClientCredentials
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.options import (
    BATCH_ONLY,
    EARLIEST,
    ISOLATION,
    LATEST,
    NAMES,
    RACK,
    SERVERS,
    STREAM_ONLY,
    Bound,
    parse,
)

BASE = {"kafka.bootstrap.servers": "one:9092,two:9092"}
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def parsed(**more):
    return parse(BASE | {"subscribe": "t"} | more)


def refused(reported, given):
    with pytest.raises(ConfigurationError, match=reported) as caught:
        parse(given)
    return caught.value.setting


def test_defaults_are_those_of_sparks_own_source():
    found = parsed()
    assert found.settings.bootstrap_servers == ("one:9092", "two:9092")
    assert found.config.topics == ("t",)
    assert (found.start, found.end) == (None, None)
    assert found.fails_on_data_loss
    assert (found.max_offsets, found.min_offsets, found.min_partitions) == (
        None,
        None,
        0,
    )
    assert found.group is None
    assert found.config == ConsumerConfig(
        topics=("t",), max_handling_ms=0, release_behind=False
    )
    assert not found.has_headers
    assert not found.has_token


def test_lists_and_times_are_read_as_spark_reads_them():
    assert parsed(subscribe="t, u,,t,").config.topics == ("t", "u")
    assert parse(BASE | {"subscribePattern": " t.* "}).config.pattern == "t.*"
    found = parsed(minOffsetsPerTrigger="2", maxTriggerDelay="1d", group="g")
    assert found.max_delay_ms == 86_400_000


def test_options_are_case_insensitive():
    found = parse(
        {
            "KAFKA.bootstrap.servers": "b:1",
            "SUBSCRIBEPATTERN": "a.*",
            "startingoffsets": "EARLIEST",
            "failOnDataLoss": "False",
            "includeHeaders": "true",
            "includetoken": "TRUE",
            "maxOffsetsPerTrigger": "10",
            "minOffsetsPerTrigger": "5",
            "maxTriggerDelay": "2m",
            "minPartitions": "4",
            "group": "g",
            "clientId": "c",
            "delivery": "amo",
            "sidecar": "unix:/run/s",
            "policy": "greedy",
            "claimsMax": "3",
            "stateDir": "",
            "coordinationTopic": "__other",
            "transport": "kafka-python",
            "kafkaConsumer.pollTimeoutMs": "50",
            "kafka.isolation.level": "read_committed",
            "kafka.client.rack": "r1",
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.username": "u",
            "kafka.sasl.password": "secret",
        }
    )
    assert found.start == Bound(EARLIEST)
    assert found.config == ConsumerConfig(
        pattern="a.*",
        delivery="amo",
        policy="greedy",
        claims_max=3,
        isolation_level="read_committed",
        max_handling_ms=0,
        release_behind=False,
    )
    assert (found.max_offsets, found.min_offsets) == (10, 5)
    assert (found.max_delay_ms, found.min_partitions) == (120_000, 4)
    assert (found.group, found.client_id, found.sidecar) == ("g", "c", "unix:/run/s")
    assert (found.state_dir, found.poll_timeout_ms) == ("", 50)
    assert found.rack == "r1"
    assert found.settings.coordination_topic == "__other"
    assert found.settings.options["sasl_plain_username"] == "u"
    assert found.connection["sasl.password"] == "secret"
    assert found.connection["transport"] == "kafka-python"
    assert "secret" not in repr(found)


@pytest.mark.parametrize("part", ["", "client.credentials."])
def test_client_credentials_are_accepted_by_java_and_librdkafka_names(part):
    found = parse(
        BASE
        | {
            "subscribe": "t",
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "kafka.sasl.oauthbearer.token.endpoint.url": "https://a/token",
            f"kafka.sasl.oauthbearer.{part}client.id": "me",
            f"kafka.sasl.oauthbearer.{part}client.secret": "hush-hush",
            "kafka.sasl.oauthbearer.scope": "s",
        }
    )
    for settings in (found.settings, pickle.loads(pickle.dumps(found.settings))):
        provider = settings.client_config()["sasl_oauth_token_provider"]
        assert isinstance(provider, ClientCredentials)
    assert "hush" not in repr(found)


@pytest.mark.parametrize(
    ("given", "refresh_ms"), [("5000", 5_000), ("300000", 30_000), ("0", 1)]
)
def test_metadata_max_age_limits_the_wait_for_new_partitions(given, refresh_ms):
    found = parse(BASE | {"subscribe": "t", "kafka.metadata.max.age.ms": given})
    assert found.config.metadata_refresh_ms == refresh_ms
    assert found.connection["metadata.max.age.ms"] == given


def test_only_the_path_of_a_sidecars_token_is_sent(tmp_path):
    file = tmp_path / "token"
    file.write_text("hush")
    options = {"subscribe": "t", "group": "g", "sidecar": "http://127.0.0.1:80"}
    found = parse(BASE | options | {"sidecarTokenFile": str(file)})
    assert found.sidecar_token_file == str(file)
    assert found.connection["sidecar_token_file"] == str(file)
    assert b"hush" not in pickle.dumps(found)
    unix = parse(BASE | options | {"sidecar": "unix:/run/s"})
    assert "sidecar_token_file" not in unix.connection


def test_offsets_are_parsed_by_partition():
    text = json.dumps({"t": {"0": 23, "1": -2}})
    assert parsed(startingOffsets=text).start == Bound(
        EARLIEST, offsets={T0: 23, T1: -2}
    )
    text = json.dumps({"t": {"0": 23, "1": -1}})
    assert parsed(endingOffsets=text).end == Bound(LATEST, offsets={T0: 23, T1: -1})
    assert parsed(startingOffsets="latest").start == Bound(LATEST)
    assert parsed(endingOffsets="latest").end.is_plain


def test_timestamps_are_parsed_for_all_and_for_single_partitions():
    found = parsed(startingTimestamp="5", startingOffsetsByTimestampStrategy="latest")
    assert found.start == Bound(EARLIEST, time_ms=5, is_strict=False)
    text = json.dumps({"t": {"0": 7}})
    found = parsed(startingOffsetsByTimestamp=text, endingOffsetsByTimestamp=text)
    assert found.start == Bound(EARLIEST, times_ms={T0: 7})
    assert found.end == Bound(LATEST, times_ms={T0: 7})
    assert not found.end.is_plain
    assert parsed(endingTimestamp="9").end.time_ms == 9


def test_assign_is_parsed_into_partitions():
    found = parse(BASE | {"assign": '{"t": [1, 0, 1]}'})
    assert found.assigned == (T0, T1)
    assert found.config.topics == ("t",)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("subscribes", "subscribe"),
        ("startingOffset", "startingOffsets"),
        ("maxOffsetPerTriggers", "maxOffsetsPerTrigger"),
        ("groupid", "group"),
    ],
)
def test_an_unknown_option_names_the_nearest(name, near):
    assert (
        refused(rf"did you mean {near}\?$", BASE | {"subscribe": "t", name: "x"})
        == name
    )


def test_an_unrelated_option_is_refused_without_a_guess():
    refused("the options are .*, subscribe, ", BASE | {"subscribe": "t", "zzzz": "x"})


def test_an_unknown_connection_option_names_the_nearest():
    refused("the nearest is", BASE | {"subscribe": "t", "kafka.sasl.mechanis": "x"})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kafka.group.id", "g", "use the option group"),
        ("groupIdPrefix", "g", "use the option group"),
        ("kafka.auto.offset.reset", "earliest", "use startingOffsets"),
        ("checkpointLocation", "/c", "writeStream, and format marshal only reads"),
        ("path", "t", "call load"),
        ("provider", "marshal", "CREATE TEMPORARY VIEW"),
        ("kafka.isolation.level", "serializable", "must be one of read_uncommitted"),
        ("assign", '{"t": [0]}', "exactly one of subscribe"),
        ("startingOffsets", "begin", "cannot be read"),
        ("startingOffsets", '{"t": {"0": 1, "0": 2}}', r"\('0' is there twice\)"),
        ("startingOffsets", '{"t": {"0": 1}, "t": {"1": 2}}', "'t' is there twice"),
        ("startingOffsets", '{"t": {"0": 1, "00": 2}}', "'t-0' is there twice"),
        ("endingOffsets", '{"t": {"0": 1, "0": 2}}', "'0' is there twice"),
        ("startingOffsets", "[1]", "cannot be read"),
        ("startingOffsets", "{}", "names no partition"),
        ("startingOffsets", '{"t": {"0": -3}}', "cannot be at -3"),
        ("startingOffsets", '{"t": {"0": true}}', "cannot be at True"),
        ("startingOffsets", '{"t": {"-1": 1}}', "'-1' is no whole number"),
        ("startingOffsets", '{"t": {"1_0": 1}}', "'1_0' is no whole number"),
        ("startingOffsets", '{"t": {" 1": 1}}', "' 1' is no whole number"),
        ("startingOffsets", '{"t": {"\u0663": 1}}', "is no whole number"),
        ("startingOffsets", '{"t": {"0": NaN}}', "cannot be at nan"),
        ("maxOffsetsPerTrigger", "1_0", "'1_0' is no whole number"),
        ("maxOffsetsPerTrigger", "\u0663", "is no whole number"),
        ("maxOffsetsPerTrigger", "9" * 5_000, "is no whole number"),
        ("startingOffsets", '{"t": {"0": "1"}}', "cannot be at '1'"),
        ("endingOffsets", "earliest", "cannot end at earliest"),
        ("endingOffsets", '{"t": {"0": -2}}', "cannot end at -2"),
        ("startingTimestamp", "soon", "no whole number"),
        ("startingOffsetsByTimestampStrategy", "none", "neither error nor latest"),
        ("failOnDataLoss", "yes", "neither true nor false"),
        ("maxOffsetsPerTrigger", "0", "at least 1"),
        ("minPartitions", "many", "no whole number"),
        ("maxTriggerDelay", "1m", "needs minOffsetsPerTrigger"),
        ("transport", "slow", "transport is 'slow'"),
        ("delivery", "amo", "set the option group"),
        ("sidecar", "unix:/x", "set the option group"),
        ("sidecarTokenFile", "/x", "it needs the option sidecar"),
    ],
)
def test_invalid_values_of_options_raise(name, value, expected):
    refused(expected, BASE | {"subscribe": "t", name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("group", "no good", "is not a valid name"),
        ("delivery", "exactly once", "neither 'alo'"),
        ("policy", "best", "policy"),
        ("claimsMax", "-1", "no whole number"),
        ("sidecar", " ", "it is empty"),
        ("sidecar", "unix:s", "must be absolute"),
        ("sidecar", "http://far:80", "not this machine"),
        ("sidecar", "http://localhost:80", "requires a token; name its file"),
        ("clientId", "", "is not a valid name"),
    ],
)
def test_invalid_values_of_claim_options_raise(name, value, expected):
    refused(expected, BASE | {"subscribe": "t", "group": "g"} | {name: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"subscribe": "t"}, "name at least one broker"),
        (BASE, "name the topics .* only reads; write with format kafka"),
        (BASE | {"topic": "out"}, "only reads; write with format kafka"),
        (BASE | {"subscribe": "t,u!"}, "no valid topic name"),
        (BASE | {"subscribePattern": "("}, "syntax of RE2"),
        (BASE | {"subscribePattern": " "}, "subscribePattern .* it is empty"),
        (BASE | {"subscribe": " , "}, "subscribe .* it names no topic"),
        (BASE | {"assign": "t"}, "cannot be read"),
        (BASE | {"assign": '{"t": ["0"]}'}, "no partition"),
        (BASE | {"assign": "{}"}, "names no partition"),
        (
            BASE
            | {"subscribe": "t", "startingOffsets": "latest", "startingTimestamp": "1"},
            "at most one of startingOffsets",
        ),
        (
            BASE
            | {
                "subscribe": "t",
                "maxOffsetsPerTrigger": "1",
                "minOffsetsPerTrigger": "2",
            },
            "2 is more than maxOffsetsPerTrigger",
        ),
        (
            BASE
            | {"subscribe": "t", "minOffsetsPerTrigger": "2", "maxTriggerDelay": "1y"},
            "no time such as",
        ),
        (
            BASE
            | {
                "subscribe": "t",
                "minOffsetsPerTrigger": "2",
                "maxTriggerDelay": "\u0663m",
            },
            "no time such as",
        ),
    ],
)
def test_contradictory_options_raise(given, expected):
    refused(expected, given)


def test_a_batch_read_refuses_a_group_and_a_stream_requires_one():
    parsed().require_batch()
    parsed(group="g").require_stream()
    with pytest.raises(ConfigurationError, match="availableNow=True"):
        parsed(group="g").require_batch()
    with pytest.raises(ConfigurationError, match="name the group"):
        parsed().require_stream()
    with pytest.raises(ConfigurationError, match="decided by claims"):
        parse(BASE | {"assign": '{"t": [0]}', "group": "g"}).require_stream()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kafka.foo", "1"),
        ("kafka.security.protocol", "SSLX"),
        ("kafka.sasl.mechanism", "X"),
        ("kafka.bootstrap.servers", "b:x"),
        ("kafka.ssl.truststore.location", "/no/such"),
        ("transport", "slow"),
        ("coordinationTopic", "a b"),
        ("policy", "none"),
        ("sidecar", "x"),
        ("startingOffsets", "5"),
        ("startingOffsets", '{"t": [1]}'),
    ],
)
def test_an_error_names_the_option_that_was_given(name, value):
    with pytest.raises(ConfigurationError, match=f"^option {re.escape(name)}") as found:
        parsed(**{"group": "g", "subscribe": "t", name: value})
    assert found.value.setting == name
    assert "object has no attribute" not in str(found.value)


def test_a_batch_read_ignores_limits_of_triggers(caplog):
    parsed(maxOffsetsPerTrigger="5").require_batch()
    assert "option_ignored maxOffsetsPerTrigger of format marshal" in caplog.text
    parsed(minOffsetsPerTrigger="5").require_batch()
    assert "option_ignored minOffsetsPerTrigger of format marshal" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endingOffsets", "latest"),
        ("endingTimestamp", "5"),
        ("endingOffsetsByTimestamp", '{"t": {"0": 5}}'),
    ],
)
def test_a_stream_refuses_ending_offsets(name, value):
    message = f"^option {name} .*a stream has no end"
    with pytest.raises(ConfigurationError, match=message) as found:
        parsed(group="g", **{name: value}).require_stream()
    assert found.value.setting == name


def test_a_batch_read_that_starts_at_latest_is_refused():
    with pytest.raises(ConfigurationError, match=r"^option startingOffsets .*no rows"):
        parsed(startingOffsets="latest").require_batch()
    parsed(startingOffsets='{"t": {"0": -1}}').require_batch()
    parsed(startingOffsets="earliest").require_batch()


def test_option_names_are_sorted_and_unique():
    assert len(set(NAMES)) == len(NAMES)
    assert list(NAMES) == sorted(NAMES, key=str.lower)


FLAGS = re.MULTILINE | re.DOTALL
# Defaults of Spark's own source, which the documents do not repeat.
DEFAULTS = {
    "failOnDataLoss": "true",
    "includeHeaders": "false",
    "kafka.isolation.level": "read_uncommitted",
    "kafkaConsumer.pollTimeoutMs": "120000",
    "maxTriggerDelay": "15m",
    "startingOffsetsByTimestampStrategy": "error",
}


def documented():
    """Return the documented options: stream, batch or both, and the default."""
    root = next(p for p in Path(__file__).parents if (p / "docs").is_dir())
    page = (root / "docs" / "SPARK.md").read_text()
    own = page.split("<!-- list: spark options -->")[1].split("\n\n")[0]
    cells = re.findall(r"^- `([^`]+)` \(([^)]+)\):", own, re.MULTILINE)
    found = {name: ("stream", default.strip("`")) for name, default in cells}
    assert "A batch has only the last three." in page
    found |= {name: ("both", default.strip("`")) for name, default in cells[-3:]}
    listed = page.split("<!-- list: options of spark -->")[1].split("\n\n")[0]
    for users, names in re.findall(r"^- (\w+): (.+?)(?=\n- |\Z)", listed, FLAGS):
        of = "both" if users == "connection" else users
        for name in re.findall(r"`([^`*]+)`", names):
            found[name] = (of, DEFAULTS.get(name, "none"))
    return found


def test_the_documented_options_are_the_known_options():
    found = documented()
    assert sorted(found) == sorted({*NAMES, SERVERS, ISOLATION, RACK})
    for name, (users, _) in found.items():
        one = {"stream": STREAM_ONLY, "batch": (*BATCH_ONLY, "assign")}
        assert (name in one["stream"]) == (users == "stream"), name
        assert (name in one["batch"]) == (users == "batch"), name


def test_a_documented_default_has_no_effect_if_it_is_set():
    base = BASE | {"subscribe": "t", "group": "g", "minOffsetsPerTrigger": "1"}
    literal = {
        name: default
        for name, (_, default) in documented().items()
        if default not in {"none", "required", "random", "the user's"}
    }
    assert len(literal) > 10
    assert set(DEFAULTS) <= set(literal)
    for name, default in literal.items():
        assert parse(base | {name: default}) == parse(base), name
