"""How directives drain and cordon clients (PROTOCOL 9.7).

Part of the rationalizer: only ``rationalizer.apply`` calls these. A directive is
advice: it changes who should have a key, never who may claim one, so it can cost
balance and time, never safety.
"""

from collections.abc import Callable
from typing import Any

from kafka_marshal.protocol import judging
from kafka_marshal.protocol.fold_groups import end_operation, install_directive
from kafka_marshal.protocol.items import StandingDirective
from kafka_marshal.protocol.records import Directive
from kafka_marshal.protocol.state import Step, Transitions


def _directive(step: Step, record: Directive) -> Transitions:
    state = step.state
    config = state.config
    assert config is not None  # the record needs level 2
    reason = judging.judge_directive(state, record, config=config)
    if reason is not None:
        return (step.refused(reason),)
    group_id, op_id = record.group_id, record.op_id
    if record.msg_expire_time <= state.append_time_ms:
        end_operation(state, group_id, op_id=op_id, offset=step.entry.offset)
        return (step.accepted("directive_ended"),)
    longest_ms = state.append_time_ms + config.limit("max_pause_ms")
    standing = StandingDirective(
        op_id=op_id,
        client_id=record.client_id,
        incarnation=record.incarnation,
        seq=record.seq,
        until_ms=min(record.msg_expire_time, longest_ms),
        client=record.client,
        host=record.host,
        action=record.action,
    )
    install_directive(state, group_id, standing=standing)
    return (step.accepted("directed"),)


FOLDS: dict[type, Callable[[Step, Any], Transitions]] = {Directive: _directive}
"""How a directive is folded."""
