"""``marshal groups``: who works, who may not, and pausing them."""

from typing import Annotated

import typer

from kafka_marshal import ClaimRejected, DeadlineExceeded
from kafka_marshal.adoption import adopt as adopt_group
from kafka_marshal.adoption import plan_adoption
from kafka_marshal_cli import columns, facts, parsing
from kafka_marshal_cli.render import Answer, Section, instant
from kafka_marshal_cli.shared import Call, command, tell

app = typer.Typer(
    help="Groups: look at them, pause them, adopt them.", no_args_is_help=True
)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.")]
Reason = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Why; stored in the log for people.")
]


@app.command("list", epilog="Example: marshal groups list -o json")
@command()
def list_groups(call: Call) -> None:
    """List every group that the log knows, with its pause if it has one."""
    world = call.formatted_world()
    section = Section("groups", facts.group_rows(world), columns.GROUPS)
    call.answer(Answer(facts.as_of(world), {}, (section,)))


@app.command("describe", epilog="Example: marshal groups describe billing")
@command()
def describe(call: Call, group: Group) -> None:
    """Show a group's pause, members and claims.

    AGE is by log time, which stands still while nothing is appended; AGE NOW
    adds the time since. A member is active, leaving, left, fenced (silent for more
    than 2H) or unregistered (it owns without having announced itself).
    LOG-END-OFFSET and LAG are asked of the cluster, and `-` where that cannot tell.
    """
    world = call.formatted_world()
    pauses = facts.pause_rows(world, group_id=group)
    members = facts.member_rows(world, group_id=group)
    claims = facts.claim_rows(world, group_id=group)
    if not (pauses or members or claims):
        raise ClaimRejected(
            f"group {group!r} is not in the log; see: marshal groups list",
            reason="unknown_group",
        )
    sections = (
        Section("pauses", pauses, columns.PAUSES),
        Section("members", members, columns.MEMBERS),
        Section("claims", call.with_lag(claims), columns.CLAIMS_OF_A_GROUP),
    )
    call.answer(Answer(facts.as_of(world), {"group_id": group}, sections))


# The name of the record that it writes; kept for those who look for that.
@app.command("release", hidden=True)
@app.command(
    "pause",
    epilog="Example: marshal groups pause billing --for 10m --reason deploy --wait",
)
@command()
def pause(
    call: Call,
    group: Group,
    *,
    for_: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="DURATION",
            help="How long, like 10m; it ends by itself then. Renewed as long as "
            "this command works or waits.",
        ),
    ],
    reason: Reason = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until nobody holds anything any more: up to --timeout where "
            "given, else as long as the pause.",
        ),
    ] = False,
) -> None:
    """Pause a group: members finish what is in hand and release their partitions."""
    for_ms = parsing.duration_ms("--for", for_, is_bare_ms=False)
    wait_ms = 0
    if wait:
        wait_ms = call.timeout_ms if call.is_timeout_given else for_ms
    with call.admin() as admin:
        result = admin.pause_group(group, for_ms=for_ms, reason=reason, wait_ms=wait_ms)
    world = call.world()
    held = facts.key_texts(result.held)
    found = {
        "group_id": group,
        "op_id": result.op_id,
        "until_ms": result.until_ms,
        "reason": reason,
        "held": held,
    }
    shown = {"until_ms": instant(result.until_ms)}
    call.answer(Answer(facts.as_of(world), found, (), shown))
    if wait and held:
        raise DeadlineExceeded(
            f"group {group!r} is paused, but {', '.join(held)} was not let go within "
            f"{wait_ms} ms; see: marshal groups describe {group}"
        )
    if held:
        tell(f"{len(held)} claims are yet to be let go; --wait waits for that")


@app.command("resume", epilog="Example: marshal groups resume billing --reason done")
@command()
def resume(call: Call, group: Group, *, reason: Reason = None) -> None:
    """End a group's pause; its members go on where they were."""
    with call.admin() as admin:
        count = admin.resume_group(group, reason=reason)
    found = {"group_id": group, "partitions_count": count, "reason": reason}
    call.answer(Answer(facts.as_of(call.world()), found))


@app.command(
    "adopt",
    epilog="Example: marshal groups adopt billing --from-group billing-v1 --execute",
)
@command()
def adopt(
    call: Call,
    group: Group,
    *,
    from_group: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help="Consumer group in Kafka that is left; by default one of the same "
            "name.",
        ),
    ] = None,
    from_topic: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Coordination topic of the Go original, whose last heartbeats count "
            "beside the committed offsets.",
        ),
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="TOPIC", help="Only this one. Repeatable."),
    ] = None,
    execute: Annotated[
        bool,
        typer.Option(
            "--execute/--dry-run",
            help="Set the positions, or only show what would be set.",
        ),
    ] = False,
) -> None:
    """Start a group where a consumer group of Kafka left off.

    Without --execute nothing is written. The consumers of the group that is left
    must be stopped; a position that the coordination log has already stands.
    """
    plan = plan_adoption(
        call.bootstrap_servers,
        group_id=group,
        from_group=from_group,
        from_topic=from_topic,
        topics=topics or (),
        coordination_topic=call.coordination_topic,
        options=call.options,
        transport=call.transport,
        timeout_ms=call.timeout_ms,
    )
    shown = plan
    refusal: ClaimRejected | None = None
    if execute:
        try:
            shown = adopt_group(
                call.bootstrap_servers,
                plan=plan,
                coordination_topic=call.coordination_topic,
                options=call.options,
                transport=call.transport,
                timeout_ms=call.timeout_ms,
            )
        except ClaimRejected as error:
            refusal = error
    found = facts.adoption_facts(shown, is_executed=execute and refusal is None)
    section = Section("partitions", facts.adoption_rows(shown), columns.ADOPTION)
    call.answer(Answer(facts.as_of(call.world()), found, (section,)))
    if refusal is not None:
        raise refusal
    if not execute:
        tell("nothing was written; --execute sets the positions")
