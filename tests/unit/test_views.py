"""Views: which entries belong to one, and what is estimated for people."""

import pytest
from enginekit import KEY as OWNED
from enginekit import fold
from logkit import KEY, OP, H, Log, beat, pause
from pastkit import past

from kafka_marshal import (
    LogUnreadable,
    Losses,
    TopicMisconfigured,
    World,
    WorldWatch,
    WrongCluster,
    watch,
)
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import ReleaseGroup
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import LogEntry
from kafka_marshal.views import REASONS_MAX, LogScan, Prefix

__all__ = ["past"]
UNTIL = 2_000_000


def entry(offset, timestamp_ms=0, value=b""):
    return LogEntry(
        offset=offset,
        leader_epoch=0,
        timestamp_ms=timestamp_ms,
        timestamp_type=1,
        value=value,
    )


def accepted(prefix, *entries, partition=0):
    return [e.offset for e in entries if prefix.accept(partition, e)]


def test_a_view_of_an_offset_ends_there():
    prefix = Prefix({0: 1}, None)
    assert accepted(prefix, *map(entry, range(4))) == [0, 1]
    assert accepted(prefix, entry(0), partition=1) == []


def test_a_view_of_a_time_is_a_prefix_though_a_clock_goes_back():
    prefix = Prefix(None, 10)
    times = [entry(0, 5), entry(1, 11), entry(2, 7), entry(3, 12)]
    assert accepted(prefix, *times) == [0]
    assert accepted(prefix, entry(0, 10), partition=1) == [0]


def released(reason, *, op=OP, seq=0):
    record = ReleaseGroup(
        client_id="admin",
        group_id="g",
        incarnation=bytes(16),
        seq=seq,
        op_id=op,
        msg_expire_time=UNTIL,
        reason=reason,
    )
    return encode(record)


def test_the_first_reason_of_an_operation_is_kept():
    prefix = Prefix(None, None)
    for seq, reason in enumerate(("deploy", "still", None)):
        prefix.accept(0, entry(seq, value=released(reason, seq=seq)))
    prefix.accept(0, entry(9, value=b"\x01\x05\x00garbage"))
    prefix.accept(0, entry(10, value=None))
    assert prefix.reasons == {("g", OP): "deploy"}


def test_reasons_beyond_the_view_are_left_out():
    prefix = Prefix({0: -1}, None)
    prefix.accept(0, entry(0, value=released("later")))
    assert prefix.reasons == {}


def test_reasons_are_bounded():
    prefix = Prefix(None, None)
    for number in range(REASONS_MAX + 5):
        op = number.to_bytes(16, "big")
        prefix.accept(0, entry(number, value=released(str(number), op=op)))
    assert len(prefix.reasons) == REASONS_MAX
    assert ("g", (5).to_bytes(16, "big")) in prefix.reasons
    assert ("g", (4).to_bytes(16, "big")) not in prefix.reasons


def test_an_age_is_estimated_with_the_time_since():
    log = Log()
    log.append(beat(log.claimed(), 5))
    log.append(b"", after=10)
    world = World([log.state], {0: H})
    assert world.estimated_age_ms(log.state, log.key()) == H + 10
    assert world.elapsed_ms(7) == 0
    assert World([log.state], {0: -5}).elapsed_ms(0) == 0


def test_claims_are_sorted_and_by_group():
    log = Log()
    for name in ("h", "g"):
        log.claimed(key=KEY._replace(group_id=name))
    world = World([log.state], {})
    assert [key.group_id for key, _ in world.claims()] == ["g", "h"]
    assert [key.group_id for key, _ in world.claims("h")] == ["h"]


@pytest.mark.parametrize(
    ("world", "kind", "message"),
    [
        pytest.param(
            World([Log(configured=False).state], {}),
            TopicMisconfigured,
            "marshal topic format",
            id="unformatted",
        ),
        pytest.param(
            World([Log(k=2).state, Log(1, configured=False).state], {}),
            TopicMisconfigured,
            r"torn_format: coordinating partitions \[1\]",
            id="torn",
        ),
        pytest.param(
            World([Log(k=2).state, Log(1, k=2, format_id=bytes(16)).state], {}),
            TopicMisconfigured,
            "torn_format",
            id="two-formats",
        ),
        pytest.param(
            World([Log(k=2).state], {}),
            TopicMisconfigured,
            "lost partitions",
            id="cut-down",
        ),
        pytest.param(
            World([Log().state], {}, cluster_id="other"),
            WrongCluster,
            "formatted for cluster 'cluster', and this is cluster 'other'",
            id="another-cluster",
        ),
    ],
)
def test_a_topic_that_is_not_in_order(world, kind, message):
    with pytest.raises(kind, match=message) as caught:
        world.config()
    assert caught.value.problems


def test_a_topic_of_another_use_is_not_to_be_formatted():
    data = Log(configured=False)
    data.append(b"an order")
    with pytest.raises(TopicMisconfigured, match="1 of its records are not") as caught:
        World([data.state], {}).config()
    assert "check the name" in str(caught.value)
    assert "topic format" not in str(caught.value)


def test_a_topic_that_is_in_order():
    spare = Log(1, configured=False)  # PROTOCOL 2.5: added in Kafka, changes nothing
    world = World([Log().state, spare.state], {}, cluster_id="cluster")
    assert world.config().partition_count == 1


def test_a_pause_has_no_reason_in_the_world_itself():
    log = Log()
    log.append(pause(UNTIL))
    assert World([log.state], {}).reasons == {}


# --- the past, where retention has deleted the start of the log


def entries_of(past):
    return [
        each.entry() for each in past.cluster.kafka.log(past.cluster.place(0)).records
    ]


def whole(past, offset):
    """Fold the whole log up to an offset, before anything of it is deleted."""
    state = WorldState(0)
    for each in entries_of(past):
        if each.offset <= offset:
            apply(state, each)
    return state


def test_the_past_begins_at_the_newest_checkpoint_before_it(past):
    expected = {at: whole(past, at) for at in range(past.end)}
    past.delete(past.begins[0])
    for at in range(past.ends[0], past.end):
        view = World.at(offset={0: at})
        assert view.log_start_missing == ()
        assert digest(view.partitions[0]) == digest(expected[at])
        assert view.partitions[0].keys[OWNED].owner.client_id == "a"


def test_offsets_before_every_checkpoint_are_unknown(past):
    past.delete(past.begins[0])
    for at in (0, past.begins[0], past.ends[0] - 1):
        view = World.at(offset={0: at})
        assert view.log_start_missing == (0,)
        with pytest.raises(LogUnreadable, match=r"partitions \[0\] begins above"):
            view.require_known([0])
        with pytest.raises(LogUnreadable):
            view.config()
        view.require_known([1])


def test_a_partition_that_is_not_asked_about_is_not_unknown(past):
    past.delete(past.begins[0])
    assert World.at(offset={}).log_start_missing == ()


def test_a_time_of_the_past_begins_at_a_checkpoint_before_it(past):
    times = {each.offset: each.timestamp_ms for each in entries_of(past)}
    at_ms = times[past.ends[1]]
    expected = whole(past, max(o for o, ms in times.items() if ms <= at_ms))
    past.delete(past.begins[0])
    view = World.at(time_ms=at_ms)
    assert digest(view.partitions[0]) == digest(expected)
    assert World.at(time_ms=times[past.begins[0]] - 1).log_start_missing == (0,)


def test_a_log_that_is_whole_is_folded_from_its_start(past):
    view = World.at(offset={0: 3})
    assert view.log_start_missing == ()
    assert digest(view.partitions[0]) == digest(whole(past, 3))


def test_a_scan_begins_at_the_first_checkpoint_that_remains(past):
    expected = digest(fold(past.cluster))
    past.delete(past.begins[0])
    with LogScan() as scan:
        restored = scan.restore()[0]
        assert restored.world.next_offset == past.begins[0] + 1
        for _, each in scan:
            apply(restored.world, each)
    assert digest(restored.world) == expected
    past.delete(past.begins[1] + 1)
    with LogScan() as scan:
        assert scan.restore()[0].is_log_start_missing


def test_losses_begin_there_too(past):
    past.delete(past.begins[0])
    found = Losses.open()
    assert found.began_at == {0: past.begins[0] + 1}
    assert found.world.partitions[0].keys[OWNED].owner.client_id == "a"
    past.delete(past.begins[1] + 1)
    with pytest.raises(LogUnreadable, match="marshal doctor"):
        Losses.open()


def test_a_watch_of_the_whole_log_begins_there_too(past, monkeypatch):
    expected = digest(fold(past.cluster))
    past.delete(past.begins[0])
    monkeypatch.setattr(watch, "open_coordination_log", past.open)
    with WorldWatch.open() as watching:
        watching.catch_up(30_000)
        assert digest(watching.world().partitions[0]) == expected
    past.delete(past.begins[1] + 1)
    with WorldWatch.open() as watching:
        watching.catch_up(30_000)
        assert watching.world().log_start_missing == (0,)
