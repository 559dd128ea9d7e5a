"""Records of a later feature level, written by newer programs."""

from kafka_marshal.protocol.codec import Undecodable, decode, uvarint
from simulator.fleet import Fleet
from simulator.levels import BEYOND, FRAME_VERSION, level_of
from simulator.newer import LATER_TYPES, MOMENTS
from simulator.plan import ABOVE, HALT, LEVEL, Fault, draw
from simulator.strikes import Strikes
from simulator.world import World

H_MS = 10_000
BELOW = 0


class Scene:
    """A fleet in which only the test causes faults."""

    def __init__(self, seed=3):
        # These kinds have to be drawn; none occurs without the test.
        self.world = World(draw(seed, faults=(ABOVE, LEVEL, HALT)))
        self.fleet = Fleet(self.world)
        self.world.on_news = self.fleet.on_news
        self.strikes = Strikes(self.world, self.fleet)
        self.fleet.admit()
        self.world.produce(4)
        self.run()

    def run(self, duration_ms=4 * H_MS):
        self.world.run(duration_ms)
        return self.world.coverage.counts

    def strike(self, kind, *, number=1, who=0, size=4):
        self.strikes.strike(
            Fault(number=number, at_ms=0, kind=kind, for_ms=0, who=who, size=size)
        )

    def values(self):
        kafka, cluster = self.world.cluster.kafka, self.world.cluster
        numbers = range(self.world.plan.coordinators)
        return [
            stored.value
            for number in numbers
            for stored in kafka.log(cluster.place(number)).records
        ]


def test_a_record_above_all_levels_is_undecodable():
    scene = Scene()
    before = {*scene.values()}
    for number in range(20):
        scene.strike(ABOVE, number=number, who=number * len(MOMENTS))
    written = {*scene.values()} - before
    assert len(written) > 20
    assert all(isinstance(decode(value), Undecodable) for value in written)
    counts = scene.run()
    assert counts["above_ignored"] >= len(written)
    assert counts["above_of_owner"] > 0
    assert scene.fleet.apps[0].node.held


def test_a_record_of_a_later_level_is_written_at_its_moment():
    scene = Scene()
    for at, moment in enumerate(MOMENTS):
        before = scene.world.coverage.counts["above_ignored"]
        scene.strike(ABOVE, number=at, who=at)
        if moment == "paused":
            scene.strikes.pause(H_MS)
        elif moment == "claimed":
            scene.fleet.remove(scene.fleet.apps[0])
            scene.fleet.admit()
        elif moment == "granted":
            continue  # at least once, no grants are requested
        assert scene.run(8 * H_MS)["above_ignored"] > before, moment


def test_known_records_are_written_above_a_lowered_level():
    scene = Scene()
    scene.strike(LEVEL, size=BELOW)
    scene.run()
    for number in range(2, 30):
        scene.strike(ABOVE, number=number, who=number * len(MOMENTS))
    counts = scene.run()
    assert counts["known_above_level"] > 0
    assert scene.fleet.apps[0].node.held


def test_newer_programs_write_records_after_a_halt():
    scene = Scene()
    scene.strike(HALT, size=0)
    counts = scene.run()
    assert counts["halted"] > 0
    scene.fleet.admit()
    counts = scene.run()
    assert counts["behind_a_halt"] > 0
    assert counts["started_beside_halt"] > 0
    assert counts["checkpoint_above"] > 0


def test_record_types_of_later_levels_are_unknown():
    headers = [b"".join(map(uvarint, (FRAME_VERSION, n, 0))) for n in LATER_TYPES]
    assert {level_of(header) for header in headers} == {BEYOND}
