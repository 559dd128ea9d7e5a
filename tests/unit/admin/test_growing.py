"""An admin grows a keyed data topic, on a log in memory."""

import pytest
from enginekit import fold, lowered, world, write
from growkit import (
    RECORDS,
    SHORT_MS,
    Died,
    Tool,
    at,
    growths,
    keyed,
    partitions,
    produce,
    records,
    require_grown,
)
from logkit import claim, growth, ident, release
from resizekit import Tool as Resizer
from resizekit import key

from kafka_marshal.admin.growing import SETTLE_MS
from kafka_marshal.errors import (
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    LogUnwritable,
    TopicMisconfigured,
)
from kafka_marshal.protocol.types import TopicPartition


def test_a_growth_announces_adds_settles_and_ends():
    cluster, steps = keyed(), []
    tool = Tool(cluster)
    began_ms = cluster.clock.now_ms()
    plan = tool.grow(on_progress=steps.append)
    require_grown(cluster)
    assert plan.steps == ("announce", "add", "settle", "end")
    assert (plan.added_count, plan.duration_ms) == (4, SHORT_MS)
    assert tool.done == ["log", "topic", "log"]
    assert cluster.clock.now_ms() - began_ms >= SHORT_MS
    shown = [(each.step, each.left_ms) for each in steps]
    assert [name for name, _ in shown] == [
        *("announce", "add", "settle", "settle", "settle", "end")
    ]
    assert shown[2][1] == SHORT_MS
    assert shown[3][1] <= SHORT_MS - 10_000


def test_each_record_has_the_reason():
    cluster = keyed()
    Tool(cluster).grow(reason="more consumers")
    Tool(cluster).grow(withdraw=True, reason="a mistake")
    found = [each.reason for each in records(cluster)]
    assert found == ["more consumers", "more consumers", "a mistake"]


def test_nothing_is_written_without_execute():
    cluster = keyed()
    tool = Tool(cluster)
    plan = tool.grow_topic("t", 8)
    assert (tool.done, growths(cluster), partitions(cluster)) == ([], (), 4)
    assert plan.settle_ms == plan.duration_ms == SETTLE_MS


def test_ends_are_read_after_the_settle_time():
    cluster, tool = keyed(), None

    def late(progress):
        if progress.step == "settle" and progress.left_ms < SHORT_MS:
            produce(cluster, 1)

    tool = Tool(cluster)
    tool.grow(on_progress=late)
    require_grown(cluster, (5, 2, 7, 9))


def test_ends_include_uncommitted_records():
    cluster = keyed()
    cluster.kafka.begin_transaction(TopicPartition("t", 1), [b"open"])
    Tool(cluster).grow()
    require_grown(cluster, (5, 1, 7, 9))


def test_a_topic_can_grow_several_times():
    cluster = keyed()
    Tool(cluster).grow(8)
    Tool(cluster).grow(16)
    Tool(cluster).grow(48)
    assert [each[1:3] for each in growths(cluster)] == [(4, 8), (8, 16), (16, 48)]
    assert all(each.ends is not None for each in growths(cluster))


def test_another_admin_continues_wherever_the_first_one_dies():
    for left in range(3):
        cluster = keyed()
        with pytest.raises(Died):
            Tool(cluster, left=left).grow()
        if left == 0:
            assert (growths(cluster), partitions(cluster)) == ((), 4)
        else:
            assert growths(cluster)[0].ends is None
            assert partitions(cluster) == (4 if left == 1 else 8)
        began_ms = cluster.clock.now_ms()
        plan = Tool(cluster, "second").grow()
        assert plan.steps == ("announce", "add", "settle", "end")[left:]
        require_grown(cluster)
        # The log does not show how long the first admin has waited.
        assert cluster.clock.now_ms() - began_ms >= SHORT_MS


def test_a_growth_whose_request_had_no_answer_is_continued():
    cluster = keyed()
    tool = Tool(cluster, refusal=CoordinationError("no answer"))
    with pytest.raises(CoordinationError, match="partitions 8 --execute"):
        tool.grow()
    Tool(cluster).grow()
    require_grown(cluster)


def test_a_growth_that_has_ended_is_not_repeated():
    cluster = keyed()
    Tool(cluster).grow()
    tool = Tool(cluster)
    assert (tool.grow().steps, tool.done) == ((), [])


def test_a_second_admin_may_end_a_growth_while_the_first_waits():
    cluster, began = keyed(), []

    def second(progress):
        if progress.step == "settle" and not began:
            began.append(progress)
            Tool(cluster, "second").grow(settle_ms=1_000)

    tool = Tool(cluster)
    tool.grow(on_progress=second)
    assert (began != [], tool.done) == (True, ["log", "topic"])
    require_grown(cluster)


@pytest.mark.parametrize("step", ["announce", "add", "end"])
def test_a_growth_ends_although_another_admin_did_a_step_first(step):
    cluster, began = keyed(), []

    def second(progress):
        if progress.step == step and not began:
            began.append(progress)
            Tool(cluster, "second").grow(settle_ms=1_000)

    Tool(cluster).grow(on_progress=second)
    require_grown(cluster)
    assert began


def test_the_first_ends_in_the_log_count():
    cluster = keyed()

    def second(progress):
        if progress.step == "end" and partitions(cluster) == 8:
            Tool(cluster, "second").grow(settle_ms=0)
            produce(cluster, 0)

    Tool(cluster).grow(on_progress=second)
    require_grown(cluster)
    assert [each.ends for each in records(cluster)[-2:]] == [RECORDS, (6, 0, 7, 9)]


def test_a_growth_is_refused_while_another_is_open():
    cluster = keyed()
    with pytest.raises(Died):
        Tool(cluster, left=2).grow()
    with pytest.raises(ClaimRejected, match="partitions 8 --execute") as caught:
        Tool(cluster).grow(16)
    assert caught.value.reason == "busy"
    assert "--partitions 8 --withdraw --execute" in str(caught.value)


def test_a_growth_is_refused_if_another_is_announced_meanwhile():
    cluster = keyed()

    def second(progress):
        if progress.step == "announce":
            write(cluster, growth(16, 4))

    with pytest.raises(ClaimRejected, match="announced meanwhile") as caught:
        Tool(cluster).grow(on_progress=second)
    assert (caught.value.reason, partitions(cluster)) == ("busy", 4)


def test_an_open_growth_is_withdrawn():
    cluster = keyed()
    with pytest.raises(Died):
        Tool(cluster, left=1).grow()
    steps = []
    plan = Tool(cluster).grow(None, withdraw=True, on_progress=steps.append)
    assert (plan.steps, plan.duration_ms, plan.added_count) == (("withdraw",), 0, 0)
    assert [each.step for each in steps] == ["withdraw"]
    assert (growths(cluster), partitions(cluster)) == ((), 4)
    Tool(cluster).grow(12)
    assert growths(cluster)[0].new_count == partitions(cluster) == 12


def test_an_ended_growth_is_withdrawn_by_its_partition_count():
    cluster = keyed()
    Tool(cluster).grow(8)
    Tool(cluster).grow(16)
    with pytest.raises(ClaimRejected, match="from 4 to 8, from 8 to 16"):
        Tool(cluster).grow(None, withdraw=True)
    Tool(cluster).grow(8, withdraw=True)
    assert [each[1:3] for each in growths(cluster)] == [(8, 16)]
    Tool(cluster).grow(None, withdraw=True)
    assert growths(cluster) == ()
    with pytest.raises(ClaimRejected, match="the log knows none"):
        Tool(cluster).grow(16, withdraw=True)


def test_a_growth_that_is_withdrawn_meanwhile_is_not_ended():
    cluster = keyed()

    def second(progress):
        if progress.step == "settle" and progress.left_ms < SHORT_MS:
            Tool(cluster).grow(None, withdraw=True)

    with pytest.raises(ClaimRejected, match="withdrawn meanwhile"):
        Tool(cluster).grow(on_progress=second)
    assert growths(cluster) == ()


def test_a_growth_that_is_withdrawn_just_before_its_end_is_refused():
    cluster = keyed()

    def second(progress):
        if progress.step == "end":
            Tool(cluster).grow(None, withdraw=True)

    with pytest.raises(ClaimRejected, match="it was withdrawn, or another one"):
        Tool(cluster).grow(on_progress=second)


def test_a_withdrawal_that_another_admin_did_first_is_refused():
    cluster = keyed()
    Tool(cluster).grow()

    def second(progress):
        if len(records(cluster)) == 2:
            Tool(cluster).grow(None, withdraw=True)

    with pytest.raises(ClaimRejected, match="groups grow --topic t"):
        Tool(cluster).grow(None, withdraw=True, on_progress=second)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_count_that_is_not_a_possible_multiple_is_refused(count):
    cluster = keyed()
    with pytest.raises(ConfigurationError, match="has 4 partitions and cannot get"):
        Tool(cluster).grow(count)
    assert records(cluster) == []


def test_a_growth_to_fewer_partitions_than_the_topic_has_is_refused():
    cluster = keyed()
    Tool(cluster).grow()
    Tool(cluster).grow(16)
    with pytest.raises(ConfigurationError, match="has 16 partitions and cannot get 8"):
        Tool(cluster).grow(8)
    cluster.kafka.add_partitions("t", 4)
    with pytest.raises(ConfigurationError, match="has 20 partitions and cannot get 16"):
        Tool(cluster).grow(16)
    Tool(cluster).grow(40)
    assert growths(cluster)[-1][1:3] == (20, 40)


def test_a_count_reached_without_an_announcement_is_refused():
    with pytest.raises(ClaimRejected, match="members claimed the new ones at once"):
        Tool(keyed()).grow(4)


def test_a_topic_of_too_many_partitions_cannot_grow():
    cluster = keyed()
    cluster.kafka.create_topic("u", 4_097)
    with pytest.raises(ConfigurationError, match="more than 4096"):
        Tool(cluster).grow(8_194, "u")


@pytest.mark.parametrize("count", [100_004, 2**31, 2**40])
def test_a_topic_cannot_grow_beyond_what_the_log_accepts(count):
    with pytest.raises(ConfigurationError, match="growths to 100000 at most"):
        Tool(keyed()).grow(count)


@pytest.mark.parametrize(
    ("topic", "count", "text"),
    [
        ("__marshal", 8, "marshal topic resize"),
        ("nowhere", 8, "does not exist"),
        ("t", None, "name the number"),
        (None, 8, "topic must be a text"),
    ],
)
def test_a_growth_without_a_data_topic_and_a_count_is_refused(topic, count, text):
    with pytest.raises(ConfigurationError, match=text):
        Tool(keyed()).grow(count, topic)


@pytest.mark.parametrize("settle_ms", [-1, 8 * 86_400_000])
def test_a_settle_time_out_of_bounds_is_refused(settle_ms):
    with pytest.raises(ConfigurationError, match=f"not {settle_ms}"):
        Tool(keyed()).grow(settle_ms=settle_ms)


def test_a_growth_below_level_2_is_refused():
    cluster = lowered()
    with pytest.raises(ConfigurationError, match="marshal topic upgrade --execute"):
        Tool(cluster).grow()


@pytest.mark.parametrize("kind", [TopicMisconfigured, LogUnwritable])
def test_a_growth_that_the_cluster_refuses_can_be_withdrawn(kind):
    cluster = keyed()
    tool = Tool(cluster, refusal=kind("too many"))
    with pytest.raises(kind, match=r"^too many; .*--withdraw --execute$"):
        tool.grow()
    assert growths(cluster)[0].ends is None
    Tool(cluster).grow(None, withdraw=True)
    assert growths(cluster) == ()


@pytest.mark.parametrize("kind", [TopicMisconfigured, LogUnwritable])
def test_a_growth_that_the_cluster_would_refuse_is_not_announced(kind):
    cluster, steps = keyed(), []
    tool = Tool(cluster, objection=kind("too many"))
    with pytest.raises(kind, match=r"^too many$"):
        tool.grow(on_progress=steps.append)
    assert (steps, growths(cluster), partitions(cluster)) == ([], (), 4)


def test_a_growth_beyond_the_limit_is_refused():
    cluster = world(1, records=RECORDS, operations=1)
    write(cluster, growth(2, 1, topic="u"))
    with pytest.raises(ClaimRejected, match="no more growths") as caught:
        Tool(cluster).grow()
    assert (caught.value.reason, partitions(cluster)) == ("limits", 4)


def test_no_partition_is_added_before_the_announcement_is_read_back():
    cluster = keyed()
    tool = Tool(cluster)

    def await_all(*_):
        raise DeadlineExceeded("no verdict")

    tool._follow().await_all = await_all
    with pytest.raises(DeadlineExceeded):
        tool.grow()
    assert (tool.done, partitions(cluster)) == (["log"], 4)


def test_an_unexpected_refusal_of_a_growth_is_an_error():
    cluster = keyed()
    tool = Tool(cluster)
    plain = tool._follow().append
    tool._follow().append = lambda _, record: plain(1, record)
    with pytest.raises(LogUnwritable, match=r"refused the growth \(wrong_partition\)"):
        tool.grow()


@pytest.mark.parametrize("is_created", [True, False])
def test_a_topic_deleted_or_created_again_meanwhile_gets_no_ends(is_created):
    cluster = keyed()

    def again(progress):
        if progress.step == "end":
            cluster.kafka.delete_topic("t")
            if is_created:
                cluster.kafka.create_topic("t", 8)

    with pytest.raises(ClaimRejected, match="deleted or created again") as caught:
        Tool(cluster).grow(on_progress=again)
    assert caught.value.reason == "old_topic"
    assert growths(cluster)[0].ends is None
    plan = Tool(cluster).grow(8, withdraw=True)
    assert plan.partition_count == (8 if is_created else None)
    assert growths(cluster) == ()


def test_a_growth_fails_if_brokers_do_not_know_all_partitions(monkeypatch):
    """The metadata of a broker that has just started may lack partitions."""
    cluster = keyed()
    tool = Tool(cluster)
    monkeypatch.setattr(tool._data, "ends", lambda *_: {})
    with pytest.raises(CoordinationError, match="know 0 of the 4 partitions"):
        tool.grow()
    assert growths(cluster)[0].ends is None


def test_a_growth_of_an_earlier_topic_does_not_prevent_another():
    cluster = keyed()
    Tool(cluster).grow()
    cluster.kafka.delete_topic("t")
    cluster.kafka.create_topic("t", 4)
    plan = Tool(cluster).grow()
    assert plan.steps == ("announce", "add", "settle", "end")
    require_grown(cluster, (0, 0, 0, 0))


@pytest.mark.parametrize("has_ends", [True, False])
def test_without_ids_a_growth_of_an_earlier_topic_must_be_withdrawn(has_ends):
    cluster = keyed()
    write(cluster, growth(16, 8))
    if has_ends:
        write(cluster, growth(16, 8, ends=(1,) * 8))
    for count in (8, 16):
        with pytest.raises(ClaimRejected, match="of an earlier topic"):
            Tool(cluster).grow(count)
    Tool(cluster).grow(16, withdraw=True)
    Tool(cluster).grow()
    require_grown(cluster)


def rows(sources):
    return [
        (each.partition, each.position, each.end, each.lag, each.waiting)
        for each in sources
    ]


def test_a_growth_shows_positions_lags_and_waiting_partitions():
    cluster = keyed()
    for number, position in enumerate((5, 0, 3)):
        at(cluster, number, position)
    plan = Tool(cluster).grow_topic("t", 12)
    assert {each.group_id for each in plan.sources} == {"g"}
    # Before the ends are known, all new partitions wait.
    assert rows(plan.sources) == [
        (0, 5, 5, 0, (4, 8)),
        (1, 0, 0, 0, (5, 9)),
        (2, 3, 7, 4, (6, 10)),
        (3, None, 9, None, (7, 11)),
    ]
    Tool(cluster).grow(12)
    at(cluster, 6, 1)
    at(cluster, 7, None)
    ((known, sources),) = [
        (each.growth, each.sources) for each in Tool(cluster).growths("t")
    ]
    assert (known.new_count, known.ends) == (12, RECORDS)
    assert rows(sources) == [
        (0, 5, 5, 0, ()),
        (1, 0, 0, 0, ()),
        # Partition 6 has a position: its consumption has begun.
        (2, 3, 7, 4, (10,)),
        (3, None, 9, None, (7, 11)),
    ]


def test_a_position_in_an_earlier_topic_of_the_name_is_not_shown():
    cluster = keyed(1)
    Tool(cluster).grow()
    topic_id = cluster.kafka.topic("t").topic_id
    for number, claimed_id in ((0, ident("earlier")), (4, ident("earlier"))):
        epoch = write(cluster, claim("c1", key=key(number), topic_id=claimed_id))
        write(cluster, release(epoch, 9, key=key(number)))
    epoch = write(cluster, claim("c1", key=key(5), topic_id=topic_id))
    write(cluster, release(epoch, 0, key=key(5)))
    (report,) = Tool(cluster).growths("t")
    assert rows(report.sources)[:2] == [
        (0, None, 5, None, (4,)),
        (1, None, 0, None, ()),
    ]


def test_only_growths_of_the_given_topic_are_shown():
    cluster = keyed()
    assert Tool(cluster).growths() == ()
    write(cluster, growth(2, 1, topic="u"))
    cluster.kafka.create_topic("u", 1)
    (report,) = Tool(cluster).growths()
    assert (report.growth.topic, report.sources) == ("u", ())
    assert Tool(cluster).growths("t") == ()


def test_each_key_is_shown_once_while_the_coordination_topic_grows():
    cluster = keyed(2)
    for number, position in enumerate(RECORDS):
        at(cluster, number, position)
    Tool(cluster).grow()
    found = rows(Tool(cluster).growths()[0].sources)
    with pytest.raises(Died):
        Resizer(cluster, left=6).resize(4)
    assert fold(cluster).layout is not None
    assert rows(Tool(cluster).growths()[0].sources) == found
    assert len(found) == len(RECORDS)


def test_an_unknown_log_end_is_shown_as_none():
    cluster = keyed()
    at(cluster, 0, 5)
    tool = Tool(cluster)
    tool.log_ends = lambda _: {}
    plan = tool.grow_topic("t", 8)
    assert rows(plan.sources)[0] == (0, 5, None, None, (4,))
