"""Connection options translated for librdkafka; options without an equivalent."""

import base64
import json
import ssl
import time

import pytest
from confluent_kafka import Consumer, Producer

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.fast.settings import fast_config, impossible
from kafka_marshal.kafka_io.oauth import TOKEN_LIFE_S
from kafka_marshal.kafka_io.settings import DOTTED_OPTIONS, OPTIONS, ConnectionConfig

SASL = {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-256"}
USER = {"sasl_plain_username": "me", "sasl_plain_password": "hush"}
OAUTH = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}


def config(**options):
    return fast_config(ConnectionConfig("a:1,b", options=options))


class Provider:
    def __init__(self, token):
        self._token = token

    def token(self):
        return self._token

    def extensions(self):
        return {"tenant": "one"}


def jwt(claims):
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"head.{part}.tail"


def test_the_default_configuration_sets_four_properties():
    assert config() == {
        "bootstrap.servers": "a:1,b:9092",
        "client.id": "kafka-marshal",
        "reconnect.backoff.max.ms": 1_000,
        "topic.metadata.refresh.interval.ms": 5_000,
    }


def test_security_options_get_the_names_of_librdkafka():
    found = config(
        **SASL, **USER, ssl_cafile="/ca", ssl_certfile="/c", ssl_password="p"
    )
    assert {name: str(value) for name, value in found.items()} == {
        "bootstrap.servers": "a:1,b:9092",
        "client.id": "kafka-marshal",
        "reconnect.backoff.max.ms": "1000",
        "topic.metadata.refresh.interval.ms": "5000",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "me",
        "sasl.password": "hush",
        "ssl.ca.location": "/ca",
        "ssl.certificate.location": "/c",
        "ssl.key.location": "/c",
        "ssl.key.password": "p",
    }
    assert "hush" not in repr(found)


@pytest.mark.parametrize(("flag", "word"), [(True, "https"), (False, "none")])
def test_the_host_name_flag_sets_the_identification_algorithm(flag, word):
    found = config(security_protocol="SSL", ssl_check_hostname=flag)
    assert found["ssl.endpoint.identification.algorithm"] == word


def test_a_separate_key_file_is_kept():
    found = config(security_protocol="SSL", ssl_certfile="/c", ssl_keyfile="/k")
    assert found["ssl.key.location"] == "/k"


@pytest.mark.parametrize("kind", [Consumer, Producer])
def test_librdkafka_accepts_the_translated_options(kind):
    """Options that have an equivalent, some of them with extreme values."""
    found = config(
        client_dns_lookup="use_all_dns_ips",
        client_id="me",
        connections_max_idle_ms=0,
        metadata_max_age_ms=86_400_000,
        receive_buffer_bytes=65_536,
        reconnect_backoff_max_ms=10,
        reconnect_backoff_ms=5_000,
        send_buffer_bytes=65_536,
        **SASL,
        **USER,
        ssl_check_hostname=True,
    )
    kind(found | {"group.id": "x"} if kind is Consumer else found)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"proxy_url": "http://a"}, "proxy_url"),
        (
            {"security_protocol": "SSL", "ssl_context": ssl.create_default_context()},
            "ssl_context",
        ),
        ({**SASL, "sasl_mechanism": "AWS_MSK_IAM"}, "sasl_mechanism"),
        ({**SASL, "sasl_mechanism": "GSSAPI"}, "sasl_mechanism"),
        ({**SASL, **USER, "sasl_kerberos_name": object()}, "sasl_kerberos_name"),
    ],
)
def test_an_option_without_an_equivalent_is_refused_by_name(options, name):
    settings = ConnectionConfig("a", options=options)
    assert list(impossible(settings)) == [name]
    with pytest.raises(ConfigurationError, match="kafka-python") as caught:
        fast_config(settings)
    assert caught.value.setting == name


def test_every_other_option_has_a_dotted_name():
    hard = {"proxy_url", "ssl_context", "sasl_kerberos_name"}
    hard |= {"sasl_kerberos_domain_name", "sasl_kerberos_service_name"}
    for name in set(OPTIONS) - hard - {"sasl_oauth_token_provider"}:
        assert name in DOTTED_OPTIONS.values(), name
    assert impossible(ConnectionConfig("a")) == {}


def test_the_oauth_callback_returns_the_token_of_the_provider():
    token = jwt({"exp": 4_000_000_000})
    found = config(**OAUTH, sasl_oauth_token_provider=Provider(token))
    answer = found["oauth_cb"]("")
    assert answer == (token, 4_000_000_000.0, "", {"tenant": "one"})


@pytest.mark.parametrize(
    "token", ["opaque", "a.b.c", jwt({}), jwt([1]), jwt({"exp": "soon"})]
)
def test_a_token_of_unknown_lifetime_gets_the_default_lifetime(token):
    found = config(**OAUTH, sasl_oauth_token_provider=Provider(token))
    before = time.time()
    expiry = found["oauth_cb"]("")[1]
    assert before + TOKEN_LIFE_S <= expiry <= time.time() + TOKEN_LIFE_S


def test_a_token_stays_in_use_while_its_provider_fails(caplog):
    class Failing(Provider):
        def token(self):
            raise OSError("server of tokens is down")

    provider = Provider(jwt({"exp": 4_000_000_000}))
    callback = config(**OAUTH, sasl_oauth_token_provider=provider)["oauth_cb"]
    found = callback("")
    assert callback.failure is None
    provider.__class__ = Failing
    assert callback("") == found
    assert "server of tokens is down" in str(callback.failure)
    assert "server of tokens is down" in caplog.text


def test_a_failing_provider_raises_once_its_token_has_expired():
    provider = Provider(jwt({"exp": time.time()}))
    callback = config(**OAUTH, sasl_oauth_token_provider=provider)["oauth_cb"]
    callback("")
    provider.token = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        callback("")
    assert isinstance(callback.failure, ZeroDivisionError)


def test_the_expiry_that_a_provider_reports_is_used():
    class Knowing(Provider):
        expires_at_s = 4_000_000_000.0

    provider = Knowing("opaque")
    found = config(**OAUTH, sasl_oauth_token_provider=provider)["oauth_cb"]("")
    assert found[1] == 4_000_000_000.0
