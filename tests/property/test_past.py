"""A view of a past moment equals a replay of the whole log up to that moment."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pastkit import patch_open
from pastlogs import RandomLog, cluster_of

from kafka_marshal import World
from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine import checkpoint_reader
from kafka_marshal.protocol.layout import used_count
from kafka_marshal.protocol.snapshot import to_bytes
from kafka_marshal.protocol.types import TopicPartition
from simulator.fakelog import FakeCoordinationLog

K = 2


class Scene:
    """Two random logs that retention has shortened, and a reader of them."""

    def __init__(self, seed, patch):
        self.rng = rng = random.Random(seed)
        self.logs = [RandomLog(t, rng, length=90, k=K, resizes=True) for t in range(K)]
        self.kafka = cluster_of(*self.logs)
        self.starts = []
        for t, log in enumerate(self.logs):
            offset = rng.choice((0, rng.choice(log.entries).offset))
            place = TopicPartition(COORDINATION_TOPIC, t)
            self.kafka.delete_records(place, before=offset)
            self.starts.append(offset)
        patch_open(patch, self.open)
        size = rng.choice((1, 2, 9, 60))
        patch.setattr(checkpoint_reader, "WINDOW_MIN", size)
        patch.setattr(checkpoint_reader, "WINDOW_MAX", 4 * size)

    def open(self, *_, **__):
        log = self.kafka.coordination_log()
        log.poll_entries_max = self.rng.choice((1, 7, 5_000))
        return log

    def is_beyond_the_bound(self, t, time_ms):
        """Return whether no usable checkpoint lies below the brokers' look-up.

        Brokers look at all timestamps: also those of clients, and those after a clock
        stepped back.
        """
        log, start = self.logs[t], self.starts[t]
        later = (e.offset for e in log.entries if e.timestamp_ms > time_ms)
        bound = next((offset for offset in later if offset >= start), None)
        return bound is not None and not log.knows(log.at_offset(bound - 1), start)

    def is_of_a_later_begin(self, state, time_ms):
        """Return whether a state is that of a time after its partition began again.

        If the clock was behind from then on, and nothing before is known, a view shows
        the time as it came again.
        """
        log = self.logs[state.partition]
        return any(
            to_bytes_or_none(state)
            == to_bytes_or_none(log.at_time(time_ms, begin=each))
            for each in log.begins
        )

    def compare(self, world, expected, *, time_ms=None):
        """Compare the states of a view, and those it lacks, with a replay."""
        found = {state.partition: state for state in world.partitions}
        assert found.keys() == expected.keys()
        lost = {*world.log_start_missing, *world.unused}
        unknown = {
            t
            for t, state in expected.items()
            if not self.logs[t].knows(state, self.starts[t])
        }
        shown_again = set()
        if time_ms is not None:
            shown_again = {
                t for t in unknown - lost if self.is_of_a_later_begin(found[t], time_ms)
            }
            unknown -= shown_again
            unknown |= {
                t
                for t in expected.keys() - shown_again
                if self.is_beyond_the_bound(t, time_ms) and self.starts[t]
            }
        assert lost == unknown
        if world.unused:
            count = used_count(expected[0])
            assert count is not None
            assert all(t >= count for t in world.unused)
            assert all(t < count for t in world.log_start_missing)
        for t in expected.keys() - unknown - shown_again:
            assert to_bytes_or_none(found[t]) == to_bytes_or_none(expected[t])


def to_bytes_or_none(state):
    return None if state.leader_epoch is None else to_bytes(state)


@given(st.integers(0, 2**32))
@example(50366)
@example(4452)
def test_random_moments_equal_a_replay(seed):
    with pytest.MonkeyPatch.context() as patch:
        scene = Scene(seed, patch)
        for _ in range(6):
            offsets = {
                t: scene.rng.choice(log.entries).offset
                for t, log in enumerate(scene.logs)
                if scene.rng.random() < 0.8
            }
            expected = {t: scene.logs[t].at_offset(o) for t, o in offsets.items()}
            has_members = scene.rng.random() < 0.3
            scene.compare(World.at(offset=offsets, has_members=has_members), expected)
            entry = scene.rng.choice(scene.rng.choice(scene.logs).entries)
            time_ms = max(0, entry.timestamp_ms + scene.rng.choice((-1, 0, 0, 1)))
            expected = {t: log.at_time(time_ms) for t, log in enumerate(scene.logs)}
            view = World.at(time_ms=time_ms, has_members=has_members)
            scene.compare(view, expected, time_ms=time_ms)


@given(st.integers(0, 2**32))
@example(42)
def test_a_wrong_time_index_of_a_broker_makes_no_view_wrong(seed):
    """What was appended later is also shown by the states of checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        scene = Scene(seed, patch)
        ends = [log.entries[-1].offset + 1 for log in scene.logs]

        def guess(_self, _time_ms, _timeout_ms):
            return {t: scene.rng.randint(scene.starts[t], ends[t]) for t in (0, 1)}

        patch.setattr(FakeCoordinationLog, "offsets_for_times", guess)
        for _ in range(6):
            entry = scene.rng.choice(scene.rng.choice(scene.logs).entries)
            view = World.at(time_ms=entry.timestamp_ms)
            for state in view.partitions:
                t = state.partition
                expected = scene.logs[t].at_time(entry.timestamp_ms)
                if t in (*view.log_start_missing, *view.unused):
                    continue
                if to_bytes_or_none(state) != to_bytes_or_none(expected):
                    assert not scene.logs[t].knows(expected, scene.starts[t])
                    assert scene.is_of_a_later_begin(state, entry.timestamp_ms)


def test_the_logs_have_checkpoints_within_a_change_of_the_partition_count():
    found = []
    for seed in range(20):
        log = RandomLog(0, random.Random(seed), length=90, k=K, resizes=True)
        found += [log.at_offset(begun).layout for begun, _ in log.checkpoints]
    assert sum(layout is not None for layout in found) > 20
