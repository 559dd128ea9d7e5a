"""Where a sidecar listens, as its users write it down."""

import ipaddress
import re
from pathlib import Path

import attrs

from kafka_marshal.errors import ConfigurationError

UNIX = "unix:"
_HTTP = re.compile(r"http://(\[[0-9a-fA-F:]+\]|[^/:\[\]]+):([0-9]{1,5})/?")
TOKEN_BYTES_MAX = 4_096


@attrs.frozen
class Address:
    """A sidecar's address.

    Attributes:
        text: As it was given; for messages.
        socket: Path of its Unix socket, None over TCP.
        base_url: What the paths of its API follow.
    """

    text: str
    socket: str | None
    base_url: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address that a text means.

        Raises:
            ConfigurationError: It means none.
        """
        if text.startswith(UNIX):
            path = text.removeprefix(UNIX).removeprefix("//")
            if not Path(path).is_absolute():
                raise _wrong(text, "the path of a Unix socket must be absolute")
            return cls(text, path, "http://sidecar")
        found = _HTTP.fullmatch(text)
        if found is None:
            raise _wrong(text, "it has neither form")
        host, port = found[1].strip("[]"), int(found[2])
        # A lease is a time of this machine's clock: nobody else can tell one.
        if not is_loopback(host):
            raise _wrong(text, f"{host!r} is not this machine")
        if not 1 <= port <= 65_535:  # noqa: PLR2004 - what TCP has
            raise _wrong(text, f"{port} is no port")
        return cls(text, None, f"http://{found[1]}:{port}")

    def token(self, file: str | Path | None) -> str | None:
        """Return the token to show, from its file; a Unix socket needs none.

        Raises:
            ConfigurationError: There is none, and one is needed.
        """
        if file is None:
            if self.socket is None:
                raise ConfigurationError(
                    f"a sidecar at {self.text} asks for a token; name its file with "
                    "sidecar_token_file, or use its Unix socket",
                    setting="sidecar_token_file",
                )
            return None
        try:
            with Path(file).open("rb") as opened:
                text = opened.read(TOKEN_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the sidecar's token cannot be read from {str(file)!r}: {error}",
                setting="sidecar_token_file",
            ) from error
        if not text or not text.isprintable():
            raise ConfigurationError(
                f"the file {str(file)!r} holds no token: one line of text, as written "
                "by the sidecar",
                setting="sidecar_token_file",
            )
        return text


def is_loopback(host: str) -> bool:
    """Return whether a host of a URL, without brackets, is this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wrong(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"sidecar {text!r} is no address of one: {why}; write unix:/path/of/the.sock "
        "or http://127.0.0.1:PORT",
        setting="sidecar",
    )
