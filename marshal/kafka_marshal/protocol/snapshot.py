"""State to canonical bytes and back, and the digest that replicas compare.

Canonical tuples (PROTOCOL 4, "Digest"; docs/PROTOCOL.md lists them with a
golden digest). All are MessagePack arrays with integers in their shortest
form, so that equal states give equal bytes on every machine.
"""

from hashlib import blake2b
from typing import Any

import msgspec

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import decode, encode
from kafka_marshal.protocol.records import Config
from kafka_marshal.protocol.state import GroupState, KeyState, Pause, WorldState
from kafka_marshal.protocol.types import Key, Owner

FORMAT_VERSION = 1
_DIGEST_BYTES = 16
_MODULUS = 1 << 128

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(strict=True).decode


def digest(state: WorldState) -> str:
    """Return the 128-bit digest of the hard state, as 32 hex digits.

    The sum modulo 2**128 of the BLAKE2b-16 hashes of every canonical tuple:
    only tuples that changed since the last call are hashed again.
    """
    hashes = state.item_hashes
    for name in state.dirty:
        state.item_sum -= hashes.pop(name, 0)
        item = _item(state, name)
        if item is not None:
            hashes[name] = _hash(item)
            state.item_sum += hashes[name]
    state.dirty.clear()
    state.item_sum %= _MODULUS
    total = (state.item_sum + _hash(_header(state))) % _MODULUS
    return total.to_bytes(_DIGEST_BYTES, "big").hex()


def to_bytes(state: WorldState) -> bytes:
    """Return the canonical bytes of the hard state.

    Raises:
        ValueError: The state has halted: what lies behind is not known.
    """
    if state.halted is not None:
        raise ValueError("a halted state cannot be snapshotted")
    keys = [_key(key, known) for key, known in sorted(state.keys.items())]
    groups = [_group(name, group) for name, group in sorted(state.groups.items())]
    operations: list[Any] = []
    return _encode([FORMAT_VERSION, _header(state), keys, groups, operations])


def from_bytes(value: bytes) -> WorldState:
    """Return the state that ``to_bytes`` wrote; soft state starts empty.

    Raises:
        MalformedRecord: The bytes are no canonical state.
    """
    try:
        state = _read(_decode(value))
        is_canonical = to_bytes(state) == value
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise MalformedRecord(f"not a snapshot: {error}") from error
    if not is_canonical:
        raise MalformedRecord("not a snapshot: not in canonical form")
    return state


def _read(fields: list[Any]) -> WorldState:
    version, header, keys, groups, operations = fields
    if version != FORMAT_VERSION or operations != []:
        raise ValueError("unknown version")
    state = _read_header(header)
    state.groups = dict(_read_group(fields) for fields in groups)
    state.keys = dict(_read_key(fields) for fields in keys)
    state.rebuild_derived()
    return state


def _hash(item: list[Any]) -> int:
    return int.from_bytes(
        blake2b(_encode(item), digest_size=_DIGEST_BYTES).digest(), "big"
    )


def _item(state: WorldState, name: Key | str) -> list[Any] | None:
    if isinstance(name, Key):
        known = state.keys.get(name)
        return None if known is None else _key(name, known)
    group = state.groups.get(name)
    return None if group is None else _group(name, group)


def _header(state: WorldState) -> list[Any]:
    return [
        "header",
        state.partition,
        state.next_offset,
        state.leader_epoch,
        state.epoch_time_ms,
        state.log_time_ms,
        state.append_time_ms,
        None if state.config is None else encode(state.config),
    ]


def _key(key: Key, known: KeyState) -> list[Any]:
    return [
        "key",
        *key,
        known.owner,
        known.epoch,
        known.epoch_leader_epoch,
        known.renewed_ms,
        known.heartbeat_interval_ms,
        known.active_ms,
        known.position,
        known.granted,
        known.topic_id,
        known.retired_topic_ids,
        known.resume_hash,
        known.lock,
        known.previous,
        known.handoff,
    ]


def _group(group_id: str, group: GroupState) -> list[Any]:
    pause = group.pause
    return [
        "group",
        group_id,
        None
        if pause is None
        else [
            pause.op_id,
            pause.client_id,
            pause.incarnation,
            pause.seq,
            pause.incarnations,
            pause.until_ms,
        ],
        group.over,
    ]


def _read_header(fields: list[Any]) -> WorldState:
    tag, partition, next_offset, leader_epoch, epoch_ms, log_ms, append_ms, raw = fields
    if tag != "header":
        raise ValueError("no header")
    config = None if raw is None else decode(raw)
    if not isinstance(config, Config | None):
        raise TypeError("unreadable Config")
    return WorldState(
        partition=partition,
        next_offset=next_offset,
        leader_epoch=leader_epoch,
        epoch_time_ms=epoch_ms,
        log_time_ms=log_ms,
        append_time_ms=append_ms,
        config=config,
    )


def _read_key(fields: list[Any]) -> tuple[Key, KeyState]:
    tag, group_id, topic, partition, owner, *rest = fields
    if tag != "key":
        raise ValueError("no key")
    known = KeyState(None if owner is None else Owner(*owner), *rest)
    known.retired_topic_ids = tuple(known.retired_topic_ids)
    known.previous = None if known.previous is None else (*known.previous,)
    known.handoff = None if known.handoff is None else (*known.handoff,)
    return Key(group_id, topic, partition), known


def _read_group(fields: list[Any]) -> tuple[str, GroupState]:
    tag, group_id, pause, over = fields
    if tag != "group":
        raise ValueError("no group")
    if pause is not None:
        op_id, client_id, incarnation, seq, seen, until_ms = pause
        pause = Pause(op_id, client_id, incarnation, seq, tuple(seen), until_ms)
    return group_id, GroupState(pause, tuple((at, op_id) for at, op_id in over))
