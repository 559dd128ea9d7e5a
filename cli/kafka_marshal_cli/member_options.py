"""What a process is among the members of its group: options of those that claim."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kafka_marshal.config import Membership
from kafka_marshal_cli import parsing
from kafka_marshal_cli.shared import OptionGroup

PANEL = "Member"


OPTIONS: dict[str, tuple[Any, Any]] = {
    "labels": (
        Annotated[
            str,
            typer.Option(
                "--labels",
                metavar="NAME=TEXT,...",
                envvar="MARSHAL_LABELS",
                help="What planners know of this member: `rack`, `target`, "
                "`replaces` (the client whose place it takes; `*` for any "
                "that is drained or restarts), or any others.",
                rich_help_panel=PANEL,
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
                help="Never plan for the group, where that has policy `planner`.",
                rich_help_panel=PANEL,
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
                help="It, or a member that replaces it, starts again soon after "
                "its orderly end: with policy `planner` its partitions wait "
                "for that one, for `grace_ms` of the group.",
                rich_help_panel=PANEL,
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


MEMBER = OptionGroup(OPTIONS, _member)
