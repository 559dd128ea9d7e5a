"""Views: which entries belong to one, and what is estimated for people."""

import pytest
from enginekit import KEY as OWNED
from enginekit import fold
from logkit import KEY, H, Log, beat, offer, pause, ready
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
from kafka_marshal.past import Since
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.snapshot import digest
from kafka_marshal.views import LogScan

__all__ = ["past"]
UNTIL = 2_000_000


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


def test_open_handoffs_are_shown_with_phase_and_times():
    log = Log(level=2)
    other = KEY._replace(group_id="h")
    for key in (other, KEY):
        log.append(offer(log.claimed(key=key), key=key))
    since_ms = log.state.now_ms
    log.append(ready(log.key().epoch), after=5)
    world = World([log.state], {})
    (row,) = world.handoffs("g")
    assert row == {
        **KEY._asdict(),
        "owner": "c1",
        "successor": "c2",
        "phase": "ready",
        "since_ms": since_ms,
        "until_ms": since_ms + H,
    }
    assert [each["phase"] for each in world.handoffs()] == ["ready", "offered"]
    late = World([log.state], {0: H})
    assert [each["group_id"] for each in late.handoffs()] == ["g"]


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
    assert World([log.state], {}).notes == {}


# --- the past, where retention has deleted the start of the log


def test_the_past_begins_at_the_newest_checkpoint_before_it(past):
    expected = {at: past.whole(at) for at in range(past.end)}
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
    times = {each.offset: each.timestamp_ms for each in past.entries()}
    at_ms = times[past.ends[1]]
    expected = past.whole(max(o for o, ms in times.items() if ms <= at_ms))
    past.delete(past.begins[0])
    view = World.at(time_ms=at_ms)
    assert digest(view.partitions[0]) == digest(expected)
    assert World.at(time_ms=times[past.begins[0]] - 1).log_start_missing == (0,)


def test_a_log_that_is_whole_is_folded_from_its_start(past):
    view = World.at(offset={0: 3})
    assert view.log_start_missing == ()
    assert digest(view.partitions[0]) == digest(past.whole(3))


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


# --- readings of a part of the log, which is whole


def test_a_scan_since_a_moment_begins_at_the_newest_checkpoint_before_it(past):
    expected = digest(fold(past.cluster))
    times = {each.offset: each.timestamp_ms for each in past.entries()}
    for since, begun in (
        (Since(offsets={0: past.end}), past.begins[1] + 1),
        (Since(offsets={0: past.ends[1]}), past.begins[0] + 1),
        (Since(offsets={0: past.begins[0]}), 0),
        (Since(offsets={}), 0),
        (Since(time_ms=times[past.ends[1]]), past.begins[0] + 1),
        (Since(time_ms=times[past.begins[0]]), 0),
        (Since(time_ms=times[past.end - 1] + 1), past.begins[1] + 1),
        (Since(time_ms=times[past.end - 1] + 1, fits=lambda _: False), 0),
    ):
        with LogScan() as scan:
            restored = scan.restore(since=since)[0]
            assert restored.world.next_offset == begun
            for _, each in scan:
                apply(restored.world, each)
        assert digest(restored.world) == expected


def test_a_scan_since_a_moment_ends_at_the_moment_of_its_view(past):
    expected = digest(past.whole(past.ends[1] - 1))
    with LogScan() as scan:
        scan.until(offset={0: past.ends[1] - 1})
        restored = scan.restore(since=Since(offsets={0: past.end}))[0]
        assert restored.world.next_offset == past.begins[0] + 1
        for _, each in scan:
            apply(restored.world, each)
    assert digest(restored.world) == expected


def test_a_scan_of_selected_entries_reads_no_others(past):
    for first, last in ((3, None), (3, 5), (0, 2), (past.end + 5, None)):
        with LogScan() as scan:
            scan.select(0, first=first, last=last)
            found = [each.offset for _, each in scan]
        end = past.end if last is None else last + 1
        assert [at for at in found if at >= first] == list(range(first, end))
        assert min(found, default=first) >= first
    with LogScan() as scan:
        scan.select(1)
        assert list(scan) == []


def test_losses_since_a_time_begin_before_the_claims_that_were_open_then(past):
    times = {each.offset: each.timestamp_ms for each in past.entries()}
    latest = max(times.values())
    # The only claim is earlier than both checkpoints, so all of the log is read.
    found = Losses.open(since_ms=latest + 1)
    assert found.began_at == {}
    assert found.lost == Losses.open().lost
    past.delete(past.begins[0])
    assert Losses.open(since_ms=latest + 1).began_at == {0: past.begins[0] + 1}
    # No claim of another group was open.
    assert Losses.open(since_ms=latest + 1, group_id="x").began_at == {}
