import pytest
from hypothesis import given
from hypothesis import strategies as st
from logkit import KEY, Log, beat, claim, ident, release

from kafka_marshal import World
from kafka_marshal.ports import LogRange, TopicInfo
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal_cli.adoption import (
    Action,
    AdoptionPlan,
    _Source,
    _steps,
    read_group,
    step_of,
)

PLACE = TopicPartition("orders", 0)
ALL = LogRange(0, 100)


def found(
    offset=50, log_range=ALL, position=None, owner=None, *, place=PLACE, is_current=True
):
    return step_of(
        place,
        offset,
        source="committed",
        log_range=log_range,
        before=position,
        is_current=is_current,
        owner=owner,
    )


@pytest.mark.parametrize(
    ("step", "action", "position", "lag"),
    [
        pytest.param(found(50), Action.SET, 50, 50, id="ordinary"),
        pytest.param(found(0), Action.SET, 0, 100, id="offset-0-is-an-offset"),
        pytest.param(found(100), Action.SET, 100, 0, id="at-the-end"),
        pytest.param(found(101), Action.BEYOND, None, None, id="beyond-the-end"),
        pytest.param(
            found(5, LogRange(20, 100)), Action.SET, 20, 80, id="below-the-start"
        ),
        pytest.param(
            found(20, LogRange(20, 100)), Action.SET, 20, 80, id="at-the-start"
        ),
        pytest.param(found(position=50), Action.DONE, 50, 50, id="done"),
        pytest.param(found(position=60), Action.KEEP, 60, 40, id="log-is-ahead"),
        pytest.param(found(position=10), Action.KEEP, 10, 90, id="log-is-behind"),
        pytest.param(
            found(101, position=60), Action.KEEP, 60, 40, id="log-wins-beyond-too"
        ),
        pytest.param(
            found(position=50, is_current=False),
            Action.BEYOND,
            None,
            None,
            id="position-of-an-earlier-topic",
        ),
        pytest.param(found(owner="w1"), Action.HELD, None, None, id="held"),
        pytest.param(
            found(position=50, owner="w1"), Action.HELD, 50, 50, id="held-and-done"
        ),
        pytest.param(found(log_range=None), Action.GONE, None, None, id="gone"),
    ],
)
def test_offsets_position_and_owner_decide_the_action(step, action, position, lag):
    assert (step.action, step.position, step.lag) == (action, position, lag)


def test_a_step_has_source_offset_and_position_before():
    step = found(50, position=60)
    assert (step.partition, step.source) == (PLACE, "committed")
    assert (step.offset, step.before) == (50, 60)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        pytest.param(found(5, LogRange(20, 100)), "deleted 15 unproc", id="below"),
        pytest.param(found(101), "ends at 100", id="beyond"),
        pytest.param(
            found(position=60, is_current=False), "position 60 is of an", id="earlier"
        ),
        pytest.param(found(owner="w1"), "'w1'", id="held"),
        pytest.param(found(position=60), "is kept", id="keep"),
    ],
)
def test_a_blocked_kept_or_raised_offset_has_a_note(step, words):
    assert words in step.note


@pytest.mark.parametrize(
    ("known", "now", "action"),
    [
        (ident("old"), ident("new"), Action.BEYOND),
        (ident("old"), ident("old"), Action.KEEP),
        (None, ident("new"), Action.KEEP),
        (ident("old"), None, Action.KEEP),
    ],
)
def test_a_position_counts_only_in_its_own_topic(known, now, action):
    log, place = Log(), TopicPartition("t", 0)
    log.append(claim(topic_id=known))
    epoch = log.state.keys[KEY].epoch
    log.append(beat(epoch, 20))
    log.append(release(epoch, 20))
    (step,) = _steps(
        _Source({place: (3, "committed")}, False, 0),
        World([log.state], {0: 0}),
        group_id="g",
        topics={"t": TopicInfo(1, now)},
        ranges={place: LogRange(0, 5)},
    )
    assert (step.action, step.before) == (action, 20)


def test_a_position_that_is_set_or_equal_has_no_note():
    assert [step.note for step in (found(), found(position=50))] == [None] * 2


def test_a_plan_selects_its_steps_by_action():
    others = [found(place=TopicPartition("orders", number)) for number in (2, 11)]
    plan = AdoptionPlan(
        group_id="g",
        from_group="old",
        from_topic=None,
        is_source_active=False,
        steps=(found(owner="w"), *others),
    )
    assert [step.partition for step in plan.blocked] == [PLACE]
    assert [step.partition.partition for step in plan.of(Action.SET)] == [2, 11]


# --- the text records of the Go original

ORIGINAL_PLACE = TopicPartition("orders", 3)
NOW_S = 1_480_000_000


def line(kind, offset=None, *, group="billing", at_s=NOW_S, part=3):
    text = f"{kind}/1/{at_s}/ab12/worker-1/{group}/orders/{part}"
    return (text if offset is None else f"{text}/{offset}").encode()


def test_the_last_heartbeat_of_a_partition_gives_its_offset():
    group = read_group(
        [
            line("ClaimingPartition"),
            line("Heartbeat", 10),
            line("Heartbeat", 25),
            line("ClaimingMessages", 30),
            line("Heartbeat", 99, group="reports"),
            line("Heartbeat", 7, part=4),
        ],
        "billing",
    )
    assert group.offsets == {ORIGINAL_PLACE: 25, TopicPartition("orders", 4): 7}
    assert group.unreadable_count == 0


def test_a_release_gives_the_offset_and_ends_the_claim():
    group = read_group(
        [line("Heartbeat", 10), line("ReleasingPartition", 12)], "billing"
    )
    assert group.offsets == {ORIGINAL_PLACE: 12}
    assert not group.is_active(NOW_S)


@pytest.mark.parametrize(
    ("silent_s", "is_active"), [(0, True), (119, True), (120, False), (86_400, False)]
)
def test_a_group_is_active_until_silent_for_two_intervals(silent_s, is_active):
    group = read_group([line("Heartbeat", 10)], "billing")
    assert group.is_active(NOW_S + silent_s) is is_active


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="tombstone"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b"\x01\x01\x00\x99", id="our-own-records"),
        pytest.param(line("Heartbeat"), id="no-offset"),
        pytest.param(line("Heartbeat", "1/2"), id="too-many-fields"),
        pytest.param(line("Heartbeat", -5), id="negative"),
        pytest.param(line("Heartbeat", "1_0"), id="underscore"),
        pytest.param(line("Heartbeat", "\u0661"), id="other-digits"),
        pytest.param(line("Heartbeat", 2**63), id="too-large"),
        pytest.param(line("Heartbeat", 5, part="x"), id="no-partition"),
        pytest.param(line("Heartbeat", 5, at_s="soon"), id="no-time"),
        pytest.param(line("Nonsense", 5), id="unknown"),
        pytest.param(line("Heartbeat", 5, group="a/b"), id="slash-in-a-name"),
    ],
)
def test_an_undecodable_entry_is_counted_and_changes_nothing(value):
    group = read_group([line("Heartbeat", 10), value], "billing")
    assert group.unreadable_count == 1
    assert group.offsets == {ORIGINAL_PLACE: 10}


@given(st.lists(st.binary(max_size=80)))
def test_random_bytes_cause_no_error(values):
    assert read_group(values, "billing").unreadable_count <= len(values)


def test_a_record_of_another_group_is_skipped():
    assert read_group([line("Heartbeat", 10, group="x")], "billing").offsets == {}


def test_offsets_and_unreadable_records_add_up_over_partitions():
    values = [line("Heartbeat", 10), b"?", line("ReleasingPartition", 4, part=1), b"?"]
    whole = read_group(values, "billing")
    assert whole.offsets == {ORIGINAL_PLACE: 10, TopicPartition("orders", 1): 4}
    assert whole.unreadable_count == 2
    assert whole.is_active(NOW_S)
