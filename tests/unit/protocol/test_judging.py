"""The reasons of refusals and their order, in all combinations of conditions.

A test lists conditions and reasons in the order of judgement; it expects the reason of
the first condition that holds.
"""

from itertools import product

import pytest
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    LOCK,
    MOVES,
    OP,
    SECRET,
    STAYS,
    H,
    Log,
    beat,
    claim,
    config,
    direct,
    forgetting,
    hashed,
    ident,
    messages,
    offer,
    pause,
    ready,
    release,
    resume,
    schedule,
    scope_of,
    source_log,
    target_log,
)

from kafka_marshal.protocol.hashing import coordinating_partition
from kafka_marshal.protocol.items import Offer, Pause, Scheduled
from kafka_marshal.protocol.judging import (
    OP_INCARNATIONS_MAX,
    PAUSE_AHEAD_MS_MAX,
    draining_reason,
    is_home,
    judge_claim,
    judge_directive,
    judge_forgetting,
    judge_next,
    judge_offer,
    judge_pause_group,
    judge_ready,
    judge_release_group,
    judge_resume,
    mismatch,
    new_place,
    time_left,
)
from kafka_marshal.protocol.state import (
    SCHEDULED_MAX,
    SCOPED_MAX,
    GroupState,
    KeyState,
    Owner,
    WorldState,
)
from kafka_marshal.protocol.types import Key

NOW = 10_000
M = 20_000
EPOCH = 5
K = 2
HOME = coordinating_partition(KEY.topic, KEY.partition, partition_count=K)
SELF, OTHER = Owner("c1", INC), Owner("c2", ident("c2"))


def world(*, place=HOME, paused=False, known=None, groups=(), fenced=()):
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
    state.fences = {("g", *owner): 0 for owner in fenced}
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
def test_a_claim_gets_the_first_reason_that_applies(owner, age, occupied):
    seen = set()
    for generation, place, fenced, held, handoff, expected, had, named in product(
        (1, 2),
        (HOME, 1 - HOME),
        BOOLEANS,
        tuple(product(BOOLEANS, BOOLEANS)),
        HANDOFFS,
        (None, EPOCH, EPOCH - 1),
        (None, TOPIC),
        (None, TOPIC, RETIRED, NEW),
    ):
        paused, locked = held
        known = key_state(
            owner,
            age,
            lock=LOCK if locked else None,
            handoff=handoff[0],
            topic_id=had,
            retired_topic_ids=(ident("older"), RETIRED),
        )
        who = (SELF,) if fenced else (OTHER, Owner("c1", INC_AGAIN))
        state = world(place=place, paused=paused, known=known, fenced=who)
        is_changed = None not in (had, named) and had != named
        order = [
            (generation == 2, "wrong_generation"),
            (place != HOME, "wrong_partition"),
            (fenced, "sender_fenced"),
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
    common = {"wrong_generation", "wrong_partition", "sender_fenced"}
    assert seen == common | later | {"paused", "locked", "handoff"}


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
def test_a_first_claim_of_a_key_gets_the_first_reason_that_applies(
    other_keys, groups, full
):
    for generation, place, fenced, paused, expected in product(
        (1, 2), (HOME, 1 - HOME), BOOLEANS, BOOLEANS, (None, EPOCH)
    ):
        who = (SELF,) if fenced else ()
        state = world(place=place, paused=paused, groups=groups, fenced=who)
        if "g" not in groups:
            del state.groups["g"]
        for number in range(other_keys):
            state.keys[Key("g", "u", number)] = key_state(None)
        order = [
            (generation == 2, "wrong_generation"),
            (place != HOME, "wrong_partition"),
            (fenced, "sender_fenced"),
            (full, "limits"),
            (paused and "g" in groups, "paused"),
            (expected is not None, "cas"),
        ]
        record = claim(generation=generation, expected=expected)
        settings = config(k=K, keys=3, groups=3)
        reason = judge_claim(state, record, config=settings, key=KEY)
        assert reason == first(order), order


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
def test_a_resume_gets_the_first_reason_that_applies(age, is_fresh):
    for generation, place, fenced, held, owner, epoch, sender, stored in product(
        (1, 2),
        (HOME, 1 - HOME),
        BOOLEANS,
        tuple(product(BOOLEANS, BOOLEANS)),
        (None, SELF, OTHER, Owner("c2", INC), Owner("c1", ident("third"))),
        (EPOCH, EPOCH - 1),
        (INC, INC_AGAIN),
        (None, hashed(SECRET), hashed(b"another")),
    ):
        paused, locked = held
        known = key_state(
            owner,
            age,
            lock=LOCK if locked else None,
            resume_hash=stored,
            # A resume is not judged by these:
            handoff=("c9", NOW + 1),
            retired_topic_ids=(RETIRED,),
            topic_id=TOPIC,
        )
        # The process to resume may be fenced; the sender must not be.
        who = Owner("c1", sender)
        fences = (who,) if fenced else {SELF, OTHER} - {who}
        state = world(place=place, paused=paused, known=known, fenced=fences)
        fits = (
            owner == SELF
            and epoch == EPOCH
            and sender != INC
            and stored == hashed(SECRET)
        )
        order = [
            (generation == 2, "wrong_generation"),
            (place != HOME, "wrong_partition"),
            (fenced, "sender_fenced"),
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
def test_a_resume_of_an_unknown_key_is_refused(generation, place, paused, expected):
    state = world(place=place, paused=paused)
    record = resume(EPOCH, generation=generation)
    assert judge_resume(state, record, config=state.config, key=KEY) == expected


# --- Records of an owner: PROTOCOL 4.5 to 4.7 ---

SENDS = [
    pytest.param(beat, id="Heartbeat"),
    pytest.param(release, id="ReleasingPartition"),
    pytest.param(lambda epoch: messages(epoch, 0, 1), id="ClaimingMessages"),
    pytest.param(offer, id="HandoffOffer"),
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
def test_only_the_owner_under_the_present_epoch_may_change_a_key(
    send, owner, epoch, expected, paused
):
    known = None if owner == "no key" else key_state(owner, 2 * H + 1)
    state = world(paused=paused, known=known)
    assert mismatch(state, send(epoch), key=KEY) == expected


@pytest.mark.parametrize("send", SENDS)
def test_without_a_config_no_sender_is_the_owner(send):
    state = world(place=1 - HOME)
    state.config = None
    assert mismatch(state, send(EPOCH), key=KEY) == "not_owner"


@pytest.mark.parametrize("topic", ["/checkpoint", "/planner"])
def test_a_reserved_key_belongs_to_the_partition_that_it_names(topic):
    for place, partition in product((0, 1), (0, 1, 2)):
        key = Key("marshal", topic, partition)
        state = world(place=place)
        is_here = place == partition
        reason = judge_claim(state, claim(key=key), config=state.config, key=key)
        assert reason == (None if is_here else "wrong_partition")
        reason = mismatch(state, beat(0, key=key), key=key)
        assert reason == ("not_owner" if is_here else "wrong_partition")


# --- Handoffs: PROTOCOL 9.4 ---


def test_an_offer_gets_the_first_reason_that_applies():
    for fenced, paused in product(BOOLEANS, BOOLEANS):
        who = (SELF,) if fenced else (OTHER,)
        state = world(paused=paused, known=key_state(SELF), fenced=who)
        order = [(fenced, "sender_fenced"), (paused, "paused")]
        assert judge_offer(state, offer(EPOCH), key=KEY) == first(order), order


@pytest.mark.parametrize("exists", BOOLEANS)
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(None, id="no offer"),
        pytest.param(("c2", NOW + 1), id="open"),
        pytest.param(("c2", NOW), id="at its end"),
        pytest.param(("c3", NOW + 1), id="to another client"),
        pytest.param(("c3", NOW), id="to another client, at its end"),
    ],
)
def test_a_ready_gets_the_first_reason_that_applies(exists, made):
    for epoch, fenced, paused in product((EPOCH, EPOCH - 1), BOOLEANS, BOOLEANS):
        to, until_ms = made or (None, None)
        held = None if made is None else Offer(to, until_ms, 7, None)
        known = key_state(SELF, offer=held) if exists else None
        # The fence of the owner is no fence of its successor.
        who = (OTHER,) if fenced else (SELF,)
        state = world(paused=paused, known=known, fenced=who)
        order = [
            (not exists or epoch != EPOCH, "old_epoch"),
            (made is None, "no_offer"),
            (to != "c2", "not_successor"),
            (until_ms == NOW, "late"),
            (fenced, "sender_fenced"),
            (paused, "paused"),
        ]
        assert judge_ready(state, ready(epoch), key=KEY) == first(order), order


# --- How long a refusal lasts ---


def test_only_held_and_quiet_have_a_remaining_time():
    state, known = world(), key_state(OTHER, H)
    state.quiet_until_ms = NOW + 5
    assert time_left(state, known, reason="held") == {"remaining_ms": H + 1}
    assert time_left(state, known, reason="quiet") == {"remaining_ms": 5}
    assert time_left(state, known, reason="paused") is None


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
def test_a_pause_gets_the_first_reason_that_applies(op, is_active, seen):
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


def test_a_pause_of_a_group_beyond_the_limit_is_refused():
    state = world(groups=("h", "i"))
    del state.groups["g"]
    for until, room in product((M, M + 1), (2, 3)):
        settings = config(k=K, groups=room)
        expected = first([(room == 2, "limits"), (until <= M, "expired")])
        assert judge_release_group(state, pause(until), config=settings) == expected


@pytest.mark.parametrize("age", [0, 2 * H, 2 * H + 1])
def test_a_forgetting_gets_the_first_reason_that_applies(age):
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


def test_a_forgetting_without_a_config_is_refused():
    state = WorldState(HOME)
    assert judge_forgetting(state, forgetting(EPOCH), key=KEY) == "no_config"


def planned(op, begin=M + 5, until=M + 9):
    return Scheduled(begin, op, "a", ADMIN, 7, until)


@pytest.mark.parametrize("op", [OP, OTHER_OP, OVER_OP])
@pytest.mark.parametrize("is_active", BOOLEANS)
@pytest.mark.parametrize("scheduled", [(), (OP,), (1, 2, 3, 4), (OP, 1, 2, 3)])
def test_a_scheduled_pause_gets_the_first_reason_that_applies(op, is_active, scheduled):
    for begin, until in product(
        (M + 5, M + 6, M + PAUSE_AHEAD_MS_MAX, M + PAUSE_AHEAD_MS_MAX + 1),
        (M + 6, M + 9),
    ):
        state = world()
        group = state.groups["g"]
        names = [
            one if isinstance(one, bytes) else ident(str(one)) for one in scheduled
        ]
        group.scheduled = tuple(planned(name) for name in names)
        group.over = ((2, OVER_OP),)
        if is_active:
            group.pause = Pause(
                op_id=OTHER_OP,
                client_id="a",
                incarnation=ADMIN,
                seq=7,
                incarnations=(ADMIN,),
                until_ms=M + 1,
            )
        is_same = (begin, until) == (M + 5, M + 9)
        order = [
            (begin > M + PAUSE_AHEAD_MS_MAX, "limits"),
            (op == OVER_OP, "op_over"),
            (until <= begin, "expired"),
            (op in names and not is_same, "busy"),
            (op in names, None),
            (is_active and op == OTHER_OP, "busy"),
            (len(names) == SCHEDULED_MAX, "limits"),
        ]
        record = schedule(begin, until, op=op)
        reason = judge_pause_group(state, record, until_ms=until, config=state.config)
        assert reason == first(order), (begin, until)


def test_a_scheduled_pause_of_a_group_beyond_the_limit_is_refused():
    state = world(groups=("h", "i"))
    del state.groups["g"]
    for room in (2, 3):
        record, settings = schedule(M + 1, M + 2), config(k=K, groups=room)
        reason = judge_pause_group(state, record, until_ms=M + 2, config=settings)
        assert reason == ("limits" if room == 2 else None)


# --- Pauses with a scope: PROTOCOL 4.15 ---

T_0, T_ALL = {"t": (0,)}, {"t": ()}
KNOWN = [
    pytest.param(None, id="new"),
    pytest.param("lasting", id="lasting"),
    pytest.param("scheduled", id="scheduled"),
]
FULL = {("g", ident(str(number))): None for number in range(SCOPED_MAX)}


def held(op, scope=None):
    return Pause(
        op_id=op,
        client_id="a",
        incarnation=ADMIN,
        seq=7,
        incarnations=(ADMIN,),
        until_ms=M + 1,
        scope=scope_of(scope),
    )


def scoped_world(known, *, is_full, paused=False):
    """Return a world that knows the operation with one scope, or does not."""
    state = world()
    group = state.groups["g"]
    group.pause = held(OTHER_OP) if paused else None
    group.scoped = (held(OP, T_0),) if known == "lasting" else ()
    if known == "scheduled":
        group.scheduled = (planned(OP)._replace(scope=scope_of(T_0)),)
    state.scopes = dict(FULL) if is_full else {}
    return state


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("scope", [None, T_0, T_ALL])
def test_a_pause_with_a_scope_gets_the_first_reason_that_applies(known, scope):
    for paused, is_full, expires, seq in product(
        BOOLEANS, BOOLEANS, (M, M + 1), (7, 8)
    ):
        state = scoped_world(known, is_full=is_full, paused=paused)
        is_end = expires == M
        order = [
            (is_end and known == "scheduled", None),
            (not is_end and known is not None and scope != T_0, "busy"),
            (known == "lasting" and seq == 7, "old_seq"),
            (known == "lasting", None),
            (paused and scope is None, "busy"),
            (is_end, "expired"),
            (is_full and known is None and scope is not None, "limits"),
        ]
        record = schedule(0, expires, seq=seq, scope=scope)
        reason = judge_release_group(state, record, config=state.config)
        assert reason == first(order), (paused, is_full, expires, seq)


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("scope", [None, T_0, T_ALL])
def test_a_scheduled_pause_with_a_scope_gets_the_first_reason_that_applies(
    known, scope
):
    for paused, is_full in product(BOOLEANS, BOOLEANS):
        state = scoped_world(known, is_full=is_full, paused=paused)
        order = [
            (known == "scheduled" and scope != T_0, "busy"),
            (known == "scheduled", None),
            (known == "lasting", "busy"),
            (is_full and scope is not None, "limits"),
        ]
        record = schedule(M + 5, M + 9, scope=scope)
        reason = judge_pause_group(state, record, until_ms=M + 9, config=state.config)
        assert reason == first(order), (paused, is_full)


@pytest.mark.parametrize(
    ("mine", "others", "is_full"),
    [
        pytest.param(SCOPED_MAX - 1, 1, False, id="room for one more"),
        pytest.param(SCOPED_MAX, 0, True, id="group full"),
        pytest.param(0, SCOPED_MAX + 1, False, id="another group full"),
        pytest.param(1, SCOPED_MAX + 1, True, id="partition full"),
    ],
)
def test_pauses_with_a_scope_are_limited_per_group_and_partition(mine, others, is_full):
    state = world()
    state.config = config(k=K, operations=SCOPED_MAX + 2)
    names = [("g", number) for number in range(mine)]
    names += [("h", number) for number in range(others)]
    state.scopes = {(group, ident(str(number))): None for group, number in names}
    expected = "limits" if is_full else None
    now, later = schedule(0, M + 1, scope=T_0), schedule(M + 5, M + 9, scope=T_0)
    assert judge_release_group(state, now, config=state.config) == expected
    reason = judge_pause_group(state, later, until_ms=M + 9, config=state.config)
    assert reason == expected


# --- settings and plans


def next_of(log, group_id="g", *, is_next=True):
    return judge_next(log.state, group_id, is_next=is_next, overtaken="late")


def test_settings_and_plans_are_refused_while_importing_and_away_from_home():
    assert next_of(target_log(), MOVES, is_next=False) == "importing"
    away = {next_of(Log(level=2, k=2), name) for name in "abcdefgh"}
    assert away == {None, "wrong_partition"}


def test_settings_and_plans_must_be_the_next_and_fit_the_limit():
    log = Log(level=2, groups=1)
    assert next_of(log, is_next=False) == "late"
    assert next_of(log) is None
    log.append(direct())
    assert next_of(log) is None
    assert next_of(log, "h", is_next=False) == "late"
    assert next_of(log, "h") == "limits"


# --- directives


def judged(log, record):
    return judge_directive(log.state, record, config=log.state.config)


def test_a_directive_is_refused_while_its_new_home_is_importing():
    assert judged(target_log(), direct(group=MOVES)) == "importing"
    assert judged(target_log(), direct(group="marshal")) == "importing"


def test_a_directive_is_judged_in_the_order_of_9_7():
    log = Log(level=2, groups=1)
    away = {judged(Log(level=2, k=2), direct(group=name)) for name in "abcdefgh"}
    assert away == {None, "wrong_partition"}
    assert judged(log, direct(until=0)) == "expired"
    assert judged(log, direct()) is None
    log.append(direct())
    assert judged(log, direct(group="h", until=0)) == "limits"
    assert judged(log, direct("c2")) == "busy"
    assert judged(log, direct()) == "old_seq"
    assert judged(log, direct(inc=ident("other"))) is None
    assert judged(log, direct("c2", until=0, seq=1)) is None
    log.append(direct(until=0, seq=1))
    assert judged(log, direct(until=0, seq=2)) == "op_over"


# --- changes of the partition count


def test_only_a_moving_key_has_a_draining_reason():
    log, *_ = source_log()
    assert draining_reason(log.state, KEY) == "moving"
    assert draining_reason(log.state, STAYS) is None


def test_a_partition_is_home_by_the_old_or_the_new_count():
    log, *_ = source_log()
    assert all(is_home(log.state, group) for group in "ghij")
    log = target_log()
    assert not all(is_home(log.state, group) for group in "ghij")
    assert is_home(Log().state, "g")


def test_a_claim_of_an_unknown_key_is_refused_while_importing():
    log = target_log()
    assert log.outcome_of(claim(generation=2)) == "importing"


def test_a_forgetting_is_refused_while_the_partition_count_changes():
    log, epoch, stays = source_log()
    assert log.outcome_of(forgetting(epoch)) == "moving"
    assert log.outcome_of(forgetting(stays, key=STAYS)) == "busy"


def test_records_of_the_owner_of_a_final_key_are_ignored():
    log, epoch, _ = source_log()
    log.append(b"", after=2 * H + 1)
    assert log.outcome_of(beat(epoch - 1)) == "not_owner"
    assert log.outcome_of(release(epoch)) == "not_owner"
    assert log.outcome_of(release(epoch, client="c2")) == "not_owner"


def test_a_retired_partition_refuses_records():
    log = Log(1, level=2)
    soon = log.now_ms + 9
    for record in (claim(), forgetting(1), beat(1), direct(), pause(soon)):
        assert log.outcome_of(record) == "retired"
    assert log.outcome_of(schedule(soon, soon + 9)) == "retired"


def test_a_refusal_names_the_new_partition_of_a_moved_key():
    log, *_ = source_log()
    place = {"generation": 2, "partition": 1}
    assert new_place(log.state, KEY, reason="wrong_generation") == place
    assert new_place(log.state, KEY, reason="held") is None
    assert new_place(Log().state, KEY, reason="wrong_generation") is None
    reserved = Key("marshal", "/checkpoint", 0)
    found = new_place(log.state, reserved, reason="wrong_generation")
    assert found == {"generation": 2, "partition": 0}
    assert new_place(WorldState(0), KEY, reason="retired") is None
