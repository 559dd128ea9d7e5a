"""The checks of `marshal doctor`, one by one."""

import errno
import fcntl
import os
import time
from pathlib import Path

import attrs
import msgspec
import pytest
from logkit import KEY, H, Log, growth, member

from kafka_marshal import World
from kafka_marshal.admin.formatting import TopicReport
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.kafka_io.topic_rules import ClusterInfo, TopicDescription
from kafka_marshal.kafka_io.topiclog import reader_timeout_ms
from kafka_marshal_cli import checks
from kafka_marshal_cli.checks import Check, ClockReading, Result


def test_a_check_has_one_of_four_results():
    assert [each.value for each in Result] == ["ok", "note", "failed", "skipped"]
    assert Check("clock", Result.OK, "runs well").run is None


SECOND = 1_000_000_000
SOUND = TopicDescription(
    name="__marshal",
    exists=True,
    partition_count=2,
    replication=3,
    in_sync=3,
    configs={"min.insync.replicas": "2"},
)


def report(**changes):
    return TopicReport(
        cluster=ClusterInfo("cluster", 1, ()),
        topic=attrs.evolve(SOUND, **changes),
        found=(),
        note=None,
    )


def world(log, *, behind_ms=1_000):
    return World(
        [log.state], {}, cluster_id="cluster", read_at_ms=log.now_ms + behind_ms
    )


@pytest.mark.parametrize(
    ("off_ppm", "result"),
    [(0, "ok"), (900, "ok"), (-900, "ok"), (1_100, "failed"), (-1_100, "failed")],
)
def test_a_clock_that_drifts_more_than_1000_ppm_fails(off_ppm, result):
    ended = ClockReading(SECOND + off_ppm * SECOND // 1_000_000, SECOND)
    check = checks.local_clock(ClockReading(0, 0), ended)
    assert check.result.value == result
    assert (check.run is None) is (result == "ok")


def test_the_time_to_read_two_clocks_is_not_counted_as_drift():
    ended = ClockReading(SECOND // 4 + checks.READING_NS, SECOND // 4)
    check = checks.local_clock(ClockReading(0, 0), ended)
    assert "drifts 0 ppm" in check.found


def test_a_machine_without_a_boot_clock_gets_a_note(monkeypatch):
    if hasattr(time, "CLOCK_BOOTTIME"):
        reading = ClockReading.now()
        assert reading is not None
        assert reading.boot_ns > 0
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert ClockReading.now() is None
    assert checks.local_clock(None, None).result is Result.NOTE


def test_a_usable_state_folder_passes_and_is_not_created(tmp_path):
    home = tmp_path / "not" / "yet"
    check = checks.state_folder(lambda: home)
    assert (check.result, str(home) in check.found) == (Result.OK, True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_two_can_hold_a_lock_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda _file, _how: None)
    check = checks.state_folder(lambda: tmp_path)
    assert check.result is Result.FAILED
    assert "MARSHAL_STATE_DIR" in check.run


def test_a_folder_below_one_of_another_user_is_reported(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    check = checks.state_folder(lambda: tmp_path / "private")
    assert check.result is Result.FAILED
    assert check.found == f"{tmp_path / 'private'} cannot be used: Permission denied"


@pytest.mark.parametrize("broken", ["fsync", "flock"])
def test_a_folder_where_fsync_or_flock_fails_is_reported(tmp_path, monkeypatch, broken):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os if broken == "fsync" else fcntl, broken, refuse)
    check = checks.state_folder(lambda: tmp_path)
    assert (check.result, "No locks available" in check.found) == (Result.FAILED, True)


@pytest.mark.parametrize(
    ("limit", "result"),
    [(64, Result.NOTE), (255, Result.NOTE), (256, Result.OK), (None, Result.OK)],
)
def test_a_low_limit_of_open_files_is_noted(limit, result):
    check = checks.open_files(limit)
    assert check.result is result
    assert ("ulimit -n" in (check.run or "")) is (result is Result.NOTE)


def test_a_machine_without_usable_pidfds_gets_a_note():
    def refuse(_pid):
        raise OSError(errno.EPERM, "Operation not permitted")

    refused = checks.death_watch(refuse)
    assert (refused.result, "not permitted" in refused.found) == (Result.NOTE, True)
    opened = checks.death_watch(lambda _pid: os.open(os.devnull, os.O_RDONLY))
    assert opened.result is Result.OK


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, "ok"),
        ({"in_sync": 2, "behind": (1,)}, "note"),
        ({"in_sync": 1, "behind": (1,)}, "failed"),
        ({"replication": 1, "in_sync": 1, "configs": {}}, "note"),
    ],
)
def test_missing_or_too_few_replicas_are_reported(changes, result):
    (check,) = checks.copies(report(**changes), servers="b:1,c:2")
    assert check.result.value == result
    assert (check.run is None) is (result == "ok")
    if check.run and check.run.startswith("kafka-topics"):
        assert "--bootstrap-server b:1,c:2 " in check.run


@pytest.mark.parametrize(
    ("worst_ms", "result"),
    [(H / 10 - 1, "ok"), (H / 10, "note"), (H / 2 - 1, "note"), (H / 2, "failed")],
)
def test_round_trips_are_compared_with_the_heartbeat_interval(worst_ms, result):
    check = checks.round_trips([1, worst_ms], 2 * H, read_ms=2 * H)
    assert check.result.value == result


@pytest.mark.parametrize(
    ("interval_ms", "result"), [(1_200, "note"), (1_500, "ok"), (60_000, "ok")]
)
def test_an_interval_too_short_for_the_read_timeout_is_noted(interval_ms, result):
    """Leases end before a read over a broken connection times out."""
    check = checks.round_trips([1], interval_ms, read_ms=reader_timeout_ms(interval_ms))
    assert check.result.value == result
    assert ("noticed only after" in check.found) is (result == "note")


def test_a_broker_whose_clock_is_ahead_is_named():
    log = Log()
    assert checks.leaders_clocks(world(log), {0: 2}) is None
    check = checks.leaders_clocks(world(log, behind_ms=-3_000), {0: 2})
    assert (check.result, "broker 2 is 3s ahead" in check.found) == (Result.NOTE, True)


def test_a_record_100_ms_after_the_read_is_no_clock_error():
    assert checks.leaders_clocks(world(Log(), behind_ms=-100), {0: 2}) is None


def test_records_without_a_time_of_the_broker_are_noted():
    log = Log()
    servers = "one:9092,two:9092"
    assert list(checks.timestamps(world(log), "__marshal", servers=servers)) == []
    log.claimed(key=KEY)
    log.append(b"whatever", kind=0)
    (check,) = checks.timestamps(world(log), "__marshal", servers=servers)
    assert check.found.startswith("1 record was not dated")
    assert check.run == (
        "kafka-configs --bootstrap-server one:9092,two:9092 --alter --entity-type "
        "topics --entity-name __marshal --add-config "
        "message.timestamp.type=LogAppendTime"
    )


def test_live_members_that_do_not_support_the_level_fail():
    log = Log()
    log.append(member("old"))
    assert list(checks.levels(world(log))) == []
    log.state.config = msgspec.structs.replace(log.state.config, feature_level=2)
    (check,) = checks.levels(world(log))
    assert check.result is Result.FAILED
    assert check.found == "members that do not support level 2: g/old"
    log.append(b"", after=3 * H)
    assert list(checks.levels(world(log))) == []


def test_members_of_an_unformatted_partition_are_not_checked():
    log = Log(configured=False)
    assert list(checks.levels(world(log))) == []


def test_an_unfinished_growth_is_noted_until_it_ends():
    log = Log(level=2)
    assert list(checks.growths(world(log))) == []
    log.append(growth(8, 4, topic="payments"))
    (check,) = checks.growths(world(log))
    assert (check.check, check.result) == ("growths", Result.NOTE)
    assert "payments grows from 4 to 8 partitions" in check.found
    assert check.run.startswith(
        "marshal groups grow --topic payments --partitions 8 --execute"
    )
    log.append(growth(8, 4, topic="payments", ends=(0,) * 4))
    assert list(checks.growths(world(log))) == []


def test_a_user_without_a_home_directory_is_noted():
    def find():
        raise ConfigurationError("user 7 has no home directory", setting="state_dir")

    check = checks.state_folder(find)
    assert check.result is Result.NOTE
    assert check.run == "set MARSHAL_STATE_DIR"
