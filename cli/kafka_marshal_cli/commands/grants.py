"""``marshal grants``: offsets that were granted at most once."""

from typing import Annotated

import typer

from kafka_marshal import ConfigurationError, Losses
from kafka_marshal.protocol.losses import Loss
from kafka_marshal_cli import parsing, presenters
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import (
    AT,
    Call,
    OfTopic,
    command,
    notify,
    unknown_group,
    wall_ms,
)

app = typer.Typer(no_args_is_help=True)


@app.command("losses", epilog="Example: marshal grants losses --group alerts -o json")
@command(option_groups=AT)
def losses(
    call: Call,
    *,
    at: Moment | None,
    group: Annotated[
        str, typer.Option("--group", "-g", metavar="GROUP", help="The group.")
    ],
    topic: OfTopic = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="In LOST, only claims that ended after a time like -1h.",
        ),
    ] = None,
) -> None:
    """List the offsets that were granted at most once and never processed.

    LOST are offsets of claims that ended, or whose owner has been silent for more than
    two heartbeat intervals. AT RISK are offsets that a crash of the owners would lose
    now. MARK is the progress that the owner recorded last; without it (`-`) every
    granted offset is listed. So the list may have offsets that were processed after
    MARK was recorded. Ranges are inclusive, and include offsets without a record.

    Grants are not in checkpoints, so the command reads the whole log, or the log after
    its first remaining checkpoint. With --since, it reads from a checkpoint before that
    time and before the claims that were open then.
    """
    if at is not None and at.time_ms is None:
        raise ConfigurationError(
            f"--at is {at.text}, and a group has claims in several coordinating "
            "partitions; write a time like 2026-01-31T12:00:00Z, or like -5m",
            setting="--at",
        )
    since_ms = None if since is None else parsing.since_ms(since, now_ms=wall_ms())
    with call.scan() as scan:
        found = Losses.of(
            scan,
            group_id=group,
            topic=topic,
            time_ms=at.time_ms if at else None,
            since_ms=since_ms,
        )
    found.world.config()
    for number, offset in found.began_at.items():
        notify(
            f"marshal: partition {number} begins at the checkpoint before offset "
            f"{offset}: what was granted earlier is not listed"
        )
    if not any(group in state.groups for state in found.world.partitions):
        raise unknown_group(group)
    lost, at_risk = map(_rows, (found.lost, found.at_risk))
    facts = {
        "group_id": group,
        "lost_count": sum(row["offsets_count"] for row in lost),
        "at_risk_count": sum(row["offsets_count"] for row in at_risk),
    }
    sections = (
        Section("lost", lost, presenters.LOSS_COLUMNS),
        Section("at_risk", at_risk, presenters.LOSS_COLUMNS),
    )
    call.answer(Answer(presenters.as_of(found.world, at), facts, sections))


def _rows(found: tuple[Loss, ...]) -> list[presenters.Row]:
    return [presenters.loss_row(loss) for loss in found]
