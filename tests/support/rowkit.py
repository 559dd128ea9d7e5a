"""Compares the rows that a member keeps with rows that are computed again.

An engine stops on an error in its round, so what differs is noted for the test.
"""

import attrs

from kafka_marshal.engine.key_rows import KeyRows

SHOWN = (
    "rows",
    "claimable_at_ms",
    "named",
    "named_by_plan",
    "abandoned",
    "suspects",
    "has_orphans",
    "_claimable_since",
)


@attrs.define
class Checked:
    """What the comparisons found.

    Attributes:
        rounds: Rounds so far.
        wanted: Wanted keys, counted in each round.
        computed: Rows that were computed for them.
        wrong: What differed.
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
