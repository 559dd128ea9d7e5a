"""Writes records as programs of a later level do, before or after their level.

Each would do harm if an older reader interpreted it as a record of its own level: it
releases, claims, rewinds, grants, pauses or replaces the keys of a process.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from kafka_marshal.protocol.checkpoints import checkpoint_key, split
from kafka_marshal.protocol.codec import encode, header_of, kind_of, uvarint
from kafka_marshal.protocol.hashing import RESERVED_TOPICS
from kafka_marshal.protocol.records import (
    BatchHeartbeat,
    CheckpointBegin,
    CheckpointChunk,
    CheckpointEnd,
    ClaimingMessages,
    ClaimingPartition,
    Config,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Reset,
    ResolvePosition,
    StagedTopic,
    StagePosition,
)
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import Key, Owner
from simulator.base import GROUP
from simulator.checkers import Folded
from simulator.levels import BEYOND, FRAME_VERSION, level_of
from simulator.plan import Fault, chance
from simulator.world import World

BATCH_MAX = 5
FAR = 10**6
LEVEL = 9
LATER_TYPES = (25, 30, 29, 26, 27, 28, 134, 133, 200, 2**20)
MOMENTS: Sequence[str | None] = (None, "claimed", "granted", "renewed", "paused")
"""When to write: at once, or right after the next record with this effect."""
WRITES_BEHIND = 12
OPERATION = b"newer operation."


class Newer:
    """Writes records above the level in force."""

    def __init__(self, world: World) -> None:
        """Start without records to write."""
        self._world = world
        self._waiting: list[tuple[str, Fault]] = []

    # --- when

    def strike(self, fault: Fault) -> None:
        """Write a few such records, now or right after a later record."""
        moment = MOMENTS[fault.who % len(MOMENTS)]
        if moment is None:
            self._write_batch(fault, fault.who % self._world.plan.coordinators)
        else:
            self._waiting.append((moment, fault))

    def on_fold(self, folded: Folded) -> None:
        """Write the records that waited for the effect of this one."""
        effect, world = folded.transition.effect, self._world
        for item in [each for each in self._waiting if each[0] == effect]:
            self._waiting.remove(item)
            # Not now: the fold has not reached the log's end yet.
            write = partial(self._write_batch, item[1], folded.partition)
            world.loop.at(world.now_ms, write)

    def follow(self, fault: Fault, numbers: Sequence[int]) -> None:
        """Let programs of that level continue, once a Config has raised it."""
        world = self._world
        rng = chance(world.plan.seed, f"behind/{fault.number}")
        for at in range(WRITES_BEHIND if numbers else 0):
            number = rng.choice(numbers)
            write = partial(self._write_behind, number, f"{fault.number}/{at}")
            world.loop.at(world.now_ms + rng.randint(0, 2 * world.plan.h_ms), write)
        for number in numbers:
            keep = partial(self._write_checkpoint, number, f"{fault.number}/{number}")
            world.loop.at(world.now_ms + world.plan.h_ms // 2, keep)

    # --- what

    def _write_batch(self, fault: Fault, number: int) -> None:
        rng = chance(self._world.plan.seed, f"above/{fault.number}")
        for _ in range(1 + fault.size % BATCH_MAX):
            self._write(number, self._above(number, rng))

    def _write_behind(self, number: int, name: str) -> None:
        """Write a record that older readers know, and must not apply behind a halt."""
        if number not in self._world.levels.stops:
            return  # not behind it yet
        rng = chance(self._world.plan.seed, f"behind/{name}")
        self._write(number, self._harm(number, rng))

    def _write_checkpoint(self, number: int, name: str) -> None:
        """Write a checkpoint behind a halt, from which no older reader may begin."""
        world = self._world
        if number not in world.levels.stops:
            return
        rng = chance(world.plan.seed, f"checkpoint/{name}")
        owner, checkpoint_id = Owner("newer", rng.randbytes(16)), rng.randbytes(16)
        state, key = world.levels.state_behind(number), checkpoint_key(number)
        config, log = state.config, world.cluster.kafka.log(world.cluster.place(number))
        assert config is not None
        sender: dict[str, Any] = {
            "client_id": owner.client_id,
            "group_id": key.group_id,
            "incarnation": owner.incarnation,
        }
        epoch = self._write(
            number,
            _claim(owner, key, generation=config.generation),
        )
        begin = CheckpointBegin(
            **sender, seq=2, epoch=epoch, checkpoint_id=checkpoint_id
        )
        offset = self._write(number, begin)
        state.next_offset, state.leader_epoch = offset + 1, log.leader_epoch
        state.groups.setdefault(key.group_id, GroupState())
        now_ms, h_ms = state.now_ms, config.heartbeat_interval_ms
        known = KeyState(
            owner=owner,
            epoch=epoch,
            epoch_leader_epoch=log.leader_epoch,
            renewed_ms=now_ms,
            heartbeat_interval_ms=h_ms,
            active_ms=now_ms,
        )
        state.keys[key] = known
        state.rebuild_derived()
        value, digest_ = to_bytes(state), bytes.fromhex(digest(state))
        parts = split(value)
        for at, part in enumerate(parts):
            chunk = CheckpointChunk(
                **sender,
                seq=3 + at,
                epoch=epoch,
                checkpoint_id=checkpoint_id,
                number=at,
                data=part,
            )
            self._write(number, chunk)
        end = CheckpointEnd(
            **sender,
            seq=3 + len(parts),
            epoch=epoch,
            checkpoint_id=checkpoint_id,
            begin_offset=offset,
            begin_leader_epoch=log.leader_epoch,
            part_count=len(parts),
            size_bytes=len(value),
            digest=digest_,
        )
        self._write(number, end)

    def _write(self, number: int, record: Record | bytes) -> int:
        cluster = self._world.cluster
        value = record if isinstance(record, bytes) else encode(record)
        offset = cluster.kafka.produce(cluster.place(number), value)
        text = f"a newer program writes {value[:3].hex()} at {number}/{offset}"
        self._world.trace(text)
        return offset

    def _above(self, number: int, rng: random.Random) -> bytes:
        record = self._harm(number, rng)
        value = encode(record)
        if level_of(value) > self._world.levels.in_force(number):
            return value
        kind = kind_of(record)
        how = rng.choice(["version", "version", "type", "frame"])
        frame, number_, version = FRAME_VERSION, kind.number, 0
        if how == "version":
            version = rng.randint(1, 300)
        elif how == "type":
            number_ = rng.choice(LATER_TYPES)
        else:
            frame = 2
        header = b"".join(map(uvarint, (frame, number_, version)))
        payload = value[len(header_of(type(record))) :]
        if rng.random() < 0.5:  # noqa: PLR2004 - with a field more, or not
            fields = msgspec.msgpack.decode(payload)
            payload = msgspec.msgpack.encode([*fields, rng.choice([None, 0, b"new"])])
        assert level_of(header + payload) == BEYOND
        return header + payload

    def _harm(self, number: int, rng: random.Random) -> Record:
        """Return a record that would do harm, mostly with an owner as its sender."""
        state = self._world.watcher.worlds[number]
        owned = sorted((k, s) for k, s in state.keys.items() if s.owner is not None)
        if not owned or rng.random() < 0.2:  # noqa: PLR2004 - a stranger's
            return self._strangers(state, rng)
        self._world.coverage.note("above_of_owner")
        key, known = rng.choice(owned)
        return _owners(state, key, known, rng=rng)

    def _strangers(self, state: WorldState, rng: random.Random) -> Record:
        owner = Owner(f"newer{rng.randrange(FAR)}", rng.randbytes(16))
        config = state.config
        generation = 1 if config is None else config.generation
        keys = [*self._world.keys_of(state.partition), *sorted(state.keys)]
        key = rng.choice(keys) if keys else Key(GROUP, "t", 0)
        harms: list[Record] = [
            _claim(owner, key, generation=generation),
            ReleaseGroup(
                client_id=owner.client_id,
                group_id=GROUP,
                incarnation=owner.incarnation,
                seq=1,
                op_id=rng.randbytes(16),
                msg_expire_time=state.append_time_ms + FAR,
                reason="upgrade",
            ),
        ]
        if config is not None:
            harms.append(_raised(config))
            harms.append(_reset(state, config, owner))
        return rng.choice(harms)


def _claim(owner: Owner, key: Key, *, generation: int) -> ClaimingPartition:
    return ClaimingPartition(
        client_id=owner.client_id,
        group_id=key.group_id,
        incarnation=owner.incarnation,
        seq=1,
        generation=generation,
        topic=key.topic,
        partition=key.partition,
        topic_id=None,
        resume_hash=None,
        expected_epoch=None,
        resume=None,
    )


def _raised(config: Config) -> Config:
    return msgspec.structs.replace(
        config,
        generation=config.generation + 1,
        era=config.era + 1,
        feature_level=LEVEL,
    )


def _reset(state: WorldState, config: Config, owner: Owner) -> Reset:
    """Return a Reset that would replace a state by one without keys."""
    bare = WorldState(state.partition)
    bare.config, bare.next_offset = config, state.next_offset
    bare.leader_epoch, bare.log_time_ms = state.leader_epoch, state.log_time_ms
    data = to_bytes(bare)
    return Reset(
        client_id=owner.client_id,
        group_id="marshal",
        incarnation=owner.incarnation,
        seq=1,
        op_id=OPERATION,
        number=0,
        part_count=1,
        size_bytes=len(data),
        digest=bytes.fromhex(digest(bare)),
        data=data,
    )


def _owners(
    state: WorldState, key: Key, known: KeyState, *, rng: random.Random
) -> Record:
    """Return a harmful record with an owner as its sender."""
    owner, epoch = known.owner, known.epoch
    assert owner is not None
    seq = rng.randrange(FAR)
    sender: dict[str, Any] = {
        "client_id": owner.client_id,
        "group_id": key.group_id,
        "incarnation": owner.incarnation,
        "seq": seq,
    }
    named: dict[str, Any] = {
        "topic": key.topic,
        "partition": key.partition,
        "epoch": epoch,
        **sender,
    }
    head = known.next_unclaimed() or 0
    harms: list[Record] = [
        Heartbeat(**named, position=rng.choice([0, head + FAR]), rewind=True),
        ReleasingPartition(
            **named,
            position=rng.choice([None, head + FAR]),
            successor=None,
            reason="upgrade",
        ),
        ReleasingPartition(**named, position=None, successor="newer", reason=None),
        ClaimingMessages(
            **named,
            grantee=rng.randbytes(16),
            first=head,
            proposed_last_offset=head + rng.randrange(9),
        ),
        BatchHeartbeat(**sender, beats=((epoch, head + FAR),)),
        CheckpointBegin(**sender, epoch=epoch, checkpoint_id=rng.randbytes(16)),
        ResolvePosition(
            **sender, op_id=OPERATION, commit=False, decided=None, reason=None
        ),
    ]
    if key.topic not in RESERVED_TOPICS:
        places = ((key.partition, 0),)
        staged = (StagedTopic(key.topic, None, places),)
        harms.append(
            StagePosition(
                **sender, op_id=OPERATION, plan_digest=OPERATION, topics=staged
            )
        )
    if state.config is not None:
        harms.append(_reset(state, state.config, owner))
    return rng.choice(harms)
