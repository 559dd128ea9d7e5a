"""How an owner offers a key, and how its successor reports ready (PROTOCOL 9.4).

Part of the rationalizer: only ``rationalizer.apply`` calls these. An offer is advice
between two clients: no claim, lease or position depends on it.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.items import Offer
from kafka_marshal.protocol.records import HandoffOffer, HandoffReady
from kafka_marshal.protocol.state import Step, Transitions
from kafka_marshal.protocol.types import OFFSET_MAX, Key

WITHIN_MS_MAX = 3_600_000
"""Most log time that an offer lasts."""


def _offer(step: Step, record: HandoffOffer) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    stray = judging.mismatch(state, record, key=key)
    if stray is not None:
        return (step.ignored(stray, key),)
    reason = judging.judge_offer(state, record, key=key)
    if reason is not None:
        return (step.refused(reason, key),)
    known = state.keys[key]
    known.active_ms = state.now_ms
    state.dirty[key] = None
    if record.successor is None:
        known.offer = None
        state.soft.offered_ms.pop(key, None)
        return (step.accepted("offer_withdrawn", key),)
    until_ms = min(state.now_ms + min(record.within_ms, WITHIN_MS_MAX), OFFSET_MAX)
    known.offer = Offer(record.successor, until_ms, step.entry.offset, None)
    state.soft.offered_ms[key] = (step.entry.offset, state.now_ms)
    return (step.accepted("offered", key),)


def _ready(step: Step, record: HandoffReady) -> Transitions:
    state = step.state
    key = Key(record.group_id, record.topic, record.partition)
    reason = judging.judge_ready(state, record, key=key)
    if reason is not None:
        return (step.refused(reason, key),)
    known = state.keys[key]
    assert known.offer is not None  # else it was refused
    known.offer = known.offer._replace(ready=record.incarnation)
    known.active_ms = state.now_ms
    state.dirty[key] = None
    return (step.accepted("ready", key),)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {
    HandoffOffer: _offer,
    HandoffReady: _ready,
}
"""How each record of a handoff is folded."""
