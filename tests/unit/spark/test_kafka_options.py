"""The table of Spark's own options."""

import re
from pathlib import Path

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.spark import java
from kafka_marshal.spark.kafka_options import (
    IGNORED,
    KAFKA_OPTIONS,
    MAPPED,
    REFUSED,
    SAME,
)
from kafka_marshal.spark.options import (
    ISOLATION,
    KAFKA_PREFIX,
    NAMES,
    RACK,
    SERVERS,
    parse,
)

BASE = {SERVERS: "b:1", "subscribe": "t"}
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SASL = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN"}
LOGIN = {"kafka.sasl.jaas.config": f'{PLAIN} required username="u" password="p";'}
TOKENS = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "OAUTHBEARER",
    "kafka.sasl.oauthbearer.token.endpoint.url": "https://a/token",
    "kafka.sasl.oauthbearer.client.credentials.client.id": "me",
    "kafka.sasl.oauthbearer.client.credentials.client.secret": "hush",
}
TLS = {"kafka.security.protocol": "SSL"}
# For each option a valid value, with the other options that it requires.
WITH = {
    "assign": {"assign": '{"t": [0]}', "subscribe": None},
    "subscribePattern": {"subscribePattern": "t.*", "subscribe": None},
    SERVERS: {SERVERS: "b:1"},
    "subscribe": {"subscribe": "t"},
    "startingOffsets": {"startingOffsets": "latest"},
    "startingOffsetsByTimestamp": {"startingOffsetsByTimestamp": '{"t": {"0": 5}}'},
    "startingOffsetsByTimestampStrategy": {
        "startingOffsetsByTimestampStrategy": "latest"
    },
    "endingOffsets": {"endingOffsets": "latest"},
    "endingOffsetsByTimestamp": {"endingOffsetsByTimestamp": '{"t": {"0": 5}}'},
    "failOnDataLoss": {"failOnDataLoss": "false"},
    "includeHeaders": {"includeHeaders": "true"},
    "maxTriggerDelay": {"maxTriggerDelay": "5m", "minOffsetsPerTrigger": "1"},
    ISOLATION: {ISOLATION: "read_committed"},
    RACK: {RACK: "r"},
    "kafka.client.dns.lookup": {"kafka.client.dns.lookup": "use_all_dns_ips"},
    "kafka.sasl.kerberos.service.name": {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "GSSAPI",
        "kafka.sasl.kerberos.service.name": "kafka",
    },
    "kafka.sasl.mechanism": {**SASL, **LOGIN},
    "kafka.sasl.jaas.config": {**SASL, **LOGIN},
    **{name: TOKENS for name in TOKENS if "oauthbearer" in name},
    "kafka.sasl.oauthbearer.scope": {**TOKENS, "kafka.sasl.oauthbearer.scope": "s"},
    "kafka.security.protocol": TLS,
    "kafka.ssl.endpoint.identification.algorithm": {
        **TLS,
        "kafka.ssl.endpoint.identification.algorithm": "https",
    },
    **{
        name: TLS | {name: "some text"}
        for name in KAFKA_OPTIONS
        if name.startswith("kafka.ssl.") and not name.endswith("algorithm")
    },
    "kafka.ssl.keystore.key": {
        **TLS,
        "kafka.ssl.keystore.key": "KEY",
        "kafka.ssl.keystore.certificate.chain": "CHAIN",
    },
    "kafka.ssl.keystore.certificate.chain": {
        **TLS,
        "kafka.ssl.keystore.key": "KEY",
        "kafka.ssl.keystore.certificate.chain": "CHAIN",
    },
}


def documented():
    """Return the refused and mapped options of docs/SPARK.md, each with its note."""
    root = next(p for p in Path(__file__).parents if (p / "docs").is_dir())
    page = (root / "docs" / "SPARK.md").read_text()
    listed = page.split("<!-- list: refused options -->")[1].split("\n\n")[0]
    yield from ((name, REFUSED) for name in re.findall("`([^`]+)`", listed))
    listed = page.split("<!-- list: mapped options -->")[1].split("\n\n")[0]
    for item in " ".join(listed.split()).split("- `")[1:]:
        options, _, note = f"`{item}".partition(": ")
        yield from ((name, note.strip()) for name in re.findall("`([^`]+)`", options))


def test_options_that_change_on_switching_are_documented():
    assert sorted(documented()) == sorted(
        (name, meaning.note if meaning.kind == MAPPED else REFUSED)
        for name, meaning in KAFKA_OPTIONS.items()
        if meaning.kind in {MAPPED, REFUSED}
    )


def given(name, tmp_path):
    found = {**BASE, **WITH.get(name, {name: "5"})}
    if name.endswith("store.location"):
        (tmp_path / "store.pem").write_text("-----BEGIN CERTIFICATE-----")
        found[name] = str(tmp_path / "store.pem")
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("name", KAFKA_OPTIONS)
def test_each_option_has_its_documented_meaning(name, tmp_path, caplog):
    meaning = KAFKA_OPTIONS[name]
    # Spark passes names in lower case.
    options = {key.lower(): value for key, value in given(name, tmp_path).items()}
    if meaning.kind == REFUSED:
        wanted = f"option {name} of format marshal: {meaning.note}"
        with pytest.raises(ConfigurationError, match=re.escape(wanted)):
            parse(options)
        return
    found = parse(options)
    dotted = name.removeprefix(KAFKA_PREFIX)
    if meaning.kind == IGNORED:
        assert f"option_ignored {name}" in caplog.text
        assert meaning.note in caplog.text
        assert dotted not in found.connection
        return
    assert caplog.text == ""
    is_of_java = dotted in {*java.NAMES, *java.RENAMED}
    assert is_of_java == (meaning.kind == MAPPED or ".credentials." in dotted)
    if meaning.kind == SAME and name == dotted:
        assert name in NAMES
