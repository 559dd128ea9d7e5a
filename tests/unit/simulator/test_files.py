"""Files of kept states on hosts, and damage to them."""

import random

import pytest

from kafka_marshal.defaults import COORDINATION_TOPIC
from kafka_marshal.engine.snapshotter import capture
from kafka_marshal.errors import MalformedRecord
from kafka_marshal.ports import Event
from kafka_marshal.snapshots import read_sections
from simulator import files
from simulator.files import DAMAGES, HostFiles
from simulator.node import Cluster

CLIENT = "c1"


class Scene:
    """A cluster, a node that has read its log, and the state files of its host."""

    def __init__(self):
        self.cluster = Cluster()
        self.node = self.cluster.node(CLIENT)
        self.cluster.run(1_000)
        self.files = HostFiles(
            cluster_id=self.cluster.config.cluster_id,
            topic_id=self.cluster.kafka.topic(COORDINATION_TOPIC).topic_id,
        )
        self.save()

    def save(self):
        world = self.node.engine.context.replicas[0].world
        self.files.save(CLIENT, capture(world, source="a test"))

    def start(self):
        """Start a process with the kept states; return the sources that it restored."""
        node = self.cluster.node(CLIENT, sources=[self.files.folder(CLIENT)])
        node.observer.forward = lambda event: self.files.observe(CLIENT, event)
        self.cluster.run(1_000)
        assert node.engine.is_ready
        return [event.fields["source"] for event in node.observer.named("restored")]


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.files.close()


def only(monkeypatch, name):
    monkeypatch.setattr(files, "DAMAGES", {name: DAMAGES[name]})


def test_a_process_starts_from_an_undamaged_file(scene):
    assert scene.start() == [str(scene.files.folder(CLIENT).file_of(0))]
    assert scene.files.misled is None
    assert not scene.files.is_hurt(CLIENT)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_process_never_starts_from_a_damaged_file(scene, monkeypatch, name):
    only(monkeypatch, name)
    assert scene.files.damage(CLIENT, 0, rng=random.Random(1)) == name
    assert scene.files.is_hurt(CLIENT)
    assert scene.start() == []
    assert scene.files.misled is None


@pytest.mark.parametrize("name", DAMAGES)
def test_only_whole_replacements_of_a_file_can_be_read(name):
    made = Scene()
    path = made.files.folder(CLIENT).file_of(0)
    value = path.read_bytes()
    made.files.close()
    bent = DAMAGES[name](value, random.Random(2))
    assert bent != value
    is_whole = name.startswith(("of ", "with "))
    try:
        assert len(list(read_sections(bent, source="a test"))) == 1
        assert is_whole
    except MalformedRecord:
        assert not is_whole


def test_a_file_is_damaged_once_until_it_is_saved_again(scene, monkeypatch):
    only(monkeypatch, "overwritten")
    assert scene.files.damage("nobody", 0, rng=random.Random(1)) is None
    assert scene.files.damage(CLIENT, 0, rng=random.Random(1)) == "overwritten"
    assert scene.files.damage(CLIENT, 0, rng=random.Random(1)) is None
    scene.save()
    assert not scene.files.is_hurt(CLIENT)


def test_a_start_from_a_damaged_file_is_detected(scene):
    scene.files.damage(CLIENT, 0, rng=random.Random(1))
    source = str(scene.files.folder(CLIENT).file_of(0))
    fields = {"partition": 0, "offset": 3, "source": source}
    scene.files.observe(CLIENT, Event("ready", {}))
    assert scene.files.misled is None
    scene.files.observe(CLIENT, Event("restored", fields))
    assert "began at 3" in scene.files.misled


def test_close_deletes_all_files(scene):
    home = scene.files.folder(CLIENT).path.parents[2]
    assert home.exists()
    scene.files.close()
    assert not home.exists()
