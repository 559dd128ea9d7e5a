"""Removes stored plans of resets that no ``--continue`` needs any more.

A plan is stored before the first record of its operation, and removed at its end. The
plan of a command that was killed stays, so that ``--continue`` can resume it; members
end its operation meanwhile.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kafka_marshal.admin.group_reset import read_plan
from kafka_marshal.admin.set_position import PositionPlan, format_of
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.resolving import PositionOperation, unresolved
from kafka_marshal.protocol.state import WorldState

FOLDER = "plans"
"""Directory of the plans, in the state directory."""
KEPT_S = 7 * 24 * 3600
"""How long a plan stays of which the log shows nothing: neither its begin nor its end.

Its command died before the first record, or the log has forgotten the operation.
"""


def remove_finished(home: Path, worlds: Iterable[WorldState], *, wall_s: float) -> None:
    """Remove the plans of a state directory whose operations have ended.

    The plan of an open operation stays, whatever its age, as does that of an operation
    on another coordination topic. Never raises: what cannot be removed stays.

    Args:
        home: The state directory.
        worlds: All coordinating partitions, folded to their ends.
        wall_s: Wall time in seconds, to compare with the times of the files.
    """
    worlds = list(worlds)
    for path in home.joinpath(FOLDER).glob("*.json"):
        with suppress(ConfigurationError, OSError):  # no plan, or of another user
            plan, age_s = read_plan(path), wall_s - path.stat().st_mtime
            if _is_finished(plan, worlds, age_s=age_s):
                path.unlink()


def _is_finished(plan: PositionPlan, worlds: list[WorldState], *, age_s: float) -> bool:
    operation = PositionOperation(plan.group_id, bytes.fromhex(plan.op_id))
    groups = [g for w in worlds if (g := w.groups.get(plan.group_id)) is not None]
    is_pausing = any(
        each.pause is not None and each.pause.op_id == operation.op_id
        for each in groups
    )
    if is_pausing or operation in unresolved(worlds):
        return False
    if any(each.is_over(operation.op_id) for each in groups):
        return True
    return plan.format_id == format_of(worlds) and age_s > KEPT_S
