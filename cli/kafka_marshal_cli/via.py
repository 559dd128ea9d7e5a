"""``--sidecar``: work through the sidecar of this host, as the library does."""

from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal_cli.shared import Call, Gathered

PANEL = "Sidecar"


@attrs.frozen
class Via:
    """Where claims come from, as it was asked for.

    Attributes:
        sidecar: Address of a sidecar, None for an engine of this process.
        token_file: File with its token.
    """

    sidecar: str | None = None
    token_file: Path | None = None

    @property
    def token(self) -> Path | None:
        """The token's file where one is shown: a profile may name it all the same."""
        is_tcp = self.sidecar is not None and self.sidecar.startswith("http")
        return self.token_file if is_tcp else None

    def servers(self, call: Call) -> str | None:
        """Return the addresses of the cluster, None for what the sidecar uses."""
        is_own = self.sidecar is None or call.is_server_given
        return call.bootstrap_servers if is_own else None

    def topic(self, call: Call) -> str | None:
        """Return the coordination topic, None for the sidecar's."""
        is_own = self.sidecar is None or call.is_topic_given
        return call.coordination_topic if is_own else None


OPTIONS: dict[str, tuple[Any, Any]] = {
    "sidecar": (
        Annotated[
            str | None,
            typer.Option(
                "--sidecar",
                metavar="ADDRESS",
                envvar="MARSHAL_SIDECAR",
                help="Sidecar of this host that holds the claims: "
                "unix:/path/of/the.sock or http://127.0.0.1:PORT.",
                rich_help_panel=PANEL,
            ),
        ],
        None,
    ),
    "token_file": (
        Annotated[
            Path | None,
            typer.Option(
                "--token-file",
                metavar="FILE",
                envvar="MARSHAL_SIDECAR_TOKEN_FILE",
                help="File with the sidecar's token, over TCP.",
                rich_help_panel=PANEL,
            ),
        ],
        None,
    ),
}

VIA = Gathered(OPTIONS, lambda given: Via(given["sidecar"], given["token_file"]))
