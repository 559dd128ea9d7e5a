"""Options of commands that claim: the process as a member, and its sidecar."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal.config import Membership
from kafka_marshal_cli import parsing
from kafka_marshal_cli.shared import Call, OptionGroup

MEMBER_PANEL = "Member"
SIDECAR_PANEL = "Sidecar"


MEMBER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "labels": (
        Annotated[
            str,
            typer.Option(
                "--labels",
                metavar="NAME=TEXT,...",
                envvar="MARSHAL_LABELS",
                help="For planners: `rack`, `target`, `replaces` (the client whose "
                "place it takes; `*` for any that is drained or restarts), or others.",
                rich_help_panel=MEMBER_PANEL,
            ),
        ],
        "",
    ),
    "no_plan": (
        Annotated[
            bool,
            typer.Option(
                "--no-plan",
                envvar="MARSHAL_NO_PLAN",
                help="Never plan for the group (policy `planner`).",
                rich_help_panel=MEMBER_PANEL,
            ),
        ],
        False,
    ),
    "restarts": (
        Annotated[
            bool,
            typer.Option(
                "--restarts",
                envvar="MARSHAL_RESTARTS",
                help="It, or a member that replaces it, starts again soon: with policy "
                "`planner` its partitions wait for that, `grace_ms` of the group.",
                rich_help_panel=MEMBER_PANEL,
            ),
        ],
        False,
    ),
}


def _member(given: Mapping[str, Any]) -> Membership:
    texts = [each for each in given["labels"].split(",") if each.strip()]
    return Membership(
        labels=parsing.pairs("--labels", texts),
        can_plan=not given["no_plan"],
        restarts=given["restarts"],
    )


MEMBER = OptionGroup(MEMBER_OPTIONS, _member)


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


SIDECAR_OPTIONS: dict[str, tuple[Any, Any]] = {
    "sidecar": (
        Annotated[
            str | None,
            typer.Option(
                "--sidecar",
                metavar="ADDRESS",
                envvar="MARSHAL_SIDECAR",
                help="Sidecar that holds the claims: unix:/path/of/the.sock or "
                "http://127.0.0.1:PORT.",
                rich_help_panel=SIDECAR_PANEL,
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
                rich_help_panel=SIDECAR_PANEL,
            ),
        ],
        None,
    ),
}

SIDECAR = OptionGroup(
    SIDECAR_OPTIONS, lambda given: SidecarOption(given["sidecar"], given["token_file"])
)
