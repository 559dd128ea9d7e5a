"""The option ``--sidecar``: hold claims through the sidecar of this host."""

from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal_cli.shared import Call, OptionGroup

PANEL = "Sidecar"


@attrs.frozen
class SidecarOption:
    """The sidecar that holds the claims, if any.

    Attributes:
        sidecar: Address of the sidecar, None to hold claims in this process.
        token_file: File with its token.
    """

    sidecar: str | None = None
    token_file: Path | None = None

    @property
    def token(self) -> Path | None:
        """The token file over TCP, else None: a profile may name one in any case."""
        is_tcp = self.sidecar is not None and self.sidecar.startswith("http")
        return self.token_file if is_tcp else None

    def connection(self, call: Call) -> dict[str, Any]:
        """Return the arguments of ``Marshal`` that say where to connect."""
        return {
            "bootstrap_servers": self.servers(call),
            "coordination_topic": self.topic(call),
            "options": call.options,
            "transport": call.transport,
            "sidecar": self.sidecar,
            "sidecar_token_file": self.token,
        }

    def servers(self, call: Call) -> str | None:
        """Return the addresses of the cluster, None for those of the sidecar."""
        is_own = self.sidecar is None or call.is_server_given
        return call.bootstrap_servers if is_own else None

    def topic(self, call: Call) -> str | None:
        """Return the coordination topic, None for that of the sidecar."""
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

SIDECAR = OptionGroup(
    OPTIONS, lambda given: SidecarOption(given["sidecar"], given["token_file"])
)
