"""How growths of data topics are folded, on partition 0 (PROTOCOL 9.10).

Part of the rationalizer: only ``rationalizer.apply`` calls these. They change no key:
what a growth means for the claims of new partitions, claimants decide.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.growths import (
    ENDS_KEPT_MAX,
    ends_count,
    judge,
    with_growth,
)
from kafka_marshal.protocol.records import DataGrowth
from kafka_marshal.protocol.state import GROWTHS, Step, Transitions


def _grow(step: Step, record: DataGrowth) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    if state.partition != 0:
        return (step.refused(judging.elsewhere(state)),)
    reason = judge(state.growths, record)
    if reason == "known":
        return (step.ignored(reason),)
    if reason is not None:
        return (step.refused(reason),)
    growths = with_growth(state.growths, record, offset=step.entry.offset)
    is_withdrawn = record.new_count == record.old_count
    has_room = (
        len(growths) <= config.limit("operations")
        and ends_count(growths) <= ENDS_KEPT_MAX
    )
    if record.ends is None and not is_withdrawn and not has_room:
        return (step.refused("limits"),)
    state.growths = growths
    state.dirty[GROWTHS] = None
    if is_withdrawn:
        return (step.accepted("growth_withdrawn"),)
    return (step.accepted("grown" if record.ends is not None else "growing"),)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {DataGrowth: _grow}
"""How a growth is folded."""
