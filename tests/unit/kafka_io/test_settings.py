"""Connection settings: names, values, and errors for invalid ones."""

import pickle
import re
from types import SimpleNamespace

import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.settings import (
    DOTTED_OPTIONS,
    OPTIONS,
    ConnectionConfig,
    Secret,
    fields_of,
)

SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}
TOKENS = {
    "sasl_mechanism": "OAUTHBEARER",
    "sasl_oauthbearer_token_endpoint_url": "https://tokens/oauth2",
    "sasl_oauthbearer_client_id": "billing",
    "sasl_oauthbearer_client_secret": "hidden",
}
USER = {"sasl_plain_username": "me", "sasl_plain_password": "hush"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("a", ("a:9092",), id="default-port"),
        pytest.param("a:1,b:2", ("a:1", "b:2"), id="list"),
        pytest.param(" a:1 , b ,", ("a:1", "b:9092"), id="spaces"),
        pytest.param(["a:1", "b"], ("a:1", "b:9092"), id="sequence"),
        pytest.param("[::1]:5", ("[::1]:5",), id="ipv6"),
        pytest.param("[::1]", ("[::1]:9092",), id="ipv6-default"),
        pytest.param("::1", ("[::1]:9092",), id="ipv6-bare"),
    ],
)
def test_addresses_are_parsed_into_host_and_port(given, expected):
    assert ConnectionConfig(given).bootstrap_servers == expected


@pytest.mark.parametrize(
    "given",
    [
        "",
        " , ",
        [],
        "a:b",
        "a:0",
        "a:65536",
        "a:²",
        ":9",
        "http://a:1",
        "a b:1",
        b"a:1",
        [b"a:1"],
        9092,
    ],
)
def test_invalid_addresses_are_refused(given):
    with pytest.raises(ConfigurationError) as caught:
        ConnectionConfig(given)
    assert caught.value.setting == "bootstrap_servers"


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("::1:47205", "like [::1]:47205, with brackets"),
        ("a:1:b:2", "like broker-1:9092,"),
        ("a:1;b:2", "like broker-1:9092,"),
    ],
)
def test_an_address_with_more_colons_than_its_port_has_is_refused(given, advice):
    """It was read as a host of this name, and looked up for 30 s."""
    with pytest.raises(ConfigurationError, match="is not host:port") as caught:
        ConnectionConfig(given)
    assert repr(given) in str(caught.value)
    assert advice in str(caught.value)


def test_a_mapping_is_refused_as_an_address():
    """Its keys were taken for host names, and looked up for 30 s."""
    given = {"bootstrap.servers": "a:1", "sasl.password": "secret"}
    with pytest.raises(ConfigurationError, match="a mapping; what secures") as caught:
        ConnectionConfig(given)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


def test_options_that_are_no_mapping_are_refused():
    with pytest.raises(ConfigurationError, match="dict") as caught:
        ConnectionConfig("a", options="security.protocol=SSL")
    assert caught.value.setting == "options"


@pytest.mark.parametrize("topic", [7, "", ".", "..", "a b", "a/b", "x" * 250, "ü"])
def test_invalid_names_of_the_coordination_topic_are_refused(topic):
    with pytest.raises(ConfigurationError) as caught:
        ConnectionConfig("a", coordination_topic=topic)
    assert caught.value.setting == "coordination_topic"


def test_the_default_client_config_sets_four_options():
    settings = ConnectionConfig("a,b:1")
    assert settings.coordination_topic == "__marshal"
    assert settings.addresses == "a:9092, b:1"
    assert settings.client_config() == {
        "bootstrap_servers": ["a:9092", "b:1"],
        "client_id": "kafka-marshal",
        "metadata_max_age_ms": 5_000,
        "reconnect_backoff_max_ms": 1_000,
    }


def test_none_selects_the_default():
    assert ConnectionConfig(None, coordination_topic=None, options=None) == (
        ConnectionConfig("localhost:9092")
    )


def test_a_flat_mapping_is_split_into_fields_and_options():
    given = {
        "bootstrap_servers": "a",
        "transport": "fast",
        "client.id": "c",
        "sidecar_token_file": "/run/token",
    }
    assert ConnectionConfig(**fields_of(given)) == ConnectionConfig(
        "a", transport="fast", options={"client_id": "c"}
    )


@pytest.mark.parametrize("client", [KafkaConsumer, KafkaProducer, KafkaAdminClient])
def test_every_client_of_kafka_python_knows_every_option(client):
    theirs = {name for name in OPTIONS if not name.startswith("sasl_oauthbearer")}
    assert theirs <= set(client.DEFAULT_CONFIG)
    assert set(DOTTED_OPTIONS.values()) <= set(OPTIONS)


def test_dotted_names_equal_the_names_of_kafka_python():
    plain = ConnectionConfig("a", options=SASL | USER)
    dotted = ConnectionConfig(
        "a",
        options={
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "plain",
            "sasl.username": "me",
            "sasl.password": "hush",
        },
    )
    assert plain == dotted
    assert plain.client_config() == dotted.client_config()


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("metadata.max.age.ms", "5000", 5_000),
        ("reconnect_backoff_max_ms", 7, 7),
        ("client.id", "me", "me"),
    ],
)
def test_option_values_are_converted_to_their_type(name, given, expected):
    config = ConnectionConfig("a", options={name: given}).client_config()
    assert config[DOTTED_OPTIONS.get(name, name)] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https", True),
        ("none", False),
        ("", False),
        (True, True),
        (False, False),
        ("False", False),
        ("yes", True),
    ],
)
def test_the_identification_algorithm_sets_the_host_name_check(given, expected):
    options = {
        "security.protocol": "SSL",
        "ssl.endpoint.identification.algorithm": given,
    }
    config = ConnectionConfig("a", options=options).client_config()
    assert config["ssl_check_hostname"] is expected


@pytest.mark.parametrize(
    ("options", "setting", "words"),
    [
        pytest.param({"sasl.user": "x"}, "sasl.user", "sasl.username", id="typo"),
        pytest.param(
            {"securty_protocol": "SSL"},
            "securty_protocol",
            "security_protocol",
            id="t2",
        ),
        pytest.param({"acks": 1}, "acks", "heartbeat interval", id="not-ours"),
        pytest.param(
            {"client.id": "a", "client_id": "b"},
            "client_id",
            "mean the same",
            id="twice",
        ),
        pytest.param(
            {"send_buffer_bytes": "many"}, "send_buffer_bytes", "whole number", id="int"
        ),
        pytest.param(
            {"send_buffer_bytes": "9" * 5_000},
            "send_buffer_bytes",
            "whole number",
            id="digits",
        ),
        pytest.param(
            {"send_buffer_bytes": True}, "send_buffer_bytes", "whole number", id="bool"
        ),
        pytest.param(
            {"send_buffer_bytes": -1}, "send_buffer_bytes", "whole number", id="below"
        ),
        pytest.param({"client_id": 5}, "client_id", "text", id="text"),
        pytest.param(
            {"security_protocol": "TLS"}, "security_protocol", "SASL_SSL", id="protocol"
        ),
        pytest.param(
            {"security_protocol": "SSL", "ssl_check_hostname": "perhaps"},
            "ssl_check_hostname",
            "true or false",
            id="flag",
        ),
        pytest.param(
            {"client_dns_lookup": "default"},
            "client_dns_lookup",
            "must be one of use_all_dns_ips, resolve_canonical",
            id="dns",
        ),
        pytest.param(
            {"security_protocol": "SASL_SSL"}, "sasl_mechanism", "needed", id="no-sasl"
        ),
        pytest.param(
            {"sasl_plain_username": "x"}, "security_protocol", "ignores", id="idle-sasl"
        ),
        pytest.param(
            {"ssl_cafile": "x"}, "security_protocol", "ignores", id="idle-ssl"
        ),
        pytest.param(SASL, "sasl_plain_username", "needed", id="no-user"),
        pytest.param(
            SASL | {"sasl_plain_username": "x"},
            "sasl_plain_password",
            "needed",
            id="no-password",
        ),
        pytest.param(
            SASL | {"sasl_mechanism": "OAUTHBEARER"},
            "sasl_oauthbearer_token_endpoint_url",
            "sasl_oauth_token_provider, an object with a token() method",
            id="no-token",
        ),
        pytest.param(
            SASL
            | {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": "token"},
            "sasl_oauth_token_provider",
            "token() method",
            id="no-provider",
        ),
        pytest.param(
            SASL | TOKENS | {"sasl_oauthbearer_token_endpoint_url": "/etc/token"},
            "sasl_oauthbearer_token_endpoint_url",
            "https://",
            id="no-endpoint",
        ),
        pytest.param(
            SASL
            | TOKENS
            | {"sasl_oauthbearer_token_endpoint_url": "https://me:pass@tokens/oauth2"},
            "sasl_oauthbearer_token_endpoint_url",
            "without a user",
            id="endpoint-with-user",
        ),
        pytest.param(
            SASL
            | TOKENS
            | {"sasl_oauth_token_provider": SimpleNamespace(token=lambda: "x")},
            "sasl_oauthbearer_token_endpoint_url",
            "keep one",
            id="two-sources",
        ),
        pytest.param(
            SASL | TOKENS | {"sasl_oauthbearer_client_secret": ""},
            "sasl_oauthbearer_client_secret",
            "sasl_oauthbearer_client_secret is needed.",
            id="no-secret",
        ),
    ],
)
def test_an_invalid_option_is_refused_by_name(options, setting, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        ConnectionConfig("a", options=options)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"security.protocol": "TLS"}, "'security.protocol' is 'TLS'"),
        ({"socket.send.buffer.bytes": "x"}, "'socket.send.buffer.bytes' must be"),
        (
            {"ssl.endpoint.identification.algorithm": "x"},
            "'ssl.endpoint.identification.algorithm' must be",
        ),
        ({"client.id": 5}, "'client.id' must be text"),
        (SASL, "sasl_plain_username (sasl.username) is needed"),
        ({"ssl.truststore.location": "x"}, "use ssl.ca.location"),
        ({"sasl.jaas.config": "x"}, "use sasl.username and sasl.password"),
    ],
)
def test_an_error_names_an_option_as_given(options, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        ConnectionConfig("a", options=options)


def test_a_token_provider_object_is_passed_through():
    provider = SimpleNamespace(token=lambda: "x")
    options = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": provider,
    }
    config = ConnectionConfig("a", options=options).client_config()
    assert config["sasl_oauth_token_provider"] is provider


def test_client_credentials_become_one_shared_token_provider():
    options = SASL | TOKENS
    first, second = (
        ConnectionConfig("a", options=options).client_config() for _ in range(2)
    )
    provider = first["sasl_oauth_token_provider"]
    assert second["sasl_oauth_token_provider"] is provider
    assert callable(provider.token)
    assert not [name for name in first if name.startswith("sasl_oauthbearer")]


def test_text_of_the_settings_hides_secrets():
    settings = ConnectionConfig(
        "a", options=SASL | USER | {"ssl_password": "quiet", "proxy_url": "x://u:p@h"}
    )
    # kafka-python logs the whole configuration of an admin client.
    for text in (repr(settings), str(settings), str(settings.client_config())):
        for secret in ("hush", "quiet", "u:p"):
            assert secret not in text
    assert settings.client_config()["sasl_plain_password"] == "hush"
    assert "".join(["x", Secret("y")]) == "xy"


def test_settings_can_be_pickled():
    settings = ConnectionConfig("a", options=SASL | USER)
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert "hush" not in repr(again)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("sasl.mechanis", "'sasl.mechanism'"),
        ("sasl_plain_user", "'sasl_plain_username'"),
        ("max.poll.records", None),
        ("zzz", None),
    ],
)
def test_an_unknown_option_names_the_nearest_one(name, near):
    with pytest.raises(ConfigurationError, match=f"option '{name}'") as caught:
        ConnectionConfig("a:1", options={name: "x"})
    assert caught.value.setting == name
    if near is None:
        assert "nearest" not in str(caught.value)
    else:
        assert f"the nearest is {near}" in str(caught.value)


def test_the_arguments_property_restores_the_settings():
    given = ConnectionConfig(
        "a:1,b:2",
        coordination_topic="own",
        options={"security.protocol": "SSL"},
        transport="fast",
    )
    assert ConnectionConfig(**given.arguments) == given
    assert given.arguments["bootstrap_servers"] == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("given_ms", "used_ms"), [(0, 2**31 - 1), (1, 1), (2**63 - 1, 2**31 - 1)]
)
def test_no_limit_for_idle_connections_is_none_for_both_clients(given_ms, used_ms):
    """kafka-python would close each connection at once."""
    given = ConnectionConfig("a", options={"connections.max.idle.ms": given_ms})
    assert given.client_config()["connections_max_idle_ms"] == used_ms
    assert given.options == {"connections_max_idle_ms": given_ms}


def test_a_choice_is_accepted_in_any_case():
    options = {"client.dns.lookup": "USE_ALL_DNS_IPS", "security.protocol": "plaintext"}
    assert ConnectionConfig("a", options=options).options == {
        "client_dns_lookup": "use_all_dns_ips",
        "security_protocol": "PLAINTEXT",
    }
