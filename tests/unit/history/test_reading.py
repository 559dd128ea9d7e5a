"""Reading the past of a key: which partitions, up to where, and from where on."""

import pytest
from logkit import (
    KEY,
    START_MS,
    H,
    Log,
    beat,
    claim,
    decide,
    pause,
    release,
    resolve,
    stage,
)
from pastkit import past
from scankit import FakeScan

from kafka_marshal import ConfigurationError, KeyHistory, LogUnreadable
from kafka_marshal.errors import TopicMisconfigured
from kafka_marshal.history import reading
from kafka_marshal.protocol.hashing import home_partition, key_partition
from kafka_marshal.protocol.records import POSITION_LEVEL

__all__ = ["past"]
LATER_MS = 4_102_444_800_000


class Cluster:
    """Logs by coordinating partition; ``read`` has which were opened, in order."""

    def __init__(self, monkeypatch, *logs, count=None):
        self.logs, self.read = logs, []
        self.count = len(logs) if count is None else count
        monkeypatch.setattr(reading, "LogScan", self.opened)

    def opened(self, *_, only, **__):
        (number,) = only(self.count)
        self.read.append(number)
        return FakeScan(self.logs[number])


def place(count, key=KEY):
    return key_partition(key.topic, key.partition, partition_count=count)


def test_only_the_partition_of_the_key_is_read(monkeypatch):
    logs = [Log(number, k=4) for number in range(4)]
    mine = place(4)
    logs[mine].append(claim(), at=LATER_MS)
    cluster = Cluster(monkeypatch, *logs)
    found = KeyHistory.open(key=KEY)
    assert cluster.read == [mine]
    assert (found.state, found.world.partition) == ("owned", mine)
    assert (found.claims_count, found.events_count, found.entries_count) == (1, 2, 2)
    assert found.began_at is None


def test_partitions_that_were_added_in_kafka_are_left_again(monkeypatch):
    logs = [Log(0, k=1), *(Log(n, configured=False) for n in range(1, 8))]
    guessed = place(8)
    assert guessed
    logs[0].append(claim(), at=LATER_MS)
    cluster = Cluster(monkeypatch, *logs)
    assert KeyHistory.open(key=KEY).state == "owned"
    assert cluster.read == [guessed, 0]


def test_an_unformatted_topic_is_an_error(monkeypatch):
    Cluster(monkeypatch, Log(configured=False))
    with pytest.raises(TopicMisconfigured, match="marshal topic format"):
        KeyHistory.open(key=KEY)


def test_before_the_format_nothing_was_claimed(monkeypatch):
    Cluster(monkeypatch, Log())
    assert KeyHistory.open(key=KEY, time_ms=1).state == "unclaimed"


def test_a_view_of_an_offset_and_of_a_time(monkeypatch):
    log = Log()
    epoch = log.claimed()
    log.append(release(epoch), after=5)
    log.append(claim("c2"), at=LATER_MS)
    Cluster(monkeypatch, log)
    assert KeyHistory.open(key=KEY, offset=epoch).state == "owned"
    assert KeyHistory.open(key=KEY, offset=epoch + 1).state == "free"
    assert KeyHistory.open(key=KEY, time_ms=START_MS + 4).state == "owned"
    found = KeyHistory.open(key=KEY, time_ms=START_MS + 5)
    assert (found.state, found.entries_count) == ("free", 3)
    assert KeyHistory.open(key=KEY).claims[-1].client_id == "c2"


def test_an_offset_that_is_not_there_yet_is_refused(monkeypatch):
    Cluster(monkeypatch, Log())
    with pytest.raises(ConfigurationError, match="ends at 1") as caught:
        KeyHistory.open(key=KEY, offset=1)
    assert caught.value.setting == "offset"


def test_an_owner_is_stale_by_the_time_since_the_last_entry(monkeypatch):
    log = Log()
    log.append(beat(log.claimed(), 3))
    Cluster(monkeypatch, log)
    assert KeyHistory.open(key=KEY).state == "stale"
    assert KeyHistory.open(key=KEY, offset=2).state == "owned"


def staged_logs():
    """Return two partitions: that of the key, and the home of its group."""
    key = KEY
    home = home_partition(key.group_id, partition_count=2)
    partitions = (p for p in range(100) if place(2, key._replace(partition=p)) != home)
    key = key._replace(partition=next(partitions))
    logs = [Log(number, k=2, level=POSITION_LEVEL) for number in range(2)]
    mine = logs[1 - home]
    mine.append(release(mine.claimed(key=key), 9, key=key))
    for log in logs:
        log.append(pause(LATER_MS))
    mine.append(stage((key.partition, 4)))
    return key, home, logs


def test_the_commit_on_another_home_is_part_of_the_events(monkeypatch):
    key, home, logs = staged_logs()
    assert logs[home].outcome_of(decide()) == "decided"
    assert logs[1 - home].outcome_of(resolve(commit=True)) == "position_set"
    cluster = Cluster(monkeypatch, *logs)
    found = KeyHistory.open(key=key)
    assert cluster.read == [1 - home, home]
    assert [e.what for e in found.events][4:] == [
        *("staged", "decided", "unpaused", "position_set")
    ]
    decided = found.events[5]
    assert (decided.partition, decided.client_id) == (home, "admin")
    assert found.events_count == 8


def test_a_commit_after_the_moment_of_the_view_is_left_out(monkeypatch):
    key, home, logs = staged_logs()
    assert logs[home].outcome_of(decide(), after=10) == "decided"
    Cluster(monkeypatch, *logs)
    found = KeyHistory.open(key=key, time_ms=START_MS + 9)
    assert found.events[-1].what == "staged"
    assert KeyHistory.open(key=key).events[-1].what == "decided"


def test_an_operation_without_a_commit_shows_none(monkeypatch):
    key, _, logs = staged_logs()
    Cluster(monkeypatch, *logs)
    assert KeyHistory.open(key=key).events[-1].what == "staged"


def test_a_log_without_its_start_begins_at_the_first_checkpoint(past, monkeypatch):
    whole = KeyHistory.open(key=KEY)
    past.delete(before=past.begins[0])
    found = KeyHistory.open(key=KEY)
    assert found.began_at == past.begins[0] + 1
    assert found.events[0].what == "restored"
    assert found.claims[0].effect == "restored"
    assert found.claims[0].token == whole.claims[0].token
    assert found.entries_count == past.end - past.begins[0] - 1
    assert whole.began_at is None


def test_a_moment_before_the_first_checkpoint_is_unknown(past):
    past.delete(before=past.begins[0])
    with pytest.raises(LogUnreadable, match="no checkpoint lies between"):
        KeyHistory.open(key=KEY, offset=past.begins[0])


def test_long_logs_are_folded_in_runs(monkeypatch):
    monkeypatch.setattr(reading, "RUN_ENTRIES_MAX", 3)
    log = Log()
    epoch = log.claimed()
    for position in range(20):
        log.append(beat(epoch, position), after=H)
    Cluster(monkeypatch, log)
    found = KeyHistory.open(key=KEY)
    assert found.claims[0].beats_count == 20
    assert found.entries_count == 22
