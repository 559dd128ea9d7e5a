"""Connection settings as librdkafka names them.

Users give options once, as kafka-python names them (or by dotted names); both
transports must reach the same cluster with the same identity. What librdkafka
cannot take is refused here by name, before any IO, so that the choice of a
transport can go by it.
"""

import base64
import binascii
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.settings import DOTTED_OPTIONS, ConnectionSettings

_NAMES = {ours: dotted for dotted, ours in DOTTED_OPTIONS.items()} | {
    # What librdkafka calls metadata.max.age.ms only bounds a cache.
    "metadata_max_age_ms": "topic.metadata.refresh.interval.ms",
    "sasl_mechanism": "sasl.mechanism",
}
_REFRESH_MS_MAX = 3_600_000
# Options that have no equivalent, and why.
_IMPOSSIBLE = {
    "proxy_url": "librdkafka knows no proxies",
    "sasl_kerberos_domain_name": "librdkafka's Kerberos works differently",
    "sasl_kerberos_name": "librdkafka's Kerberos works differently",
    "sasl_kerberos_service_name": "librdkafka's Kerberos works differently",
    "ssl_context": "it is Python's, and librdkafka has an OpenSSL of its own",
}
_IMPOSSIBLE_MECHANISMS = {
    "AWS_MSK_IAM": "librdkafka has no such mechanism",
    # It would run kinit with a keytab, where kafka-python uses the ticket cache.
    "GSSAPI": "librdkafka's Kerberos works differently, and its wheels have none",
}
# For tokens that do not tell when they expire; asked for again at 80 % of it.
TOKEN_LIFE_S = 300.0


def impossible(settings: ConnectionSettings) -> Mapping[str, str]:
    """Return the options that librdkafka cannot take, each with the reason."""
    found = {
        name: reason for name, reason in _IMPOSSIBLE.items() if name in settings.options
    }
    reason = _IMPOSSIBLE_MECHANISMS.get(settings.options.get("sasl_mechanism", ""))
    return found | ({"sasl_mechanism": reason} if reason is not None else {})


def _expiry(token: str) -> float:
    """Return when a token expires, in seconds of the epoch.

    A JWT says so in its middle part; of other tokens nothing is known.
    """
    unknown = time.time() + TOKEN_LIFE_S
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return unknown


def _token_callback(provider: Any) -> Callable[[object], Any]:
    """Make librdkafka's callback of a token provider of kafka-python's kind."""

    def answer(_: object) -> tuple[str, float, str, dict[str, str]]:
        token = provider.token()
        return token, _expiry(token), "", dict(provider.extensions())

    return answer


def fast_config(settings: ConnectionSettings) -> dict[str, Any]:
    """Return what every librdkafka client of ours is given.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka.
    """
    for name, reason in impossible(settings).items():
        raise ConfigurationError(
            f"Connection option {name!r} cannot be used by transport 'fast': {reason}. "
            "Use transport='kafka-python', or leave the option out.",
            setting=name,
        )
    options = settings.client_config()
    config: dict[str, Any] = {
        "bootstrap.servers": ",".join(options.pop("bootstrap_servers"))
    }
    provider = options.pop("sasl_oauth_token_provider", None)
    if provider is not None:
        config["oauth_cb"] = _token_callback(provider)
    # librdkafka refuses a first wait above the longest; kafka-python does not mind.
    first_ms = options.get("reconnect_backoff_ms", 0)
    options["reconnect_backoff_max_ms"] = max(
        first_ms, options["reconnect_backoff_max_ms"]
    )
    if "ssl_certfile" in options:
        # As in Python, where one file may hold both.
        options.setdefault("ssl_keyfile", options["ssl_certfile"])
    if "ssl_check_hostname" in options:
        is_checked = options["ssl_check_hostname"]
        options["ssl_check_hostname"] = "https" if is_checked else "none"
    if "metadata_max_age_ms" in options:
        wanted_ms = options["metadata_max_age_ms"]
        options["metadata_max_age_ms"] = min(wanted_ms, _REFRESH_MS_MAX)
    return config | {_NAMES[name]: value for name, value in options.items()}
