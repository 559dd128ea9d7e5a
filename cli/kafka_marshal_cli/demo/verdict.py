"""Checks the guarantees on the evidence of one round. Pure.

Each check states a guarantee of the protocol (PROTOCOL 5, 6, 8 and 11), the measured
value and the bound. Processed records are taken only from the journals, claims and
positions only from the log.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs

from kafka_marshal.history.rows import Interval
from kafka_marshal.protocol.losses import RELEASED, TAKEN_OVER
from kafka_marshal_cli.demo.evidence import (
    Evidence,
    Place,
    Takeover,
    Work,
    place_of,
)

ROUND_TRIPS = 3
SHOWN_MAX = 8
AT_MOST_ONCE = "amo"


@attrs.frozen(kw_only=True)
class Check:
    """One guarantee, and whether it held.

    Attributes:
        name: The guarantee.
        held: Whether it held.
        measured: Measured value, if there is one.
        bound: Largest value allowed.
        unit: Unit of both values.
        text: The finding as a sentence.
    """

    name: str
    held: bool
    measured: int | None = None
    bound: int | None = None
    unit: str = ""
    text: str

    @classmethod
    def of_none(
        cls, name: str, count: int, *, good: str, bad: str, unit: str = "records"
    ) -> "Check":
        """Return a check that holds if a count is 0.

        Args:
            name: The guarantee.
            count: The count.
            good: The finding if the count is 0.
            bad: The finding if the count is larger.
            unit: What is counted.
        """
        return cls(
            name=name,
            held=not count,
            measured=count,
            bound=0,
            unit=unit,
            text=bad if count else good,
        )


@attrs.frozen(kw_only=True)
class Verdict:
    """The result of one round.

    Attributes:
        delivery: ``alo`` or ``amo``.
        produced: Records that Kafka acknowledged.
        processed: Number of distinct records that were processed.
        lost: (partition, offset) of every record that was not processed.
        duplicated: Number of times that a record was processed again.
        checks: Every guarantee that was checked.
    """

    delivery: str
    produced: int
    processed: int
    lost: tuple[tuple[int, int], ...]
    duplicated: int
    checks: tuple[Check, ...]

    @property
    def held(self) -> bool:
        """Whether every guarantee held."""
        return bool(self.checks) and all(check.held for check in self.checks)

    def to_object(self) -> dict[str, Any]:
        """Return the verdict as plain data, for JSON."""
        return {
            "delivery": self.delivery,
            "held": self.held,
            "records": {
                "produced": self.produced,
                "processed": self.processed,
                "lost": len(self.lost),
                "duplicated": self.duplicated,
            },
            "lost": [
                {"partition": partition, "offset": offset}
                for partition, offset in self.lost
            ],
            "checks": [attrs.asdict(check) for check in self.checks],
        }


def judge(evidence: Evidence) -> Verdict:
    """Check every guarantee on the evidence."""
    works = evidence.works()
    counts = Counter((work.partition, work.offset) for work in works)
    produced = {
        (partition, offset)
        for partition, count in evidence.produced.items()
        for offset in range(count)
    }
    lost = tuple(sorted(produced - set(counts)))
    duplicated = sum(counts.values()) - len(counts)
    if evidence.delivery == AT_MOST_ONCE:
        delivery = [_lost_amo(evidence, lost), _duplicates_amo(counts)]
    else:
        delivery = [_lost_alo(len(produced), lost), *_duplicates_alo(evidence, works)]
    checks = [
        _no_problems(evidence),
        _something_happened(len(produced), counts, produced),
        *delivery,
        _under_claims(evidence, works),
        *_takeovers(evidence),
        *_pause(evidence, works),
    ]
    return Verdict(
        delivery=evidence.delivery,
        produced=len(produced),
        processed=len(counts),
        lost=lost,
        duplicated=duplicated,
        checks=tuple(checks),
    )


# --- The round itself


def _no_problems(evidence: Evidence) -> Check:
    problems = evidence.problems + evidence.log.findings
    return Check.of_none(
        "The round ran as planned",
        len(problems),
        good="Each step came within its deadline.",
        bad=" ".join(problems),
        unit="problems",
    )


def _something_happened(
    produced: int, counts: Counter[tuple[int, int]], known: set[tuple[int, int]]
) -> Check:
    """Fail if nothing was produced, or unknown records were processed."""
    strange = [place for place in counts if place not in known]
    if strange:
        text = f"{len(strange)} records were processed but never produced."
    elif not produced or not counts:
        text = "Nothing was produced, or nothing was processed: nothing is proved."
    else:
        text = f"{produced} records were produced, {len(counts)} of them processed."
    return Check(
        name="Real records, real work",
        held=bool(produced and counts and not strange),
        measured=len(counts),
        unit="records",
        text=text,
    )


# --- At least once


def _lost_alo(produced: int, lost: tuple[tuple[int, int], ...]) -> Check:
    return Check.of_none(
        "No record is lost",
        len(lost),
        good=f"All {produced} records were processed.",
        bad=f"{len(lost)} of {produced} were never processed: {_places(lost)}.",
    )


def _duplicates_alo(evidence: Evidence, works: list[Work]) -> list[Check]:
    """Compare duplicates with the records at risk when each claim ended."""
    claims = {place_of(claim): claim for claim in evidence.log.claims}
    before: dict[tuple[int, int], list[Work]] = {}
    duplicates, wrong = 0, []
    for work in works:
        place = (work.partition, work.offset)
        earlier = before.setdefault(place, [])
        if earlier:
            duplicates += 1
            if not _is_explained(work, earlier[-1], claims=claims):
                wrong.append(place)
        earlier.append(work)
    takeovers = evidence.log.takeovers()
    risked = sum(len(_at_risk(works, each)) for each in takeovers)
    uncommitted = sum(evidence.uncommitted_count(each.before) for each in takeovers)
    bound = risked + uncommitted
    text = (
        f"{duplicates} processed twice; at most {bound} could be: {risked} handled "
        f"since the last position in the log, {uncommitted} more in progress."
    )
    if wrong:
        text = (
            f"{len(wrong)} of {duplicates} duplicates have no takeover to explain "
            f"them: {_places(wrong)}."
        )
    return [
        Check(
            name="Duplicates stay within their bound",
            held=not wrong and duplicates <= bound,
            measured=duplicates,
            bound=bound,
            unit="records",
            text=text,
        ),
        _position_ages(evidence, works),
    ]


def _is_explained(
    work: Work, earlier: Work, *, claims: Mapping[Place, Interval]
) -> bool:
    """Return whether a takeover explains that a record was processed again."""
    now, then = claims.get(work.claim), claims.get(earlier.claim)
    if now is None or then is None or now.token <= then.token:
        return False
    return then.ending == TAKEN_OVER and work.offset >= (now.start_position or 0)


def _at_risk(works: list[Work], takeover: Takeover) -> list[Work]:
    """Return the work beyond the position that the next owner started from."""
    before, after = takeover.before, takeover.after
    return [
        work
        for work in works
        if work.claim == place_of(before)
        and work.client_id == before.client_id
        and work.offset >= (after.start_position or 0)
    ]


def _position_ages(evidence: Evidence, works: list[Work]) -> Check:
    """Check that positions lag by at most one interval of work (PROTOCOL 6.1)."""
    longest_ms, allowed_ms, held = 0, evidence.heartbeat_interval_ms, True
    for each in evidence.log.takeovers():
        risked = _at_risk(works, each)
        if not risked:
            continue
        age_ms = risked[-1].at_ms - risked[0].at_ms
        # After one interval no batch is handed out, but the last one may be finished.
        bound_ms = evidence.heartbeat_interval_ms + evidence.last_batch_ms(each.before)
        held = held and age_ms <= bound_ms
        if age_ms >= longest_ms:
            longest_ms, allowed_ms = age_ms, bound_ms
    text = (
        f"The log's positions lagged behind the work by at most "
        f"{_seconds(longest_ms)}; allowed are one heartbeat interval and the "
        f"last batch, "
        f"{_seconds(allowed_ms)}."
    )
    return Check(
        name="Positions keep up",
        held=held,
        measured=longest_ms,
        bound=allowed_ms,
        unit="ms",
        text=text,
    )


# --- At most once


def _duplicates_amo(counts: Counter[tuple[int, int]]) -> Check:
    wrong = sorted(place for place, count in counts.items() if count > 1)
    return Check.of_none(
        "No record is processed twice",
        len(wrong),
        good="No record was processed twice.",
        bad=f"{len(wrong)} were processed more than once: {_places(wrong)}.",
    )


def _lost_amo(evidence: Evidence, lost: tuple[tuple[int, int], ...]) -> Check:
    """Check that only offsets granted under a claim that was taken over are lost."""
    missing = set(lost)
    allowed: set[tuple[int, int]] = set()
    crowded = []
    ended = [claim for claim in evidence.log.claims if claim.ending == TAKEN_OVER]
    for claim in ended:
        partition, _ = place = place_of(claim)
        mine = {
            (partition, offset)
            for granted in evidence.log.grants.get(place, ())
            for offset in range(granted.first, granted.end)
        } & missing
        allowed |= mine
        if len(mine) > evidence.batch:
            crowded.append(f"{len(mine)} of partition {partition}")
    strange = sorted(missing - allowed)
    text = (
        f"{len(lost)} lost: exactly the records that were granted to killed "
        f"consumers and not processed ({_places(lost)}); allowed is a batch of "
        f"{evidence.batch} for each claim that ended unreleased ({len(ended)})."
    )
    if not lost:
        text = "Nothing was lost."
    if crowded:
        text = f"More than a batch of {evidence.batch} was lost: {', '.join(crowded)}."
    if strange:
        text = (
            f"{len(strange)} of {len(lost)} lost records were not granted to a "
            f"killed consumer: {_places(strange)}."
        )
    return Check(
        name="Losses stay within their bound",
        held=not strange and not crowded,
        measured=len(lost),
        bound=evidence.batch * len(ended),
        unit="records",
        text=text,
    )


# --- Both


def _under_claims(evidence: Evidence, works: list[Work]) -> Check:
    """Check each journal line against the claim that its token names."""
    owners = {place_of(claim): claim.client_id for claim in evidence.log.claims}
    wrong = []
    for work in works:
        is_own = owners.get(work.claim) == work.client_id
        is_granted = evidence.delivery != AT_MOST_ONCE or any(
            each.first <= work.offset < each.end
            for each in evidence.log.grants.get(work.claim, ())
        )
        if not (is_own and is_granted):
            wrong.append((work.partition, work.offset))
    return Check.of_none(
        "All work is done under a claim",
        len(wrong),
        good="Each record was processed under a claim that the log had accepted.",
        bad=f"{len(wrong)} were processed without one: {_places(wrong)}.",
    )


def _takeovers(evidence: Evidence) -> list[Check]:
    """Check each partition of the killed consumer (PROTOCOL 11, L1)."""
    h_ms = evidence.heartbeat_interval_ms
    round_trip_ms = max(1, evidence.round_trip_ms)
    bound_ms = 2 * h_ms + evidence.jitter_ms + ROUND_TRIPS * round_trip_ms
    name = "Killed consumers are replaced in time"
    after = {place_of(each.before): each for each in evidence.log.takeovers()}
    held_by_dead = [
        claim
        for claim in evidence.log.claims
        if claim.client_id == evidence.killed and claim.ending != RELEASED
    ]
    if not held_by_dead:
        text = "No consumer was killed while it held a partition."
        return [Check(name=name, held=False, bound=bound_ms, unit="ms", text=text)]
    checks = []
    for claim in held_by_dead:
        partition, _ = place = place_of(claim)
        each = after.get(place)
        if each is None:
            text = f"Partition {partition} was not taken over."
            checks.append(
                Check(name=name, held=False, bound=bound_ms, unit="ms", text=text)
            )
            continue
        took_ms = each.took_ms
        is_early = took_ms <= 2 * h_ms
        text = (
            f"Partition {partition}: {each.after.client_id} took it over "
            f"{_seconds(took_ms)} after {claim.client_id}'s last heartbeat; allowed "
            f"are {_seconds(bound_ms)}: two intervals, jitter of "
            f"{_seconds(evidence.jitter_ms)} and 3 round trips of "
            f"{_seconds(round_trip_ms)}, the slowest seen."
        )
        if is_early:
            text = (
                f"Partition {partition} was taken {_seconds(took_ms)} after "
                f"the last heartbeat, before two intervals of {_seconds(h_ms)} "
                "were over."
            )
        checks.append(
            Check(
                name=name,
                held=not is_early and took_ms <= bound_ms,
                measured=took_ms,
                bound=bound_ms,
                unit="ms",
                text=text,
            )
        )
    return checks


def _pause(evidence: Evidence, works: list[Work]) -> list[Check]:
    name = "A paused group processes nothing"
    pause = evidence.pause
    if pause is None:
        text = "The group was not paused, drained and resumed."
        return [Check(name=name, held=False, bound=0, unit="records", text=text)]
    busy = [w for w in works if pause.drained_at_ms < w.at_ms < pause.ended_at_ms]
    rested_ms = pause.ended_at_ms - pause.drained_at_ms
    places = _places([(w.partition, w.offset) for w in busy])
    drain_ms = pause.drained_at_ms - pause.asked_at_ms
    round_trips_ms = ROUND_TRIPS * max(1, evidence.round_trip_ms)
    bound_ms = 2 * evidence.heartbeat_interval_ms + round_trips_ms
    drained = (
        f"All partitions were released {_seconds(drain_ms)} after the pause was "
        "requested; allowed are two heartbeat intervals and 3 "
        f"round trips, {_seconds(bound_ms)}."
    )
    resumed = any(work.at_ms >= pause.ended_at_ms for work in works)
    went_on = "The group processed records again after the pause."
    if not resumed:
        went_on = "Nothing was processed after the pause."
    return [
        Check.of_none(
            name,
            len(busy),
            good=f"Nothing was processed in the {_seconds(rested_ms)} of the pause.",
            bad=f"{len(busy)} records were processed during the pause: {places}.",
        ),
        Check(
            name="A pause takes effect in time",
            held=drain_ms <= bound_ms,
            measured=drain_ms,
            bound=bound_ms,
            unit="ms",
            text=drained,
        ),
        Check(name="A pause ends", held=resumed, text=went_on),
    ]


def _seconds(value_ms: int) -> str:
    return f"{value_ms / 1000:.2f} s"


def _places(places: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> str:
    """Return places as text: the first few ranges of offsets, by partition."""
    ranges: list[list[int]] = []
    for partition, offset in sorted(set(places)):
        if ranges and ranges[-1][0] == partition and ranges[-1][2] == offset - 1:
            ranges[-1][2] = offset
        else:
            ranges.append([partition, offset, offset])
    shown = [
        f"partition {partition} offset {first}"
        + (f" to {last}" if last > first else "")
        for partition, first, last in ranges[:SHOWN_MAX]
    ]
    more = len(ranges) - SHOWN_MAX
    return "; ".join(shown) + (f"; and {more} more ranges" if more > 0 else "")
