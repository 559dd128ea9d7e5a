"""``marshal clients``: the processes that the log knows."""

from collections.abc import Iterable
from typing import Annotated

import typer

from kafka_marshal import ConfigurationError, DeadlineExceeded
from kafka_marshal.admin.draining import DirectiveResult
from kafka_marshal.admin.fencing import ClientProcess, FenceResult
from kafka_marshal.clock import duration, instant
from kafka_marshal.counting import counted
from kafka_marshal.identity import forget_client, state_home
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal_cli import confirmation, parsing, presenters
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.profiles import user_path
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import (
    AT,
    Call,
    Group,
    OfGroup,
    Reason,
    WriteNothing,
    command,
    note_unknown_group,
    notify,
    wall_ms,
)

LIVE_STATES = frozenset({"active", "unregistered"})

app = typer.Typer(no_args_is_help=True)


@app.command("list", epilog="Example: marshal clients list --group billing")
@command(option_groups=AT)
def list_clients(
    call: Call,
    *,
    at: Moment | None,
    group: OfGroup = None,
) -> None:
    """List every client: active, leaving, left, silent, fenced or unregistered.

    Clients that have left or are silent are dropped from the list when other members of
    their group announce themselves, a fenced client once it owns nothing. There is a
    column DIRECTIVE while a client is drained or cordoned, and LABELS if a client has
    some, like its rack. With --at, clients that were silent for more than two heartbeat
    intervals may be missing.

    LOG LAG counts the entries of the log after the last one that a client had applied
    when it last announced itself, in the partition of __marshal where the count is
    largest. For a healthy client these are the entries of a third of a heartbeat
    interval. If LOG LAG stays high or grows, the client is stopped, lacks CPU time, or
    cannot reach a broker. LOG READ counts the entries that a client has read since its
    start: few, if it began at a stored state or a checkpoint. JSON has applied_offsets
    and began_offsets by partition.
    """
    world = call.formatted_world(at, has_members=True)
    rows = presenters.member_rows(world, group_id=group)
    columns = presenters.client_columns(rows, has_group=True)
    section = Section("clients", rows, columns, presenters.CLIENTS_LESS)
    call.answer(Answer(presenters.as_of(world, at), {}, (section,)))
    if at is None and group is not None:
        note_unknown_group(world, group)


def _require_names(group: str, client: str) -> None:
    for setting, name in (("GROUP", group), ("CLIENT", client)):
        if not is_identifier(name):
            raise ConfigurationError(f"{name!r} is not a valid name", setting=setting)


@app.command("fence", epilog="Example: marshal clients fence billing worker-7")
@command(writes=True)
def fence(
    call: Call,
    *,
    group: Group,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client_id.")],
    incarnation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HEX",
            help="Only this process; repeatable. By default all processes that own "
            "partitions or announce themselves.",
        ),
    ] = None,
    reason: Reason = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait until its partitions are free, --timeout at most."
        ),
    ] = False,
    yes: confirmation.Yes = False,
    dry_run: WriteNothing = False,
) -> None:
    """End the claims of a client's process for good, whatever that process does.

    A process that works stops at once, releases its partitions, and ends with
    ClientFenced. The partitions of a process that hangs are free two heartbeat
    intervals after its last renewal. A new process of the client claims as usual.

    Fencing a sidecar ends the claims of all its clients in this group. The command asks
    you to type the client_id if the client is alive by the log. Log time moves only
    with records: if no client writes any more, a dead client also counts as alive.
    """
    _require_names(group, client)
    with call.admin() as admin:
        chosen = incarnation
        if chosen is None:
            found = admin.client_processes(group, client)
            # Fence exactly the processes that the person confirms.
            chosen = [p.incarnation for p in found if p.owned or p.is_announced] or None
        else:
            found = tuple(
                each
                for each in admin.client_processes(group, client)
                if each.incarnation in chosen
            )
        if not yes and not dry_run:
            _confirm_fence(found, group, client=client)
        result = admin.fence_client(
            group,
            client,
            incarnations=chosen,
            reason=reason,
            wait_ms=call.timeout_ms if wait else 0,
            dry_run=dry_run,
        )
    _answer_fence(call, result, dry_run=dry_run)
    if wait and result.held and not dry_run:
        raise DeadlineExceeded(
            f"client {client!r} is fenced, and {len(result.held)} of its partitions "
            "are not free yet; wait with the same command, or see: marshal claims list "
            f"--group {group}"
        )


def _confirm_fence(
    processes: Iterable[ClientProcess], group: str, *, client: str
) -> None:
    live = [each for each in processes if each.is_live and not each.is_fenced]
    if live:
        count = sum(len(each.held) for each in live)
        hosts = ", ".join(sorted({each.host or "unknown" for each in live}))
        state = "is alive"
        if all(each.is_silent for each in live):
            # Log time would show the silence only after the next append.
            state = (
                "has been silent for more than two heartbeat intervals by the clock of "
                "this machine, though not yet by the log, where no client has written "
                "since: it may be alive"
            )
        confirmation.require(
            client,
            effect=f"client {client} of group {group} {state} on host {hosts} and "
            f"holds {counted(count, 'partition')}; fencing ends its claims",
            yes=False,
        )


def _answer_fence(call: Call, result: FenceResult, *, dry_run: bool) -> None:
    held = result.held
    longest_ms = max((each.remaining_ms for each in held), default=0)
    facts = {
        "group_id": result.group_id,
        "client_id": result.client_id,
        "is_changed": result.is_changed,
        "held_count": len(held),
        "free_within_ms": longest_ms,
        "is_executed": result.is_changed and not dry_run,
    }
    rows = [
        {
            "incarnation": process.incarnation,
            "host": process.host,
            "is_fenced": process.is_fenced,
            "held_count": len(process.held),
            "offsets": {str(t): at for t, at in sorted(process.fenced.items())},
        }
        for process in result.processes
    ]
    keys = [
        {
            "topic": each.key.topic,
            "partition": each.key.partition,
            "remaining_ms": each.remaining_ms,
        }
        for each in held
    ]
    sections = (
        Section("fenced", rows, presenters.FENCED_COLUMNS),
        Section("held", keys, presenters.STILL_HELD_COLUMNS),
    )
    shown = {"free_within_ms": duration(longest_ms)}
    as_of = {"time_ms": wall_ms(), "offsets": {}}
    call.answer(Answer(as_of, facts, sections, shown))
    if dry_run and result.is_changed:
        notify(f"nothing was written; {counted(len(held), 'claim')} would end")
    elif not result.is_changed:
        notify("nothing was written: all processes of the client are fenced, or gone")


Name = Annotated[str | None, typer.Argument(metavar="[CLIENT]", help="The client_id.")]
Host = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="All clients on this host, instead of CLIENT."),
]
For = Annotated[
    str,
    typer.Option("--for", metavar="DURATION", help="Maximum duration."),
]
Repeated = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Complete or extend this operation."),
]


@app.command("drain", epilog="Example: marshal clients drain --host web-1 --wait")
@command(writes=True)
def drain(
    call: Call,
    client: Name = None,
    *,
    host: Host = None,
    group: OfGroup = None,
    for_: For = "1h",
    operation: Repeated = None,
    reason: Reason = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until nothing is held, --timeout at most."),
    ] = False,
    dry_run: WriteNothing = False,
) -> None:
    """Make a client, or all clients on a host, hand off partitions to others.

    The client finishes its records and claims nothing new. It releases each partition
    to another member, which may warm up first. Partitions that no other member may take
    stay. The drain ends after --for, or by `marshal clients uncordon`. `marshal clients
    list` shows the HOST of each member.
    """
    with call.admin() as admin:
        result = admin.drain(
            client,
            host=host,
            group_id=group,
            for_ms=parsing.duration_ms("--for", for_),
            operation=operation,
            reason=reason,
            wait_ms=call.timeout_ms if wait else 0,
            on_progress=lambda count: notify(_still_held(count)),
            dry_run=dry_run,
        )
    _answer_directive(call, result, dry_run=dry_run)
    if wait and result.held and not dry_run:
        raise DeadlineExceeded(
            f"{_still_held(len(result.held))}: no other member may "
            "take them, or their records are not handled yet; wait with the same "
            f"command and --operation {result.operation}"
        )


@app.command("cordon", epilog="Example: marshal clients cordon worker-7 --for 12h")
@command(writes=True)
def cordon(
    call: Call,
    client: Name = None,
    *,
    host: Host = None,
    group: OfGroup = None,
    for_: For = "1h",
    operation: Repeated = None,
    reason: Reason = None,
    dry_run: WriteNothing = False,
) -> None:
    """Keep a client, or all clients on a host, from taking more partitions.

    The client keeps the partitions within its share. The cordon ends after --for, or by
    `marshal clients uncordon`.
    """
    with call.admin() as admin:
        result = admin.cordon(
            client,
            host=host,
            group_id=group,
            for_ms=parsing.duration_ms("--for", for_),
            operation=operation,
            reason=reason,
            dry_run=dry_run,
        )
    _answer_directive(call, result, dry_run=dry_run)


@app.command("uncordon", epilog="Example: marshal clients uncordon worker-7")
@command(writes=True)
def uncordon(
    call: Call,
    client: Name = None,
    *,
    host: Host = None,
    group: OfGroup = None,
    operation: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Only this drain or cordon; by default all.",
        ),
    ] = None,
    reason: Reason = None,
    dry_run: WriteNothing = False,
) -> None:
    """End drains and cordons; the members take their shares again.

    `marshal groups describe` shows the ids of drains and cordons.
    """
    if client is None and host is None and operation is None:
        raise ConfigurationError(
            "name a client, a --host or an --operation; see: marshal clients list",
            setting="client",
        )
    with call.admin() as admin:
        count = admin.uncordon(
            client,
            host=host,
            group_id=group,
            operation=operation,
            reason=reason,
            dry_run=dry_run,
        )
    facts = {
        "client_id": client,
        "host": host,
        "group_id": group,
        "op_id": operation,
        "partitions_count": count,
        "is_executed": not dry_run,
    }
    call.answer(Answer({"time_ms": wall_ms(), "offsets": {}}, facts))
    if dry_run:
        notify(
            f"nothing was written; drains and cordons would end in {count} "
            "coordinating partitions"
        )


def _answer_directive(call: Call, result: DirectiveResult, *, dry_run: bool) -> None:
    facts = {
        "op_id": result.operation or None,
        "action": result.action,
        "client_id": result.subject.client_id,
        "host": result.subject.host,
        "group_id": result.subject.group_id,
        "until_ms": result.until_ms,
        "held_count": len(result.held),
        "is_executed": not dry_run,
    }
    rows = [{"group_id": name, "client_id": each} for name, each in result.members]
    sections = (
        Section("members", rows, presenters.CLIENT_COLUMNS[:2]),
        Section(
            "held", [each._asdict() for each in result.held], presenters.KEY_COLUMNS
        ),
    )
    shown = {"until_ms": instant(result.until_ms)}
    call.answer(Answer({"time_ms": wall_ms(), "offsets": {}}, facts, sections, shown))
    if dry_run:
        notify("nothing was written")
    elif not result.members:
        notify(
            f"no live member matches {result.subject}, so nothing is handed off; "
            "other members take over the partitions of a client once it is stale; end "
            f"the {result.action} with: marshal clients uncordon --operation "
            f"{result.operation}"
        )


@app.command("forget", epilog="Example: marshal clients forget billing worker-7")
@command()
def forget(
    call: Call,
    *,
    group: Group,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client_id.")],
    state_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            envvar="MARSHAL_STATE_DIR",
            help="Directory of identities; by default the user's.",
        ),
    ] = None,
    yes: confirmation.Yes = False,
) -> None:
    """Remove the identity directory of a client that will not come back.

    The directory has the secrets with which a restarted client resumes its claims. The
    claims stay: `marshal clients fence` ends them. Nothing is written to the log. The
    command also succeeds if there is no such directory. It is refused while the client
    runs on this host, and asks you to type the client_id if the client runs on another
    host.
    """
    _require_names(group, client)
    world = call.formatted_world()
    live = [
        row
        for row in presenters.member_rows(world, group_id=group)
        if row["client_id"] == client and row["state"] in LIVE_STATES
    ]
    if live:
        hosts = ", ".join(sorted({row["host"] or "unknown" for row in live}))
        confirmation.require(
            client,
            effect=f"client {client} of group {group} is alive on host {hosts}; "
            "without its identity, a restart on this host resumes nothing",
            yes=yes,
        )
    home = user_path("--state-dir", state_dir) if state_dir else state_home()
    domain = world.config().format_id.hex()
    try:
        is_removed = forget_client(
            home, domain=domain, group_id=group, client_id=client
        )
    except OSError as error:
        raise ConfigurationError(
            f"{home} cannot be changed: {error}; run this as the user of the client",
            setting="--state-dir",
        ) from error
    if not is_removed:
        notify(
            f"nothing was removed: this host has no identity of client {client!r} of "
            f"group {group!r} in {home}; see: marshal clients list"
        )
    found = {
        "group_id": group,
        "client_id": client,
        "state_dir": str(home),
        "is_removed": is_removed,
    }
    call.answer(Answer(presenters.as_of(world), found))


def _still_held(count: int) -> str:
    return counted(count, "partition is still held", many="partitions are still held")
