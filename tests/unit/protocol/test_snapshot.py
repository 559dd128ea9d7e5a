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
    decide,
    direct,
    fence,
    fold,
    growth,
    hashed,
    ident,
    imported,
    layout_import,
    messages,
    offer,
    pause,
    planned,
    release,
    resets,
    schedule,
    settings,
    source_log,
    target_log,
)

from kafka_marshal.errors import MalformedRecord
from kafka_marshal.protocol import snapshot
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Fence, Offer, StandingDirective
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import (
    chained,
    digest,
    freeze,
    from_bytes,
    outline,
    to_bytes,
)
from kafka_marshal.protocol.state import (
    QUIET,
    SCOPED_MAX,
    Previous,
    WorldState,
)
from kafka_marshal.protocol.types import Key

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
SECOND = Key("g", "t", 1)
THIRD = Key("h", "t", 2)


def story():
    """Return a log whose keys and groups have most fields that level 1 knows."""
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
    """Return a log with a staged Reset and a quiet time, beside three keys."""
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
def test_a_list_head_is_encoded_as_in_messagepack(count):
    whole = pack([0] * count)
    assert snapshot._encode_list_head(count) == whole[: len(whole) - count]


def test_canonical_bytes_read_back_as_the_same_state():
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
def test_nearly_empty_states_read_back(state):
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
    assert keys[0] == [
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


def test_each_entry_changes_the_digest_as_a_new_fold_computes_it():
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


def test_the_digest_of_an_unchanged_state_is_the_same():
    state = story().state
    assert digest(state) == digest(state)
    assert state.dirty == {}


def test_soft_state_is_neither_in_the_digest_nor_in_the_bytes():
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


def test_a_state_read_back_folds_later_entries_equally():
    log = story()
    back = from_bytes(to_bytes(log.state))
    for what in (beat(4, 5), b"", release(5, client="c3", key=SECOND), claim("c9")):
        transitions = log.append(what, after=H)
        assert apply(back, log.entries[-1]) == transitions
        assert to_bytes(back) == to_bytes(log.state)


# --- Invalid snapshots ---


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
def test_invalid_bytes_are_refused(value):
    with pytest.raises(MalformedRecord, match="not a snapshot"):
        from_bytes(value)


def test_truncated_bytes_are_refused():
    value = to_bytes(story().state)
    for size in range(len(value)):
        with pytest.raises(MalformedRecord):
            from_bytes(value[:size])


def respelled(change):
    """Return the bytes of ``story`` after a change of its rows."""
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
def test_a_state_that_no_log_can_produce_is_refused(change):
    assert from_bytes(respelled(lambda _: None)) == story().state
    with pytest.raises(MalformedRecord):
        from_bytes(respelled(change))


def test_eras_without_a_config_are_refused():
    rows = unpack(to_bytes(WorldState(0)))
    rows[4].append(["eras", [[0, 0]]])
    with pytest.raises(MalformedRecord):
        from_bytes(pack(rows))


def test_a_snapshot_has_the_eras_of_earlier_configs():
    log = Log()
    for generation in (2, 3):
        before = digest(log.state)
        log.append(config(generation, era=generation))
        assert digest(log.state) != before
    assert unpack(to_bytes(log.state))[4] == [["eras", [[1, 1], [2, 2]]]]
    back = from_bytes(to_bytes(log.state))
    assert (back, digest(back)) == (log.state, digest(log.state))
    # A fold never keeps this many eras.
    log.state.eras = tuple((n, n) for n in range(-63, 2))
    with pytest.raises(MalformedRecord):
        from_bytes(to_bytes(log.state))


def test_a_snapshot_has_a_staged_reset_and_the_quiet_time_after_one():
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


# --- Outlines, which are read before the rows ---


def test_an_outline_has_the_header_counts_and_digest_of_the_state():
    state = story().state
    known = outline(to_bytes(state))
    assert (known.key_count, known.group_count) == (len(state.keys), len(state.groups))
    assert known.header.config == state.config
    assert known.header.next_offset == state.next_offset
    assert known.digest() == digest(state)


def test_the_digest_of_an_outline_covers_eras_and_quiet_time():
    log = Log(level=2)
    log.append(config(2, era=2, level=2))
    for record in resets(to_bytes(log.state), digest(log.state)):
        log.append(record)
    assert log.state.quiet_until_ms is not None
    assert outline(to_bytes(log.state)).digest() == digest(log.state)


@pytest.mark.parametrize("count", [0, 15, 16, 2**16 - 1, 2**16])
def test_an_outline_counts_keys_without_reading_them(count):
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


def scheduled():
    log = Log(level=2)
    log.append(schedule(START_MS + 10, START_MS + 20, seq=3))
    log.append(schedule(START_MS + 5, START_MS + 6, op=ident("two"), client="ops"))
    return log.state


def test_scheduled_pauses_are_element_2_of_their_group():
    state = scheduled()
    _, _, _, (group,), _ = unpack(to_bytes(state))
    assert group == [
        *("group", "g", None, []),
        [
            [
                2,
                [
                    [START_MS + 5, ident("two"), "ops", ident("ops"), 0, START_MS + 6],
                    [START_MS + 10, OP, "admin", ident("admin"), 3, START_MS + 20],
                ],
            ]
        ],
    ]
    again = from_bytes(to_bytes(state))
    assert (again, again.lapses_ms) == (state, START_MS + 5)
    assert digest(again) == digest(state)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda group: group[4][0][1].reverse(), id="order"),
        pytest.param(lambda group: group[4][0][1].clear(), id="none"),
        pytest.param(lambda group: group[4][0][1][0].__setitem__(1, OP), id="twice"),
        pytest.param(lambda group: group[4][0][1][0].__setitem__(5, 9), id="end"),
        pytest.param(lambda group: group[4][0][1][0].__setitem__(2, "a/b"), id="name"),
        pytest.param(lambda group: group[3].append([1, OP]), id="over"),
        pytest.param(
            lambda group: group.__setitem__(2, [OP, "a", INC, 0, [INC], 9]), id="begun"
        ),
        pytest.param(
            lambda group: group[4][0][1].extend([group[4][0][1][1]] * 3), id="too many"
        ),
        pytest.param(lambda group: group[4][0].__setitem__(0, 9), id="number"),
    ],
)
def test_scheduled_pauses_that_no_log_can_produce_are_refused(change):
    parts = unpack(to_bytes(scheduled()))
    change(parts[3][0])
    with pytest.raises(MalformedRecord, match="not a snapshot"):
        from_bytes(pack(parts))


def scoped():
    log = Log(level=2)
    scope = {"t": (0, 3), "u": ()}
    log.append(schedule(0, START_MS + 20, op=ident("b"), seq=3, scope=scope))
    log.append(schedule(0, START_MS + 10, op=ident("a"), scope={"t": ()}))
    log.append(schedule(START_MS + 5, START_MS + 6, op=ident("c"), scope={"t": ()}))
    return log.state


def test_pauses_with_a_scope_are_element_4_of_their_group():
    state, admin = scoped(), ident("admin")
    _, _, _, (group,), _ = unpack(to_bytes(state))
    a, b, c = map(ident, "abc")
    later = [START_MS + 5, c, "admin", admin, 0, START_MS + 6, [["t", []]]]
    first = [a, "admin", admin, 0, [admin], START_MS + 10, [["t", []]]]
    scope = [["t", [0, 3]], ["u", []]]
    second = [b, "admin", admin, 3, [admin], START_MS + 20, scope]
    assert group == ["group", "g", None, [], [[2, [later]], [4, [first, second]]]]
    again = from_bytes(to_bytes(state))
    assert (again, again.scopes.keys()) == (state, state.scopes.keys())
    assert (digest(again), again.lapses_ms) == (digest(state), START_MS + 5)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rows: rows.reverse(), id="order"),
        pytest.param(lambda rows: rows.clear(), id="none"),
        pytest.param(lambda rows: rows.insert(0, rows[0]), id="twice"),
        pytest.param(lambda rows: rows[0].__setitem__(0, ident("c")), id="scheduled"),
        pytest.param(lambda rows: rows[0].__setitem__(1, "a/b"), id="name"),
        pytest.param(lambda rows: rows[0].__setitem__(6, None), id="no scope"),
        pytest.param(lambda rows: rows[0].__setitem__(6, []), id="empty scope"),
        pytest.param(lambda rows: rows[1][6].reverse(), id="topics"),
        pytest.param(lambda rows: rows[1][6][0][1].reverse(), id="partitions"),
        pytest.param(
            lambda rows: rows.extend(
                [b"z%015d" % n, *rows[0][1:]] for n in range(SCOPED_MAX - 2)
            ),
            id="too many",
        ),
    ],
)
def test_pauses_with_a_scope_that_no_log_can_produce_are_refused(change):
    parts = unpack(to_bytes(scoped()))
    change(parts[3][0][4][1][1])
    with pytest.raises(MalformedRecord, match="not a snapshot"):
        from_bytes(pack(parts))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"owner": None}, id="without an owner"),
        pytest.param({"offer": Offer("c2", 5, 1, None)}, id="before the claim"),
        pytest.param({"offer": Offer("c2", 5, 99, None)}, id="after the state"),
        pytest.param({"offer": Offer("c/2", 5, 2, None)}, id="to no name"),
    ],
)
def test_an_offer_that_no_log_can_produce_is_refused(wrong):
    log = Log(level=2)
    log.append(offer(log.claimed()))
    assert from_bytes(to_bytes(log.state)) == log.state
    for name, value in wrong.items():
        setattr(log.key(), name, value)
    with pytest.raises(MalformedRecord):
        from_bytes(to_bytes(log.state))


def fenced():
    """Return a log with fences beside a verdict, and one in a group without keys."""
    log = Log(level=2)
    log.append(release(log.claimed(), 5))
    log.append(pause(START_MS + H))
    log.append(decide())
    log.append(fence("c1"))
    log.append(fence("c2"))
    log.append(fence("c3", group="h"))
    return log


def test_fences_are_element_3_of_their_group():
    log = fenced()
    rows = unpack(to_bytes(log.state))[3]
    verdict = [OP, PLAN, 1, 4, False]
    fences = [[5, "c1", ident("c1")], [6, "c2", ident("c2")]]
    assert rows[0][4] == [[1, verdict], [3, fences]]
    assert rows[1] == ["group", "h", None, [], [[3, [[7, "c3", ident("c3")]]]]]
    back = from_bytes(to_bytes(log.state))
    assert (back, back.fences) == (log.state, log.state.fences)
    assert digest(back) == digest(log.state) == freeze(log.state).digest()


def test_a_fence_changes_the_digest():
    log = fenced()
    before = digest(log.state)
    log.append(fence("c4"))
    assert digest(log.state) != before
    assert digest(log.state) == digest(from_bytes(to_bytes(log.state)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda more: more.reverse(), id="out of order"),
        pytest.param(lambda more: more.append([3, [[1, "c9", INC]]]), id="twice"),
        pytest.param(lambda more: more.append([4, 1]), id="an unknown element"),
        pytest.param(lambda more: more[1].append(1), id="an element too many"),
        pytest.param(put(1, 1, []), id="no fences"),
        pytest.param(lambda more: more[1][1].reverse(), id="youngest first"),
        pytest.param(lambda more: more[1][1].append([8, "c9", INC]), id="ahead"),
        pytest.param(put(1, 1, 1, 1, "a/b"), id="a bad name"),
        pytest.param(put(1, 1, 1, 2, b"short"), id="a short incarnation"),
        pytest.param(put(1, 1, 1, [6, "c1", ident("c1")]), id="a process twice"),
    ],
)
def test_fences_that_no_log_can_produce_are_refused(change):
    rows = unpack(to_bytes(fenced().state))
    assert from_bytes(pack(rows)) == fenced().state
    change(rows[3][0][4])
    with pytest.raises(MalformedRecord):
        from_bytes(pack(rows))


def test_more_fences_than_a_fold_keeps_are_refused():
    log = fenced()
    group = log.state.groups["g"]
    group.fences = tuple(Fence(n, "c1", bytes([n] * 16)) for n in range(65))
    log.state.next_offset = 65
    with pytest.raises(MalformedRecord):
        from_bytes(to_bytes(log.state))
    group.fences = group.fences[1:]
    assert from_bytes(to_bytes(log.state)).groups["g"] == group


SOON = START_MS + 100


def test_a_state_with_directives_is_read_back():
    log = Log(level=2)
    log.append(direct(until=SOON))
    log.append(direct(host="m1", op=ident("a"), action="cordon"))
    value = to_bytes(log.state)
    again = from_bytes(value)
    assert again == log.state
    assert again.directed == log.state.directed
    assert again.lapses_ms == log.state.lapses_ms == SOON
    assert digest(again) == digest(log.state)


def sound(**changes):
    return StandingDirective(
        OP, "admin", ident("admin"), 0, SOON, "c1", None, "drain"
    )._replace(**changes)


@pytest.mark.parametrize(
    "directives",
    [
        pytest.param([sound(), sound()], id="twice"),
        pytest.param([sound(op_id=b"\2" * 16), sound(op_id=b"\1" * 16)], id="unsorted"),
        pytest.param([sound(host="m1")], id="client and host"),
        pytest.param([sound(client=None)], id="nobody"),
        pytest.param([sound(client="no name")], id="no client"),
        pytest.param([sound(client_id="no name")], id="no sender"),
        pytest.param([sound(client=None, host="")], id="empty host"),
        pytest.param([sound(action="stop")], id="action"),
        pytest.param([sound(op_id=b"\3" * 16)], id="over"),
    ],
)
def test_directives_that_no_log_can_produce_are_refused(directives):
    log = Log(level=2)
    log.append(direct(op=b"\3" * 16))
    log.append(direct(op=b"\3" * 16, until=0, seq=1))
    log.append(direct())
    log.state.groups["g"].directives = tuple(directives)
    with pytest.raises(MalformedRecord):
        from_bytes(to_bytes(log.state))


def configured():
    """Return a log with settings beside a fence, and some in a group without keys."""
    log = Log(level=2)
    log.append(fence("c1"))
    log.append(settings(policy="fair", handoff_ms=5))
    log.append(settings(group="h", grace_ms=0))
    return log


def test_settings_are_element_6_of_their_group():
    log = configured()
    rows = unpack(to_bytes(log.state))[3]
    assert rows[0][4][1] == [6, [1, "fair", None, None, 5, None, None]]
    assert rows[1] == [
        *("group", "h", None, []),
        [[6, [1, None, None, None, None, None, 0]]],
    ]
    back = from_bytes(to_bytes(log.state))
    assert back == log.state
    before = digest(log.state)
    assert digest(back) == before == freeze(log.state).digest()
    log.append(settings(2, policy="fair", handoff_ms=6))
    assert digest(log.state) not in {before, digest(back)}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda more: more.reverse(), id="out of order"),
        pytest.param(lambda more: more.append(more[1]), id="twice"),
        pytest.param(lambda more: more[1].append(1), id="an element too many"),
        pytest.param(put(1, 1, 0, 0), id="no generation"),
        pytest.param(put(1, 1, 1, ""), id="an empty policy"),
        pytest.param(put(1, 1, 1, "a/b"), id="a bad name"),
        pytest.param(put(1, 1, 3, -1), id="a negative time"),
        pytest.param(put(1, 1, 5, 0), id="no handoffs"),
        pytest.param(lambda more: more[1][1].pop(), id="a setting less"),
    ],
)
def test_settings_that_no_log_can_produce_are_refused(change):
    rows = unpack(to_bytes(configured().state))
    change(rows[3][0][4])
    with pytest.raises(MalformedRecord):
        from_bytes(pack(rows))


def planned_log():
    """Return a log with plans of a group with settings, and of one without."""
    log = Log(level=2)
    log.append(settings())
    log.append(planned())
    log.append(planned(group="h"))
    return log


def test_plans_are_element_7_of_their_group():
    log = planned_log()
    rows = unpack(to_bytes(log.state))[3]
    assert rows[0][4][1] == [7, [1, log.now_ms]]
    assert rows[1] == ["group", "h", None, [], [[7, [1, log.now_ms]]]]
    back = from_bytes(to_bytes(log.state))
    assert (back, back.plans_ms) == (log.state, log.now_ms)
    before = digest(log.state)
    assert digest(back) == before == freeze(log.state).digest()
    log.append(planned(1), after=0)
    assert digest(log.state) not in {before, digest(back)}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda more: more.reverse(), id="out of order"),
        pytest.param(lambda more: more.append(more[1]), id="twice"),
        pytest.param(put(1, 1, 0, 0), id="no generation"),
        pytest.param(put(1, 1, 1, None), id="no time"),
        pytest.param(lambda more: more[1][1].append(1), id="an element too many"),
    ],
)
def test_plans_that_no_log_can_produce_are_refused(change):
    rows = unpack(to_bytes(planned_log().state))
    change(rows[3][0][4])
    with pytest.raises(MalformedRecord):
        from_bytes(pack(rows))


# --- an open change of the partition count


def with_layout(change):
    """Return the bytes of a target partition after a change of its layout item."""
    log = target_log()
    log.append(layout_import(imported(position=3)))
    world = msgspec.msgpack.decode(to_bytes(log.state))
    (item,) = (row for row in world[4] if row[0] == "layout")
    change(world, item)
    return msgspec.msgpack.encode(world)


def test_a_layout_and_imported_keys_are_read_back():
    for log in (source_log()[0], target_log()):
        log.append(layout_import())
        again = from_bytes(to_bytes(log.state))
        assert again == log.state
        assert digest(again) == digest(log.state) == freeze(log.state).digest()
    assert from_bytes(with_layout(lambda *_: None)).layout is not None
    with pytest.raises(MalformedRecord):
        outline(to_bytes(log.state))  # a Reset cannot have a layout


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, item: item.__setitem__(2, 2), id="no-step"),
        pytest.param(lambda _, item: item.__setitem__(2, 6), id="other-sources"),
        pytest.param(lambda _, item: item[4].append([1, 0, None]), id="a-source-more"),
        pytest.param(lambda _, item: item.__setitem__(3, 99), id="an-offset-ahead"),
        pytest.param(lambda world, _: world[1].__setitem__(1, 5), id="beyond"),
        pytest.param(
            lambda world, _: world[2][0].__setitem__(4, ["c1", INC]), id="owned-at-0"
        ),
    ],
)
def test_a_layout_that_no_log_can_produce_is_refused(change):
    with pytest.raises(MalformedRecord):
        from_bytes(with_layout(change))


def test_a_layout_without_a_config_is_refused():
    world = msgspec.msgpack.decode(with_layout(lambda *_: None))
    world[1][7] = None
    world[2] = world[3] = []
    with pytest.raises(MalformedRecord, match="count that no log can produce"):
        from_bytes(msgspec.msgpack.encode(world))


def test_growths_are_read_back_and_invalid_ones_are_refused():
    log = Log(level=2)
    log.append(growth())
    value = to_bytes(log.state)
    assert from_bytes(value) == log.state
    with pytest.raises(MalformedRecord):
        from_bytes(value.replace(b"\x04\x08\xc0", b"\x04\x06\xc0"))
