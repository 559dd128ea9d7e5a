"""Converts a state to canonical bytes and back; the digest that replicas compare.

Canonical tuples (PROTOCOL 4, "Digest"; docs/PROTOCOL.md lists them with a
golden digest). All are MessagePack arrays with integers in their shortest
form, so that equal states give equal bytes on every machine.

Bytes that are read are not trusted: they are rejected unless every value has the type
and is within the bounds that a fold would have given it.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice, pairwise
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Literal, NamedTuple

import attrs
import msgspec
from msgspec import Meta

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol.codec import (
    decode,
    encode,
    is_identifier,
    is_key_topic,
    is_scope,
    is_topic,
)
from kafka_marshal.protocol.growths import ENDS_KEPT_MAX, are_of_a_log
from kafka_marshal.protocol.items import (
    ERAS_MAX,
    Fence,
    Growth,
    Layout,
    LayoutSource,
    Lock,
    Offer,
    Pause,
    Planned,
    Scheduled,
    StandingDirective,
    Time,
    Verdict,
)
from kafka_marshal.protocol.layout import is_step, sources_of
from kafka_marshal.protocol.records import (
    U32,
    Config,
    Counting,
    Data,
    Fields,
    Hash,
    Id,
    Name,
    Next,
    Offset,
    Partition,
    Scope,
)
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.state import (
    DIRECTIVES_MAX,
    FENCES_MAX,
    OPERATIONS,
    RETIRED_TOPIC_IDS_MAX,
    SCHEDULED_MAX,
    SCOPED_MAX,
    GroupState,
    KeyState,
    Previous,
    Staging,
    WorldState,
)
from kafka_marshal.protocol.types import Key, Owner

FORMAT_VERSION = 1
_DIGEST_BYTES = 16
_MODULUS = 1 << 128
_CONFIGS_MAX = 64

_KEY_BYTES_MAX = 1_200
_GROUP_BYTES_MAX = 2_330
_OVER_BYTES_MAX = 32
_FENCE_BYTES_MAX = 240
_SCOPED_BYTES_MAX = 6_400
_DIRECTIVE_BYTES_MAX = 1_400
_GROWTH_BYTES_MAX = 320
_END_BYTES_MAX = 9
_REST_BYTES_MAX = 8_192
"""Maximum bytes of each key; of each group without the following parts; of each ended
operation, fence, pause with a scope and directive; of each growth of a data topic
without its ends; of each end; and of all the rest (without the parts of a Reset)."""

KEYS_PER_PIECE = 1_000
_encode = msgspec.msgpack.Encoder().encode
# The fields in the order of the canonical tuple, which is that of the class. The offer
# follows in one more element, which most keys lack.
_fields_of = attrgetter(
    *(field.name for field in attrs.fields(KeyState) if field.name != "offer")
)


Deadline = Annotated[int, Meta(ge=-(2**63))]
"""A log time, which ends at the largest offset, plus half a heartbeat interval."""


class _Header(Fields, frozen=True, kw_only=True):
    tag: Literal["header"]
    partition: Partition
    next_offset: Next
    leader_epoch: Partition | None
    epoch_time_ms: Time | None
    log_time_ms: Time | None
    append_time_ms: Time
    config: bytes | None


class _Offer(Fields, frozen=True, tag=1):
    offer: Offer


class _Key(Fields, frozen=True, kw_only=True):
    tag: Literal["key"]
    group_id: Name
    topic: Name
    partition: Partition
    owner: tuple[Name, Id] | None
    epoch: Offset
    epoch_leader_epoch: Partition
    renewed_ms: Time
    heartbeat_interval_ms: Next
    active_ms: Time
    position: Next | None
    granted: Next | None
    topic_id: Id | None
    retired_topic_ids: Annotated[tuple[Id, ...], Meta(max_length=RETIRED_TOPIC_IDS_MAX)]
    resume_hash: Hash | None
    lock: Lock | None
    previous: tuple[Id, Next | None, Next | None] | None
    handoff: tuple[Name, Deadline] | None
    # Left out if empty, so that keys without an offer keep their digests.
    more: Annotated[tuple[_Offer, ...], Meta(max_length=1)] = ()


class _Pause(Fields, frozen=True, kw_only=True):
    op_id: Id
    client_id: Name
    incarnation: Id
    seq: Offset
    incarnations: tuple[Id, ...]
    until_ms: Next


class _ScopedPause(_Pause, frozen=True, kw_only=True):
    scope: Scope


class _Verdict(Fields, frozen=True, tag=1):
    verdict: Verdict


class _Schedule(Fields, frozen=True, tag=2):
    pauses: Annotated[
        tuple[Scheduled, ...], Meta(min_length=1, max_length=SCHEDULED_MAX)
    ]


class _Fences(Fields, frozen=True, tag=3):
    fences: Annotated[tuple[Fence, ...], Meta(min_length=1, max_length=FENCES_MAX)]


class _Scoped(Fields, frozen=True, tag=4):
    pauses: Annotated[
        tuple[_ScopedPause, ...], Meta(min_length=1, max_length=SCOPED_MAX)
    ]


class _Directives(Fields, frozen=True, tag=5):
    directives: Annotated[
        tuple[StandingDirective, ...], Meta(min_length=1, max_length=DIRECTIVES_MAX)
    ]


class _Settings(Fields, frozen=True, tag=6):
    settings: Settings


class _Planned(Fields, frozen=True, tag=7):
    planned: Planned


class _Group(Fields, frozen=True, kw_only=True):
    tag: Literal["group"]
    group_id: Name
    pause: _Pause | None
    over: tuple[tuple[Offset, Id], ...]
    # Left out if empty, so that groups without these keep their digests.
    more: Annotated[
        tuple[
            _Verdict
            | _Schedule
            | _Fences
            | _Scoped
            | _Directives
            | _Settings
            | _Planned,
            ...,
        ],
        Meta(max_length=7),
    ] = ()


class _Quiet(Fields, frozen=True, tag="quiet"):
    until_ms: Time


class _Staging(Fields, frozen=True, tag="reset", kw_only=True):
    op_id: Id
    client_id: Name
    incarnation: Id
    part_count: Offset
    size_bytes: Offset
    digest: Id
    until_ms: Time
    parts: tuple[Data, ...]


class _Eras(Fields, frozen=True, tag="eras"):
    eras: Annotated[tuple[tuple[Offset, U32], ...], Meta(max_length=ERAS_MAX)]


class _Layout(Fields, frozen=True, tag="layout", kw_only=True):
    op_id: Id
    from_count: Counting
    offset: Offset
    sources: tuple[LayoutSource, ...]


class _Growths(Fields, frozen=True, tag="growths"):
    growths: Annotated[tuple[Growth, ...], Meta(min_length=1)]


class _World(Fields, frozen=True, kw_only=True):
    version: Literal[1]
    header: _Header
    keys: tuple[_Key, ...]
    groups: tuple[_Group, ...]
    operations: tuple[_Quiet | _Staging | _Eras | _Layout | _Growths, ...]


class _Parts(Fields, frozen=True, kw_only=True):
    version: Literal[1]
    header: msgspec.Raw
    keys: msgspec.Raw
    groups: msgspec.Raw
    operations: msgspec.Raw


_decode = msgspec.msgpack.Decoder(_World).decode
_decode_parts = msgspec.msgpack.Decoder(_Parts).decode
_decode_header = msgspec.msgpack.Decoder(_Header).decode
_decode_rows = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_quiet_and_eras = msgspec.msgpack.Decoder(list[_Quiet | _Eras | _Growths]).decode


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
    return _to_hex(state.item_sum + _hash(_header(state)))


def _to_hex(total: int) -> str:
    return (total % _MODULUS).to_bytes(_DIGEST_BYTES, "big").hex()


class Frozen(NamedTuple):
    """A copy of a state at one offset, which no later fold changes.

    Copying costs a fraction of encoding, which any thread may do afterwards. Keys are
    tuples of partition and fields, by group and topic; nothing is sorted.
    """

    header: list[Any]
    keys: dict[tuple[str, str], list[tuple[Any, ...]]]
    groups: list[list[Any]]
    quiet_until_ms: int | None
    staging: Staging | None
    eras: tuple[tuple[int, int], ...]
    layout: Layout | None
    growths: tuple[Growth, ...]

    def pieces(self) -> Iterator[bytes]:
        """Yield the canonical bytes in pieces."""
        yield _encode_list_head(5) + _encode(FORMAT_VERSION) + _encode(self.header)
        yield _encode_list_head(sum(map(len, self.keys.values())))
        rows = self._rows()
        while slice_ := b"".join(map(_encode, islice(rows, KEYS_PER_PIECE))):
            yield slice_
        yield _encode(sorted(self.groups)) + _encode(_operations(self))

    def digest(self) -> str:
        """Return the digest of the state at that offset."""
        items = chain(self._rows(), self.groups, _digested(self))
        return _to_hex(sum(map(_hash, items)) + _hash(self.header))

    def _rows(self) -> Iterator[list[Any]]:
        for name, keys in sorted(self.keys.items()):
            for row in sorted(keys, key=itemgetter(0)):
                yield ["key", *name, *row]


def freeze(state: WorldState) -> Frozen:
    """Copy the hard state.

    Raises:
        ValueError: The state has halted, so that the rest of the log is unknown.
    """
    if state.halted is not None:
        raise ValueError("a halted state cannot be snapshotted")
    keys: defaultdict[tuple[str, str], list[tuple[Any, ...]]] = defaultdict(list)
    for (group_id, topic, partition), known in state.keys.items():
        keys[group_id, topic].append((partition, *_row_of(known)))
    groups = [_group(name, group) for name, group in state.groups.items()]
    return Frozen(
        header=_header(state),
        keys=keys,
        groups=groups,
        quiet_until_ms=state.quiet_until_ms,
        staging=state.staging,
        eras=state.eras,
        layout=state.layout,
        growths=state.growths,
    )


def to_bytes(state: WorldState) -> bytes:
    """Return the canonical bytes of the hard state; raises as ``freeze`` does."""
    return b"".join(freeze(state).pieces())


def from_bytes(value: bytes) -> WorldState:
    """Return the state that canonical bytes hold; its soft state is empty.

    Raises:
        MalformedRecord: The bytes are not those of a canonical state.
    """
    try:
        state = _read(_decode(value))
        is_canonical = to_bytes(state) == value
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise MalformedRecord(f"not a snapshot: {error}") from error
    if not is_canonical:
        raise MalformedRecord("not a snapshot: not in canonical form")
    return state


def bytes_max(config: Config) -> int:
    """Return the most bytes of a state within the limits of a Config.

    The parts of an unfinished Reset are not included.
    """
    return (
        _REST_BYTES_MAX
        + ENDS_KEPT_MAX * _END_BYTES_MAX
        + config.limit("keys") * _KEY_BYTES_MAX
        + config.limit("groups") * _GROUP_BYTES_MAX
        + config.limit("operations")
        * (
            _OVER_BYTES_MAX
            + _FENCE_BYTES_MAX
            + _SCOPED_BYTES_MAX
            + _DIRECTIVE_BYTES_MAX
            + _GROWTH_BYTES_MAX
        )
    )


class Outline(NamedTuple):
    """The header and the sizes of canonical bytes, without their rows.

    Attributes:
        header: The state without keys, groups and operations.
        key_count: Number of keys.
        group_count: Number of groups.
        parts: Header, keys, groups and operations, undecoded.
    """

    header: WorldState
    key_count: int
    group_count: int
    parts: tuple[msgspec.Raw, ...]

    def digest(self) -> str:
        """Return the digest of the state, if the bytes are canonical.

        This takes a small part of the time to read the state.
        """
        header, *lists = self.parts
        rows = chain.from_iterable(map(_decode_rows, lists))
        return _to_hex(sum(map(_hash_bytes, chain([header], rows))))


def outline(value: bytes) -> Outline:
    """Read the parts of canonical bytes that are cheap to read.

    Raises:
        MalformedRecord: The bytes are not canonical, or the state has an unfinished
            Reset. Bytes that raise nothing may still be malformed.
    """
    try:
        parts = _decode_parts(value)
        header = _read_header(_decode_header(parts.header))
        _decode_quiet_and_eras(parts.operations)
        lists = (parts.keys, parts.groups)
        key_count, group_count = map(_count_of_list, map(bytes, lists))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedRecord(f"not a snapshot: {error}") from error
    raw = (parts.header, *lists, parts.operations)
    return Outline(
        header=header, key_count=key_count, group_count=group_count, parts=raw
    )


def _count_of_list(value: bytes) -> int:
    """Return the item count in the head of a MessagePack list."""
    head = value[0]
    if head & 0xF0 == 0x90:  # noqa: PLR2004 - MessagePack's fixarray
        return head & 0x0F
    if head not in {0xDC, 0xDD}:
        raise ValueError("not a MessagePack array")
    return int.from_bytes(value[1 : 3 if head == 0xDC else 5], "big")  # noqa: PLR2004


def _read(world: _World) -> WorldState:
    state = _read_header(world.header)
    state.groups = {row.group_id: _read_group(row) for row in world.groups}
    state.keys = {
        Key(row.group_id, row.topic, row.partition): _read_key(row)
        for row in world.keys
    }
    for row in world.operations:
        if isinstance(row, _Quiet):
            state.quiet_until_ms = row.until_ms
        elif isinstance(row, _Staging):
            state.staging = _read_staging(row)
        elif isinstance(row, _Eras):
            state.eras = row.eras
        elif isinstance(row, _Growths):
            state.growths = _read_growths(row, state)
        else:
            state.layout = _read_layout(row, state)
    state.rebuild_derived()
    over_count = sum(len(group.over) for group in state.groups.values())
    is_of_a_log = (
        len(state.epochs) == sum(known.epoch != 0 for known in state.keys.values())
        and len(state.over) == over_count
        and _are_fences_of_a_log(state)
        and all(epoch < state.next_offset for epoch in state.epochs)
        and all(
            known.offer is None or known.offer.offset < state.next_offset
            for known in state.keys.values()
        )
        and all(
            group.verdict is None or group.verdict.offset < state.next_offset
            for group in state.groups.values()
        )
        and _are_of_a_log(state)
    )
    if not is_of_a_log:
        raise ValueError("offsets that no log can produce")
    # Nothing is claimed or paused before there is a Config (PROTOCOL 2.3).
    if state.config is None and (state.keys or state.groups):
        raise ValueError("claims or pauses without a Config")
    return state


def _are_of_a_log(state: WorldState) -> bool:
    """Return whether offsets and eras of the Configs ascend (PROTOCOL 4.12)."""
    if state.config is None:
        return not state.eras
    ends = [*state.eras, (state.next_offset, state.config.era)]
    return all(a < c and b < d for (a, b), (c, d) in pairwise(ends))


def _are_fences_of_a_log(state: WorldState) -> bool:
    """Return whether fences name each process of a group once, oldest first."""
    rows = [group.fences for group in state.groups.values()]
    if len(state.fences) != sum(map(len, rows)):
        return False
    ends = [[*(fence.offset for fence in row), state.next_offset] for row in rows]
    return all(a < b for offsets in ends for a, b in pairwise(offsets))


def _hash(item: list[Any]) -> int:
    return _hash_bytes(_encode(item))


def _hash_bytes(value: bytes | msgspec.Raw) -> int:
    return int.from_bytes(blake2b(value, digest_size=_DIGEST_BYTES).digest(), "big")


def _item(state: WorldState, name: Key | str) -> list[Any] | None:
    if isinstance(name, Key):
        known = state.keys.get(name)
        return None if known is None else ["key", *name, *_row_of(known)]
    if name in OPERATIONS:
        tag = name.removeprefix("/")
        return next((row for row in _digested(state) if row[0] == tag), None)
    group = state.groups.get(name)
    return None if group is None else _group(name, group)


def _row_of(known: KeyState) -> tuple[Any, ...]:
    fields: tuple[Any, ...] = _fields_of(known)
    return fields if known.offer is None else (*fields, [[1, known.offer]])


def _operations(state: WorldState | Frozen) -> list[list[Any]]:
    quiet, staging = state.quiet_until_ms, state.staging
    rows: list[list[Any]] = [["eras", state.eras]] if state.eras else []
    rows += [] if state.layout is None else [["layout", *state.layout]]
    rows += [["growths", state.growths]] if state.growths else []
    rows += [] if quiet is None else [["quiet", quiet]]
    return rows if staging is None else [*rows, ["reset", *staging[:-1]]]


def _digested(state: WorldState | Frozen) -> list[list[Any]]:
    """Return the operations, with the running hash in place of the parts of a Reset."""
    rows, staging = _operations(state), state.staging
    return rows if staging is None else [*rows[:-1], [*rows[-1][:-1], staging.chain]]


def chained(chain: bytes, part: bytes) -> bytes:
    """Return the hash over parts, with one more part (PROTOCOL 7.6)."""
    return blake2b(chain + part, digest_size=_DIGEST_BYTES).digest()


def _encode_list_head(count: int) -> bytes:
    """Return the shortest MessagePack head of a list of ``count`` items."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _header(state: WorldState) -> list[Any]:
    return [
        "header",
        state.partition,
        state.next_offset,
        state.leader_epoch,
        state.epoch_time_ms,
        state.log_time_ms,
        state.append_time_ms,
        None if state.config is None else _frame_of(state.config),
    ]


@lru_cache(maxsize=_CONFIGS_MAX)
def _frame_of(config: Config) -> bytes:
    """Return the frame of a Config. Cached, because each digest needs it."""
    return encode(config)


def _group(group_id: str, group: GroupState) -> list[Any]:
    pause = group.pause
    row = [
        "group",
        group_id,
        None if pause is None else _lasting(pause)[:-1],
        group.over,
    ]
    # A pause of the whole group is written without its scope, which is None.
    schedule = [each[: None if each.scope else -1] for each in group.scheduled]
    more: list[list[Any]] = []
    more += [] if group.verdict is None else [[1, group.verdict]]
    more += [[2, schedule]] if schedule else []
    more += [[3, group.fences]] if group.fences else []
    more += [[4, list(map(_lasting, group.scoped))]] if group.scoped else []
    more += [[5, group.directives]] if group.directives else []
    more += [] if group.settings is None else [[6, group.settings]]
    more += [] if group.planned is None else [[7, group.planned]]
    return [*row, more] if more else row


def _lasting(pause: Pause) -> list[Any]:
    return [
        pause.op_id,
        pause.client_id,
        pause.incarnation,
        pause.seq,
        pause.incarnations,
        pause.until_ms,
        pause.scope,
    ]


def _read_header(row: _Header) -> WorldState:
    config = None if row.config is None else decode(row.config)
    if not isinstance(config, Config | None):
        raise ValueError("unreadable Config")  # noqa: TRY004 - of the bytes
    return WorldState(
        partition=row.partition,
        next_offset=row.next_offset,
        leader_epoch=row.leader_epoch,
        epoch_time_ms=row.epoch_time_ms,
        log_time_ms=row.log_time_ms,
        append_time_ms=row.append_time_ms,
        config=config,
    )


def _read_key(row: _Key) -> KeyState:
    names = [row.group_id]
    names += [] if row.owner is None else [row.owner[0]]
    names += [] if row.handoff is None else [row.handoff[0]]
    offer = row.more[0].offer if row.more else None
    names += [] if offer is None else [offer.successor]
    if not all(map(is_identifier, names)) or not is_key_topic(row.topic):
        raise ValueError("a name that no record can have")
    # PROTOCOL 10.4: an imported key, which nobody has claimed yet.
    if not row.epoch and (row.owner, row.resume_hash, row.more) != (None, None, ()):
        raise ValueError("a claim at offset 0")
    # PROTOCOL 9.4: only an owner offers, and whatever ends its claim ends the offer.
    if offer is not None and (row.owner is None or offer.offset <= row.epoch):
        raise ValueError("an offer that no owner made")
    return KeyState(
        owner=None if row.owner is None else Owner(*row.owner),
        epoch=row.epoch,
        epoch_leader_epoch=row.epoch_leader_epoch,
        renewed_ms=row.renewed_ms,
        heartbeat_interval_ms=row.heartbeat_interval_ms,
        active_ms=row.active_ms,
        position=row.position,
        granted=row.granted,
        topic_id=row.topic_id,
        retired_topic_ids=row.retired_topic_ids,
        resume_hash=row.resume_hash,
        lock=row.lock,
        previous=None if row.previous is None else Previous(*row.previous),
        handoff=row.handoff,
        offer=offer,
    )


def _read_group(row: _Group) -> GroupState:
    pause = row.pause
    found = GroupState(
        pause=None if pause is None else Pause(**msgspec.structs.asdict(pause)),
        over=row.over,
    )
    names = [row.group_id] if pause is None else [row.group_id, pause.client_id]
    for element in row.more:
        if isinstance(element, _Verdict):
            found.verdict = element.verdict
        elif isinstance(element, _Schedule):
            found.scheduled = element.pauses
            names += [each.client_id for each in found.scheduled]
        elif isinstance(element, _Scoped):
            found.scoped = tuple(
                Pause(**msgspec.structs.asdict(each)) for each in element.pauses
            )
            names += [each.client_id for each in found.scoped]
        elif isinstance(element, _Directives):
            found.directives = element.directives
            names += [each.client_id for each in found.directives]
            names += [each.client for each in found.directives if each.client]
        elif isinstance(element, _Settings):
            found.settings = element.settings
            policy = found.settings.policy
            names += [] if policy is None else [policy]
        elif isinstance(element, _Planned):
            found.planned = element.planned
        else:
            found.fences = element.fences
            names += [fence.client_id for fence in found.fences]
    if not all(map(is_identifier, names)):
        raise ValueError("a name that no record can have")
    if found.scheduled or found.scoped:
        _check_pauses(found)
    _check_directives(found)
    return found


def _check_pauses(group: GroupState) -> None:
    """Raise if no fold gives these pauses (PROTOCOL 4.14, 4.15)."""
    scheduled, scoped = group.scheduled, group.scoped
    every: list[Pause | Scheduled] = [*group.pauses, *scheduled]
    names = {each.op_id for each in every}
    begun = set() if group.pause is None else {group.pause.op_id}
    is_sound = (
        list(scheduled) == sorted(scheduled, key=itemgetter(0, 1))
        and all(each.begin_ms <= each.until_ms for each in scheduled)
        and list(scoped) == sorted(scoped, key=attrgetter("op_id"))
        and all(is_scope(each.scope) for each in every)
        and len(group.scoped_operations) <= SCOPED_MAX
        and len(names) == len(every)
        and not any(map(group.is_over, names - begun))
    )
    if not is_sound:
        raise ValueError("pauses that no log can produce")


def _check_directives(group: GroupState) -> None:
    """Raise if no fold gives these directives (PROTOCOL 9.7)."""
    every = group.directives
    is_sound = (
        all(one.op_id < other.op_id for one, other in pairwise(every))
        and all((each.client is None) != (each.host is None) for each in every)
        and not any(group.is_over(each.op_id) for each in every)
    )
    if not is_sound:
        raise ValueError("directives that no log can produce")


def _read_layout(row: _Layout, state: WorldState) -> Layout:
    """Return the open change; raise if no fold gives it (PROTOCOL 10)."""
    config = state.config
    places = (
        ()
        if config is None
        else sources_of(
            state.partition, from_count=row.from_count, to_count=config.partition_count
        )
    )
    is_sound = (
        config is not None
        and is_step(row.from_count, config.partition_count)
        and state.partition < max(row.from_count, config.partition_count)
        and tuple(source.partition for source in row.sources) == places
        and row.offset < state.next_offset
    )
    if not is_sound:
        raise ValueError("a change of the partition count that no log can produce")
    return Layout(row.op_id, row.from_count, row.offset, row.sources)


def _read_growths(row: _Growths, state: WorldState) -> tuple[Growth, ...]:
    """Return the growths of data topics; raise if no fold gives them (9.10)."""
    growths = row.growths
    is_sound = (
        state.config is not None
        and state.partition == 0
        and are_of_a_log(growths, next_offset=state.next_offset)
        and all(is_topic(each.topic) for each in growths)
    )
    if not is_sound:
        raise ValueError("growths of data topics that no log can produce")
    return growths


def _read_staging(row: _Staging) -> Staging:
    if not is_identifier(row.client_id):
        raise ValueError("a name that no record can have")
    chain = b""
    for part in row.parts:
        chain = chained(chain, part)
    return Staging(
        op_id=row.op_id,
        client_id=row.client_id,
        incarnation=row.incarnation,
        part_count=row.part_count,
        size_bytes=row.size_bytes,
        digest=row.digest,
        until_ms=row.until_ms,
        parts=row.parts,
        chain=chain,
    )
