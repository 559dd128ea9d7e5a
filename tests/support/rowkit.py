"""Compares rows that a member keeps of a group with rows computed again.

An engine stops on an error in its round, so differences are recorded for the test.
"""

import attrs

from kafka_marshal.engine import planning
from kafka_marshal.engine.key_rows import KeyRows
from kafka_marshal.engine.planning import GroupPlanner
from kafka_marshal.protocol.plans import situation_of, turn_of

SHOWN = (
    "rows",
    "claimable_at_ms",
    "named",
    "named_by_plan",
    "abandoned",
    "suspects",
    "has_orphans",
    "waiting",
    "_claimable_since",
)


@attrs.define
class Checked:
    """The results of the comparisons.

    Attributes:
        rounds: Rounds so far.
        wanted: Wanted keys, summed over all rounds.
        computed: Rows that were computed for them.
        wrong: The differences.
    """

    rounds: int = 0
    wanted: int = 0
    computed: int = 0
    wrong: list[str] = attrs.field(factory=list)


def check_rows(monkeypatch):
    """Compare all rows in every round of every member; return the counts."""
    seen = Checked()
    product, row = KeyRows.update, KeyRows._row

    def counted(rows, *args):
        seen.computed += 1
        return row(rows, *args)

    def update(rows, wanted, inputs):
        full = KeyRows()
        full._claimable_since = dict(rows._claimable_since)
        product(rows, wanted, inputs)
        computed = seen.computed
        product(full, wanted, inputs)
        seen.computed = computed
        seen.rounds += 1
        seen.wanted += len(wanted)
        for name in SHOWN:
            kept, right = getattr(rows, name), getattr(full, name)
            if kept != right:
                seen.wrong.append(f"{name} is {kept}, and should be {right}")

    monkeypatch.setattr(KeyRows, "_row", counted)
    monkeypatch.setattr(KeyRows, "update", update)
    return seen


def check_planners(monkeypatch):
    """Compare the input of each planner in every round; return the counts.

    ``wanted`` counts the rounds in which a planner may plan, ``computed`` those that
    read keys.
    """
    seen = Checked()
    product = GroupPlanner.drive

    def counted(*args):
        seen.computed += 1
        return situation_of(*args)

    def drive(planner, counts, now_ms):
        context = planner._context
        product(planner, counts, now_ms)
        seen.rounds += 1
        if not planner.is_in_force() or context.rebuilding or context.has_layout:
            return
        if context.is_paused(planner._group_id) or not planner.can_plan:
            return
        reading = planner._reading(counts, now_ms)
        members = reading.members()
        if turn_of(members, planner._outbox.claimant.owner.client_id) is None:
            return
        seen.wanted += 1
        given = situation_of(reading, members).given
        if planner._given not in {None, given}:
            seen.wrong.append(f"input is {planner._given}, and should be {given}")

    monkeypatch.setattr(planning, "situation_of", counted)
    monkeypatch.setattr(GroupPlanner, "drive", drive)
    return seen
