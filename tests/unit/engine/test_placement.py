"""Coordinating partitions of keys and groups, while their number changes."""

import msgspec
import pytest
from logkit import Log, config, imported, layout_done, layout_fence, layout_final
from logkit import layout_import as import_to

from kafka_marshal.engine import placement
from kafka_marshal.engine.placement import Placement
from kafka_marshal.engine.replica import Replica
from kafka_marshal.protocol.checkpoints import checkpoint_key
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.layout import place_of
from kafka_marshal.protocol.placement import newest
from kafka_marshal.protocol.types import Key

BEFORE, AFTER = 2, 4
KEYS = [Key("g", "t", number) for number in range(16)]
MOVED = next(
    key
    for key in KEYS
    if place_of(key, partition_count=BEFORE) == 0
    and place_of(key, partition_count=AFTER) == 2
)
STAYING = next(
    key
    for key in KEYS
    if place_of(key, partition_count=BEFORE) == place_of(key, partition_count=AFTER)
)


class Scene:
    """Four partitions, and the placement that follows them."""

    def __init__(self):
        self.logs = [
            Log(t, k=BEFORE, level=2) if t < BEFORE else Log(t, configured=False)
            for t in range(AFTER)
        ]
        replicas = self.replicas = {}
        for t, log in enumerate(self.logs):
            replicas[t] = Replica(t, now_ms=0)
            replicas[t].world = log.state
        self.placement = Placement(replicas)
        self.follow()

    def follow(self):
        states = [log.state for log in self.logs]
        config = newest(self.logs[0].state.config, states)
        return self.placement.follow(config)

    def append(self, partition, record, effect):
        assert self.logs[partition].outcome_of(record) == effect
        self.follow()

    def fence(self, *partitions):
        for t in partitions:
            self.append(t, layout_fence(AFTER, BEFORE), "layout_fenced")


@pytest.fixture
def scene():
    return Scene()


def test_keys_and_groups_are_placed_by_the_config(scene):
    assert scene.placement.partition_of(MOVED) == 0
    assert not scene.placement.awaits_import(MOVED)
    (home,) = scene.placement.homes_of("g")
    assert home == home_partition("g", partition_count=BEFORE)
    assert scene.placement.partition_of(checkpoint_key(1)) == 1
    assert not scene.follow()


def test_the_table_of_places_is_limited(scene, monkeypatch):
    monkeypatch.setattr(placement, "KEPT_MAX", 3)
    for key in KEYS * 2:
        assert scene.placement.partition_of(key) == place_of(
            key, partition_count=BEFORE
        )
        assert len(scene.placement._now) <= 3


def test_a_moving_key_stays_in_its_source_until_it_is_imported(scene):
    scene.logs[0].claimed(key=MOVED)
    scene.fence(0)
    assert scene.placement.partition_of(MOVED) == 0
    assert scene.placement.awaits_import(MOVED)
    scene.fence(1, 2, 3)
    assert scene.placement.partition_of(MOVED) == 0
    record = import_to(imported(MOVED), source=0)
    scene.append(2, record, "imported")
    assert scene.placement.partition_of(MOVED) == 2
    assert not scene.placement.awaits_import(MOVED)


def test_a_moving_key_waits_for_a_source_that_is_not_read_yet(scene):
    """Two changes took place while the process was stopped: it lacks the source."""
    scene.fence(0, 1, 2, 3)
    del scene.replicas[0]
    assert scene.placement.partition_of(MOVED) == 2
    assert scene.placement.awaits_import(MOVED)
    del scene.replicas[2]
    assert scene.placement.awaits_import(MOVED)


def test_a_key_is_known_elsewhere_once_its_target_has_imported_it(scene):
    """PROTOCOL 10.9: whatever its source shows, for that may have lost the fence."""
    scene.logs[0].claimed(key=MOVED)
    scene.fence(2)
    assert not scene.placement.is_known_elsewhere(MOVED, 0)
    scene.append(2, import_to(imported(MOVED), source=0), "imported")
    assert scene.placement.is_known_elsewhere(MOVED, 0)
    assert not scene.placement.is_known_elsewhere(MOVED, 2)
    assert not scene.placement.is_known_elsewhere(
        STAYING, scene.placement.partition_of(STAYING)
    )
    assert not scene.placement.is_known_elsewhere(checkpoint_key(0), 1)


def test_a_key_under_an_earlier_config_is_not_known_elsewhere(scene):
    scene.fence(2)
    scene.append(2, import_to(imported(MOVED), source=0), "imported")
    later = msgspec.structs.replace(scene.logs[2].state.config, generation=3)
    scene.placement.follow(later)
    assert not scene.placement.is_known_elsewhere(MOVED, 0)


@pytest.mark.parametrize("place", [0, 1])
def test_a_staying_key_waits_until_its_partition_has_the_fence(scene, place):
    """PROTOCOL 10.9: it may have lost the fence, and a token would be too low."""
    key = next(
        key
        for key in KEYS
        if place_of(key, partition_count=AFTER) == place
        and place_of(key, partition_count=BEFORE) == place
    )
    assert not scene.placement.awaits_import(key)
    scene.fence(2 if place == 0 else 0)
    assert scene.placement.partition_of(key) == place
    assert scene.placement.awaits_import(key)
    assert not scene.placement.awaits_import(checkpoint_key(place))
    scene.fence(place)
    assert scene.placement.partition_of(key) == place
    assert not scene.placement.awaits_import(key)
    del scene.replicas[place]
    assert scene.placement.awaits_import(key)


def test_a_new_key_can_be_claimed_once_nothing_is_left_to_import(scene):
    scene.fence(0, 1, 2, 3)
    assert scene.placement.partition_of(MOVED) == 2
    assert scene.placement.awaits_import(MOVED)
    scene.append(2, layout_done(0, source=0), "layout_done")
    assert not scene.placement.awaits_import(MOVED)


def test_a_target_that_has_ended_the_change_awaits_no_import(scene):
    scene.logs[0].claimed(key=MOVED)
    scene.fence(0, 1, 2, 3)
    scene.append(2, import_to(imported(MOVED), source=0), "imported")
    scene.append(2, layout_done(1, source=0), "layout_done")
    scene.append(2, layout_final(), "layout_final")
    assert scene.placement.partition_of(MOVED) == 2
    assert not scene.placement.awaits_import(MOVED)


@pytest.mark.parametrize("lost", [0, 1])
def test_keys_wait_in_a_partition_that_lost_an_ended_change(scene, lost):
    """PROTOCOL 10.9: a claim would get a lower token than claims under the change."""
    key = next(
        key
        for key in KEYS
        if place_of(key, partition_count=AFTER) == lost
        and place_of(key, partition_count=BEFORE) == lost
    )
    scene.fence(0, 1, 2, 3)
    for t in (2, 3):
        scene.append(t, layout_done(0, source=t - 2), "layout_done")
    for t in range(AFTER):
        scene.append(t, layout_final(), "layout_final")
    assert not scene.placement.has_layouts
    assert not scene.placement.awaits_import(key)
    log = scene.logs[lost] = Log(lost, k=BEFORE, level=2)
    scene.replicas[lost].world = log.state
    scene.follow()
    assert (scene.placement.lost, scene.placement.has_layouts) == ({lost}, True)
    assert scene.placement.awaits_import(key)
    assert not scene.placement.awaits_import(MOVED)
    assert not scene.placement.awaits_import(checkpoint_key(lost))


def test_a_group_has_both_homes_until_the_change_has_ended(scene):
    group = next(
        name
        for name in (f"g{n}" for n in range(100))
        if home_partition(name, partition_count=AFTER) >= BEFORE
    )
    after = home_partition(group, partition_count=AFTER)
    before = home_partition(group, partition_count=BEFORE)
    scene.fence(0, 1, 2, 3)
    assert scene.placement.homes_of(group) == (after, before)
    assert scene.placement.has_layouts
    for t, source in ((2, 0), (3, 1)):
        scene.append(t, layout_done(0, source=source), "layout_done")
    for t in range(AFTER):
        scene.append(t, layout_final(), "layout_final")
    assert scene.placement.homes_of(group) == (after,)
    assert not scene.placement.has_layouts


@pytest.mark.parametrize("is_behind", [False, True])
def test_keys_wait_while_all_partitions_lack_a_config_that_was_read(scene, is_behind):
    """PROTOCOL 10.9: a claim would get a lower token than claims under that Config."""
    first = scene.logs[0]
    alter = config(2, era=9, k=BEFORE, level=2, h=7_000)
    scene.append(0, alter, "configured")
    if is_behind:
        scene.append(1, alter, "configured")
    assert scene.placement.read == alter
    for t in (0, 1):
        log = scene.logs[t] = Log(t, k=BEFORE, level=2)
        scene.replicas[t].world = log.state
    scene.follow()
    assert (scene.placement.lost, scene.placement.has_layouts) == ({0, 1}, True)
    assert all(scene.placement.awaits_import(key) for key in KEYS)
    scene.append(0, alter, "configured")
    scene.append(1, alter, "configured")
    assert first.state.config == scene.placement.read
    assert (scene.placement.lost, scene.placement.has_layouts) == (set(), False)


def test_of_two_configs_of_one_generation_the_later_era_is_kept(scene):
    for era in (9, 8, 10):
        log = scene.logs[0] = Log(0, k=BEFORE, level=2)
        scene.replicas[0].world = log.state
        scene.append(0, config(2, era=era, k=BEFORE, level=2), "configured")
    assert scene.placement.read.era == 10
