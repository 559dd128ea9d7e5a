"""What a client of a sidecar does again: registrations, and consumers one by one."""

import pytest
from enginekit import world
from fakesidecar import FakeSidecar, connected, failure

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.engine import Subscription
from kafka_marshal.policies import find_policy
from kafka_marshal.ports import TopicInfo
from kafka_marshal.remote.backend import SidecarBackend
from simulator.node import Recorder


@pytest.fixture
def sidecar():
    return FakeSidecar()


@pytest.fixture
def link(sidecar):
    link = SidecarBackend(
        connected(sidecar),
        info=sidecar.info(),
        data=world(records=(10,)).kafka.data_log(),
        observer=Recorder(),
        transport="fake",
    )
    link.start()
    yield link
    sidecar.last.end()
    link.close()


def test_an_interval_lowered_during_a_registration_is_asked_for_again(sidecar, link):
    stream = sidecar.stream()
    sidecar.answers["PUT", "c"] = [
        (400, failure("ConfigurationError", "beat_ms is 500", setting="beat_ms"))
    ]
    sidecar.is_known = False
    stream.end()
    sidecar.last = sidecar.stream()  # after the registration
    assert link.session.failure is None
    assert len(sidecar.named("PUT", "/clients/c")) == 2


def test_the_settings_of_ended_subscriptions_are_not_kept(sidecar, link):
    sidecar.last = sidecar.stream()
    for is_last in (False, False, True):
        subscription = Subscription(
            group_id="g",
            topics={"t": TopicInfo(1, None)},
            policy=find_policy("fair"),
            config=ConsumerConfig(topics=("t",)),
        )
        link.subscribe(subscription)
        if not is_last:
            with link.engine.changed:
                link.session.unsubscribe(subscription, release=True)
    assert link._specs.keys() == link.session.names.keys()
