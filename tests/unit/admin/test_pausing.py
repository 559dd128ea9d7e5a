"""Pauses of a group in all partitions, as an admin writes and renews them."""

import pytest
from enginekit import H, fold, lines, world, write
from logkit import config
from positionkit import following

from kafka_marshal.admin import pausing
from kafka_marshal.admin.pausing import (
    ENDED,
    EXPIRED_MAX,
    PauseOperation,
    Period,
    Sender,
    current_person,
    ending,
    in_order,
    op_id_of,
    parse_topics,
    period_of,
    scope_of_topics,
)
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    DeadlineExceeded,
    GroupPaused,
    LogUnreadable,
    LogUnwritable,
)
from kafka_marshal.protocol.codec import person_of
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    PauseGroup,
    ReleaseGroup,
    ScopedTopic,
)
from kafka_marshal.protocol.state import SCHEDULED_MAX, SCOPED_MAX
from kafka_marshal.protocol.text import scope_texts
from simulator.fakestore import AppendFate

K = 4
FOR_MS = 900
HOME = home_partition("g", partition_count=K)
OTHERS = [t for t in range(K) if t != HOME]
TIMEOUT_MS = 30_000


@pytest.fixture(name="cluster")
def _cluster():
    return world(partitions=K, groups=3)


def operation(cluster, client="admin", **changes):
    period = Period(for_ms=FOR_MS)
    wanted = {"group_id": "g", "partition_count": K, "period": period} | changes
    return PauseOperation(
        following(cluster, client), cluster.clock.view(), Sender(client), **wanted
    )


def sent(cluster, client="admin"):
    """Return partition and outcome of the records of an admin, in order of time."""
    found = []
    for t in range(K):
        for line in lines(cluster, t):
            record = line.record
            is_pause = isinstance(record, ReleaseGroup | PauseGroup)
            if is_pause and record.client_id == client:
                message = line.transition.effect or line.transition.reason
                found.append((line.time_ms, t, message))
    return [each[1:] for each in sorted(found)]


def paused(cluster):
    return {t for t in range(K) if fold(cluster, t).active_pause("g") is not None}


def slow_once(cluster, operation, *, partition, delay_ms):
    """Delay the first append to one partition."""
    log = operation._follower.own_log
    plain = log.append

    def append(to, value):
        is_slow = to == partition and not slow
        if is_slow:
            slow.append(value)
            cluster.fates["admin"] = AppendFate(delay_ms=delay_ms)
        done = plain(to, value)
        cluster.fates.pop("admin", None)
        return done

    slow = []
    log.append = append


def test_a_pause_is_written_to_the_home_partition_first(cluster):
    cluster.fates["admin"] = AppendFate(delay_ms=40)
    one = operation(cluster)
    one.begin(TIMEOUT_MS)
    order = sent(cluster)
    assert order[0] == (HOME, "paused")
    assert sorted(order[1:]) == [(t, "paused") for t in OTHERS]
    pauses = [fold(cluster, t).active_pause("g") for t in range(K)]
    assert {pause.op_id for pause in pauses} == {one.op_id}


def test_the_first_of_two_admins_pauses_all_partitions(cluster):
    # Neither has read what the other writes.
    one, two = operation(cluster, "one"), operation(cluster, "two")
    one.begin(TIMEOUT_MS)
    shown = r"'one' until \S+Z, or longer if that one renews it"
    with pytest.raises(GroupPaused, match=shown) as raised:
        two.begin(TIMEOUT_MS)
    assert raised.value.by == "one"
    assert sent(cluster, "two") == [(HOME, "busy")]
    assert paused(cluster) == set(range(K))


def test_planned_end_ms_refuses_a_paused_group_and_writes_nothing(cluster):
    two = operation(cluster, "two")
    assert two.planned_end_ms() == cluster.clock.view().wall_ms() + FOR_MS
    two._clock = cluster.clock.view(wall_offset_ms=-100 * FOR_MS)
    assert two.planned_end_ms() == fold(cluster, HOME).append_time_ms + FOR_MS
    operation(cluster, "one").begin(TIMEOUT_MS)
    with pytest.raises(GroupPaused, match="'one'") as raised:
        operation(cluster, "two").planned_end_ms()
    assert raised.value.by == "one"
    assert sent(cluster, "two") == []


def test_a_pause_is_renewed_while_one_partition_is_slow(cluster):
    one = operation(cluster)
    slow_once(cluster, one, partition=OTHERS[0], delay_ms=5 * FOR_MS // 3)
    one.begin(TIMEOUT_MS)
    assert paused(cluster) == set(range(K))
    reported = sent(cluster)
    # The delayed record expired and was sent again; the others were renewed meanwhile.
    assert reported.count((OTHERS[0], "expired")) == 1
    assert reported.count((HOME, "paused")) >= 4
    assert all(outcome in {"paused", "expired"} for _, outcome in reported)


def test_a_pause_shorter_than_its_appends_take_is_sent_only_a_few_times(cluster):
    cluster.fates["admin"] = AppendFate(delay_ms=40)
    one = operation(cluster, period=Period(for_ms=1))
    with pytest.raises(ClaimRejected, match="or a longer pause") as raised:
        one.begin(TIMEOUT_MS)
    assert raised.value.reason == "expired"
    assert sent(cluster) == [(HOME, "expired")] * EXPIRED_MAX


def test_a_pause_is_renewed_as_long_as_the_admin_waits(cluster):
    one = operation(cluster)
    one.begin(TIMEOUT_MS)
    end_ms = cluster.clock.now_ms() + 10 * FOR_MS
    assert one.hold_until(lambda: cluster.clock.now_ms() >= end_ms, 20 * FOR_MS)
    assert paused(cluster) == set(range(K))
    renewals = sent(cluster).count((HOME, "paused")) - 1
    assert 25 <= renewals <= 30
    assert not one.hold_until(lambda: False, FOR_MS)


def test_the_pause_of_a_dead_admin_expires(cluster):
    one = operation(cluster)
    slow_once(cluster, one, partition=OTHERS[0], delay_ms=100 * FOR_MS)
    with pytest.raises(DeadlineExceeded, match="groups resume g"):
        one.begin(3 * FOR_MS)
    assert paused(cluster) == {t for t in range(K) if t != OTHERS[0]}
    cluster.run(FOR_MS)
    for t in range(K):
        write(cluster, b"time passes", t)
    assert paused(cluster) == set()


def test_a_pause_that_one_partition_refuses_is_ended_in_all(cluster):
    held = OTHERS[0]
    other = Sender("other").record("g", b"o" * 16, expire_ms=2**60, reason=None)
    one = operation(cluster)
    write(cluster, other, held)
    cluster.fates["admin"] = AppendFate(delay_ms=40)
    with pytest.raises(GroupPaused, match="'other'"):
        one.begin(TIMEOUT_MS)
    assert paused(cluster) == {held}
    reported = sent(cluster)
    assert (held, "busy") in reported
    # The home is last: until then, no other admin can begin a pause.
    assert reported[-1] == (HOME, "unpaused")
    assert {t for t, outcome in reported if outcome == "unpaused"} == set(range(K)) - {
        held
    }


def test_a_pause_that_ended_in_one_partition_is_ended_in_all(cluster):
    one = operation(cluster)
    one.begin(TIMEOUT_MS)
    other = Sender("other").record("g", one.op_id, expire_ms=ENDED, reason=None)
    write(cluster, other, OTHERS[1])
    with pytest.raises(ClaimRejected, match="is over in coordinating") as raised:
        one.hold_until(lambda: False, TIMEOUT_MS)
    assert raised.value.reason == "op_over"
    assert paused(cluster) == set()


def test_a_pause_beyond_the_limit_of_groups_is_ended_in_all(cluster):
    one = operation(cluster)
    for number in range(3):
        other = Sender("other").record(
            f"h{number}", b"o" * 16, expire_ms=2**60, reason=None
        )
        write(cluster, other, OTHERS[0])
    with pytest.raises(LogUnwritable, match="limits"):
        one.begin(TIMEOUT_MS)
    assert paused(cluster) == set()


@pytest.mark.parametrize("lands", [False, True], ids=["lost", "late"])
def test_a_pause_record_that_is_lost_or_late_is_sent_again(cluster, lands):
    one = operation(cluster)
    fate = AppendFate(delay_ms=FOR_MS // 2, is_lost=not lands, fails_after_ms=10)
    cluster.fates["admin"] = fate
    plain = one._renew

    def renew():
        cluster.fates.pop("admin", None)
        plain()

    one._renew = renew
    one.begin(TIMEOUT_MS)
    assert paused(cluster) == set(range(K))


def test_a_pause_fails_if_a_partition_is_halted(cluster):
    one = operation(cluster)
    above = cluster.config.__class__(
        **{
            name: getattr(cluster.config, name)
            for name in cluster.config.__struct_fields__
        }
        | {"generation": 2, "era": 2, "feature_level": 9}
    )
    write(cluster, above, HOME)
    with pytest.raises(LogUnreadable, match="level 9"):
        one.begin(H)


# --- a pause that begins later, and the ends of pauses


def later(cluster, *, begin=500, lasts=FOR_MS, client="admin", **changes):
    begin_ms = cluster.clock.wall_ms() + begin
    period = Period(for_ms=lasts, begin_ms=begin_ms, until_ms=begin_ms + lasts)
    return operation(cluster, client, period=period, **changes), period


def tick(cluster):
    for t in range(K):
        write(cluster, b"time passes", t)


def test_a_scheduled_pause_begins_in_all_partitions_without_its_admin(cluster):
    one, period = later(cluster)
    one.begin(TIMEOUT_MS)
    assert sorted(sent(cluster)) == [(t, "scheduled") for t in range(K)]
    assert sent(cluster)[0][0] == HOME
    assert paused(cluster) == set()
    cluster.run(500)
    tick(cluster)
    pauses = [fold(cluster, t).active_pause("g") for t in range(K)]
    assert {(p.op_id, p.until_ms) for p in pauses} == {(one.op_id, period.until_ms)}
    cluster.run(FOR_MS)
    tick(cluster)
    assert paused(cluster) == set()
    # Nothing was renewed.
    assert len(sent(cluster)) == K


def test_a_scheduled_pause_that_one_partition_refuses_is_ended_in_all(cluster):
    taken = OTHERS[0]
    for number in range(SCHEDULED_MAX):
        begin_ms = cluster.clock.wall_ms() + 10_000
        record = PauseGroup(
            **Sender("other").fields("g"),
            op_id=bytes([number]) * 16,
            begin_time=begin_ms,
            msg_expire_time=begin_ms + 9,
            scope=None,
            reason=None,
        )
        write(cluster, record, taken)
    one, _ = later(cluster)
    with pytest.raises(ClaimRejected, match="cancel one with") as raised:
        one.begin(TIMEOUT_MS)
    assert raised.value.reason == "limits"
    groups = {t: fold(cluster, t).groups["g"] for t in range(K)}
    assert all(group.scheduled_as(one.op_id) is None for group in groups.values())
    assert sent(cluster)[-1] == (HOME, "unpaused")


def test_renewals_do_not_move_the_end_of_a_pause_until_a_time(cluster):
    until_ms = cluster.clock.wall_ms() + FOR_MS
    one = operation(cluster, period=Period(for_ms=FOR_MS, until_ms=until_ms))
    one.begin(TIMEOUT_MS)
    end_ms = cluster.clock.now_ms() + FOR_MS // 2
    one.hold_until(lambda: cluster.clock.now_ms() >= end_ms, FOR_MS)
    pauses = [fold(cluster, t).active_pause("g") for t in range(K)]
    assert {pause.until_ms for pause in pauses} == {until_ms}


def test_a_pause_whose_end_has_passed_is_not_sent_again(cluster):
    one = operation(cluster, period=Period(for_ms=9, until_ms=1))
    with pytest.raises(ClaimRejected, match="has passed") as raised:
        one.begin(TIMEOUT_MS)
    assert raised.value.reason == "expired"
    assert sent(cluster) == [(HOME, "expired")]


def chosen(cluster, *, op_id=None):
    follower = following(cluster, "reader")
    wall_ms = cluster.clock.wall_ms()
    return ending(follower, "g", op_id=op_id, wall_ms=wall_ms)


def test_a_resume_ends_active_pauses_and_those_that_are_due(cluster):
    planned, _ = later(cluster, begin=400)
    planned.begin(TIMEOUT_MS)
    far, _ = later(cluster, begin=90_000, client="far")
    far.begin(TIMEOUT_MS)
    one = operation(cluster, "now")
    one.begin(TIMEOUT_MS)
    assert chosen(cluster) == dict.fromkeys(range(K), (one.op_id,))
    assert chosen(cluster, op_id=far.op_id) == dict.fromkeys(range(K), (far.op_id,))
    cluster.run(400)
    both = dict.fromkeys(range(K), (one.op_id, planned.op_id))
    assert chosen(cluster) == both


def test_a_resume_cancels_the_only_scheduled_pause(cluster):
    with pytest.raises(ClaimRejected, match="not paused; see: marshal groups list"):
        chosen(cluster)
    one, _ = later(cluster)
    one.begin(TIMEOUT_MS)
    assert chosen(cluster) == dict.fromkeys(range(K), (one.op_id,))
    two, _ = later(cluster, client="two")
    two.begin(TIMEOUT_MS)
    with pytest.raises(ClaimRejected, match=one.op_id.hex()) as raised:
        chosen(cluster)
    assert raised.value.reason == "ambiguous"
    with pytest.raises(ClaimRejected, match="groups describe g") as raised:
        chosen(cluster, op_id=bytes(16))
    assert raised.value.reason == "not_paused"


def test_the_record_of_a_pause_names_its_person():
    sender = Sender("admin", "ada")
    record = sender.record("g", b"o" * 16, expire_ms=1, reason=None)
    assert person_of(record) == "ada"
    assert (
        person_of(Sender("admin").record("g", b"o" * 16, expire_ms=1, reason=""))
        is None
    )


def test_the_person_is_the_user_unless_the_environment_names_another(monkeypatch):
    monkeypatch.setattr(pausing.getpass, "getuser", lambda: "root")
    monkeypatch.delenv("MARSHAL_AS", raising=False)
    assert current_person() == "root"
    monkeypatch.setenv("MARSHAL_AS", "ada")
    assert current_person() == "ada"
    monkeypatch.setenv("MARSHAL_AS", "")
    assert current_person() is None


@pytest.mark.parametrize(
    "error", [KeyError("uid 7"), OSError("no user"), ImportError()]
)
def test_a_user_without_a_name_gives_no_person(monkeypatch, error):
    def getuser():
        raise error

    monkeypatch.setattr(pausing.getpass, "getuser", getuser)
    monkeypatch.delenv("MARSHAL_AS", raising=False)
    assert current_person() is None


def test_a_pause_is_ended_at_home_last():
    assert in_order(range(4), home=1) == [0, 2, 3, 1]


# --- Pauses with a scope ---


def scoped(cluster, client="admin", **changes):
    scope = (ScopedTopic("t", (0, 1)),)
    return operation(cluster, client, **({"scope": scope} | changes))


def scopes(cluster):
    """Return the coordinating partitions in which each pause with a scope is active."""
    found = {}
    for t in range(K):
        group = fold(cluster, t).groups.get("g")
        for pause in () if group is None else group.scoped:
            found.setdefault((pause.op_id, scope_texts(pause.scope)), set()).add(t)
    return found


def test_a_pause_with_a_scope_is_written_to_all_partitions_and_renewed(cluster):
    one = scoped(cluster)
    one.begin(TIMEOUT_MS)
    assert sent(cluster)[0] == (HOME, "paused")
    assert scopes(cluster) == {(one.op_id, ("t:0,1",)): set(range(K))}
    assert paused(cluster) == set()
    ends_ms = one.ends_ms
    end_ms = cluster.clock.now_ms() + 2 * FOR_MS
    assert one.hold_until(lambda: cluster.clock.now_ms() >= end_ms, 3 * FOR_MS)
    assert max(one.ends_ms) > max(ends_ms)
    cluster.run(FOR_MS)
    tick(cluster)
    assert scopes(cluster) == {}


def test_pauses_with_a_scope_are_active_beside_that_of_the_group(cluster):
    one, two, whole = scoped(cluster), scoped(cluster, "other"), operation(cluster)
    for each in (one, two, whole):
        each.begin(TIMEOUT_MS)
    assert len(scopes(cluster)) == 2
    assert paused(cluster) == set(range(K))
    every = chosen(cluster)
    assert set(every[0]) == {one.op_id, two.op_id, whole.op_id}
    assert chosen(cluster, op_id=two.op_id) == dict.fromkeys(range(K), (two.op_id,))


def test_a_ninth_pause_with_a_scope_is_refused_and_ended(cluster):
    for number in range(SCOPED_MAX):
        record = PauseGroup(
            **Sender("other").fields("g"),
            op_id=bytes([number]) * 16,
            begin_time=0,
            msg_expire_time=cluster.clock.wall_ms() + 9_000,
            scope=(ScopedTopic("t", ()),),
            reason=None,
        )
        write(cluster, record, OTHERS[0])
    with pytest.raises(ClaimRejected, match="8 pauses of some topics") as raised:
        scoped(cluster).begin(TIMEOUT_MS)
    assert raised.value.reason == "limits"
    assert sent(cluster)[-1] == (HOME, "unpaused")


def test_a_scope_is_sorted_and_has_no_repetitions():
    found = scope_of_topics(config(level=2), {"u": None, "t": [3, 0, 3]})
    assert scope_texts(found) == ("t:0,3", "u")
    assert scope_texts(None) == ()


def test_topics_are_named_whole_or_by_partition():
    assert parse_topics(["a", "b:1,0", "b:3"]) == {
        "a": None,
        "b": frozenset({0, 1, 3}),
    }
    assert parse_topics(["a:1", "a"]) == parse_topics(["a", "a:1"]) == {"a": None}
    for text in ("", "a:", "a:x", "a:1:2", "a:-1", "a:1,"):
        with pytest.raises(ConfigurationError, match="topic:0,1"):
            parse_topics([text])


def test_topics_that_are_no_list_of_strings_are_refused():
    """A single string would be read as one topic for each of its letters."""
    assert parse_topics(["u", "t:0,1", "t:1,2"]) == {"u": None, "t": {0, 1, 2}}
    for given in ("orders", [("t", 0)], ["t:x"], [None]):
        with pytest.raises(ConfigurationError, match=r"list, like|is not a topic"):
            parse_topics(given)


@pytest.mark.parametrize("name", ["for_ms", "until_ms", "begin_ms"])
def test_the_times_of_a_pause_must_be_whole_numbers(name):
    given = {"for_ms": 9, "until_ms": None, "begin_ms": None}
    if name == "until_ms":
        given["for_ms"] = None
    for wrong in ("10m", 9.5):
        with pytest.raises(ConfigurationError, match=f"{name} must be a whole number"):
            period_of(
                config(level=2),
                given["for_ms"] if name != "for_ms" else wrong,
                until_ms=wrong if name == "until_ms" else None,
                begin_ms=wrong if name == "begin_ms" else None,
                wall_ms=1,
            )


@pytest.mark.parametrize(
    ("level", "wanted", "expected"),
    [
        pytest.param(1, {"t": None}, "needs level 2", id="level"),
        pytest.param(2, {}, "1 to 16 topics", id="none"),
        pytest.param(2, {"t": range(257)}, "up to 256 partitions", id="partitions"),
        pytest.param(
            2, {f"t{n}": None for n in range(17)}, "1 to 16 topics", id="topics"
        ),
    ],
)
def test_a_scope_beyond_the_limits_is_refused(level, wanted, expected):
    with pytest.raises(ConfigurationError, match=expected):
        scope_of_topics(config(level=level), wanted)


@pytest.mark.parametrize(
    ("begin_ms", "text"),
    [(None, "from 1970-01-01T00:00:09.000Z on"), (9_500, "00:00:09.500Z on")],
)
def test_a_pause_cannot_end_before_it_begins(begin_ms, text):
    with pytest.raises(ConfigurationError, match="cannot end at") as caught:
        period_of(config(), None, until_ms=8_000, begin_ms=begin_ms, wall_ms=9_000)
    assert caught.value.setting == "until_ms"
    assert text in str(caught.value)


NOW_MS, DAY_MS = 9_000, 24 * 3_600_000
MONTH_MS = 30 * DAY_MS


def period(for_ms, until_ms, begin_ms):
    given = config(level=SECOND_LEVEL)
    return period_of(
        given, for_ms, until_ms=until_ms, begin_ms=begin_ms, wall_ms=NOW_MS
    )


def test_the_error_of_a_pause_that_is_too_long_has_readable_units():
    with pytest.raises(ConfigurationError, match="lasts 1ms to 1d, not 100d"):
        period(100 * DAY_MS, None, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, None, None), Period(for_ms=1)),
        ((DAY_MS, None, None), Period(for_ms=DAY_MS)),
        ((None, 9_005, None), Period(for_ms=5, until_ms=9_005)),
        ((5, None, 9_001), Period(for_ms=5, until_ms=9_006, begin_ms=9_001)),
        ((None, 9_006, 9_001), Period(for_ms=5, until_ms=9_006, begin_ms=9_001)),
        (
            (DAY_MS, None, NOW_MS + MONTH_MS),
            Period(
                for_ms=DAY_MS,
                until_ms=NOW_MS + MONTH_MS + DAY_MS,
                begin_ms=NOW_MS + MONTH_MS,
            ),
        ),
    ],
)
def test_the_period_of_a_pause_follows_from_begin_end_and_length(given, expected):
    assert period(*given) == expected


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ((None, None, None), "for_ms"),
        ((5, 9_005, None), "for_ms"),
        ((0, None, None), "for_ms"),
        ((DAY_MS + 1, None, None), "for_ms"),
        ((None, NOW_MS + DAY_MS + 1, None), "until_ms"),
        ((5, None, NOW_MS), "begin_ms"),
        ((5, None, NOW_MS + MONTH_MS + 1), "begin_ms"),
    ],
)
def test_a_period_beyond_the_limits_is_refused(given, setting):
    with pytest.raises(ConfigurationError) as caught:
        period(*given)
    assert caught.value.setting == setting


@pytest.mark.parametrize("text", ["", "x", "00" * 15, "00" * 17, None])
def test_an_operation_id_has_32_hex_digits(text):
    assert op_id_of("0F" * 16) == b"\x0f" * 16
    with pytest.raises(ConfigurationError, match="32 hex digits"):
        op_id_of(text)
