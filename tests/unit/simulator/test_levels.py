"""The judge of S6: levels of records, and the halt at a later level."""

from types import SimpleNamespace

import pytest
from logkit import beat, claim, decide
from msgspec.structs import replace

from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol.codec import Undecodable, decode, encode
from kafka_marshal.protocol.items import Halt
from kafka_marshal.protocol.records import KINDS
from kafka_marshal.protocol.types import Owner
from simulator.checkers import LogWatcher, Violation
from simulator.levels import (
    BEYOND,
    LEVEL_BY_TYPE,
    NO_RECORD,
    Levels,
    level_of,
)
from simulator.node import Cluster

OWNER = Owner("c1", b"c1".ljust(16, b"."))
H_MS = 3_000


class Scene:
    """One coordinating partition, its watcher and its judge."""

    def __init__(self):
        self.cluster = Cluster(heartbeat_interval_ms=H_MS)
        self.seen = []
        self.watcher = LogWatcher(self.cluster.kafka, 1)
        self.levels = Levels(
            self.watcher,
            config=self.cluster.config,
            note=self.seen.append,
            now_ms=self.cluster.clock.now_ms,
        )
        self.levels.activate()

    def write(self, *values):
        for value in values:
            self.cluster.kafka.produce(self.cluster.place(0), value)
        self.watcher.catch_up()

    def configure(self, level, generation=2):
        config = replace(
            self.cluster.config,
            generation=generation,
            era=generation,
            feature_level=level,
        )
        self.levels.wrote(config)
        self.write(encode(config))

    def reader(self, *, end=None):
        """Return a fake engine that has read the records below an offset."""
        replica = Replica(0, now_ms=0)
        for stored in self.cluster.kafka.log(self.cluster.place(0)).records[:end]:
            replica.fold(stored.entry(), 0)
        context = SimpleNamespace(replicas={0: replica}, config=None)
        return SimpleNamespace(context=context, failure=None)


def later(value):
    """Return a record of level 1 with a later version in its header."""
    return value[:2] + b"\x01" + value[3:]


def test_the_judge_knows_the_level_of_each_record_type():
    assert {kind.number: kind.level for kind in KINDS} == LEVEL_BY_TYPE


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (encode(beat(0)), 1),
        (b"\x01\x07\x00", 2),
        (b"\x01\x84\x01\x00rest", 1),
        (b"\x01\x01\x01", BEYOND),
        (b"\x02\x01\x00", BEYOND),
        (b"\x01\x1c\x00", BEYOND),
        (b"\x01\xff\xff\xff\xff\x7f\x00", BEYOND),
        (None, NO_RECORD),
        (b"", NO_RECORD),
        (b"\x01\x01", NO_RECORD),
        (b"\x01\x81\x00\x00", NO_RECORD),
        (b"\x01" + b"\xff" * 9, NO_RECORD),
    ],
)
def test_the_level_of_a_record_is_read_from_its_header(value, level):
    assert level_of(value) == level


def test_a_record_of_a_later_level_is_ignored():
    scene = Scene()
    scene.write(encode(claim()), later(encode(claim("c2"))), b"\x01\x1c\x00")
    assert scene.seen == ["above_ignored", "above_behind_claim", "above_ignored"]
    assert scene.levels.in_force(0) == 2


def test_a_known_record_above_a_lowered_level_is_counted():
    scene = Scene()
    scene.configure(1)
    assert scene.levels.in_force(0) == 1
    scene.write(encode(decide()))
    assert scene.seen == ["level_changed", "known_above_level"]


def test_a_refused_config_halts_no_reader():
    scene = Scene()
    scene.write(encode(replace(scene.cluster.config, generation=9, feature_level=9)))
    assert (scene.seen, scene.levels.stops) == (["config_refused"], {})


@pytest.mark.parametrize("name", ["keys", "soft", "counters", "halted"])
def test_a_state_that_differs_from_its_twin_is_a_violation(name):
    scene = Scene()
    scene.write(encode(claim()))
    world = scene.watcher.worlds[0]
    if name == "keys":
        world.keys.clear()
    elif name == "soft":
        world.soft.notes.clear()
    elif name == "counters":
        world.soft.counters["claimed"] += 1
    else:
        world.halted = Halt(2, 3)
    with pytest.raises(Violation, match="S6"):
        scene.write(b"nothing")


def test_a_reader_has_to_halt_at_a_config_of_a_later_level():
    scene = Scene()
    scene.write(encode(claim()))
    scene.configure(3)
    stop = scene.levels.stops[0]
    assert (stop.offset, stop.config.feature_level) == (2, 3)
    scene.write(encode(claim("c2")), later(encode(beat(1))))
    assert scene.seen == ["behind_a_halt"] * 2
    reader = scene.reader()
    reader.failure = "unreadable"
    assert scene.levels.check_reader(OWNER, reader)
    assert not scene.levels.check_reader(OWNER, scene.reader(end=2))
    behind = scene.levels.state_behind(0)
    assert (behind.halted, behind.feature_level) == (None, 3)


def test_a_truncated_halting_config_halts_no_reader():
    scene = Scene()
    scene.configure(3)
    place = scene.cluster.place(0)
    scene.cluster.kafka.truncate(place, end=1, leader=1)
    scene.watcher.refold(0)
    assert scene.levels.stops == {}
    assert scene.levels.in_force(0) == 2


def halted(scene):
    reader = scene.reader()
    reader.failure = "unreadable"
    return reader, reader.context.replicas[0].world


def test_a_wrong_or_missing_halt_is_a_violation():
    scene = Scene()
    early, world = halted(scene)
    world.halted = Halt(1, 3)
    with pytest.raises(Violation, match="no Config says so"):
        scene.levels.check_reader(OWNER, early)
    scene.configure(3)
    with pytest.raises(Violation, match="but continues"):
        scene.levels.check_reader(OWNER, scene.reader())
    late, world = halted(scene)
    world.halted, world.next_offset = None, 2
    with pytest.raises(Violation, match="has to halt at 1"):
        scene.levels.check_reader(OWNER, late)
    other, world = halted(scene)
    world.append_time_ms += 1
    with pytest.raises(Violation, match="another digest"):
        scene.levels.check_reader(OWNER, other)


def test_a_process_started_after_a_halt_must_not_work_or_write():
    scene = Scene()
    scene.levels.started(OWNER)
    scene.configure(3)
    scene.levels.on_append(OWNER)
    assert not scene.levels.is_beside(OWNER)
    scene.levels.check_reader(OWNER, halted(scene)[0])
    scene.levels.started(OWNER)
    assert scene.levels.is_beside(OWNER)
    with pytest.raises(Violation, match="works behind a halt"):
        scene.levels.check_use(OWNER, 0, h_ms=H_MS)
    scene.levels.on_append(OWNER)
    with pytest.raises(Violation, match="wrote behind a halt"):
        scene.levels.check_reader(OWNER, halted(scene)[0])


def test_a_claim_ends_two_intervals_after_a_halt():
    scene = Scene()
    scene.configure(3)
    scene.cluster.clock.advance(2 * H_MS)
    scene.levels.check_use(OWNER, 0, h_ms=H_MS)
    scene.cluster.clock.advance(1)
    with pytest.raises(Violation, match="S4"):
        scene.levels.check_use(OWNER, 0, h_ms=H_MS)


def test_an_undecodable_config_is_ignored_where_logs_lose_records():
    scene = Scene()
    scene.levels.may_lose = True
    bent = encode(scene.cluster.config)[:-1] + b"\xc1"
    assert isinstance(decode(bent), Undecodable)
    scene.write(bent)
    assert scene.levels.config(0) == scene.cluster.config
    assert scene.watcher.worlds[0].config == scene.cluster.config


def test_a_start_with_different_configs_in_two_partitions_is_torn():
    scene = Scene()
    reader = scene.reader()
    assert not scene.levels.is_torn(reader)
    scene.configure(1)
    reader.context.replicas[1] = scene.reader().context.replicas[0]
    assert scene.levels.is_torn(reader)
    reader.context.config = scene.cluster.config
    assert not scene.levels.is_torn(reader)
