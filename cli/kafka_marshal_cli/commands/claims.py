"""``marshal claims``: the owners of partitions."""

from typing import TYPE_CHECKING, Annotated

import typer

from kafka_marshal import ConfigurationError
from kafka_marshal.clock import duration, instant
from kafka_marshal_cli import confirmation, parsing, presenters
from kafka_marshal_cli.lazy import LazyCommand, lazy_group
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import (
    AT,
    Call,
    Execute,
    Group,
    OfGroup,
    OfTopic,
    Partition,
    TopicPartition,
    command,
    note_unknown_group,
    notify,
    wall_ms,
)

if TYPE_CHECKING:
    from kafka_marshal.admin.state_reset import ForgetPlan

app = typer.Typer(
    no_args_is_help=True,
    cls=lazy_group(
        LazyCommand(
            "watch",
            "claims_watch",
            help="Show claims live: a table on a terminal, else a line for each "
            "change.",
        ),
        LazyCommand(
            "explain",
            "claims_explain",
            help="Explain why a partition is owned or free, with the records that made "
            "it so.",
        ),
        LazyCommand(
            "history",
            "claims_explain",
            help="List every owner of a partition, from when until when, and why each "
            "claim ended.",
        ),
    ),
)


@app.command("list", epilog="Example: marshal claims list --group billing")
@command(option_groups=AT)
def list_claims(
    call: Call,
    *,
    at: Moment | None,
    group: OfGroup = None,
    topic: OfTopic = None,
) -> None:
    """List every claim with its owner, age, position, lag, token and reason.

    LOG-END-OFFSET and LAG are looked up in the cluster; `-` means unknown. With --at
    these columns are omitted, and WHY is unknown if the last change of the claim is
    older than the last checkpoint.
    """
    world = call.formatted_world(at)
    rows = presenters.claim_rows(world, group_id=group, topic=topic)
    rows = call.with_lag(rows) if at is None else presenters.with_lag(rows, {})
    columns = presenters.claim_columns(rows=rows, is_past=world.is_past, has_why=True)
    section = Section("claims", rows, columns, presenters.CLAIMS_LESS)
    call.answer(Answer(presenters.as_of(world, at), {}, (section,)))
    if at is None and group is not None:
        note_unknown_group(world, group)
    if at is None and topic is not None and not rows:
        notify(
            f"the log has no such claims of topic {topic!r}; see: marshal claims list"
        )


@app.command(
    "who",
    epilog="Example: marshal claims who billing payments 3 --at 2026-01-31T12:00:00Z",
)
@command(option_groups=AT)
def who(
    call: Call,
    *,
    at: Moment | None,
    group: Group,
    topic: TopicPartition,
    partition: Partition = None,
) -> None:
    """Show the owner of one partition, now or in the past.

    --at may also be an offset of the key's coordinating partition. If retention has
    deleted the start of the log, a moment before the first remaining checkpoint is an
    error, with exit code 1.
    """
    key = parsing.key_of(group, topic, partition=partition)
    world = call.world() if at is None else call.world(at, key=key)
    place = world.partition_of(key)
    world.require_known([place])
    states = {state.partition: state for state in world.partitions}
    if place not in states:
        raise ConfigurationError(
            f"--at is {at.text if at else 'now'}, and the key belongs to coordinating "
            f"partition {place}; write {place}:OFFSET, or a time",
            setting="--at",
        )
    state = states[place]
    if key not in state.keys:
        from kafka_marshal_cli.commands.claims_explain import require_exists

        require_exists(call, key)
    found = {
        **key._asdict(),
        "coordinating_partition": place,
        "at_offset": state.next_offset - 1 if state.next_offset else None,
        "at_log_time_ms": state.log_time_ms,
        "is_claimed": key in state.keys,
    }
    shown = {}
    if state.log_time_ms is not None:
        shown["at_log_time_ms"] = instant(state.log_time_ms)
    if key in state.keys:
        row = presenters.claim_row(world, key, state=state)
        found |= row
        shown["why"] = presenters.why_text(row)
        shown["moving"] = presenters.moving_text(row)
        if row["owner"] is not None:
            shown["owner"] = row["owner"]["client_id"]
            for name in ("age_ms", "age_estimate_ms"):
                if row[name] is not None:
                    shown[name] = duration(row[name])
    else:
        found["owner"] = None
        shown["owner"] = "none: the partition was not claimed at that time"
    call.answer(Answer(presenters.as_of(world, at), found, (), shown))
    if at is None:
        note_unknown_group(world, group)


def _confirm_forgetting(
    plan: "ForgetPlan", group: str, *, force: bool, yes: bool
) -> None:
    """Ask before dropping claims if the group has live owners, or topics exist."""
    existing = plan.existing if force else ()
    if existing:
        effect = (
            f"topics of group {group} exist ({', '.join(existing)}); without their "
            "claims the group processes these topics again from the start position"
        )
    elif plan.held:
        effect = (
            f"group {group} is active: {len(plan.held)} of its claims have live "
            "owners and stay; the others are dropped with their positions"
        )
    else:
        return
    confirmation.require(group, effect=effect, yes=yes)


@app.command(
    "forget", epilog="Example: marshal claims forget billing --topic gone --execute"
)
@command(writes=True)
def forget(
    call: Call,
    *,
    group: Group,
    topic: OfTopic = None,
    execute: Execute = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also drop claims of existing topics; their records are repeated.",
        ),
    ] = False,
    yes: confirmation.Yes = False,
) -> None:
    """Drop a group's claims that have no owner, with positions and granted offsets.

    This is for topics that were deleted: otherwise their granted offsets (at most once)
    would stay. Claims with an owner stay. The command asks you to type the name of the
    group if it has live owners, or with --force if topics exist.
    """
    with call.admin() as admin:
        if execute:
            before = admin.forget_keys(group, topic=topic)
            _confirm_forgetting(before, group, force=force, yes=yes)
        plan = admin.forget_keys(
            group, topic=topic, execute=execute, allow_existing=force
        )
    rows = [{**key._asdict(), "epoch": epoch} for key, epoch in plan.keys]
    found = {
        "group_id": group,
        "is_executed": execute,
        "held_count": len(plan.held),
        "existing_topics": list(plan.existing),
    }
    shown = {"existing_topics": ", ".join(plan.existing) or "none"}
    as_of = {"time_ms": wall_ms(), "offsets": {}}
    sections = (Section("forgotten", rows, presenters.FORGOTTEN_COLUMNS),)
    call.answer(Answer(as_of, found, sections, shown))
    if plan.existing:
        notify(
            f"marshal: kept claims of topics that exist: {', '.join(plan.existing)}; "
            "--force drops these as well, and their records are repeated"
        )
    if not execute:
        notify("nothing was written; --execute drops them")
