"""``marshal grants``: offsets that were granted at most once."""

from typing import Annotated

import typer

from kafka_marshal import ClaimRejected, ConfigurationError, Losses
from kafka_marshal.protocol.losses import Loss
from kafka_marshal_cli import columns, facts, parsing
from kafka_marshal_cli.render import Answer, Section
from kafka_marshal_cli.shared import Call, command, tell, wall_ms

app = typer.Typer(
    help="At most once: offsets that were lost, or are at risk.", no_args_is_help=True
)


@app.command("losses", epilog="Example: marshal grants losses --group alerts -o json")
@command()
def losses(
    call: Call,
    *,
    group: Annotated[str, typer.Option(metavar="GROUP", help="The group.")],
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Of this data topic only.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="As of an ISO time, or like -5m."),
    ] = None,
) -> None:
    """List the offsets that were granted at most once and never processed.

    LOST are those of claims that ended: taken over from a dead or frozen owner,
    resumed by its next life, released with something unused; or whose owner has
    been silent for more than 2H. AT RISK is what a crash of the owners would add
    now. An owner says how far it is whenever it asks for grants, beats or releases,
    so after a crash the batch that it was working on is listed, and those that it
    was done with since it last wrote, however much was processed. MARK is how far
    it said to be; `-` where it never did, so that everything granted to it is
    listed. Both ends of a range are inclusive; offsets without a record count
    along. Where retention has deleted the start of the log, the list begins at the
    first checkpoint that remains.
    """
    time_ms = None
    if at is not None:
        offset, time_ms = parsing.moment("--at", at, now_ms=wall_ms())
        if offset is not None:
            raise ConfigurationError(
                f"--at is {at!r}, and a group has claims in several coordinating "
                "partitions; write a time like 2026-01-31T12:00:00Z, or like -5m",
                setting="--at",
            )
    with call.scan() as scan:
        found = Losses.of(scan, group_id=group, topic=topic, time_ms=time_ms)
    found.world.config()
    for number, offset in found.began_at.items():
        tell(
            f"marshal: partition {number} begins at the checkpoint before offset "
            f"{offset}: what was granted earlier is not listed"
        )
    if not any(group in state.groups for state in found.world.partitions):
        raise ClaimRejected(
            f"group {group!r} is not in the log; see: marshal groups list",
            reason="unknown_group",
        )
    lost, at_risk = map(_rows, (found.lost, found.at_risk))
    told = {
        "group_id": group,
        "lost_count": sum(row["offsets_count"] for row in lost),
        "at_risk_count": sum(row["offsets_count"] for row in at_risk),
    }
    sections = (
        Section("lost", lost, columns.LOSSES),
        Section("at_risk", at_risk, columns.LOSSES),
    )
    call.answer(Answer(facts.as_of(found.world), told, sections))


def _rows(found: tuple[Loss, ...]) -> list[facts.Row]:
    return [facts.loss_row(loss) for loss in found]
