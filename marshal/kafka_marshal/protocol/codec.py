"""Converts bytes to records and back (PROTOCOL 3.1 to 3.5). Decoding never raises.

A frame is ``uvarint frame_version | uvarint type | uvarint version | payload``
and the payload is one MessagePack array. Integers of the frame use the
shortest form only, so that each record has one header.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.records import (
    KINDS,
    SCOPE_PARTITIONS_MAX,
    Config,
    DataGrowth,
    Directive,
    ImportedDirective,
    ImportedKey,
    ImportedSettings,
    Kind,
    LayoutGroups,
    PlannedMember,
    PlannedTopic,
    Record,
    Scope,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.types import encodable

R = TypeVar("R", bound=Record)

FRAME_VERSION = 1
FRAME_BYTES_MAX = 48 * 1024
_UVARINT_BYTES_MAX = 5
_MORE = 0x80  # LEB128: another byte follows

# PROTOCOL 3.4: full match; a bare ``$`` would let a newline pass.
_ID = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._:-]{1,200}\Z")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")


class Undecodable(msgspec.Struct, frozen=True, gc=False):
    """Why a value is not a record. It changes no state (PROTOCOL 1.5)."""

    reason: str


# Names that are known to be valid. The same few recur, and a lookup is several times
# faster than a match. Bounded, because the content of the log is not trusted
# (PROTOCOL S9).
NAMES_REMEMBERED_MAX = 65_536
_known_ids: set[str] = set()
_known_topics: set[str] = set()


def is_identifier(name: str) -> bool:
    """Return whether ``name`` is a valid client_id or group_id (PROTOCOL 3.5)."""
    is_known = name in _known_ids
    return is_known or (_ID.match(name) is not None and _remember(name, _known_ids))


def is_topic(name: str) -> bool:
    """Return whether ``name`` is a topic that Kafka accepts (PROTOCOL 3.5)."""
    if name in _known_topics:
        return True
    is_valid = name not in {".", ".."} and _TOPIC.match(name) is not None
    return is_valid and _remember(name, _known_topics)


def is_key_topic(name: str) -> bool:
    """Return whether a key may name ``name``: a topic, or a reserved one."""
    return is_topic(name) or name in RESERVED_TOPICS


def _remember(name: str, names: set[str]) -> bool:
    if len(names) >= NAMES_REMEMBERED_MAX:
        names.clear()
    names.add(name)
    return True


def uvarint(number: int) -> bytes:
    """Return the shortest unsigned LEB128 form of ``number``."""
    out = bytearray()
    while number >= _MORE:
        out.append(number & 0x7F | _MORE)
        number >>= 7
    out.append(number)
    return bytes(out)


def _header(kind: Kind) -> bytes:
    return uvarint(FRAME_VERSION) + uvarint(kind.number) + uvarint(kind.version)


_BY_CLASS = {kind.record: kind for kind in KINDS}
_HEADERS = {kind.record: _header(kind) for kind in KINDS}
_ENCODER = msgspec.msgpack.Encoder()
_TAG_DECODER = msgspec.msgpack.Decoder(dict[str, Any])


def kind_of(record: Record) -> Kind:
    """Return the wire kind of a record."""
    return _BY_CLASS[type(record)]


def header_of(record: type[Record]) -> bytes:
    """Return the bytes that every frame of a record kind begins with."""
    return _HEADERS[record]


def encode(record: Record) -> bytes:
    """Return the frame of a record.

    Raises:
        MalformedRecord: The record breaks a rule of the format, so that no
            reader would accept the bytes.
    """
    kind = kind_of(record)
    value = encode_fields(kind, [*msgspec.structs.astuple(record)])
    back = decode(value)
    if isinstance(back, Undecodable):
        raise MalformedRecord(f"{kind.name} is invalid: {back.reason}")
    return value


def encode_fields(kind: Kind, fields: list[Any]) -> bytes:
    """Return the frame of field values in wire order, without validation.

    Raises:
        MalformedRecord: MessagePack cannot represent a value.
    """
    if fields[-1] is UNSET:
        fields = fields[:-1]
    try:
        return _HEADERS[kind.record] + _ENCODER.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedRecord(f"{kind.name} cannot be encoded: {error}") from error


def decode(value: bytes | None) -> Record | Undecodable:
    """Return the record in ``value``, or why there is none. Never raises."""
    if value is None:
        return Undecodable("no value")
    if len(value) > FRAME_BYTES_MAX:
        return Undecodable("frame too long")
    # All types below 128 have a header of three bytes, the others of four.
    frame = _FRAMES.get(value[:3]) or _FRAMES.get(value[:4])
    if frame is None:
        return Undecodable(_unknown_header(value))
    parse, size, has_plain_names = frame
    try:
        found = parse(value[size:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Undecodable(f"bad payload: {error}"[:200])
    record: Record = found
    if (
        has_plain_names
        and found.client_id in _known_ids
        and found.group_id in _known_ids
        and found.topic in _known_topics
    ):
        return record  # the common case, without a call for each name
    reason = _bad_name(record)
    return record if reason is None else Undecodable(reason)


def decode_tags(tags: bytes) -> dict[str, Any] | None:
    """Return the tags of a record, None if they are unreadable."""
    try:
        return _TAG_DECODER.decode(tags)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


BY = "by"
"""The person for whom an admin's record was written, in its tags (PROTOCOL 3.9)."""
UNDOES = "undoes"
"""The op_id of the operation that an undo reverts, in the tags of its records."""
OP_ID_BYTES = 16
PERSON_CHARS_MAX = 200
PERSON_BYTES_MAX = 600
"""Maximum size of a person's name in tags. A part of a Reset leaves room for it."""


def person_to_tags(
    person: str | None, *, undoes: bytes | None = None
) -> bytes | UnsetType:
    """Return the tags of an admin's record; none if there is nothing to name.

    Args:
        person: The person for whom it is written, cut to the maximum length.
        undoes: op_id of the operation that the record undoes.
    """
    tags: dict[str, Any] = {BY: person_text(person)} if person else {}
    if undoes is not None:
        tags[UNDOES] = undoes
    return _ENCODER.encode(tags) if tags else UNSET


def person_text(person: str, bytes_max: int = PERSON_BYTES_MAX) -> str:
    """Return the name of a person for tags, cut to the maximum length."""
    text = encodable(person[:PERSON_CHARS_MAX]).encode()[:bytes_max]
    return text.decode(errors="ignore")


def person_of(record: Record) -> str | None:
    """Return the person in the tags of a record, or None. Bounded; never raises."""
    person = _tag(record, BY)
    return person[:PERSON_CHARS_MAX] if isinstance(person, str) else None


def undone_of(record: Record) -> bytes | None:
    """Return the op_id that a record undoes by its tags, or None. Never raises."""
    op_id = _tag(record, UNDOES)
    if isinstance(op_id, bytes) and len(op_id) == OP_ID_BYTES:
        return op_id
    return None


def _tag(record: Record, name: str) -> object:
    tags = record.tags
    found = None if isinstance(tags, UnsetType) else decode_tags(tags)
    return (found or {}).get(name)


def _are_topics(named: tuple[str | StagedTopic | PlannedTopic, ...]) -> bool:
    return all(
        is_topic(each if isinstance(each, str) else each.topic) for each in named
    )


def _are_members(named: tuple[PlannedMember, ...]) -> bool:
    return all(is_identifier(each.client_id) for each in named)


def _are_distinct(record: StagePosition) -> bool:
    """Return whether a record names each of its keys once."""
    keys = [
        (each.topic, partition)
        for each in record.topics
        for partition, _ in each.positions
    ]
    return len(set(keys)) == len(keys)


def is_scope(scope: Scope | None) -> bool:
    """Return whether a scope is sorted, without repeats, within bounds (4.15)."""
    if scope is None:
        return True
    return (
        all(is_topic(each.topic) for each in scope)
        and all(one.topic < other.topic for one, other in pairwise(scope))
        and all(a < b for each in scope for a, b in pairwise(each.partitions))
        and sum(len(each.partitions) for each in scope) <= SCOPE_PARTITIONS_MAX
    )


def _is_config(frame: bytes) -> bool:
    # Checks the header first: fences nested in fences would be decoded ever deeper.
    is_one = frame.startswith(_HEADERS[Config])
    return is_one and isinstance(decode(frame), Config)


def _are_imported(items: tuple[ImportedKey, ...]) -> bool:
    return all(
        is_identifier(each.group_id)
        and is_topic(each.topic)
        and _is_name_or_none(each.successor)
        for each in items
    )


def _are_settings(items: tuple[ImportedSettings, ...]) -> bool:
    return all(
        is_identifier(each.group_id) and _is_name_or_none(each.policy) for each in items
    )


def _are_directives(items: tuple[ImportedDirective, ...]) -> bool:
    return all(
        is_identifier(each.group_id)
        and is_identifier(each.client_id)
        and _is_name_or_none(each.client)
        and (each.client is None) != (each.host is None)
        for each in items
    )


def _is_name_or_none(name: str | None) -> bool:
    return name is None or is_identifier(name)


_RULES: dict[str, Callable[[Any], bool]] = {
    "client_id": is_identifier,
    "group_id": is_identifier,
    "topic": is_key_topic,
    "topics": _are_topics,
    "moves": _are_members,
    "successor": _is_name_or_none,
    "client": _is_name_or_none,
    "policy": _is_name_or_none,
    "fenced": is_identifier,
    "scope": is_scope,
    "config": _is_config,
    "items": _are_imported,
    "settings": _are_settings,
    "directives": _are_directives,
}
_CHECKS = {
    kind.record: tuple(
        (name, _RULES[name]) for name in kind.record.__struct_fields__ if name in _RULES
    )
    for kind in KINDS
}


def _names_one(record: Directive) -> bool:
    return (record.client is None) != (record.host is None)


def _names_groups(record: LayoutGroups) -> bool:
    return bool(record.settings or record.directives)


def _is_growth(record: DataGrowth) -> bool:
    """Return whether the topic grows to a multiple, or the growth is withdrawn."""
    old_count, ends = record.old_count, record.ends
    if record.new_count == old_count:
        return ends is None and is_topic(record.topic)
    is_whole = ends is None or len(ends) == old_count
    return record.new_count % old_count == 0 and is_whole and is_topic(record.topic)


_WHOLE: dict[type, tuple[Callable[[Any], bool], str]] = {
    StagePosition: (_are_distinct, "a key is named twice"),
    Directive: (_names_one, "it must name either a client or a host"),
    LayoutGroups: (_names_groups, "it has neither settings nor directives"),
    DataGrowth: (
        _is_growth,
        "new_count is no growth of old_count, or ends has another length",
    ),
}
"""Conditions on the fields of a record, each with the reason if it does not hold."""


class _Frame(NamedTuple):
    """How to read the payload after a header.

    Attributes:
        parse: Turns the payload into a record.
        header_size: Bytes before the payload.
        has_plain_names: Whether the names of client, group and topic are all that has
            to be checked.
    """

    parse: Callable[[bytes], Any]
    header_size: int
    has_plain_names: bool


def _frame(kind: Kind) -> _Frame:
    names = tuple(name for name, _ in _CHECKS[kind.record])
    return _Frame(
        msgspec.msgpack.Decoder(kind.record).decode,
        len(_HEADERS[kind.record]),
        has_plain_names=names == ("client_id", "group_id", "topic")
        and kind.record not in _WHOLE,
    )


_FRAMES = {_HEADERS[kind.record]: _frame(kind) for kind in KINDS}


def parser_of(record: type[R]) -> Callable[[bytes], R]:
    """Return a function that reads payloads of a record kind without checking names.

    It raises the errors of msgspec. Use ``decode`` unless the names are known to be
    valid from elsewhere.
    """
    return _FRAMES[_HEADERS[record]].parse


def _bad_name(record: Record) -> str | None:
    for name, is_valid in _CHECKS[type(record)]:
        if not is_valid(getattr(record, name)):
            return f"bad {name}"
    is_whole, reason = _WHOLE.get(type(record), (None, ""))
    return reason if is_whole is not None and not is_whole(record) else None


def _read_uvarint(value: bytes, at: int) -> tuple[int, int] | None:
    number = 0
    for index, byte in enumerate(value[at : at + _UVARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < _MORE:
            shortest = byte != 0 or index == 0
            return (number, at + index + 1) if shortest else None
    return None


def _unknown_header(value: bytes) -> str:
    at = 0
    numbers = []
    for _ in range(3):
        read = _read_uvarint(value, at)
        if read is None:
            return "bad frame header"
        number, at = read
        numbers.append(number)
    if numbers[0] != FRAME_VERSION:
        return f"unknown frame version {numbers[0]}"
    return f"unknown record type {numbers[1]} version {numbers[2]}"
