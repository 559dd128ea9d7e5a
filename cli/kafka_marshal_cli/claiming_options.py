"""Options of commands that claim partitions: membership and the sidecar."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal.config import Membership
from kafka_marshal_cli import parsing
from kafka_marshal_cli.profiles import user_path
from kafka_marshal_cli.shared import Call, OptionGroup

_member: Any = partial(typer.Option, rich_help_panel="Member")
_sidecar: Any = partial(typer.Option, rich_help_panel="Sidecar")


class LogFormat(StrEnum):
    """How a process that claims writes its events to stderr."""

    TEXT = "text"
    JSON = "json"


@attrs.frozen(kw_only=True)
class MemberOptions:
    """Options of the process as a member of its group."""

    labels: Annotated[
        str,
        _member(
            metavar="NAME=TEXT,...",
            envvar="MARSHAL_LABELS",
            help="For planners: `rack`, `target`, `replaces` (client whose place "
            "this member takes; `*` for any that is drained or restarts), or others.",
        ),
    ] = ""
    no_plan: Annotated[
        bool,
        _member(
            "--no-plan",
            envvar="MARSHAL_NO_PLAN",
            help="Never plan for the group (policy `planner`).",
        ),
    ] = False
    restarts: Annotated[
        bool,
        _member(
            "--restarts",
            envvar="MARSHAL_RESTARTS",
            help="This member, or its replacement, starts again soon: with policy "
            "`planner` its partitions wait for it, up to `grace_ms` of the group.",
        ),
    ] = False

    def membership(self) -> Membership:
        """Return the options in the form that the library takes."""
        texts = [each for each in self.labels.split(",") if each.strip()]
        return Membership(
            labels=parsing.pairs("--labels", texts),
            can_plan=not self.no_plan,
            restarts=self.restarts,
        )


MEMBER = OptionGroup.of(MemberOptions, MemberOptions.membership)


def state_dir_of(given: str | None) -> str | Path | None:
    """Return the directory of ``--state-dir`` in the form that the library takes.

    None is the default directory, and an empty text no directory.
    """
    return user_path("--state-dir", given) if given else given


@attrs.frozen
class SidecarOption:
    """The sidecar that holds the claims; without one, this process holds them."""

    sidecar: Annotated[
        str | None,
        _sidecar(
            metavar="ADDRESS",
            envvar="MARSHAL_SIDECAR",
            help="Sidecar that holds the claims: unix:/path/of/the.sock or "
            "http://127.0.0.1:PORT.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        _sidecar(
            metavar="FILE",
            envvar="MARSHAL_SIDECAR_TOKEN_FILE",
            help="File with the sidecar's token, for TCP.",
        ),
    ] = None

    @property
    def token(self) -> Path | None:
        """The token file over TCP; over a Unix socket None, even if one is given."""
        is_tcp = self.sidecar is not None and self.sidecar.startswith("http")
        if not is_tcp or self.token_file is None:
            return None
        return user_path("--token-file", self.token_file)

    def connection(self, call: Call) -> dict[str, Any]:
        """Return the arguments of ``Marshal`` for the connection."""
        return {
            "bootstrap_servers": self.servers(call),
            "coordination_topic": self.topic(call),
            "options": call.options,
            "transport": call.transport,
            "sidecar": self.sidecar,
            "sidecar_token_file": self.token,
        }

    def servers(self, call: Call) -> str | None:
        """Return the addresses of the cluster; None to use the sidecar's."""
        is_own = self.sidecar is None or call.is_server_given
        return call.bootstrap_servers if is_own else None

    def topic(self, call: Call) -> str | None:
        """Return the coordination topic; None to use the sidecar's."""
        is_own = self.sidecar is None or call.is_topic_given
        return call.coordination_topic if is_own else None


SIDECAR = OptionGroup.of(SidecarOption)
