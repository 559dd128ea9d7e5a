"""``marshal groups grow``: adds partitions to a keyed data topic."""

from typing import Annotated

import typer

from kafka_marshal import Admin, ConfigurationError, CoordinationError
from kafka_marshal.admin.growing import (
    ADD,
    ANNOUNCE,
    END,
    SETTLE,
    SETTLE_MS,
    WITHDRAW,
    GrowthPlan,
    GrowthProgress,
    GrowthReport,
)
from kafka_marshal.clock import duration
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import Call, Execute, Reason, command, notify

app = typer.Typer()
STEPS = {
    ANNOUNCE: "announcing the growth",
    ADD: "adding the partitions",
    SETTLE: "waiting until producers have learnt the new number",
    END: "recording the ends of the old partitions",
    WITHDRAW: "withdrawing the growth",
}


Topic = Annotated[
    str | None,
    typer.Option(metavar="TOPIC", help="The topic, whose records have keys."),
]
Partitions = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="New number, a multiple of the present one. Without it, known growths are "
        "shown.",
    ),
]
Settle = Annotated[
    str,
    typer.Option(
        metavar="DURATION",
        help="How long producers get to learn the number: metadata.max.age.ms plus "
        "delivery.timeout.ms at least.",
    ),
]
Withdraw = Annotated[
    bool,
    typer.Option(
        "--withdraw",
        help="Withdraw the growth: partitions wait for it no longer.",
    ),
]


@app.command(
    "grow",
    epilog="Example: marshal groups grow --topic payments --partitions 16 --execute",
)
@command(writes=True)
def grow(
    call: Call,
    *,
    topic: Topic = None,
    partitions: Partitions = None,
    settle: Settle = duration(SETTLE_MS),
    withdraw: Withdraw = False,
    reason: Reason = None,
    execute: Execute = False,
) -> None:
    """Add partitions to a keyed data topic; groups keep the order of each key.

    An old partition has an end: its log end when every producer knew the new number. No
    group claims a new partition before the old one that had its keys is processed to
    its end. If interrupted, run the command again with the same number: it waits for
    --settle again. --timeout limits each other step.

    Each row is an old partition in a group: its POSITION, the END that it has to reach
    (its log end, until END is known), and the new partitions WAITING for it. Producers
    must choose partitions by the key's hash modulo the number of partitions, as Kafka's
    own do.
    """
    if partitions is None and not withdraw:
        if execute:
            raise ConfigurationError(
                "give the number of partitions that the topic is to have",
                setting="--partitions",
            )
        _show(call, topic)
        return
    if topic is None:
        raise ConfigurationError("name the topic", setting="--topic")
    with call.admin() as admin:
        plan = admin.grow_topic(
            topic,
            partitions,
            settle_ms=parsing.duration_ms("--settle", settle),
            reason=reason,
            execute=execute,
            withdraw=withdraw,
            on_progress=show_progress,
        )
        sources = plan.sources
        if execute:
            name = plan.growth[:3]
            then = [each for each in admin.growths(topic) if each.growth[:3] == name]
            sources = tuple(source for each in then for source in each.sources)
    found = growth_facts(plan) | {"is_executed": execute and bool(plan.steps)}
    rows = presenters.growth_source_rows(sources)
    section = Section("sources", rows, presenters.GROWTH_SOURCE_COLUMNS)
    shown = {"settle_ms": duration(plan.duration_ms)}
    call.answer(Answer(presenters.as_of(call.world()), found, (section,), shown))
    for each in _notes(plan, execute=execute):
        notify(each)


def growth_facts(plan: GrowthPlan) -> presenters.Row:
    """Return the facts about a growth, or about its withdrawal."""
    return {
        "topic": plan.growth.topic,
        "from_count": plan.growth.old_count,
        "to_count": plan.growth.new_count,
        "partitions_count": plan.partition_count,
        "added_count": plan.added_count,
        "steps": list(plan.steps),
        "settle_ms": plan.duration_ms,
    }


def _show(call: Call, topic: str | None) -> None:
    """Show the growths that the log knows."""
    with call.admin() as admin:
        found: tuple[GrowthReport, ...] = admin.growths(topic)
        is_known = topic is None or bool(found) or _exists(admin, topic)
    growths = presenters.growth_rows(each.growth for each in found)
    sources = presenters.growth_source_rows(
        source for each in found for source in each.sources
    )
    sections = (
        Section("growths", growths, presenters.GROWTH_COLUMNS),
        Section("sources", sources, presenters.GROWTH_SOURCE_COLUMNS),
    )
    call.answer(Answer(presenters.as_of(call.world()), {"topic": topic}, sections))
    if not is_known:
        notify(f"topic {topic!r} does not exist, and no growth of it is known")


def _exists(admin: Admin, topic: str) -> bool:
    """Return whether a topic exists; True if this principal may not see it."""
    try:
        return admin.partition_count(topic) is not None
    except CoordinationError:
        return True


def show_progress(progress: GrowthProgress) -> None:
    """Write the current step, and the time left for producers, to stderr."""
    left = f": {duration(progress.left_ms)} left" if progress.left_ms else ""
    notify(f"{STEPS[progress.step]}{left}")


def _notes(plan: GrowthPlan, *, execute: bool) -> list[str]:
    """Return notes for people: risks of the growth, and that nothing was written."""
    growth, notes = plan.growth, []
    if not plan.steps:
        text = f"the growth to {growth.new_count} partitions has ended; nothing is left"
        return [f"{text} to do"]
    if plan.is_withdrawal:
        notes.append(
            "note: after the withdrawal members claim new partitions at once, and may "
            "process records of a key in another order"
        )
    elif plan.settle_ms < SETTLE_MS:
        notes.append(
            f"note: --settle is {duration(plan.settle_ms)}; keys of a producer that "
            "takes longer to learn the new number may lose their order"
        )
    if (plan.partition_count or 0) > growth.new_count:
        notes.append(
            f"note: the topic has {plan.partition_count} partitions; those from "
            f"{growth.new_count} on belong to no growth, and members claim them "
            "without waiting"
        )
    if not execute:
        notes.append("nothing was written; --execute writes it")
    return notes
