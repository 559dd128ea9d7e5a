"""``marshal groups history``: what admins did, from the log."""

from typing import Annotated

import typer

from kafka_marshal import ConfigurationError, GroupHistory
from kafka_marshal.admin.finishing import open_operations
from kafka_marshal.admin.growing import command as command_of
from kafka_marshal.counting import counted
from kafka_marshal.history.actions import OPEN
from kafka_marshal.history.admin_records import DIRECTIVES
from kafka_marshal.history.wording import action_to_object
from kafka_marshal_cli import history_presenters, parsing, presenters
from kafka_marshal_cli.commands.claims_explain import LIMIT_DEFAULT, Limit
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import AT, Call, command, notify, unknown_group, wall_ms

app = typer.Typer()


def _notify_missing(found: GroupHistory) -> None:
    for number, offset in found.began_at.items():
        notify(
            f"marshal: partition {number} begins at the checkpoint before offset "
            f"{offset}: what admins did earlier is not listed"
        )


def _notify_open(found: GroupHistory, group: str | None) -> None:
    """Notify of open operations and growths, with the command to run for each."""
    worlds = found.world.partitions
    for each in open_operations(worlds, group):
        state = "committed" if each.is_committed else "undecided"
        notify(
            f"operation {each.op_id} is {state}, and has locked "
            f"{counted(len(each.locked), 'partition')}; to end it, run: "
            f"marshal groups finish {each.group_id}"
        )
    for growth in (growth for world in worlds for growth in world.growths):
        if growth.ends is None:
            notify(
                f"topic {growth.topic!r} grows from {growth.old_count} to "
                f"{growth.new_count} partitions; to continue the growth, run: "
                f"{command_of(growth)} --execute"
            )


def _went_on(row: presenters.Row, since_ms: int) -> bool:
    """Return whether an action was still in effect at a time, epoch ms, or later."""
    last_ms: int = row["last_ms"]
    if row["kind"] in DIRECTIVES and row["ended"] is None:
        last_ms = max(last_ms, row["until_ms"] or 0)
    is_lasting = row["lasting_partitions"] or row["scheduled_partitions"]
    return last_ms >= since_ms or bool(is_lasting) or row["outcome"] == OPEN


@app.command("history", epilog="Example: marshal groups history billing --since=-7d")
@command(option_groups=AT)
def history(
    call: Call,
    *,
    at: Moment | None,
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="The group; by default all.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only actions still in effect after a time like -1h.",
        ),
    ] = None,
    limit: Limit = LIMIT_DEFAULT,
) -> None:
    """List what admins did: who, when, why, and what became of it.

    Each operation is one row. Changes of the coordination topic, resets of its state
    and growths of data topics concern every group. BY is the person if the record names
    one, else the client. LOG is the coordinating partition and offset of the first
    record; -o json has all records. If retention has deleted the start of the log, the
    list begins at the first remaining checkpoint.
    """
    if at is not None and at.time_ms is None:
        raise ConfigurationError(
            f"--at is {at.text}, and admins write to several coordinating partitions; "
            "write a time like 2026-01-31T12:00:00Z, or like -5m",
            setting="--at",
        )
    first_ms = None if since is None else parsing.since_ms(since, now_ms=wall_ms())
    found = GroupHistory.open(
        group_id=group,
        time_ms=None if at is None else at.time_ms,
        since_ms=first_ms,
        **call.connection(),
    )
    is_known = any(group in state.groups for state in found.world.partitions)
    is_named = any(action.group_id == group for action in found.actions)
    if group is not None and not is_known and not is_named:
        where = "in the log" if since is None else f"in the log since {since}"
        raise unknown_group(group, where)
    _notify_missing(found)
    rows = [action_to_object(action) for action in found.actions]
    if first_ms is not None:
        rows = [row for row in rows if _went_on(row, first_ms)]
    shown = rows[-limit:] if limit else rows
    count = len(found.actions) + found.dropped_count
    facts = {
        "group_id": group,
        "actions_count": count,
        "records_count": found.records_count,
    }
    section = Section("actions", shown, history_presenters.ACTION_COLUMNS)
    call.answer(Answer(presenters.as_of(found.world, at), facts, (section,)))
    if len(shown) < count:
        notify(f"{len(shown)} of {count} actions are shown; see --limit and --since")
    if at is None:
        _notify_open(found, group)
