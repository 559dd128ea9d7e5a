"""Connection settings: addresses and security.

Every client gets the same options, so a topic that can be read can also be written and
described. Options have the names of kafka-python or the dotted names of librdkafka.
Timeouts and delivery settings are not options: PROTOCOL 2.1 fixes them.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.addresses import bracketed
from kafka_marshal.defaults import COORDINATION_TOPIC, SERVERS
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import whole_number

if TYPE_CHECKING:
    from kafka_marshal.kafka_io.oauth import ClientCredentials

OPEN_TIMEOUT_MS = 30_000
# How long a broker may hold a fetch for which it has no records. A reader that seeks
# waits for the fetch in progress, so readers that read only once use the shorter time.
FETCH_WAIT_MS = 250
FETCH_WAIT_ONCE_MS = 20
# The protocol's default, in use until the interval of the log is known.
HEARTBEAT_INTERVAL_MS_DEFAULT = 60_000
DEFAULT_PORT = 9092
AUTO, FAST, KAFKA_PYTHON = "auto", "fast", "kafka-python"
TRANSPORTS = (AUTO, FAST, KAFKA_PYTHON)
PORT_MAX = 65_535
_DIGITS = re.compile(r"[0-9]{1,19}")
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

_TEXT_OPTIONS = (
    "client_dns_lookup",
    "client_id",
    "proxy_url",
    "sasl_kerberos_domain_name",
    "sasl_kerberos_service_name",
    "sasl_mechanism",
    "sasl_oauthbearer_client_id",
    "sasl_oauthbearer_client_secret",
    "sasl_oauthbearer_scope",
    "sasl_oauthbearer_token_endpoint_url",
    "sasl_plain_password",
    "sasl_plain_username",
    "security_protocol",
    "ssl_cafile",
    "ssl_certfile",
    "ssl_crlfile",
    "ssl_keyfile",
    "ssl_password",
)
_INT_OPTIONS = (
    "connections_max_idle_ms",
    "metadata_max_age_ms",
    "receive_buffer_bytes",
    "reconnect_backoff_max_ms",
    "reconnect_backoff_ms",
    "send_buffer_bytes",
)
_BOOL_OPTIONS = ("ssl_check_hostname",)
# Python objects, without a textual form.
_OBJECT_OPTIONS = ("sasl_kerberos_name", "sasl_oauth_token_provider", "ssl_context")
OPTIONS = tuple(
    sorted((*_TEXT_OPTIONS, *_INT_OPTIONS, *_BOOL_OPTIONS, *_OBJECT_OPTIONS))
)

DOTTED_OPTIONS = {
    "client.dns.lookup": "client_dns_lookup",
    "client.id": "client_id",
    "connections.max.idle.ms": "connections_max_idle_ms",
    "metadata.max.age.ms": "metadata_max_age_ms",
    "reconnect.backoff.max.ms": "reconnect_backoff_max_ms",
    "reconnect.backoff.ms": "reconnect_backoff_ms",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.oauthbearer.client.id": "sasl_oauthbearer_client_id",
    "sasl.oauthbearer.client.secret": "sasl_oauthbearer_client_secret",
    "sasl.oauthbearer.scope": "sasl_oauthbearer_scope",
    "sasl.oauthbearer.token.endpoint.url": "sasl_oauthbearer_token_endpoint_url",
    "sasl.password": "sasl_plain_password",
    "sasl.username": "sasl_plain_username",
    "security.protocol": "security_protocol",
    "socket.receive.buffer.bytes": "receive_buffer_bytes",
    "socket.send.buffer.bytes": "send_buffer_bytes",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.crl.location": "ssl_crlfile",
    "ssl.endpoint.identification.algorithm": "ssl_check_hostname",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}

BOTH_NAMES = {name: name for name in OPTIONS} | {
    ours: ours if dotted.replace(".", "_") == ours else f"{ours} ({dotted})"
    for dotted, ours in DOTTED_OPTIONS.items()
}
"""Options by both of their names, for messages: users may have written either."""
# Prefixes of options that only Java's clients have, and the options to use instead.
_JAVA = {
    "sasl.jaas": "sasl.username and sasl.password",
    "ssl.keystore": "ssl.certificate.location and ssl.key.location, PEM files",
    "ssl.truststore": "ssl.ca.location, a PEM file",
}

SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS = (
    *("PLAIN", "GSSAPI", "OAUTHBEARER", "SCRAM-SHA-256", "SCRAM-SHA-512"),
    "AWS_MSK_IAM",
)
_CHOICES = {
    "client_dns_lookup": (
        "use_all_dns_ips",
        "resolve_canonical_bootstrap_servers_only",
    ),
    "security_protocol": SECURITY_PROTOCOLS,
    "sasl_mechanism": SASL_MECHANISMS,
}
_SECRETS = (
    "proxy_url",
    "sasl_oauthbearer_client_secret",
    "sasl_plain_password",
    "ssl_password",
)
_PROVIDER = "sasl_oauth_token_provider"
_ENDPOINT = "sasl_oauthbearer_token_endpoint_url"
_OAUTH = (
    *("sasl_oauthbearer_client_id", "sasl_oauthbearer_client_secret"),
    *("sasl_oauthbearer_scope", _ENDPOINT),
)
_YES = ("1", "true", "yes", "on", "https")
_NO = ("0", "false", "no", "off", "none", "")

# For librdkafka 0 is no limit, while kafka-python would close each connection at once.
# librdkafka takes no larger number.
_IDLE = "connections_max_idle_ms"
_IDLE_MS_MAX = 2**31 - 1
# By default kafka-python waits up to 30 s before it reconnects to a broker: longer than
# a lease, although the broker may be back after one second. And metadata is refreshed
# only every five minutes or when a leader reports that it no longer leads; one that
# fails silently reports nothing.
_DEFAULTS = {
    "client_id": "kafka-marshal",
    "metadata_max_age_ms": 5_000,
    "reconnect_backoff_max_ms": 1_000,
}


class Secret(str):
    """Text whose repr is hidden, because kafka-python logs its configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return asterisks."""
        return "'***'"


def _is_ipv6(host: str) -> bool:
    from ipaddress import AddressValueError, IPv6Address  # here: few addresses are

    try:
        IPv6Address(host)
    except AddressValueError:
        return False
    return True


def _address(text: str) -> str:
    """Check one ``host[:port]`` and add the default port."""
    given = text.strip()
    host, colon, port = given.rpartition(":")
    has_brackets = host.endswith("]") or given.endswith("]")
    example = "broker-1:9092,broker-2:9092"
    if ":" in host and not has_brackets:
        if _is_ipv6(host):
            example = f"{bracketed(host)}:{port}, with brackets around IPv6"
        # Without them, a port would read as part of the host.
        host = bracketed(given) if _is_ipv6(given) else ""
        port = str(DEFAULT_PORT)
    elif not colon or given.endswith("]"):
        host, port = given, str(DEFAULT_PORT)
    is_named = host and not any(mark in host for mark in "/ \t")
    # Port 0 is invalid.
    if not is_named or not whole_number(port, most=PORT_MAX):
        raise ConfigurationError(
            f"bootstrap_servers has {text!r}, which is not host:port. Write it like "
            f"{example}.",
            setting="bootstrap_servers",
        )
    return f"{host}:{port}"


def _shown(value: object) -> str:
    """Return a refused value for a message; hide a mapping: it may have passwords."""
    if isinstance(value, Mapping):
        return "a mapping; what secures the connection belongs into options"
    return repr(value)


def _addresses(value: str | Iterable[str] | None) -> tuple[str, ...]:
    # Typed as Any: bytes, or a number, perhaps from a settings file, are refused below.
    given: Any = SERVERS if value is None else value
    if isinstance(given, str):
        given = given.split(",")
    # A mapping is a configuration of librdkafka: do not take its keys for addresses.
    is_list = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping)
    parts = list(given) if is_list else [given]
    if not all(isinstance(part, str) for part in parts):
        raise ConfigurationError(
            f"bootstrap_servers is {_shown(value)}; give text like broker-1:9092,"
            "broker-2:9092, or a list of such texts.",
            setting="bootstrap_servers",
        )
    found = tuple(_address(part) for part in parts if part.strip())
    if not found:
        raise ConfigurationError(
            "bootstrap_servers is empty: name at least one broker, like broker-1:9092.",
            setting="bootstrap_servers",
        )
    return found


def _unknown(name: str) -> ConfigurationError:
    """Return the error for an unknown option, with the nearest known name."""
    names = [*OPTIONS, *DOTTED_OPTIONS]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    for prefix, instead in _JAVA.items():
        if name.startswith(prefix):
            hint = f", which only Java's clients have; use {instead}"
    return ConfigurationError(
        f"Unknown connection option {name!r}{hint}. Connection "
        "options are about reaching and securing the cluster; timeouts and delivery "
        "settings follow from the heartbeat interval.",
        setting=name,
    )


def _whole(name: str, value: object) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"Connection option {name!r} must be a whole number of at least 0.",
            setting=name,
        )
    return value


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in (*_YES, *_NO):
        raise ConfigurationError(
            f"Connection option {name!r} must be true or false (or, by its dotted "
            "name, https or none).",
            setting=name,
        )
    return text in _YES


def _text(ours: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(
            f"Connection option {name!r} must be text.", setting=name
        )
    if ours in _SECRETS:
        return Secret(value)
    if choices := _CHOICES.get(ours):
        found = {each.upper(): each for each in choices}.get(value.upper())
        if found is None:
            raise ConfigurationError(
                f"Connection option {name!r} is {value!r}; it must be one of "
                f"{', '.join(choices)}.",
                setting=name,
            )
        return found
    return value


def _value(ours: str, name: str, value: object) -> object:
    """Convert a value to the type that kafka-python expects.

    Args:
        ours: The option by its name of kafka-python.
        name: The option as it was given, for messages.
        value: Its value.
    """
    if ours in _INT_OPTIONS:
        return _whole(name, value)
    if ours in _BOOL_OPTIONS:
        return _flag(name, value)
    return _text(ours, name, value) if ours in _TEXT_OPTIONS else value


def _options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check options and translate their names to those of kafka-python."""
    taken: dict[str, str] = {}
    options: dict[str, Any] = {}
    if not isinstance(given, Mapping | None):
        raise ConfigurationError(
            f"options has the type {type(given).__name__}; give a dict, like "
            "{'security_protocol': 'SSL'}.",
            setting="options",
        )
    for name, value in (given or {}).items():
        ours = DOTTED_OPTIONS.get(name, name)
        if ours not in OPTIONS:
            raise _unknown(name)
        if ours in taken:
            raise ConfigurationError(
                f"Connection options {taken[ours]!r} and {name!r} mean the same; "
                "keep one.",
                setting=name,
            )
        taken[ours] = name
        options[ours] = _value(ours, name, value)
    _check_security(options)
    return options


def _check_security(options: Mapping[str, Any]) -> None:
    """Reject settings that would be ignored or fail at the first connection."""
    protocol = options.get("security_protocol", "PLAINTEXT")
    mechanism = options.get("sasl_mechanism")
    has_login = protocol.startswith("SASL")
    if has_login and mechanism is None:
        choices = f"one of {', '.join(SASL_MECHANISMS)}"
        raise _needed(
            "sasl_mechanism", of="security_protocol", is_=protocol, as_=choices
        )
    for kind, is_used, instead in (
        ("sasl", has_login, "SASL_SSL (or SASL_PLAINTEXT)"),
        ("ssl", protocol.endswith("SSL"), "SSL or SASL_SSL"),
    ):
        if not is_used and any(name.startswith(f"{kind}_") for name in options):
            raise ConfigurationError(
                f"There are {kind} options, but {BOTH_NAMES['security_protocol']} is "
                f"{protocol}, which ignores them. Set it to {instead}.",
                setting="security_protocol",
            )
    if mechanism is None:
        return
    names: tuple[str, ...] = ()
    if mechanism.startswith(("PLAIN", "SCRAM")):
        names = ("sasl_plain_username", "sasl_plain_password")
    for name in names:
        if not options.get(name):
            raise _needed(name, of="sasl_mechanism", is_=mechanism)
    if mechanism == "OAUTHBEARER":
        _check_tokens(options)


def _check_tokens(options: Mapping[str, Any]) -> None:
    """Reject settings by which no token can be requested."""
    if _PROVIDER in options:
        if not callable(getattr(options[_PROVIDER], "token", None)):
            raise ConfigurationError(
                f"Connection option {_PROVIDER!r} must be an object with a token() "
                "method, which returns the token as text.",
                setting=_PROVIDER,
            )
        if _ENDPOINT in options:
            raise ConfigurationError(
                f"Connection options {_PROVIDER!r} and {_ENDPOINT!r} both give tokens; "
                "keep one.",
                setting=_ENDPOINT,
            )
        return
    for name in (_ENDPOINT, *_OAUTH[:2]):
        if not options.get(name):
            instead = f"; or {_PROVIDER}, an object with a token() method"
            raise _needed(
                name,
                of="sasl_mechanism",
                is_="OAUTHBEARER",
                as_="" if options.get(_ENDPOINT) else f"the token endpoint{instead}",
            )
    scheme, _, rest = options[_ENDPOINT].partition("://")
    # Errors show the host; a password before it would never be sent.
    if scheme.lower() not in {"http", "https"} or "@" in rest.partition("/")[0]:
        raise ConfigurationError(
            f"Connection option {BOTH_NAMES[_ENDPOINT]} must be an address that "
            "begins with https:// (or http://), without a user.",
            setting=_ENDPOINT,
        )


def _needed(name: str, *, of: str, is_: str, as_: str = "") -> ConfigurationError:
    """Return the error for an option that the value of another one needs."""
    return ConfigurationError(
        f"{BOTH_NAMES[of]} is {is_}, so {BOTH_NAMES[name]} is needed"
        + (f": {as_}." if as_ else "."),
        setting=name,
    )


@cache
def _client_credentials(
    oauth: tuple[str, ...], cafile: str | None
) -> "ClientCredentials":
    """Return the tokens that all clients of this process share."""
    # Imported here: most programs need no token.
    from kafka_marshal.kafka_io.oauth import ClientCredentials

    client_id, secret, scope, url = oauth
    return ClientCredentials(
        url, client_id=client_id, client_secret=secret, scope=scope, cafile=cafile
    )


def _or_default(topic: str | None) -> str:
    return COORDINATION_TOPIC if topic is None else topic


def _topic(_: object, __: object, value: str) -> None:
    is_text = isinstance(value, str)
    if not is_text or not _TOPIC_NAME.fullmatch(value) or value in {".", ".."}:
        raise ConfigurationError(
            f"coordination_topic is {value!r}; a topic's name has 1 to 249 of the "
            "characters a-z, A-Z, 0-9, '.', '_' and '-'.",
            setting="coordination_topic",
        )


def _transport(_: object, __: object, value: str) -> None:
    if value not in TRANSPORTS:
        raise ConfigurationError(
            f"transport is {value!r}; it must be one of {', '.join(TRANSPORTS)}.",
            setting="transport",
        )


def fields_of(connection: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``ConnectionConfig`` that a flat mapping describes.

    Args:
        connection: Fields by their names, and connection options by either of their
            names. The token file of a sidecar is left out.

    Raises:
        ConfigurationError: There are no addresses.
    """
    options = dict(connection)
    options.pop("sidecar_token_file", None)
    if "bootstrap_servers" not in options:
        raise ConfigurationError(
            "bootstrap_servers is missing: name at least one broker, like "
            "broker-1:9092",
            setting="bootstrap_servers",
        )
    names = ("bootstrap_servers", "coordination_topic", "transport")
    fields = {name: options.pop(name) for name in names if name in options}
    return fields | {"options": options}


@attrs.frozen
class ConnectionConfig:
    """Addresses and security of a cluster. Secrets are hidden in the repr.

    None stands for the default of a field.

    Attributes:
        bootstrap_servers: ``host:port`` texts; given as text with commas or as a
            sequence. One live address is enough.
        coordination_topic: Name of the coordination topic.
        options: Connection options by kafka-python's names.
        transport: Client library for the logs: ``fast`` (librdkafka), ``kafka-python``,
            or ``auto`` for the first of them that can be used.

    Raises:
        ConfigurationError: A setting is unknown, impossible or would be ignored.
    """

    bootstrap_servers: tuple[str, ...] = attrs.field(default=None, converter=_addresses)
    coordination_topic: str = attrs.field(
        default=None, converter=_or_default, validator=_topic, kw_only=True
    )
    options: Mapping[str, Any] = attrs.field(
        default=None, converter=_options, kw_only=True
    )
    transport: str = attrs.field(default=AUTO, validator=_transport, kw_only=True)

    @property
    def addresses(self) -> str:
        """Addresses as text for messages."""
        return ", ".join(self.bootstrap_servers)

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings by name, as ``Marshal``, ``Admin`` and the views take them."""
        names = ("bootstrap_servers", "coordination_topic", "options", "transport")
        return {name: getattr(self, name) for name in names}

    def client_config(self) -> dict[str, Any]:
        """Return the configuration common to all kafka-python clients."""
        options = dict(self.options)
        oauth = {name: options.pop(name, "") for name in _OAUTH}
        if oauth[_ENDPOINT]:
            options[_PROVIDER] = _client_credentials(
                tuple(oauth.values()), options.get("ssl_cafile")
            )
        if _IDLE in options:
            options[_IDLE] = min(options[_IDLE] or _IDLE_MS_MAX, _IDLE_MS_MAX)
        servers = list(self.bootstrap_servers)
        return _DEFAULTS | options | {"bootstrap_servers": servers}
