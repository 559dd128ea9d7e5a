"""The world as a JSON document: the shape all commands print (PROTOCOL 3.8)."""

from collections.abc import Iterable
from typing import Any

from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import KeyState, WorldState
from kafka_marshal.protocol.text import record_to_object
from kafka_marshal.protocol.types import Key

SCHEMA = 1


def world_to_object(states: Iterable[WorldState]) -> dict[str, Any]:
    """Return the world document of some coordinating partitions."""
    ordered = sorted(states, key=lambda state: state.partition)
    partitions = {str(state.partition): state_to_object(state) for state in ordered}
    return {"schema": SCHEMA, "partitions": partitions}


def state_to_object(state: WorldState) -> dict[str, Any]:
    """Return the document of one coordinating partition."""
    config = state.config
    document = {
        "next_offset": state.next_offset,
        "leader_epoch": state.leader_epoch,
        "log_time_ms": state.log_time_ms,
        "digest": digest(state),
        "config": None if config is None else record_to_object(config)["data"],
        "claims": [
            claim_to_object(state, key, known=known)
            for key, known in sorted(state.keys.items())
        ],
        "pauses": _pauses(state),
        "counters": dict(sorted(state.soft.counters.items())),
    }
    if state.halted is not None:
        document["halted"] = state.halted._asdict()
    return document


def claim_to_object(state: WorldState, key: Key, *, known: KeyState) -> dict[str, Any]:
    """Return the document of one key."""
    owner = known.owner
    token = state.token(key)
    owner_object = None
    freshness = age_ms = None
    if owner is not None:
        owner_object = {
            "client_id": owner.client_id,
            "incarnation": owner.incarnation.hex(),
        }
        freshness = known.freshness(state.now_ms).value
        age_ms = known.age_ms(state.now_ms)
    return {
        **key._asdict(),
        "owner": owner_object,
        "epoch": known.epoch,
        "token": None if token is None else str(token),
        "position": known.position,
        "granted": known.granted,
        "freshness": freshness,
        "age_ms": age_ms,
        "locked_by": None if known.lock is None else known.lock.hex(),
    }


def _pauses(state: WorldState) -> list[dict[str, Any]]:
    pauses = []
    for group_id in sorted(state.groups):
        pause = state.active_pause(group_id)
        if pause is not None:
            pauses.append(
                {
                    "group_id": group_id,
                    "op_id": pause.op_id.hex(),
                    "client_id": pause.client_id,
                    "until_ms": pause.until_ms,
                }
            )
    return pauses
