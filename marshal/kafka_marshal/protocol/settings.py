"""Settings of a group, written by admins to its home partition (PROTOCOL 9.1).

They tune how members share and hand off partitions. No guarantee depends on them: a
value beyond its bounds is used as the nearest one within.
"""

from typing import NamedTuple


class Settings(NamedTuple):
    """The fields of the GroupSettings in force; None stands for the default.

    Attributes:
        generation: Number of the record, counted from 1; 0 = there is none.
        policy: Policy of the members; not used yet.
        planner_version_max: Highest planner version to use; not used yet.
        debounce_ms: How long members must stay the same before surplus is released.
        handoff_ms: Log time that a successor has to warm up.
        handoffs_max: Most keys that a member offers, or warms up for, at a time.
        grace_ms: How long a key is kept for an owner that restarts; not used yet.
    """

    generation: int
    policy: str | None = None
    planner_version_max: int | None = None
    debounce_ms: int | None = None
    handoff_ms: int | None = None
    handoffs_max: int | None = None
    grace_ms: int | None = None

    def value(self, name: str) -> int:
        """Return a setting of ``TUNABLES``, its default where it is None."""
        tunable = TUNABLES[name]
        found: int | None = getattr(self, name)
        if found is None:
            return tunable.default
        return min(max(found, tunable.least), tunable.most)


class Tunable(NamedTuple):
    """The default of a setting, and its bounds."""

    default: int
    least: int
    most: int


NO_SETTINGS = Settings(0)
"""The settings of a group before its first GroupSettings."""

TUNABLES = {
    "debounce_ms": Tunable(1_000, 0, 600_000),
    "handoff_ms": Tunable(300_000, 1, 3_600_000),
    "handoffs_max": Tunable(8, 1, 1_000),
}
"""The settings that members use, by name; times in milliseconds."""
