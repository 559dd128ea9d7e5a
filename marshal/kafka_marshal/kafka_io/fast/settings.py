"""Connection settings by librdkafka's names.

Users give options once, by kafka-python's names or dotted names; both transports must
reach the same cluster with the same identity. Options that librdkafka does not support
are refused here by name, before any IO: the transport ``auto`` is then kafka-python.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.oauth import expiry_of, extensions_of
from kafka_marshal.kafka_io.settings import (
    BOTH_NAMES,
    DOTTED_OPTIONS,
    ConnectionConfig,
)

_NAMES = {ours: dotted for dotted, ours in DOTTED_OPTIONS.items()} | {
    # librdkafka's metadata.max.age.ms only bounds a cache.
    "metadata_max_age_ms": "topic.metadata.refresh.interval.ms",
}
_REFRESH_MS_MAX = 3_600_000
# Options without an equivalent, and the reason.
_IMPOSSIBLE = {
    "proxy_url": "librdkafka does not support proxies",
    "sasl_kerberos_domain_name": "librdkafka's Kerberos works differently",
    "sasl_kerberos_name": "librdkafka's Kerberos works differently",
    "sasl_kerberos_service_name": "librdkafka's Kerberos works differently",
    "ssl_context": "it is a Python object, and librdkafka has its own OpenSSL",
}
_IMPOSSIBLE_MECHANISMS = {
    "AWS_MSK_IAM": "librdkafka has no such mechanism",
    # librdkafka runs kinit with a keytab; kafka-python uses the ticket cache.
    "GSSAPI": "librdkafka's Kerberos works differently, and its wheels have none",
}
_LOGGER = logging.getLogger(__name__)
# librdkafka does not accept tokens that have expired when it looks at them.
_LEFT_S_MIN = 1.0


def impossible(settings: ConnectionConfig) -> Mapping[str, str]:
    """Return the options that librdkafka does not support, each with the reason."""
    found = {
        name: reason for name, reason in _IMPOSSIBLE.items() if name in settings.options
    }
    reason = _IMPOSSIBLE_MECHANISMS.get(settings.options.get("sasl_mechanism", ""))
    return found | ({"sasl_mechanism": reason} if reason is not None else {})


class TokenCallback:
    """librdkafka's callback for a token provider.

    librdkafka requests a token long before the last one expires, which stays in use
    while the provider fails.

    Attributes:
        failure: Why the last request failed, None if it did not.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._last: tuple[str, float, str, dict[str, str]] | None = None
        self.failure: Exception | None = None

    def __call__(self, _: object) -> tuple[str, float, str, dict[str, str]]:
        """Return a token, its expiry in epoch seconds, a principal and extensions."""
        provider, self.failure = self._provider, None
        try:
            token = provider.token()
            expires_at_s = getattr(provider, "expires_at_s", None) or expiry_of(token)
            self._last = token, expires_at_s, "", extensions_of(provider)
        except Exception as error:
            self.failure = error
            if self._last is None or self._last[1] <= time.time() + _LEFT_S_MIN:
                raise
            _LOGGER.warning(
                "cannot get a new token, so the last one stays in use: %s: %s",
                type(error).__name__,
                error,
            )
        return self._last


def fast_config(settings: ConnectionConfig) -> dict[str, Any]:
    """Return the configuration common to all librdkafka clients.

    Raises:
        ConfigurationError: An option has no equivalent in librdkafka.
    """
    for name, reason in impossible(settings).items():
        raise ConfigurationError(
            f"Connection option {BOTH_NAMES[name]} cannot be used by transport "
            f"'fast': {reason}. Use transport='kafka-python', or leave the option out.",
            setting=name,
        )
    options = settings.client_config()
    config: dict[str, Any] = {
        "bootstrap.servers": ",".join(options.pop("bootstrap_servers"))
    }
    provider = options.pop("sasl_oauth_token_provider", None)
    if provider is not None:
        config["oauth_cb"] = TokenCallback(provider)
    # librdkafka, unlike kafka-python, refuses a first backoff above the maximum.
    first_ms = options.get("reconnect_backoff_ms", 0)
    options["reconnect_backoff_max_ms"] = max(
        first_ms, options["reconnect_backoff_max_ms"]
    )
    if "ssl_certfile" in options:
        # As in Python, one file may hold certificate and key.
        options.setdefault("ssl_keyfile", options["ssl_certfile"])
    if "ssl_check_hostname" in options:
        is_checked = options["ssl_check_hostname"]
        options["ssl_check_hostname"] = "https" if is_checked else "none"
    if "metadata_max_age_ms" in options:
        wanted_ms = options["metadata_max_age_ms"]
        options["metadata_max_age_ms"] = min(wanted_ms, _REFRESH_MS_MAX)
    return config | {_NAMES[name]: value for name, value in options.items()}
