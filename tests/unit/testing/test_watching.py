"""The watch notes what the log accepts, and what the log judge finds."""

import pytest
from logkit import KEY, beat, claim
from watchkit import TOPIC, Story

from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.testing import watching
from kafka_marshal.testing.watching import LogWatch

TIMEOUT_MS = 10_000


@pytest.fixture
def story(monkeypatch):
    made = Story()
    log = made.kafka.coordination_log(TOPIC)
    monkeypatch.setattr(watching, "open_coordination_log", lambda *_, **__: log)
    return made


def test_accepted_records_are_noted(story):
    epoch = story.write(claim())
    story.write(beat(epoch, 5))
    with LogWatch("broker:9092") as watch:
        watch.catch_up(TIMEOUT_MS)
        facts = watch.facts("g")
        assert [(fact.effect, fact.position) for fact in facts] == [
            ("claimed", None),
            ("renewed", 5),
        ]
        assert watch.holders("g")[KEY].client_id == "c1"
        assert watch.findings() == ()


def test_violations_are_found(story, monkeypatch):
    def spoil(world, entry):
        transitions = apply(world, entry)
        if transitions[0].effect == "renewed":
            world.keys[KEY].owner = ("nobody", b"")
        return transitions

    monkeypatch.setattr(watching, "apply", spoil)
    story.write(beat(story.write(claim()), 5))
    with LogWatch("broker:9092") as watch:
        watch.catch_up(TIMEOUT_MS)
        (found,) = watch.findings()
        assert found.startswith("S1: offset 2: ")
