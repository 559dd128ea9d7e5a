"""Offsets skipped by a seek need no processing while the log has the seek."""

import attrs
import pytest
from logkit import KEY, beat, claim, decide, pause, resolve, stage

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.state import ACCEPTED, Transition, WorldState
from simulator.checkers import LogWatcher
from simulator.node import Cluster

PLACE = 0, KEY, None


class Scene:
    """One coordinating partition, in which c1 owns a key at position 2."""

    def __init__(self):
        self.cluster = Cluster()
        self.watcher = LogWatcher(self.cluster.kafka, 1)
        self.skips = self.watcher.skips
        self.claim("c1")
        self.write(beat(self.epoch, 2))

    def claim(self, client):
        self.write(claim(client))
        assert self.watcher.worlds[0].keys[KEY].owner.client_id == client
        self.epoch = self.watcher.worlds[0].keys[KEY].epoch
        self.token = self.watcher.worlds[0].token(KEY)

    def write(self, *records):
        """Write records; return the end of the log before them."""
        end = self.cluster.kafka.log(self.cluster.place(0)).end
        for record in records:
            self.cluster.kafka.produce(self.cluster.place(0), encode(record))
        self.watcher.catch_up()
        return end

    def seek(self, first, offset):
        """Seek and confirm it; return the end of the log before that."""
        self.skips.seeking(KEY, self.token, first=first, offset=offset)
        end = self.write(beat(self.epoch, offset, rewind=True))
        self.skips.sought(KEY, self.token, offset=offset)
        return end

    def lose(self, end):
        """Lose all records from an offset on."""
        self.cluster.kafka.truncate(self.cluster.place(0), end=end, leader=1)
        self.watcher.refold(0)

    def become_stale(self):
        self.cluster.clock.advance(4 * self.cluster.config.heartbeat_interval_ms)

    @property
    def skipped(self):
        return self.skips.of(PLACE)


@pytest.fixture
def scene():
    return Scene()


def test_a_confirmed_seek_forward_skips_the_offsets_between(scene):
    scene.seek(2, 5)
    scene.write(beat(scene.epoch, 7))
    assert scene.skipped == {2, 3, 4}


def test_offsets_committed_before_a_seek_are_not_skipped(scene):
    scene.seek(4, 6)
    assert scene.skipped == {4, 5}, "2 and 3 were committed, and no beat had that yet"


def test_a_position_without_a_seek_skips_no_offset(scene):
    scene.write(beat(scene.epoch, 5, rewind=True), beat(scene.epoch, 9))
    assert scene.skipped == set()


def test_a_seek_back_makes_offsets_need_processing_again(scene):
    scene.seek(2, 8)
    scene.seek(8, 4)
    scene.write(beat(scene.epoch, 8))
    assert scene.skipped == {2, 3}


def test_a_lost_seek_skips_no_offset(scene):
    end = scene.seek(2, 5)
    scene.lose(end)
    assert scene.skipped == set()
    scene.write(beat(scene.epoch))  # log time starts again in the new leader epoch
    scene.become_stale()
    scene.claim("c2")
    scene.write(beat(scene.epoch, 6, client="c2"))
    assert scene.skipped == set(), "the next owner has to process them"


def test_an_owner_unaware_of_a_lost_seek_still_skips_its_offsets(scene):
    end = scene.seek(2, 5)
    scene.lose(end)
    scene.write(beat(scene.epoch, 7))
    assert scene.skipped == {2, 3, 4}


def test_a_lost_seek_back_restores_the_earlier_seek(scene):
    scene.seek(2, 8)
    end = scene.seek(8, 4)
    scene.lose(end)
    assert scene.skipped == set(range(2, 8))


def test_an_imported_key_keeps_the_offsets_skipped_in_its_source(scene):
    scene.seek(2, 8)
    scene.write(beat(scene.epoch, 9))
    source, target = scene.watcher.worlds[0], WorldState(1)
    scene.watcher.worlds.append(target)
    target.keys[KEY] = attrs.evolve(source.keys[KEY], owner=None, epoch=0)
    (stored,) = scene.cluster.kafka.log(scene.cluster.place(0)).read(0, 1)
    transition = Transition(
        offset=0,
        outcome=ACCEPTED,
        effect="imported",
        reason=None,
        key=KEY,
        epoch=0,
        detail=None,
        record=None,
    )
    scene.skips.take(stored, transition, partition=1, old=None)
    assert scene.skips.of((1, *PLACE[1:])) == set(range(2, 8))


def test_a_set_position_clears_the_skipped_offsets(scene):
    scene.seek(2, 8)
    scene.write(pause(scene.cluster.clock.wall_ms() + 60_000))
    scene.become_stale()
    end = scene.write(stage((0, 3)), decide(), resolve(commit=True))
    assert scene.skipped == set()
    scene.lose(end)
    assert scene.skipped == set(range(2, 8))


def test_a_lost_key_keeps_skipped_offsets_below_the_committed_offset(scene):
    scene.seek(2, 8)
    scene.lose(1)
    scene.claim("c2")
    assert scene.skipped == set()
    scene.write(beat(scene.epoch, 6, client="c2"))
    assert scene.skipped == {2, 3, 4, 5}
