"""Settings of a group, written by admins to its home partition (PROTOCOL 9.1).

They tune how members share and hand off partitions. No guarantee depends on them: a
value beyond its bounds is used as the nearest one within.
"""

from typing import NamedTuple

from kafka_marshal.protocol.records import Counting, Name, Offset


class Settings(NamedTuple):
    """The fields of the GroupSettings in force; None stands for the default.

    Attributes:
        generation: Number of the record, counted from 1; 0 = there is none.
        policy: ``planner``: members follow the Plans of their group (PROTOCOL 9.2);
            any other, or None: each follows the policy of its own consumer.
        planner_version_max: Highest planner version to use.
        debounce_ms: How long members must stay the same before surplus is released.
        handoff_ms: Log time that a successor has to warm up.
        handoffs_max: Maximum number of keys that a member offers, or warms up for.
        grace_ms: How long a key waits for an owner that restarts, under ``planner``.
    """

    generation: Counting
    policy: Name | None = None
    planner_version_max: Counting | None = None
    debounce_ms: Offset | None = None
    handoff_ms: Counting | None = None
    handoffs_max: Counting | None = None
    grace_ms: Offset | None = None

    def value(self, name: str) -> int:
        """Return a setting of ``TUNABLES``, its default if it is None."""
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
    "grace_ms": Tunable(60_000, 0, 600_000),
}
"""The settings that members use, by name; times in milliseconds."""

FAIR = "fair"
PLANNER = "planner"
POLICIES = (FAIR, PLANNER)
"""The policies that admins set; ``fair`` leaves each consumer its own."""
