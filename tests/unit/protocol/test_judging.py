"""Every refusal, in its order: the whole product of what can speak against a record.

The orders stand here as plain lists; each case is judged by the first entry of its
list that holds.
"""

from itertools import product

import pytest
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    LOCK,
    OP,
    SECRET,
    H,
    beat,
    claim,
    config,
    forgetting,
    hashed,
    ident,
    messages,
    pause,
    release,
    resume,
)

from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.judging import (
    OP_INCARNATIONS_MAX,
    is_paused,
    judge_claim,
    judge_forgetting,
    judge_release_group,
    judge_resume,
    mismatch,
)
from kafka_marshal.protocol.state import GroupState, KeyState, Owner, Pause, WorldState
from kafka_marshal.protocol.types import Key

NOW = 10_000
M = 20_000
EPOCH = 5
K = 2
HOME = coordinating_partition(KEY.topic, KEY.partition, partition_count=K)
SELF, OTHER = Owner("c1", INC), Owner("c2", ident("c2"))


def world(*, place=HOME, paused=False, known=None, groups=()):
    held = Pause(
        op_id=OP,
        client_id="admin",
        incarnation=ident("admin"),
        seq=0,
        incarnations=(ident("admin"),),
        until_ms=M + 1,
    )
    state = WorldState(
        place,
        log_time_ms=NOW,
        append_time_ms=M,
        config=config(k=K),
        groups={name: GroupState() for name in groups},
    )
    state.groups["g"] = GroupState(held if paused else None)
    state.note_next_lapse()
    if known is not None:
        state.keys[KEY] = known
    return state


def key_state(owner, age=0, **changes):
    return KeyState(
        owner=owner,
        epoch=EPOCH,
        epoch_leader_epoch=0,
        renewed_ms=NOW - age,
        heartbeat_interval_ms=H,
        active_ms=NOW - age,
        **{"position": 3} | changes,
    )


def first(order):
    return next((reason for holds, reason in order if holds), None)


# --- Claims of a key that exists: PROTOCOL 4.3 ---

OWNERS = [
    pytest.param(None, 0, None, id="released"),
    pytest.param(SELF, 2 * H, "duplicate", id="own, at 2H"),
    pytest.param(SELF, 2 * H + 1, None, id="own, stale"),
    pytest.param(Owner("c1", INC_AGAIN), 0, "held", id="own, another life"),
    pytest.param(OTHER, -1, "held", id="renewed in the future"),
    pytest.param(OTHER, H - 1, "held", id="fresh"),
    pytest.param(OTHER, H, "held", id="unknown"),
    pytest.param(OTHER, 2 * H, "held", id="at 2H"),
    pytest.param(OTHER, 2 * H + 1, None, id="stale"),
]
HANDOFFS = [
    (None, False),
    (("c1", NOW + 1), False),
    (("c2", NOW - 1), False),
    (("c2", NOW), False),
    (("c2", NOW + 1), True),
]
TOPIC, RETIRED, NEW = ident("topic"), ident("retired"), ident("new")
BOOLEANS = (False, True)


@pytest.mark.parametrize(("owner", "age", "occupied"), OWNERS)
def test_order_of_refusals_of_a_claim(owner, age, occupied):
    seen = set()
    for generation, place, paused, locked, handoff, expected, had, named in product(
        (1, 2),
        (HOME, 1 - HOME),
        BOOLEANS,
        BOOLEANS,
        HANDOFFS,
        (None, EPOCH, EPOCH - 1),
        (None, TOPIC),
        (None, TOPIC, RETIRED, NEW),
    ):
        known = key_state(
            owner,
            age,
            lock=LOCK if locked else None,
            handoff=handoff[0],
            topic_id=had,
            retired_topic_ids=(ident("older"), RETIRED),
        )
        state = world(place=place, paused=paused, known=known)
        is_changed = None not in (had, named) and had != named
        order = [
            (generation == 2, "wrong_generation"),
            (place != HOME, "wrong_partition"),
            (paused, "paused"),
            (locked, "locked"),
            (handoff[1], "handoff"),
            (occupied == "duplicate", "duplicate"),
            (occupied == "held", "held"),
            (expected not in (None, EPOCH), "cas"),
            (named == RETIRED, "old_topic"),
            (is_changed and expected is None, "cas"),
        ]
        record = claim(generation=generation, topic_id=named, expected=expected)
        reason = judge_claim(state, record, config=state.config, key=KEY)
        assert reason == first(order), order
        seen.add(reason)
    later = {occupied} if occupied else {None, "cas", "old_topic"}
    common = {"wrong_generation", "wrong_partition", "paused", "locked", "handoff"}
    assert seen == common | later


# --- Claims of a key that does not exist ---


@pytest.mark.parametrize(
    ("other_keys", "groups", "full"),
    [
        pytest.param(2, ("g",), False, id="room for one more key"),
        pytest.param(3, ("g",), True, id="keys full"),
        pytest.param(4, ("g",), True, id="keys more than full"),
        pytest.param(0, ("g", "h", "i", "j"), False, id="groups full, ours is there"),
        pytest.param(0, ("h", "i"), False, id="room for one more group"),
        pytest.param(0, ("h", "i", "j"), True, id="groups full"),
        pytest.param(0, ("h", "i", "j", "k"), True, id="groups more than full"),
    ],
)
def test_order_of_refusals_of_a_first_claim(other_keys, groups, full):
    for generation, place, paused, expected in product(
        (1, 2), (HOME, 1 - HOME), BOOLEANS, (None, EPOCH)
    ):
        state = world(place=place, paused=paused, groups=groups)
        if "g" not in groups:
            del state.groups["g"]
        for number in range(other_keys):
            state.keys[Key("g", "u", number)] = key_state(None)
        order = [
            (generation == 2, "wrong_generation"),
            (place != HOME, "wrong_partition"),
            (full, "limits"),
            (paused and "g" in groups, "paused"),
            (expected is not None, "cas"),
        ]
        record = claim(generation=generation, expected=expected)
        settings = config(k=K, keys=3, groups=3)
        reason = judge_claim(state, record, config=settings, key=KEY)
        assert reason == first(order), order


def test_limits_do_not_apply_to_an_existing_key():
    state = world(known=key_state(None))
    assert (
        judge_claim(state, claim(), config=config(k=K, keys=1, groups=1), key=KEY)
        is None
    )


# --- Resumes: PROTOCOL 4.4 ---


@pytest.mark.parametrize(
    ("age", "is_fresh"),
    [
        pytest.param(-1, True, id="renewed in the future"),
        pytest.param(0, True, id="just renewed"),
        pytest.param(H - 1, True, id="H - 1"),
        pytest.param(H, False, id="H"),
        pytest.param(2 * H, False, id="2H"),
        pytest.param(2 * H + 1, False, id="stale"),
    ],
)
def test_order_of_refusals_of_a_resume(age, is_fresh):
    for generation, place, paused, locked, owner, epoch, sender, stored in product(
        (1, 2),
        (HOME, 1 - HOME),
        BOOLEANS,
        BOOLEANS,
        (None, SELF, OTHER, Owner("c2", INC), Owner("c1", ident("third"))),
        (EPOCH, EPOCH - 1),
        (INC, INC_AGAIN),
        (None, hashed(SECRET), hashed(b"another")),
    ):
        known = key_state(
            owner,
            age,
            lock=LOCK if locked else None,
            resume_hash=stored,
            # What is not asked of a resume:
            handoff=("c9", NOW + 1),
            retired_topic_ids=(RETIRED,),
            topic_id=TOPIC,
        )
        state = world(place=place, paused=paused, known=known)
        fits = (
            owner == SELF
            and epoch == EPOCH
            and sender != INC
            and stored == hashed(SECRET)
        )
        order = [
            (generation == 2, "wrong_generation"),
            (place != HOME, "wrong_partition"),
            (paused, "paused"),
            (locked, "locked"),
            (not fits, "resume_mismatch"),
            (not is_fresh, "resume_not_fresh"),
        ]
        record = resume(
            epoch, inc=sender, generation=generation, expected=1, topic_id=RETIRED
        )
        settings = config(k=K, keys=1, groups=1)
        reason = judge_resume(state, record, config=settings, key=KEY)
        assert reason == first(order), order


@pytest.mark.parametrize(
    ("generation", "place", "paused", "expected"),
    [
        pytest.param(2, 1 - HOME, True, "wrong_generation", id="wrong generation"),
        pytest.param(1, 1 - HOME, True, "wrong_partition", id="wrong partition"),
        pytest.param(1, HOME, True, "paused", id="paused"),
        pytest.param(1, HOME, False, "resume_mismatch", id="nothing to resume"),
    ],
)
def test_a_resume_of_a_key_that_does_not_exist(generation, place, paused, expected):
    state = world(place=place, paused=paused)
    record = resume(EPOCH, generation=generation)
    assert judge_resume(state, record, config=state.config, key=KEY) == expected


# --- Records of an owner: PROTOCOL 4.5 to 4.7 ---

SENDS = [
    pytest.param(beat, id="Heartbeat"),
    pytest.param(release, id="ReleasingPartition"),
    pytest.param(lambda epoch: messages(epoch, 0, 1), id="ClaimingMessages"),
]


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize(
    ("owner", "epoch", "expected"),
    [
        pytest.param(SELF, EPOCH, None, id="the owner"),
        pytest.param(SELF, EPOCH - 1, "old_epoch", id="an earlier claim"),
        pytest.param(SELF, EPOCH + 1, "old_epoch", id="a later claim"),
        pytest.param(None, EPOCH, "not_owner", id="released"),
        pytest.param(OTHER, EPOCH, "not_owner", id="another client"),
        pytest.param(Owner("c2", INC), EPOCH, "not_owner", id="another name"),
        pytest.param(Owner("c1", INC_AGAIN), EPOCH, "not_owner", id="another life"),
        pytest.param("no key", EPOCH, "not_owner", id="no key"),
    ],
)
@pytest.mark.parametrize("paused", BOOLEANS)
def test_which_senders_may_change_a_key(send, owner, epoch, expected, paused):
    known = None if owner == "no key" else key_state(owner, 2 * H + 1)
    state = world(paused=paused, known=known)
    assert mismatch(state, send(epoch), key=KEY) == expected


@pytest.mark.parametrize("send", SENDS)
def test_a_record_of_another_partition_is_misplaced_first(send):
    assert mismatch(world(place=1 - HOME), send(EPOCH), key=KEY) == "wrong_partition"


@pytest.mark.parametrize("send", SENDS)
def test_without_config_nobody_owns(send):
    state = world(place=1 - HOME)
    state.config = None
    assert mismatch(state, send(EPOCH), key=KEY) == "not_owner"


@pytest.mark.parametrize("topic", ["/checkpoint", "/planner"])
def test_reserved_keys_live_where_they_are_about(topic):
    for place, partition in product((0, 1), (0, 1, 2)):
        key = Key("marshal", topic, partition)
        state = world(place=place)
        is_here = place == partition
        reason = judge_claim(state, claim(key=key), config=state.config, key=key)
        assert reason == (None if is_here else "wrong_partition")
        reason = mismatch(state, beat(0, key=key), key=key)
        assert reason == ("not_owner" if is_here else "wrong_partition")


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        pytest.param("t", True, id="data"),
        pytest.param("/checkpoint", True, id="checkpoint"),
        pytest.param("/planner", False, id="planner"),
    ],
)
def test_a_pause_does_not_touch_the_planner(topic, expected):
    assert is_paused(world(paused=True), Key("g", topic, HOME)) is expected
    assert not is_paused(world(paused=False), Key("g", topic, HOME))
    assert not is_paused(world(paused=True), Key("h", topic, HOME))
    assert not is_paused(WorldState(HOME), Key("g", topic, HOME))


# --- ReleaseGroup: PROTOCOL 4.8 ---

ADMIN, FORMER, STRANGER = ident("admin"), ident("former"), ident("stranger")
OTHER_OP, OVER_OP = ident("other op"), ident("over op")
MANY = tuple(ident(f"life {number}") for number in range(OP_INCARNATIONS_MAX - 2))


@pytest.mark.parametrize("op", [OP, OTHER_OP, OVER_OP])
@pytest.mark.parametrize("is_active", BOOLEANS)
@pytest.mark.parametrize(
    "seen",
    [
        pytest.param((FORMER, ADMIN), id="two lives"),
        pytest.param((*MANY, FORMER, ADMIN), id="sixteen lives"),
    ],
)
def test_order_of_refusals_of_a_pause(op, is_active, seen):
    for sender, seq, expires in product(
        (ADMIN, FORMER, STRANGER), (6, 7, 8), (M - 1, M, M + 1)
    ):
        state = world()
        group = state.groups["g"]
        held = Pause(
            op_id=OP,
            client_id="a",
            incarnation=ADMIN,
            seq=7,
            incarnations=seen,
            until_ms=M + 1,
        )
        group.pause = held if is_active else None
        group.over = ((1, ident("older")), (2, OVER_OP))
        is_same = is_active and op == OP
        is_full = len(seen) == OP_INCARNATIONS_MAX
        order = [
            (op == OVER_OP, "op_over"),
            (is_active and op != OP, "busy"),
            (is_same and sender == ADMIN and seq <= 7, "old_seq"),
            (is_same and sender == FORMER, "old_seq"),
            (is_same and sender == STRANGER and is_full, "limits"),
            (not is_active and expires <= M, "expired"),
        ]
        record = pause(expires, op=op, inc=sender, seq=seq)
        reason = judge_release_group(state, record, config=state.config)
        assert reason == first(order), (sender, seq, expires)


def test_a_pause_of_a_group_that_has_no_room():
    state = world(groups=("h", "i"))
    del state.groups["g"]
    for until, room in product((M, M + 1), (2, 3)):
        settings = config(k=K, groups=room)
        expected = first([(room == 2, "limits"), (until <= M, "expired")])
        assert judge_release_group(state, pause(until), config=settings) == expected


def test_the_group_limit_does_not_apply_to_an_existing_group():
    state = world(groups=("h", "i"))
    assert (
        judge_release_group(state, pause(M + 1), config=config(k=K, groups=1)) is None
    )


@pytest.mark.parametrize("age", [0, 2 * H, 2 * H + 1])
def test_order_of_refusals_of_forgetting(age):
    for place, known, lock, owner, epoch in product(
        (HOME, 1 - HOME), (True, False), (OP, None), (SELF, None), (EPOCH, EPOCH + 1)
    ):
        state = key_state(owner, age, lock=lock) if known else None
        expected = first(
            (
                (place != HOME, "wrong_partition"),
                (not known, "cas"),
                (lock is not None, "locked"),
                (owner is not None and age <= 2 * H, "held"),
            )
        )
        if expected is None and epoch != EPOCH:
            expected = "cas"
        found = judge_forgetting(
            world(place=place, known=state), forgetting(epoch), key=KEY
        )
        assert found == expected


def test_nothing_is_forgotten_without_a_config():
    state = WorldState(HOME)
    assert judge_forgetting(state, forgetting(EPOCH), key=KEY) == "no_config"
