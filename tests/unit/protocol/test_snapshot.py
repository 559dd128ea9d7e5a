from hashlib import blake2b

import msgspec
import pytest
from logkit import (
    INC,
    KEY,
    LOCK,
    OP,
    PLAN,
    SECRET,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    fold,
    hashed,
    ident,
    messages,
    pause,
    release,
    resets,
)

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol import snapshot
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import (
    bytes_max,
    chained,
    digest,
    freeze,
    from_bytes,
    outline,
    to_bytes,
)
from kafka_marshal.protocol.state import (
    QUIET,
    GroupState,
    KeyState,
    Pause,
    Previous,
    WorldState,
)
from kafka_marshal.protocol.types import Key, Owner

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
SECOND = Key("g", "t", 1)
THIRD = Key("h", "t", 2)


def story():
    """Return a log that touches every part of the canonical form."""
    log = Log(forget_ms=50_000)
    first = log.claimed(topic_id=ident("one"), resume_hash=hashed(SECRET))
    log.append(messages(first, 3, 9), after=5)
    log.append(release(first, 11, successor="c2"))
    log.append(claim("c2", topic_id=ident("two"), expected=first))
    log.claimed("c3", key=SECOND)
    log.append(release(log.claimed("c1", key=THIRD), 7, key=THIRD))
    log.append(pause(START_MS + H))
    log.append(pause(0, seq=1))
    log.append(pause(START_MS + 9 * H, op=ident("second"), seq=1), after=1)
    log.append(pause(START_MS + 9 * H, op=ident("second"), client="other"), epoch=2)
    log.key(SECOND).lock = LOCK
    log.key(SECOND).previous = Previous(OP, 4, None)
    log.state.dirty[SECOND] = None
    return log


def staged():
    """Return a log in which everything is under way that is neither key nor group."""
    log = Log(level=2)
    log.claimed()
    log.claimed("c2", key=THIRD)
    log.claimed("c3", key=SECOND)
    assert log.outcome_of(resets(bytes(200), "00" * 16)[0]) == "reset_staged"
    log.state.quiet_until_ms = START_MS + 9 * H
    log.state.dirty[QUIET] = None
    return log


@pytest.mark.parametrize("made", [story, staged])
def test_a_fold_does_not_change_a_frozen_state(made, monkeypatch):
    log = made()
    expected, expected_digest = to_bytes(log.state), digest(log.state)
    frozen = freeze(log.state)
    log.append(pause(log.now_ms + H, op=ident("third"), group="z"))
    log.append(beat(1, 77), after=1)
    assert to_bytes(log.state) != expected
    monkeypatch.setattr(snapshot, "KEYS_PER_PIECE", 1)
    pieces = list(frozen.pieces())
    # Two heads, the groups, and no more than one key in each of the others.
    assert len(pieces) == 3 + len(from_bytes(expected).keys)
    assert b"".join(pieces) == expected
    assert frozen.digest() == expected_digest


@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_a_list_begins_as_messagepack_has_it(count):
    whole = pack([0] * count)
    assert snapshot._encode_list_head(count) == whole[: len(whole) - count]


def test_bytes_read_back_as_the_same_world():
    state = story().state
    back = from_bytes(to_bytes(state))
    assert back == state
    assert to_bytes(back) == to_bytes(state)
    assert digest(back) == digest(state)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(WorldState(0), id="nothing yet"),
        pytest.param(Log(3).state, id="only a Config"),
        pytest.param(WorldState(1, next_offset=9, leader_epoch=4), id="only an end"),
    ],
)
def test_small_worlds_read_back(state):
    assert from_bytes(to_bytes(state)) == state


def test_the_canonical_form_is_these_tuples():
    state = story().state
    version, header, keys, groups, operations = unpack(to_bytes(state))
    assert (version, operations) == (1, [])
    assert header[:3] == ["header", 0, 12]
    # The last entry opened a leader epoch, so log time did not advance with it.
    assert header[3:7] == [2, START_MS + 6, START_MS + 6, START_MS + 6]
    assert header[7] == encode(state.config)
    assert [key[1:4] for key in keys] == [["g", "t", 0], ["g", "t", 1], ["h", "t", 2]]
    epoch = state.keys[KEY].epoch
    assert (
        keys[0]
        == [
            "key",
            "g",
            "t",
            0,
            ["c2", ident("c2")],
            epoch,
            0,
            START_MS + 5,
            H,
            START_MS + 5,
            None,
            None,
            ident("two"),
            [ident("one")],
            None,
            None,
            None,
            None,
        ]
        or state.keys[KEY].handoff
    )
    assert keys[1][15:17] == [[OP, PLAN, 4, None], [OP, 4, None]]
    assert keys[2][4] is None
    held = state.groups["g"].pause
    assert groups[0] == [
        "group",
        "g",
        [
            ident("second"),
            "other",
            ident("other"),
            0,
            [ident("admin"), ident("other")],
            held.until_ms,
        ],
        [[9, OP]],
    ]
    assert groups[1] == ["group", "h", None, []]


def test_the_digest_is_the_sum_of_the_hashes_of_all_tuples():
    state = story().state
    _, header, keys, groups, _ = unpack(to_bytes(state))
    total = sum(
        int.from_bytes(blake2b(pack(item), digest_size=16).digest(), "big")
        for item in [header, *keys, *groups]
    )
    assert digest(state) == f"{total % 2**128:032x}"


def test_the_digest_follows_every_change():
    log = Log(forget_ms=100)
    seen = set()
    for what in (
        claim(),
        beat(1, 5),
        release(1),
        pause(START_MS + 50),
        pause(0, seq=1),
        b"",
        claim("c2", key=THIRD),
    ):
        log.append(what, after=40)
        assert digest(log.state) == digest(fold(log.entries))
        seen.add(digest(log.state))
    assert len(seen) == 7
    assert KEY not in log.state.keys


def test_a_digest_that_nothing_changed_is_the_same():
    state = story().state
    assert digest(state) == digest(state)
    assert state.dirty == {}


def test_soft_state_is_in_neither():
    log = story()
    before = digest(log.state), to_bytes(log.state)
    log.state.soft.counters["held"] = 99
    log.state.soft.undecodable.clear()
    assert (digest(log.state), to_bytes(log.state)) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("partition", 1, id="T"),
        pytest.param("next_offset", 99, id="next offset"),
        pytest.param("leader_epoch", 99, id="leader epoch"),
        pytest.param("epoch_time_ms", 99, id="W"),
        pytest.param("log_time_ms", 99, id="C"),
        pytest.param("append_time_ms", 99, id="M"),
        pytest.param("config", config(era=9), id="config"),
    ],
)
def test_the_digest_covers_the_header(name, value):
    state = story().state
    before = digest(state)
    setattr(state, name, value)
    assert digest(state) != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("owner", None, id="owner"),
        pytest.param("epoch", 99, id="epoch"),
        pytest.param("epoch_leader_epoch", 99, id="leader epoch"),
        pytest.param("renewed_ms", 99, id="renewed"),
        pytest.param("heartbeat_interval_ms", 99, id="H"),
        pytest.param("active_ms", 99, id="active"),
        pytest.param("position", 99, id="position"),
        pytest.param("granted", 99, id="granted"),
        pytest.param("topic_id", INC, id="topic_id"),
        pytest.param("retired_topic_ids", (), id="retired"),
        pytest.param("resume_hash", hashed(INC), id="resume_hash"),
        pytest.param("lock", LOCK, id="lock"),
        pytest.param("previous", Previous(OP, 1, 2), id="previous"),
        pytest.param("handoff", ("c9", 9), id="handoff"),
    ],
)
def test_the_digest_covers_every_field_of_a_key(name, value):
    log = Log()
    epoch = log.claimed(topic_id=ident("one"))
    log.append(release(epoch))
    log.claimed(topic_id=ident("two"), expected=epoch)
    before = digest(log.state)
    setattr(log.key(), name, value)
    log.state.dirty[KEY] = None
    assert digest(log.state) != before


def test_a_halted_world_has_a_digest_and_no_bytes():
    log = story()
    log.append(config(2, era=2, level=3))
    assert len(digest(log.state)) == 32
    with pytest.raises(ValueError, match="halted"):
        to_bytes(log.state)


def test_a_state_read_back_folds_the_same():
    log = story()
    back = from_bytes(to_bytes(log.state))
    for what in (beat(4, 5), b"", release(5, client="c3", key=SECOND), claim("c9")):
        transitions = log.append(what, after=H)
        assert apply(back, log.entries[-1]) == transitions
        assert to_bytes(back) == to_bytes(log.state)


# --- What is no snapshot ---


def changed(change):
    fields = unpack(to_bytes(story().state))
    change(fields)
    return pack(fields)


def put(*path):
    *way, last, value = path

    def change(fields):
        for step in way:
            fields = fields[step]
        fields[last] = value

    return change


BAD = [
    pytest.param(b"", id="empty"),
    pytest.param(b"\xc1", id="no MessagePack"),
    pytest.param(b"\x91" * 5_000, id="too deep"),
    pytest.param(pack(5), id="no array"),
    pytest.param(pack(None), id="nil"),
    pytest.param(pack([]), id="too few"),
    pytest.param(to_bytes(story().state) + b"\xc0", id="too long"),
    pytest.param(to_bytes(story().state)[:-1], id="too short"),
    pytest.param(changed(put(0, 2)), id="unknown version"),
    pytest.param(changed(put(4, [1])), id="unknown operations"),
    pytest.param(changed(put(1, 0, "head")), id="no header"),
    pytest.param(changed(put(1, ["header"])), id="short header"),
    pytest.param(changed(put(1, 7, b"\x01")), id="unreadable Config"),
    pytest.param(changed(put(1, 7, 5)), id="a Config that is a number"),
    pytest.param(changed(put(1, 7, None)), id="claims without a Config"),
    pytest.param(changed(put(2, 0, 0, "cle")), id="no key"),
    pytest.param(changed(put(2, 0, ["key", "g", "t", 0])), id="short key"),
    pytest.param(changed(put(2, 0, 4, 7)), id="an owner that is a number"),
    pytest.param(changed(put(2, 0, 5, [])), id="an epoch that is a list"),
    pytest.param(changed(put(2, 0, 13, None)), id="no retired ids"),
    pytest.param(changed(put(2, 0, 16, 7)), id="a previous that is a number"),
    pytest.param(changed(put(3, 0, 0, "grp")), id="no group"),
    pytest.param(changed(put(3, 0, 2, [1])), id="short pause"),
    pytest.param(changed(put(3, [])), id="groups missing"),
    pytest.param(changed(lambda fields: fields[2].reverse()), id="keys out of order"),
    pytest.param(changed(lambda fields: fields[3].reverse()), id="groups out of order"),
    pytest.param(
        changed(lambda fields: fields[2].append(fields[2][-1])), id="a key twice"
    ),
    pytest.param(
        b"\x95\xd0" + to_bytes(story().state)[1:], id="an integer longer than needed"
    ),
]


@pytest.mark.parametrize("value", BAD)
def test_invalid_bytes_are_no_snapshot(value):
    with pytest.raises(MalformedRecord, match="not a snapshot"):
        from_bytes(value)


def test_every_cut_is_no_snapshot():
    value = to_bytes(story().state)
    for size in range(len(value)):
        with pytest.raises(MalformedRecord):
            from_bytes(value[:size])


def respelled(change):
    """Return the bytes of the story after a change of its rows."""
    rows = unpack(to_bytes(story().state))
    change(rows)
    return pack(rows)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rows: rows[2][0].__setitem__(10, "7"), id="position"),
        pytest.param(lambda rows: rows[2][0].__setitem__(10, -1), id="below zero"),
        pytest.param(lambda rows: rows[2][0].__setitem__(5, 12), id="epoch ahead"),
        pytest.param(lambda rows: rows[2][0].__setitem__(1, "a/b"), id="group"),
        pytest.param(lambda rows: rows[2][0].__setitem__(2, "a/b"), id="topic"),
        pytest.param(lambda rows: rows[2][0].__setitem__(7, 2**63), id="time"),
        pytest.param(lambda rows: rows[3][0].__setitem__(1, "a/b"), id="its group"),
        pytest.param(lambda rows: rows[3][0][2].__setitem__(1, "a/b"), id="admin"),
        pytest.param(lambda rows: rows[3][0].__setitem__(3, [[3, OP]] * 2), id="over"),
        pytest.param(lambda rows: rows[4].append(["quiet"]), id="quiet"),
        pytest.param(
            lambda rows: rows[4].append(
                ["reset", OP, "a/b", INC, 1, 1, OP, 1, [b"part"]]
            ),
            id="sender of a reset",
        ),
        pytest.param(
            lambda rows: rows[4].extend([["quiet", 1], ["quiet", 1]]), id="twice"
        ),
        pytest.param(lambda rows: rows[4].append(["eras", []]), id="no eras"),
        pytest.param(lambda rows: rows[4].append(["eras", [[1, 1]]]), id="same era"),
        pytest.param(
            lambda rows: rows[4].append(["eras", [[99, 0]]]), id="an era ahead"
        ),
        pytest.param(
            lambda rows: rows[4].append(["eras", [[n, n - 70] for n in range(65)]]),
            id="era of a number below zero",
        ),
    ],
)
def test_an_impossible_state_is_no_snapshot(change):
    assert from_bytes(respelled(lambda _: None)) == story().state
    with pytest.raises(MalformedRecord):
        from_bytes(respelled(change))


def test_eras_without_a_config_are_no_snapshot():
    rows = unpack(to_bytes(WorldState(0)))
    rows[4].append(["eras", [[0, 0]]])
    with pytest.raises(MalformedRecord):
        from_bytes(pack(rows))


def test_eras_of_earlier_configs_are_part_of_it():
    log = Log()
    for generation in (2, 3):
        before = digest(log.state)
        log.append(config(generation, era=generation))
        assert digest(log.state) != before
    assert unpack(to_bytes(log.state))[4] == [["eras", [[1, 1], [2, 2]]]]
    back = from_bytes(to_bytes(log.state))
    assert (back, digest(back)) == (log.state, digest(log.state))
    # More than a fold keeps is no state that a fold gives.
    log.state.eras = tuple((n, n) for n in range(-63, 2))
    with pytest.raises(MalformedRecord):
        from_bytes(to_bytes(log.state))


def test_a_reset_under_way_and_the_quiet_behind_one_are_part_of_it():
    log = Log(level=2)
    records = resets(to_bytes(log.state), digest(log.state), bytes_max=20)
    for record in (*records, *records[:2]):
        log.append(record)
    log.append(b"")
    state = log.state
    assert (state.quiet_until_ms, len(state.staging.parts)) == (START_MS + 2 * H + 1, 2)
    expected_digest = digest(state)
    back = from_bytes(to_bytes(state))
    assert back == state
    assert (digest(back), back.ends_ms) == (expected_digest, state.ends_ms)
    *_, operations = unpack(to_bytes(state))
    assert operations == [
        ["quiet", START_MS + 2 * H + 1],
        [
            *("reset", OP, "admin", ident("admin"), len(records)),
            *(records[0].size_bytes, records[0].digest, state.staging.until_ms),
            [record.data for record in records[:2]],
        ],
    ]
    chain = blake2b(records[0].data, digest_size=16).digest()
    chain = blake2b(chain + records[1].data, digest_size=16).digest()
    assert chained(chained(b"", records[0].data), records[1].data) == chain
    without = from_bytes(pack([*unpack(to_bytes(state))[:-1], []]))
    assert digest(without) != expected_digest
    item = pack([*operations[1][:-1], chain])
    quiet = pack(operations[0])
    sums = [
        int.from_bytes(blake2b(each, digest_size=16).digest(), "big")
        for each in (item, quiet)
    ]
    assert (int(digest(without), 16) + sum(sums)) % 2**128 == int(expected_digest, 16)


# --- What is read before the rows are ---


def test_an_outline_equals_the_state():
    state = story().state
    known = outline(to_bytes(state))
    assert (known.key_count, known.group_count) == (len(state.keys), len(state.groups))
    assert known.header.config == state.config
    assert known.header.next_offset == state.next_offset
    assert known.digest() == digest(state)


def test_an_outline_covers_eras_and_quiet():
    log = Log(level=2)
    log.append(config(2, era=2, level=2))
    for record in resets(to_bytes(log.state), digest(log.state)):
        log.append(record)
    assert log.state.quiet_until_ms is not None
    assert outline(to_bytes(log.state)).digest() == digest(log.state)


@pytest.mark.parametrize("count", [0, 15, 16, 2**16 - 1, 2**16])
def test_rows_are_counted_before_they_are_read(count):
    rows = unpack(to_bytes(Log().state))
    rows[2] = [None] * count
    assert outline(pack(rows)).key_count == count


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(put(0, 2), id="unknown version"),
        pytest.param(put(1, 0, "head"), id="no header"),
        pytest.param(put(1, 7, b"?"), id="no Config"),
        pytest.param(put(2, 5), id="keys that are a number"),
        pytest.param(put(3, None), id="groups that are nil"),
        pytest.param(put(4, [1]), id="unknown operations"),
        pytest.param(put(4, [["reset"]]), id="a Reset under way"),
    ],
)
def test_invalid_bytes_have_no_outline(change):
    with pytest.raises(MalformedRecord, match="not a snapshot"):
        outline(changed(change))


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x91" * 5_000])
def test_bytes_without_a_list_have_no_outline(value):
    with pytest.raises(MalformedRecord):
        outline(value)


def test_no_state_within_the_limits_has_more_bytes():
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
        state.groups[group + name] = GroupState(
            Pause(
                op_id=OP,
                client_id="a" + name,
                incarnation=INC,
                seq=far,
                incarnations=(INC,) * 16,
                until_ms=far,
            ),
            tuple((far - n, OP) for n in range(64, 0, -1)),
        )
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
    group = len(pack(unpack(value)[3][0])) - 64 * snapshot._OVER_BYTES_MAX
    assert group <= snapshot._GROUP_BYTES_MAX
    rest = len(value) - 3 * row - 2 * len(pack(unpack(value)[3][0]))
    assert rest <= snapshot._REST_BYTES_MAX
    assert len(value) <= bytes_max(settled)
