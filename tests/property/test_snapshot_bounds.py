"""The snapshot of a state within the limits of its Config has a bounded size."""

import msgspec
from logkit import (
    INC,
    LOCK,
    OP,
    Log,
    config,
    hashed,
    ident,
)

from kafka_marshal.protocol import snapshot
from kafka_marshal.protocol.items import (
    Fence,
    Offer,
    Pause,
    Planned,
    Scheduled,
    Verdict,
)
from kafka_marshal.protocol.records import SCOPE_TOPICS_MAX, ScopedTopic
from kafka_marshal.protocol.settings import Settings
from kafka_marshal.protocol.snapshot import (
    bytes_max,
    from_bytes,
    to_bytes,
)
from kafka_marshal.protocol.state import (
    SCHEDULED_MAX,
    SCOPED_MAX,
    GroupState,
    KeyState,
    Previous,
    WorldState,
)
from kafka_marshal.protocol.types import Key, Owner

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def biggest_group(group, name):
    far = 2**63 - 1
    scope = tuple(
        ScopedTopic(f"{n:02}" + "t" * 247, tuple(range(2**31 - 16, 2**31)))
        for n in range(SCOPE_TOPICS_MAX)
    )
    return GroupState(
        Pause(
            op_id=OP,
            client_id="a" + name,
            incarnation=INC,
            seq=far,
            incarnations=(INC,) * 16,
            until_ms=far,
        ),
        tuple((far - n, OP) for n in range(64, 0, -1)),
        Verdict(OP, OP, 2**31 - 1, far - 1, is_resolved=False),
        tuple(
            Scheduled(far, ident(str(n)), "a" + name, INC, far, far)
            for n in range(SCHEDULED_MAX)
        ),
        tuple(
            Fence(far - n, "f" + name, f"{group}{n}".encode().ljust(16))
            for n in range(64, 0, -1)
        ),
        tuple(
            Pause(
                op_id=f"scoped{n}".encode().ljust(16),
                client_id="a" + name,
                incarnation=INC,
                seq=far,
                incarnations=(INC,) * 16,
                until_ms=far,
                scope=scope,
            )
            for n in range(SCOPED_MAX)
        ),
        settings=Settings(
            2**31 - 1, "p" + name, 2**31 - 1, far, 2**31 - 1, 2**31 - 1, far
        ),
        planned=Planned(far, -far),
    )


def test_the_largest_state_within_the_limits_fits_the_byte_bound():
    far, name, topic = 2**63 - 1, "n" * 199, "t" * 249
    long_ago = -(2**63)
    settled = config(keys=3, groups=2, operations=128, era=2**32 - 1)
    settled = msgspec.structs.replace(
        settled,
        format_id=INC,
        cluster_id="\U0001f600" * 255,
        heartbeat_interval_ms=2**31 - 1,
        partition_count=2**31 - 1,
        generation=2**31 - 1,
        tags=b"t" * 1_024,
    )
    state = WorldState(
        2**31 - 1, 2**63, 2**31 - 1, long_ago, long_ago, far, config=settled
    )
    state.eras = tuple((far - 64 + n, 2**32 - 65 + n) for n in range(64))
    state.quiet_until_ms = long_ago
    for group in "ab":
        state.groups[group + name] = biggest_group(group, name)
    for number in range(3):
        key = Key("a" + name, topic, 2**31 - 1 - number)
        state.keys[key] = KeyState(
            owner=Owner("o" + name, INC),
            epoch=far - number - 1,
            epoch_leader_epoch=2**31 - 1,
            renewed_ms=long_ago,
            heartbeat_interval_ms=far,
            active_ms=long_ago,
            position=2**63,
            granted=2**63,
            topic_id=OP,
            retired_topic_ids=(OP,) * 4,
            resume_hash=hashed(OP),
            lock=LOCK,
            previous=Previous(OP, 2**63, 2**63),
            handoff=("s" + name, long_ago),
        )
    value = to_bytes(state)
    assert from_bytes(value).keys == state.keys
    row = len(pack(unpack(value)[2][0]))
    assert row <= snapshot._KEY_BYTES_MAX
    remembered = snapshot._OVER_BYTES_MAX + snapshot._FENCE_BYTES_MAX
    group = len(pack(unpack(value)[3][0])) - 64 * remembered
    scopes = SCOPED_MAX * snapshot._SCOPED_BYTES_MAX
    assert scopes - 8 * 900 < 8 * len(pack(unpack(value)[3][0][4][3][1][0])) <= scopes
    group -= scopes
    assert group <= snapshot._GROUP_BYTES_MAX
    rest = len(value) - 3 * row - 2 * len(pack(unpack(value)[3][0]))
    assert rest <= snapshot._REST_BYTES_MAX
    assert len(value) <= bytes_max(settled)


def test_a_key_with_the_longest_offer_fits_the_byte_bound():
    """An owned key has neither a lock nor a preferred successor."""
    name, far = "n" * 199, 2**63 - 1
    log = Log()
    log.claimed()
    known = KeyState(
        owner=Owner("o" + name, INC),
        epoch=2**62,
        epoch_leader_epoch=2**31 - 1,
        renewed_ms=far,
        heartbeat_interval_ms=far,
        active_ms=far,
        position=2**63,
        granted=2**63,
        topic_id=OP,
        retired_topic_ids=(OP,) * 4,
        resume_hash=hashed(OP),
        previous=Previous(OP, 2**63, 2**63),
        offer=Offer("s" + name, far, far - 1, INC),
    )
    state = WorldState(0, next_offset=far, config=log.state.config)
    state.keys[Key("g" + name, "t" * 249, 2**31 - 1)] = known
    state.groups["g" + name] = GroupState()
    state.rebuild_derived()
    value = to_bytes(state)
    assert from_bytes(value).keys == state.keys
    assert len(pack(unpack(value)[2][0])) <= snapshot._KEY_BYTES_MAX
