"""``marshal plan``: shows and checks plans, and predicts the effect of changes."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kafka_marshal import ClaimRejected, ConfigurationError
from kafka_marshal.clock import duration, instant
from kafka_marshal.protocol.hashing import RESERVED_TOPICS, home_partition
from kafka_marshal.protocol.labels import TARGET_LABEL, number_of
from kafka_marshal.protocol.planner import MemberView
from kafka_marshal.protocol.records import CORDON, DRAIN, GROWN_MAX
from kafka_marshal.protocol.types import PARTITION_MAX, TopicPartition, whole_number
from kafka_marshal.views.plan import (
    DIVERGED,
    explain_key,
    plan_object,
    verify_plan,
    view_plan,
)
from kafka_marshal.views.plan_simulation import (
    Changes,
    NewMember,
    Simulation,
    group_topics,
    simulate,
)
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import (
    NOTHING,
    Answer,
    Column,
    Row,
    Section,
    column,
)
from kafka_marshal_cli.shared import (
    AT,
    Call,
    Execute,
    Group,
    command,
    notify,
    unknown_group,
)

if TYPE_CHECKING:
    from kafka_marshal import World

app = typer.Typer(no_args_is_help=True)


Clients = Annotated[
    list[str] | None, typer.Option("--kill", metavar="CLIENT", help="A client dies.")
]


@app.command(
    "simulate", epilog="Example: marshal plan simulate billing --kill worker-3"
)
@command(option_groups=AT)
def simulate_plan(
    call: Call,
    *,
    at: Moment | None,
    group: Group,
    kill: Clients = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[@HOST][:LIMIT]",
            help="A member joins, for LIMIT partitions at most.",
        ),
    ] = None,
    drain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLIENT", help="A client closes and releases its partitions."
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="The same for all clients on a host."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLIENT=COUNT",
            help="A client holds COUNT partitions at most; 0: no limit.",
        ),
    ] = None,
    partitions: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC=COUNT", help="A data topic has COUNT partitions."),
    ] = None,
) -> None:
    """Predict who would hold which partition after some changes; write nothing.

    Options can be repeated and combined; all changes happen at once. Without options,
    the moves that are still to come are shown. With policy `planner` the plan decides;
    other groups are assumed to follow `fair`. GAP is the longest time that a partition
    has no owner: two heartbeat intervals after a kill, otherwise unknown. `marshal
    groups describe` explains the reasons of uncovered partitions.

    A member's share depends on LIMIT; on WEIGHT, the number of members that it counts
    as; on TOPICS, the number of the group's topics that it subscribes to, 0 while its
    application does not poll; on TARGET, with policy `planner`; and on DIRECTIVE,
    `drain` or `cordon`. These columns are shown if they matter.
    """
    changes = Changes(
        kill=tuple(kill or ()),
        add=tuple(new_member(text) for text in add or ()),
        drain=tuple(drain or ()),
        drain_hosts=tuple(host or ()),
        limits=parsing.counts("--limit", limit or ()),
        partitions=_new_counts(partitions or ()),
    )
    world = call.formatted_world(at, has_members=at is not None)
    _require_known(world, group)
    counts = call.partition_counts(group_topics(world, group))
    found = simulate(world, group, changes=changes, partition_counts=counts)
    call.answer(_answer(found, group, presenters.as_of(world, at)))


def _new_counts(given: Iterable[str]) -> dict[str, int]:
    """Return the partition counts of ``--partitions``; more would take hours."""
    counts = parsing.counts("--partitions", given)
    for topic, count in counts.items():
        if count > GROWN_MAX:
            raise ConfigurationError(
                f"--partitions {topic} is {count}; it must be at most {GROWN_MAX}",
                setting="--partitions",
            )
    return counts


@app.command("show", epilog="Example: marshal plan show billing --why orders:3")
@command(option_groups=AT)
def show_plan(
    call: Call,
    *,
    at: Moment | None,
    group: Group,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC:PARTITION",
            help="Explain only this partition.",
        ),
    ] = None,
    diff: Annotated[
        int | None,
        typer.Option(
            metavar="GENERATION",
            min=1,
            help="Only what changed since this generation.",
        ),
    ] = None,
) -> None:
    """Show the plan of a group: a member for each partition that moves.

    Groups with policy `planner` follow the plan. STATE is `open`, `done` (the planned
    member has claimed the partition) or `void` (another member has). + and - count the
    partitions that a member will get and give. HANDOFFS are partitions offered to a
    member that warms up. UNCOVERED are partitions that no member can have, and why. LAG
    is the lag of all partitions that a member holds, not shown with --at; `+ N unknown`
    counts partitions without a known lag. STANDBYS stand by for a partition, in this
    order; STANDBY counts the partitions that a member stands by for.

    With --diff, FROM is the member that the earlier plan names, TO the member that the
    present plan names. STATE is `done`, `open`, or `overtaken` by another claim or a
    later plan.
    """
    if why is not None and diff is not None:
        raise ConfigurationError("give either --why or --diff", setting="--diff")
    world = call.formatted_world(at, has_members=at is not None)
    if world.is_partial:
        raise ConfigurationError(
            "--at does not name all coordinating partitions, but a plan needs all; "
            "write a time, or an offset of each, like 0:100,1:120",
            setting="--at",
        )
    _require_known(world, group)
    counts = call.partition_counts(group_topics(world, group))
    as_of = presenters.as_of(world, at)
    if why is not None:
        place = _place(why)
        text = explain_key(world, group, place=place, partition_counts=counts)
        call.answer(Answer(as_of, {"group_id": group, **place._asdict(), "why": text}))
        return
    if diff is not None:
        _show_changes(call, world, group, counts=counts, since=diff, at=at)
        return
    ends = _log_ends(call, world, group) if at is None else {}
    found = view_plan(world, group, partition_counts=counts, log_ends=ends)
    facts = plan_object(found, world.handoffs(group))
    columns = {
        "members": _member_columns(facts["members"], has_lag=at is None),
        "keys": PLANNED_KEYS,
        "handoffs": presenters.HANDOFF_COLUMNS,
        "standbys": presenters.STANDBY_COLUMNS,
        "uncovered": presenters.UNCOVERED_COLUMNS,
    }
    sections = tuple(Section(name, facts.pop(name), columns[name]) for name in columns)
    call.answer(Answer(as_of, facts, sections))


def _show_changes(
    call: Call,
    world: "World",
    group: str,
    *,
    counts: Mapping[str, int],
    since: int,
    at: Moment | None,
) -> None:
    """Show what changed since the plan of a generation."""
    from kafka_marshal.views.plan import find_plan, plan_changes

    view = view_plan(world, group, partition_counts=counts)
    home = home_partition(group, partition_count=world.config().partition_count)
    with call.scan(at, partition=home) as scan:
        note = find_plan(scan, group, generation=since)
    found = plan_changes(world, view, since=note, past=_past(call))
    states = Counter(each.state for each in found)
    rows: list[Row] = [
        {
            **each.key._asdict(),
            "source": each.source,
            "to": each.to,
            "holder": each.holder,
            "state": each.state,
        }
        for each in found
    ]
    facts = {
        "group_id": group,
        "since_generation": note.generation,
        "since_author": note.records[-1].client_id,
        "since_offset": note.offset,
        "since_ms": note.log_time_ms,
        "generation": view.generation,
        **{f"{state}_count": states[state] for state in ("done", "open", "overtaken")},
    }
    shown = {"since_ms": instant(note.log_time_ms)}
    section = Section("changes", rows, CHANGES)
    call.answer(Answer(presenters.as_of(world, at), facts, (section,), shown))


def _past(call: Call) -> Callable[[Mapping[int, int]], "World"]:
    """Return a function that reads the world as of given offsets of partitions."""

    def past(offsets: Mapping[int, int]) -> "World":
        text = ",".join(f"{t}:{offset}" for t, offset in sorted(offsets.items()))
        return call.world(Moment(text=text, offsets=offsets), has_members=True)

    return past


def _log_ends(call: Call, world: "World", group: str) -> dict[TopicPartition, int]:
    places = {key.topic_partition for key, _ in world.claims(group)}
    wanted = {place for place in places if place.topic not in RESERVED_TOPICS}
    return call.log_ends(wanted) if wanted else {}


def _lag(row: Row) -> str:
    """Return the lag of a member's partitions, with the number of unknown ones."""
    known, unknown = row["lag"], row["lag_unknown_count"]
    if known is None:
        return NOTHING
    return f"{known} + {unknown} unknown" if unknown else str(known)


def _member_columns(rows: Sequence[Row], *, has_lag: bool) -> tuple[Column, ...]:
    """Return the columns of members; optional ones only if some member has a value."""
    optional = {
        "TARGET": "target",
        "DIRECTIVE": "directive",
        "STANDBY": "standbys_count",
    }
    found = [
        each
        for each in PLANNED_MEMBERS
        if each.header not in optional
        or any(row[optional[each.header]] for row in rows)
    ]
    return (*found, LAG) if has_lag else tuple(found)


@app.command("verify", epilog="Example: marshal plan verify billing")
@command()
def verify_plan_(call: Call, *, group: Group) -> None:
    """Compute the last plan of a group again, from the log, and compare.

    The outcome is `same`, `plan_diverged` (exit code 3), or `unknown` if the log does
    not show what the planner knew.
    """
    world = call.formatted_world()
    _require_known(world, group)
    found = verify_plan(world, group, past=_past(call))
    facts = {
        "group_id": group,
        "generation": found.generation,
        "author": found.author,
        "outcome": found.outcome,
    }
    rows: list[Row] = [
        {**place._asdict(), "planned": planned, "computed": computed}
        for place, (planned, computed) in found.differences.items()
    ]
    section = Section("differences", rows, DIFFERENCES)
    call.answer(Answer(presenters.as_of(world), facts, (section,)))
    if found.outcome == DIVERGED:
        raise ClaimRejected(
            f"the plan of group {group} differs from the plan that its input "
            f"gives; its writer {found.author} runs another release, or has a bug; "
            f"see: marshal clients list --group {group}",
            reason=DIVERGED,
        )


@app.command("rebalance", epilog="Example: marshal plan rebalance billing --spread")
@command(writes=True)
def rebalance(
    call: Call,
    *,
    group: Group,
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="Spread each topic over racks, then hosts.",
        ),
    ] = False,
    execute: Execute = False,
) -> None:
    """Move partitions so that racks and hosts have equal parts of each topic.

    Planners move nothing for this by themselves. Members keep equal numbers of
    partitions, and as few partitions as possible move. The group must have policy
    `planner`: the moves become its next plan, which planners leave as it is. Members
    name their rack with `--labels rack=r1`.
    """
    if not spread:
        raise ConfigurationError(
            "give --spread; planners keep the number of partitions per member equal "
            "without a command",
            setting="--spread",
        )
    with call.admin() as admin:
        found = admin.spread_group(group, execute=execute)
    facts = {
        "group_id": group,
        "follows": found.follows,
        "moves_count": len(found.moves),
        "uncovered_count": len(found.uncovered),
        "is_executed": found.is_written,
    }
    moves: list[Row] = [
        {**move.key._asdict(), "source": move.source, "to": move.to}
        for move in found.moves
    ]
    section = Section("moves", moves, (*PLACE, *FROM_TO))
    call.answer(Answer(presenters.as_of(call.world()), facts, (section,)))
    if not found.moves:
        notify("nothing was written; no move would improve the spread")
    elif not found.is_needed:
        notify("nothing was written; the plan in force names these moves already")
    elif not execute:
        notify("nothing was written; --execute writes it")


def _require_known(world: "World", group: str) -> None:
    if not presenters.is_known(world, group):
        raise unknown_group(group)


def _place(text: str) -> TopicPartition:
    """Return the partition that ``--why TOPIC:PARTITION`` names."""
    topic, colon, number = text.rpartition(":")
    partition = whole_number(number, most=PARTITION_MAX)
    if not (colon and topic) or partition is None:
        raise ConfigurationError(
            f"--why must be written TOPIC:PARTITION, not {text!r}", setting="--why"
        )
    return TopicPartition(topic, partition)


def new_member(text: str) -> NewMember:
    """Return the member that ``--add NAME[@HOST][:LIMIT]`` names."""
    rest, colon, number = text.rpartition(":")
    if not colon:
        rest, number = text, "0"
    name, _, host = rest.partition("@")
    limit = whole_number(number)
    if not name or limit is None:
        raise ConfigurationError(
            f"--add must be written NAME, NAME@HOST or NAME@HOST:LIMIT, not {text!r}",
            setting="--add",
        )
    return NewMember(name=name, host=host, limit=limit)


def _answer(found: Simulation, group: str, as_of: Mapping[str, object]) -> Answer:
    before = Counter(found.before.values())
    after = Counter(found.owners.values())
    names = sorted({*found.members, *after, *(n for n in before if n is not None)})
    topics = {place.topic for place in found.before}
    members: list[Row] = [
        {
            "client_id": name,
            "host": found.members.get(name),
            **_terms(found.terms.get(name), topics),
            "held_count": before[name],
            "predicted_count": after[name],
        }
        for name in names
    ]
    moves: list[Row] = [
        {
            **move.key._asdict(),
            "source": move.source,
            "to": move.to,
            "wave": move.wave,
            "gap_ms": move.gap_ms,
        }
        for move in found.moves
    ]
    uncovered = presenters.uncovered_rows(found.uncovered)
    owners: list[Row] = [
        {**key._asdict(), "owner": name} for key, name in sorted(found.owners.items())
    ]
    facts = {
        "group_id": group,
        "policy": found.policy,
        "moves_count": len(moves),
        "waves": found.waves,
        "is_settled": found.is_settled,
        "uncovered_count": len(uncovered),
    }
    return Answer(
        as_of,
        facts,
        (
            Section("members", members, _simulated_columns(members, len(topics))),
            Section("moves", moves, MOVES),
            Section("uncovered", uncovered, presenters.UNCOVERED_COLUMNS),
            Section("owners", owners, OWNERS),
        ),
    )


def _terms(member: MemberView | None, topics: Collection[str]) -> Row:
    """Return what a member's share depends on; None values if the member is gone."""
    if member is None:
        return dict.fromkeys(("limit", "weight", "topics_count", "target", "directive"))
    is_directed = member.is_drained or member.is_cordoned
    return {
        "limit": member.claims_max or None,
        "weight": member.weight,
        "topics_count": len(member.topics.intersection(topics)),
        "target": number_of(dict(member.labels), TARGET_LABEL),
        "directive": (DRAIN if member.is_drained else CORDON) if is_directed else None,
    }


def _simulated_columns(rows: Sequence[Row], topics_count: int) -> tuple[Column, ...]:
    """Return the columns of predicted members; omit those with only usual values."""
    usual = {"weight": 1, "topics_count": topics_count}
    shown = {
        name
        for name in ("limit", "weight", "topics_count", "target", "directive")
        if any(row[name] not in {None, usual.get(name)} for row in rows)
    }
    client, host, *counts = MEMBERS
    terms = (each for name, each in TERMS.items() if name in shown)
    return (client, host, *terms, *counts)


PLACE = (
    column("TOPIC", "topic"),
    Column("PARTITION", lambda row: str(row["partition"]), is_number=True),
)
FROM_TO = (column("FROM", "source"), column("TO", "to"))
MEMBERS = (
    column("CLIENT", "client_id"),
    column("HOST", "host"),
    column("HELD", "held_count"),
    column("PREDICTED", "predicted_count"),
)
TERMS = {
    "limit": column("LIMIT", "limit"),
    "weight": column("WEIGHT", "weight"),
    "topics_count": column("TOPICS", "topics_count"),
    "target": column("TARGET", "target"),
    "directive": column("DIRECTIVE", "directive"),
}
MOVES = (
    *PLACE,
    *FROM_TO,
    Column("WAVE", lambda row: str(row["wave"]), is_number=True),
    Column("GAP", lambda row: _gap(row["gap_ms"]), is_number=True),
)
OWNERS = (*PLACE, column("OWNER", "owner"))
PLANNED_MEMBERS = (
    column("CLIENT", "client_id"),
    column("HOST", "host"),
    column("RACK", "rack"),
    column("LIMIT", "limit"),
    column("TARGET", "target"),
    column("DIRECTIVE", "directive"),
    column("HELD", "held_count"),
    column("PLANNED", "planned_count"),
    column("+", "gains_count"),
    column("-", "losses_count"),
    column("STANDBY", "standbys_count"),
)
LAG = Column("LAG", _lag, is_number=True)
PLANNED_KEYS = (
    *PLACE,
    column("HOLDER", "holder"),
    column("PLANNED", "planned"),
    column("STATE", "state"),
)
CHANGES = (
    *PLACE,
    *FROM_TO,
    column("HOLDER", "holder"),
    column("STATE", "state"),
)
DIFFERENCES = (*PLACE, column("PLANNED", "planned"), column("COMPUTED", "computed"))


def _gap(gap_ms: int | None) -> str:
    return "unknown" if gap_ms is None else duration(gap_ms)
