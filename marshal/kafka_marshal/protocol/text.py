"""Text form of the log and the world: JSON objects (PROTOCOL 3.7, 3.8).

A log has one object per line: ``dump`` writes the lines, ``replay`` and the transcripts
read them. Bytes are hex; an absent optional field is null or left out.
"""

import base64
import binascii
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import Undecodable, decode, encode_fields, kind_of
from kafka_marshal.protocol.items import Growth, Layout, Offer
from kafka_marshal.protocol.records import (
    KINDS,
    Fields,
    ImportedDirective,
    ImportedKey,
    ImportedPrevious,
    ImportedSettings,
    Kind,
    LayoutGroups,
    LayoutImport,
    Limits,
    PauseGroup,
    Plan,
    PlannedMember,
    PlannedTopic,
    Record,
    Resume,
    Scope,
    ScopedTopic,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry, TimestampType

_BY_NAME = {kind.name: kind for kind in KINDS}
_NESTED: dict[str, type[Fields]] = {
    "resume": Resume,
    "limits": Limits,
    "previous": ImportedPrevious,
}
_NESTED_LISTS: dict[type[Fields], dict[str, type[Fields]]] = {
    PauseGroup: {"scope": ScopedTopic},
    StagePosition: {"topics": StagedTopic},
    Plan: {"topics": PlannedTopic, "moves": PlannedMember},
    LayoutImport: {"items": ImportedKey},
    LayoutGroups: {"settings": ImportedSettings, "directives": ImportedDirective},
}
_RENAMED = {"partition_count": "K"}
_BYTES_FIELDS = frozenset(
    {
        "incarnation",
        "fenced_incarnation",
        "topic_id",
        "resume_hash",
        "secret",
        "grantee",
        "op_id",
        "format_id",
        "checkpoint_id",
        "digest",
        "plan_digest",
        "input_digest",
        "data",
        "tags",
        "config",
    }
)
_BYTES_LISTS = frozenset({"retired_topic_ids"})
_TIMESTAMP_NAMES = {
    TimestampType.NONE: "NoTimestampType",
    TimestampType.CREATE_TIME: "CreateTime",
    TimestampType.LOG_APPEND_TIME: "LogAppendTime",
}
_TIMESTAMP_TYPES = {name: number for number, name in _TIMESTAMP_NAMES.items()}


def entry_to_object(partition: int, entry: LogEntry) -> dict[str, Any]:
    """Return the text object of one entry of a coordinating partition."""
    undecodable = entry.undecodable
    record = decode(entry.value) if undecodable is None else Undecodable(undecodable)
    head: dict[str, Any] = {
        "partition": partition,
        "offset": entry.offset,
        "leader_epoch": entry.leader_epoch,
        "timestamp_ms": entry.timestamp_ms,
        "timestamp_type": _TIMESTAMP_NAMES[TimestampType(entry.timestamp_type)],
    }
    if isinstance(record, Undecodable):
        value = entry.value
        text = None if value is None else base64.b64encode(value).decode()
        head["undecodable"] = {"reason": record.reason, "value": text}
    else:
        head["payload"] = record_to_object(record)
    return head


def record_to_object(record: Record) -> dict[str, Any]:
    """Return the payload object of a record: type, version and data."""
    kind = kind_of(record)
    data = _fields_to_object(record)
    return {"type": kind.name, "version": kind.version, "data": data}


def object_to_entry(line: Any) -> tuple[int, LogEntry]:  # noqa: ANN401 - any JSON
    """Return the coordinating partition and entry that a text object describes.

    Raises:
        MalformedRecord: The object is no entry. A payload that the codec could
            not have produced raises nothing: it gives an undecodable entry.
    """
    if not isinstance(line, dict):
        raise MalformedRecord("a line must hold a JSON object")
    partition = _integer(line, "partition", least=0)
    name = line.get("timestamp_type", "LogAppendTime")
    if not isinstance(name, str) or name not in _TIMESTAMP_TYPES:
        known = ", ".join(_TIMESTAMP_TYPES)
        raise MalformedRecord(f"timestamp_type must be one of {known}")
    epoch = line.get("leader_epoch")
    value, reason = _value(line)
    return partition, LogEntry(
        offset=_integer(line, "offset", least=0),
        leader_epoch=None if epoch is None else _integer(line, "leader_epoch"),
        timestamp_ms=_integer(line, "timestamp_ms"),
        timestamp_type=_TIMESTAMP_TYPES[name],
        value=value,
        undecodable=reason,
    )


def object_to_record(payload: Any) -> Record | Undecodable:  # noqa: ANN401 - any JSON
    """Return the record that a payload object describes, judged by the codec."""
    kind = _kind(payload)
    if kind is None:
        return Undecodable("unknown type or version")
    try:
        fields = _object_to_fields(kind.record, payload["data"])
        value = encode_fields(kind, fields)
    except (MalformedRecord, ValueError) as error:
        return Undecodable(f"bad data: {error}"[:200])
    return decode(value)


def transition_to_object(partition: int, transition: Transition) -> dict[str, Any]:
    """Return the text object of a transition (PROTOCOL 3.8)."""
    key = transition.key
    return {
        "partition": partition,
        "offset": transition.offset,
        "transition": transition.outcome,
        "effect": transition.effect,
        "reason": transition.reason,
        "key": None if key is None else key._asdict(),
        "epoch": transition.epoch,
        "detail": transition.detail,
    }


def _fields_to_object(fields: Fields) -> dict[str, Any]:
    data = {}
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if value is not UNSET:
            data[_RENAMED.get(name, name)] = _to_json(value)
    return data


def _to_json(value: Any) -> Any:  # noqa: ANN401 - any field value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Fields):
        return _fields_to_object(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return value


def _integer(line: dict[str, Any], name: str, *, least: int = -(2**63)) -> int:
    value = line.get(name)
    if type(value) is not int or not least <= value < 2**63:
        # The value itself may be too deep or too long to be written out.
        raise MalformedRecord(f"{name} must be an integer from {least} to 2**63 - 1")
    return value


def _value(line: dict[str, Any]) -> tuple[bytes | None, str | None]:
    if "undecodable" in line:
        undecodable = line["undecodable"]
        if not isinstance(undecodable, dict):
            raise MalformedRecord("undecodable must be an object")
        reason = undecodable.get("reason", "undecodable")
        if not isinstance(reason, str):
            raise MalformedRecord("undecodable.reason must be a string")
        text = undecodable.get("value")
        if text is None:
            return None, reason[:200]
        try:
            return base64.b64decode(text, validate=True), reason[:200]
        except (binascii.Error, ValueError, TypeError) as error:
            raise MalformedRecord(f"undecodable.value: {error}") from error
    if "payload" not in line:
        raise MalformedRecord("a line needs payload or undecodable")
    record = object_to_record(line["payload"])
    if isinstance(record, Undecodable):
        return b"", record.reason
    fields = [getattr(record, name) for name in record.__struct_fields__]
    return encode_fields(kind_of(record), fields), None


def _kind(payload: Any) -> Kind | None:  # noqa: ANN401 - any JSON
    if not isinstance(payload, dict) or not isinstance(payload.get("data"), dict):
        return None
    if set(payload) - {"type", "version", "data"}:
        return None
    name = payload.get("type")
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    version = payload.get("version", 0)
    if kind is None or type(version) is not int or version != kind.version:
        return None
    return kind


def _object_to_fields(fields: type[Fields], data: Any) -> list[Any]:  # noqa: ANN401
    if not isinstance(data, dict):
        raise MalformedRecord("data must be an object")
    names = _names(fields)
    if not data.keys() <= names.keys():
        unknown = min(data.keys() - names.keys())
        raise MalformedRecord(f"unknown field {unknown!r}")
    values: list[Any] = []
    lists = _NESTED_LISTS.get(fields, {})
    for text_name, name in names.items():
        value = data.get(text_name)
        if name == "tags" and value is None:
            values.append(UNSET)
        elif name in _NESTED and value is not None:
            values.append(_object_to_fields(_NESTED[name], value))
        elif name in lists and isinstance(value, list):
            values.append([_object_to_fields(lists[name], each) for each in value])
        elif name in _BYTES_LISTS and isinstance(value, list):
            values.append([_from_hex(each) for each in value])
        elif name in _BYTES_FIELDS and value is not None:
            values.append(_from_hex(value))
        else:
            values.append(value)
    return values


@cache
def _names(fields: type[Fields]) -> dict[str, str]:
    """Return the names of fields by their names in the text form."""
    return {_RENAMED.get(name, name): name for name in fields.__struct_fields__}


def _from_hex(value: Any) -> bytes:  # noqa: ANN401 - any JSON
    if not isinstance(value, str):
        raise MalformedRecord("bytes are written as a string of hex digits")
    return bytes.fromhex(value)


def to_line(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return one line of JSON, without its newline."""
    return msgspec.json.encode(value).decode()


# --- the world document: the shape that all commands print (PROTOCOL 3.8)

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
        "scheduled": _scheduled(state),
        "fences": _fences(state),
        "directives": _directives(state),
        "settings": _settings(state),
        "plans": _plans(state),
        "counters": dict(sorted(state.soft.counters.items())),
    }
    if state.layout is not None:
        document["layout"] = _layout(state.layout)
    if state.growths:
        document["growths"] = [_growth(each) for each in state.growths]
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
        "locked_by": None if known.lock is None else known.lock.op_id.hex(),
        "offer": None if known.offer is None else offer_to_object(known.offer),
    }


def offer_to_object(offer: Offer) -> dict[str, Any]:
    """Return the document of an offer."""
    return {
        "successor": offer.successor,
        "until_ms": offer.until_ms,
        "ready": None if offer.ready is None else offer.ready.hex(),
    }


NAMED_MAX = 5
"""Maximum number of names that a message lists."""


def abbreviated(names: Iterable[object]) -> str:
    """Return the first few names for a line, and the number of the others."""
    every = [str(each) for each in names]
    more = len(every) - NAMED_MAX
    return ", ".join(every[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def scope_texts(scope: Scope | None) -> tuple[str, ...]:
    """Return a scope for people, like ``orders`` and ``invoices:0,3``."""
    return tuple(
        f"{each.topic}:{','.join(map(str, each.partitions))}".removesuffix(":")
        for each in scope or ()
    )


def _scheduled(state: WorldState) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group_id,
            "op_id": each.op_id.hex(),
            "client_id": each.client_id,
            "begin_ms": each.begin_ms,
            "until_ms": each.until_ms,
            "scope": _to_json(each.scope),
        }
        for group_id in sorted(state.groups)
        for each in state.groups[group_id].scheduled
    ]


def _pauses(state: WorldState) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group_id,
            "op_id": pause.op_id.hex(),
            "client_id": pause.client_id,
            "until_ms": pause.until_ms,
            "scope": _to_json(pause.scope),
        }
        for group_id in sorted(state.groups)
        for pause in state.groups[group_id].pauses
    ]


def _fences(state: WorldState) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group_id,
            "client_id": fence.client_id,
            "incarnation": fence.incarnation.hex(),
            "offset": fence.offset,
        }
        for group_id, group in sorted(state.groups.items())
        for fence in group.fences
    ]


def _directives(state: WorldState) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group_id,
            "op_id": each.op_id.hex(),
            "client_id": each.client_id,
            "client": each.client,
            "host": each.host,
            "action": each.action,
            "until_ms": each.until_ms,
        }
        for group_id, group in sorted(state.groups.items())
        for each in group.directives
    ]


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "op_id": layout.op_id.hex(),
        "from_count": layout.from_count,
        "offset": layout.offset,
        "sources": [each._asdict() for each in layout.sources],
    }


def _growth(growth: Growth) -> dict[str, Any]:
    topic_id, ends = growth.topic_id, growth.ends
    return {
        **growth._asdict(),
        "topic_id": None if topic_id is None else topic_id.hex(),
        "ends": None if ends is None else list(ends),
    }


def _settings(state: WorldState) -> list[dict[str, Any]]:
    return [
        {"group_id": group_id, **group.settings._asdict()}
        for group_id, group in sorted(state.groups.items())
        if group.settings is not None
    ]


def _plans(state: WorldState) -> list[dict[str, Any]]:
    return [
        {"group_id": group_id, **group.planned._asdict()}
        for group_id, group in sorted(state.groups.items())
        if group.planned is not None
    ]
