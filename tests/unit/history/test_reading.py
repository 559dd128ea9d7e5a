"""Reading the history of a key: from which partitions, and between which bounds."""

import pytest
from changekit import Change
from logkit import (
    KEY,
    START_MS,
    H,
    Log,
    beat,
    claim,
    decide,
    ident,
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
from kafka_marshal.history.chain import KeyChain
from kafka_marshal.history.reading import counts_in, joined, places_of
from kafka_marshal.history.wording import text_of
from kafka_marshal.protocol.hashing import home_partition, key_partition
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.snapshot import from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState

__all__ = ["past"]
LATER_MS = 4_102_444_800_000


class Cluster:
    """Logs by coordinating partition; ``read`` lists the opened ones in order."""

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


def test_unformatted_partitions_added_in_kafka_are_skipped(monkeypatch):
    logs = [Log(0, k=1), *(Log(n, configured=False) for n in range(1, 8))]
    guessed = place(8)
    assert guessed
    logs[0].append(claim(), at=LATER_MS)
    cluster = Cluster(monkeypatch, *logs)
    assert KeyHistory.open(key=KEY).state == "owned"
    with pytest.raises(TypeError, match="give Key"):
        KeyHistory.open(key=tuple(KEY))
    assert cluster.read == [guessed, 0]


def test_an_unformatted_topic_is_an_error(monkeypatch):
    Cluster(monkeypatch, Log(configured=False))
    with pytest.raises(TopicMisconfigured, match="marshal topic format"):
        KeyHistory.open(key=KEY)


def test_a_key_is_unclaimed_before_the_format(monkeypatch):
    Cluster(monkeypatch, Log())
    assert KeyHistory.open(key=KEY, time_ms=1).state == "unclaimed"


def test_a_history_may_end_at_an_offset_or_a_time(monkeypatch):
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


def test_an_offset_beyond_the_log_end_is_refused(monkeypatch):
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
    logs = [Log(number, k=2, level=SECOND_LEVEL) for number in range(2)]
    mine = logs[1 - home]
    mine.append(release(mine.claimed(key=key), 9, key=key))
    for log in logs:
        log.append(pause(LATER_MS))
    mine.append(stage((key.partition, 4)))
    return key, home, logs


def test_the_commit_in_the_home_partition_of_the_group_is_an_event(monkeypatch):
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


def test_a_commit_after_the_requested_time_is_left_out(monkeypatch):
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


def test_runs_of_heartbeats_are_counted(monkeypatch):
    log = Log()
    epoch = log.claimed()
    for position in range(20):
        log.append(beat(epoch, position), after=H)
    Cluster(monkeypatch, log)
    found = KeyHistory.open(key=KEY)
    assert found.claims[0].beats_count == 20
    assert found.entries_count == 22


# --- while the partition count changes, and after it (PROTOCOL 10)

DIRECTIONS = [pytest.param(4, 8, id="growing"), pytest.param(8, 4, id="shrinking")]


def whole_change(before, after):
    """Return a change after all its steps, and a key that moved and was claimed."""
    change = Change(before, after)
    (key,) = change.moving()
    change.claimed(key)
    change.tick(1)
    change.fence()
    change.tick(1)
    assert change.place(key).outcome_of(claim("c9", key=key)) == "wrong_generation"
    change.released(key, position=7, successor="c2")
    change.tick(1)
    change.imported(key)
    change.reclaimed(key, client="c2")
    change.done()
    change.tick(1)
    change.final()
    return change, key


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_the_past_of_a_key_is_followed_over_its_partitions(monkeypatch, before, after):
    change, key = whole_change(before, after)
    Cluster(monkeypatch, *change.logs)
    found = KeyHistory.open(key=key)
    source, target = (change.place(key, n).state.partition for n in (before, after))
    events = [(e.what, e.partition) for e in found.events]
    events.remove(("layout_fenced", target))
    assert events[:7] == [
        ("configured", source),
        ("claimed", source),
        ("layout_fenced", source),
        ("refused", source),
        ("released", source),
        ("imported", target),
        ("claimed", target),
    ]
    assert sorted(events[7:]) == sorted(("layout_final", t) for t in (source, target))
    assert found.world.partition == target
    assert [c.client_id for c in found.claims] == ["c1", "c2"]
    tokens = [c.token for c in found.claims]
    assert tokens == sorted(tokens)
    assert (found.claims_count, found.refused_count) == (2, 1)
    assert found.events_count == len(found.events)


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_key_is_explained_at_every_step_of_a_change(monkeypatch, before, after):
    change = Change(before, after)
    (key,) = change.moving()
    Cluster(monkeypatch, *change.logs)
    source, target = change.place(key), change.target(key)
    s, t = source.state.partition, target.state.partition

    def explained():
        for log in change.logs:
            log.now_ms += 1
        found = KeyHistory.open(key=key, time_ms=source.now_ms - 1)
        return found.state, found.world.partition, found.why

    change.claimed(key)
    state, place, why = explained()
    assert (state, place) == ("owned", s)
    assert "moves" not in why
    change.fence()
    assert target.outcome_of(claim(key=key, generation=2)) == "importing"
    state, place, why = explained()
    assert (state, place) == ("owned", s)
    assert f"moves to coordinating partition {t}: no member can claim it here" in why
    change.released(key, position=7)
    state, place, why = explained()
    assert (state, place) == ("free", s)
    assert "members claim it there once it is imported" in why
    change.imported(key)
    state, place, why = explained()
    assert (state, place) == ("free", t)
    assert (
        f"imported the partition at position 7 from coordinating partition {s}" in why
    )
    change.reclaimed(key)
    change.done()
    assert explained()[:2] == ("owned", t)
    change.final()
    assert explained()[:2] == ("owned", t)
    outcome = "retired" if after < before else "wrong_partition"
    assert source.outcome_of(claim(key=key, generation=2)) == outcome
    texts = [text_of(each) for each in KeyHistory.open(key=key).events]
    assert any("refused as importing: the coordinating partition" in t for t in texts)
    assert any(f"refused as {outcome}: " in text for text in texts)


def test_a_key_that_may_exist_elsewhere_is_explained(monkeypatch):
    change = Change(4, 8)
    (key,) = change.moving()
    change.fence()
    Cluster(monkeypatch, *change.logs)
    found = KeyHistory.open(key=key)
    assert found.state == "unclaimed"
    source = change.place(key).state.partition
    assert f"the partition may exist in coordinating partition {source}" in found.why
    change.done()
    found = KeyHistory.open(key=key)
    assert "may exist" not in found.why
    assert "the partition was not among them" in text_of(found.events[-1])


def test_events_are_in_order_although_the_clock_of_a_leader_is_behind(monkeypatch):
    change = Change(4, 8)
    (key,) = change.moving()
    change.claimed(key)
    change.target(key).now_ms -= 600
    change.tick(1)
    change.fence()
    change.released(key, position=7)
    change.imported(key)
    change.reclaimed(key)
    change.done()
    change.final()
    Cluster(monkeypatch, *change.logs)
    what = [e.what for e in KeyHistory.open(key=key).events]
    assert what.index("released") < what.index("imported")
    assert [c.client_id for c in KeyHistory.open(key=key).claims] == ["c1", "c2"]


@pytest.mark.parametrize(("before", "after"), DIRECTIONS)
def test_a_key_that_moved_and_returned_has_one_history(monkeypatch, before, after):
    change, key = whole_change(before, after)
    change.before, change.after, change.op = after, before, ident("back")
    change.released(key, client="c2", position=9)
    change.tick(1)
    change.fence()
    change.imported()
    change.reclaimed(key, client="c3")
    change.done()
    change.final()
    Cluster(monkeypatch, *change.logs)
    found = KeyHistory.open(key=key)
    assert [c.client_id for c in found.claims] == ["c1", "c2", "c3"]
    assert [c.token.era for c in found.claims] == [1, 2, 3]
    what = [e.what for e in found.events]
    assert [each for each in what if each in {"claimed", "imported"}] == [
        "claimed",
        "imported",
        "claimed",
        "imported",
        "claimed",
    ]
    assert found.world.partition == change.target(key).state.partition


def test_the_claim_of_a_dead_owner_ends_when_its_key_moves(monkeypatch):
    change = Change(4, 8)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.tick(3 * H)
    change.whole_after_fence()
    change.reclaimed(key)
    Cluster(monkeypatch, *change.logs)
    first, second = KeyHistory.open(key=key).claims
    assert (first.client_id, first.ending, first.reason) == ("c1", "released", "moved")
    assert (second.client_id, second.ending) == ("c2", "open")


def test_an_offset_may_be_of_the_source_or_target_partition(monkeypatch):
    change, key = whole_change(4, 8)
    Cluster(monkeypatch, *change.logs)
    source, target = change.place(key), change.target(key)
    found = KeyHistory.open(key=key, offset={source.state.partition: 1})
    assert (found.state, found.world.partition) == ("owned", source.state.partition)
    assert [c.client_id for c in found.claims] == ["c1"]
    last = len(target.entries) - 1
    for offset in (last, {target.state.partition: last}):
        found = KeyHistory.open(key=key, offset=offset)
        assert found.world.partition == target.state.partition
        assert [c.client_id for c in found.claims] == ["c1", "c2"]
    epoch = target.key(key).epoch
    found = KeyHistory.open(key=key, offset=epoch - 1)
    assert (found.state, len(found.claims)) == ("free", 1)
    unknown = Change(4, 8)
    unknown.logs = [Log(0, configured=False)]
    Cluster(monkeypatch, *unknown.logs)
    with pytest.raises(TopicMisconfigured):
        KeyHistory.open(key=key, offset=0)


def test_a_key_is_found_in_a_topic_with_unformatted_partitions(monkeypatch):
    """The key is in partition 0; eight partitions would place it elsewhere."""
    logs = [Log(0, k=1), *(Log(n, configured=False) for n in range(1, 8))]
    epoch = logs[0].claimed()
    assert place(8)
    Cluster(monkeypatch, *logs)
    assert KeyHistory.open(key=KEY, time_ms=START_MS).state == "owned"
    assert KeyHistory.open(key=KEY, offset=epoch).state == "owned"


def test_a_history_since_an_offset_covers_all_partitions_of_the_key(monkeypatch):
    change, key = whole_change(4, 8)
    Cluster(monkeypatch, *change.logs)
    epoch = change.target(key).key(key).epoch
    for since in ({"since_offset": epoch}, {"since_ms": START_MS}):
        found = KeyHistory.open(key=key, **since)
        assert [c.client_id for c in found.claims] == ["c1", "c2"]


def chain_of(log, key, *, skip=0):
    """Return the chain of a log, from a checkpoint after some entries."""
    chain, world = KeyChain(key), WorldState(log.state.partition)
    for index, entry in enumerate(log.entries):
        if index == skip and skip:
            world = from_bytes(to_bytes(world))
            chain.begin(world)
        transitions = apply(world, entry)
        if index >= skip:
            chain.take(world, entry, transitions=transitions)
    return chain, world


def test_places_of_a_moving_key_are_its_source_and_target():
    change = Change(2, 4)
    (key,) = change.moving()
    source, target = (change.place(key, n).state.partition for n in (2, 4))
    chains = {t: chain_of(change.logs[t], key) for t in (target,)}
    assert places_of(key, chains) == {0}, "only partition 0 has the count"
    change.fence()
    chains = {t: chain_of(change.logs[t], key) for t in (target,)}
    assert places_of(key, chains) == {source, target}
    assert counts_in(chains) == {2, 4}
    (stays,) = change.staying()
    log = change.place(stays)
    chains = {log.state.partition: chain_of(log, stays)}
    assert places_of(stays, chains) == {log.state.partition}


def test_a_history_may_begin_at_a_checkpoint_within_a_change():
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    change.released(key, position=5)
    change.imported(key)
    source, target = change.place(key), change.target(key)
    begun = len(target.entries)
    change.reclaimed(key)
    change.tick(1)
    change.done()
    change.final()
    chains = {
        source.state.partition: chain_of(source, key, skip=2),
        target.state.partition: chain_of(target, key, skip=begun),
    }
    path = joined(key, chains)
    assert [e.what for e in path.events] == [
        "restored",
        "layout_fenced",
        "released",
        "restored",
        "claimed",
        "layout_final",
        "layout_final",
    ]
    assert path.began_at == 2
    assert path.events_count == 7
    assert path.world is chains[target.state.partition][1]


def test_a_partition_without_records_of_the_key_is_left_out():
    change = Change(2, 4)
    (key,) = change.moving()
    change.claimed(key)
    change.released(key)
    change.fence()
    change.imported(key)
    change.done()
    change.final()
    source, target = change.place(key), change.target(key)
    source.append(b"")
    chains = {
        source.state.partition: chain_of(source, key, skip=len(source.entries) - 1),
        target.state.partition: chain_of(target, key),
    }
    path = joined(key, chains)
    assert {e.partition for e in path.events} == {target.state.partition}
    assert path.began_at is None
    at = source.state.partition
    assert joined(key, chains, at=at).world.partition == at
