"""Configs of other levels, as an admin writes them."""

import pytest
from msgspec.structs import replace

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.layout_reading import Change
from kafka_marshal.protocol.layout_steps import fence_of
from simulator.configs import Configs, OrderedConfigs, configs_of
from simulator.plan import HALT, LEVEL, RESIZE, Fault, draw
from simulator.resizing import add_partitions
from simulator.world import World

BELOW, EQUAL = 0, 40


class Scene:
    """A world without processes, and its admin."""

    def __init__(self, *faults):
        self.world = World(draw(3, faults=faults or (LEVEL, HALT)))
        self.configs = configs_of(self.world)
        self.world.settle()
        self.numbers = range(self.world.plan.coordinators)

    def run(self, *sizes, kind=LEVEL, who=0):
        for number, size in enumerate(sizes):
            fault = Fault(
                number=number, at_ms=0, kind=kind, for_ms=0, who=who, size=size
            )
            (self.configs.halt if kind == HALT else self.configs.strike)(fault)
            self.world.run(4 * self.world.plan.h_ms)

    @property
    def levels(self):
        return {self.world.levels.in_force(number) for number in self.numbers}


def test_a_changed_level_applies_to_every_partition():
    scene = Scene()
    scene.run(BELOW)
    assert scene.levels == {1}
    scene.run(EQUAL)
    assert scene.levels == {2}
    assert {w.config.generation for w in scene.world.watcher.worlds} == {3}


def test_two_changes_at_once_are_written_in_turn():
    scene = Scene()
    for size in (BELOW, EQUAL):
        scene.configs.strike(
            Fault(number=size, at_ms=0, kind=LEVEL, for_ms=0, who=0, size=size)
        )
    scene.world.run(8 * scene.world.plan.h_ms)
    assert {w.config.generation for w in scene.world.watcher.worlds} == {3}


@pytest.mark.parametrize("size", range(66, 72))
def test_an_invalid_config_is_refused_by_every_partition(size):
    scene = Scene()
    scene.run(size)
    scene.world.settle()
    counts = scene.world.coverage.counts
    assert (counts["config_refused"], counts["level_changed"]) == (1, 0)
    assert not scene.world.levels.stops


def test_a_config_lost_in_a_failover_is_written_again():
    scene = Scene()
    kafka, place = scene.world.cluster.kafka, scene.world.cluster.place(0)
    scene.configs.strike(
        Fault(number=1, at_ms=0, kind=LEVEL, for_ms=0, who=0, size=BELOW)
    )
    while kafka.log(place).end == 1:
        scene.world.run(1)
    kafka.truncate(place, end=1, leader=9)
    scene.world.watcher.refold(0)
    scene.world.run(4 * scene.world.plan.h_ms)
    assert scene.levels == {1}


@pytest.mark.parametrize("dies_early", [False, True])
def test_the_last_config_halts_all_partitions_or_only_the_first(dies_early):
    scene = Scene()
    scene.run(dies_early, kind=HALT)
    assert set(scene.world.levels.stops) == ({0} if dies_early else {*scene.numbers})
    assert scene.configs.is_over
    scene.run(BELOW, EQUAL)
    assert (
        scene.configs.halt(Fault(number=9, at_ms=0, kind=HALT, for_ms=0, who=0, size=0))
        == ()
    )
    assert scene.world.coverage.counts["level_changed"] == 0


def test_the_last_config_is_not_written_while_logs_are_truncated():
    scene = Scene()
    scene.world.is_truncating = True
    assert (
        scene.configs.halt(Fault(number=1, at_ms=0, kind=HALT, for_ms=0, who=0, size=0))
        == ()
    )
    assert not scene.configs.is_over


def generations(scene):
    configs = [world.config for world in scene.world.watcher.worlds]
    return [None if each is None else each.generation for each in configs]


def fence(scene, change, *numbers):
    """Write the fence of a change to some partitions."""
    cluster = scene.world.cluster
    sender = {"client_id": "a", "group_id": "marshal", "incarnation": bytes(16)}
    for number in numbers:
        record = fence_of(change, sender={**sender, "seq": number})
        cluster.kafka.produce(cluster.place(number), encode(record))
    scene.world.settle()


def change_of(scene):
    config = scene.world.watcher.worlds[0].config
    return Change(
        op_id=bytes(16),
        from_count=4,
        config=replace(
            config,
            generation=config.generation + 1,
            era=config.era + 1,
            partition_count=8,
        ),
    )


def test_configs_go_to_partition_0_first_if_the_count_may_change():
    assert type(Scene().configs) is Configs
    assert type(Scene(RESIZE).configs) is Configs  # where no Configs are written
    scene = Scene(RESIZE, LEVEL)
    assert type(scene.configs) is OrderedConfigs
    scene.configs.strike(
        Fault(number=1, at_ms=0, kind=LEVEL, for_ms=0, who=0, size=BELOW)
    )
    assert not scene.configs.are_over()
    scene.world.settle()
    assert generations(scene) == [2, 1, 1, 1]
    scene.world.run(4 * scene.world.plan.h_ms)
    assert (generations(scene), scene.levels) == ([2] * 4, {1})
    assert scene.configs.are_over()
    scene.configs.heal()
    scene.world.run(4 * scene.world.plan.h_ms)
    assert (generations(scene), scene.levels) == ([3] * 4, {2})
    scene.configs.heal()
    assert scene.configs.are_over()


def test_a_config_is_written_after_a_change_of_the_partition_count():
    scene = Scene(RESIZE, LEVEL)
    add_partitions(scene.world.cluster, 8)
    change = change_of(scene)
    fence(scene, change, 0)
    scene.run(BELOW)
    assert generations(scene) == [2, 1, 1, 1, None, None, None, None]
    fence(scene, change, *range(1, 8))
    assert not scene.configs.are_over()
    assert generations(scene) == [2] * 8


@pytest.mark.parametrize("size", range(66, 72))
def test_an_invalid_config_is_refused_if_the_count_may_change(size):
    scene = Scene(RESIZE, LEVEL)
    scene.run(size)
    scene.world.settle()
    assert generations(scene) == [1] * 4
