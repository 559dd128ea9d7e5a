"""What a client of a sidecar does again: registrations, and consumers one by one."""

import pytest
from enginekit import world
from fakesidecar import WAIT_S, FakeSidecar, connected, failure

from kafka_marshal.config import ConsumerConfig
from kafka_marshal.engine import Subscription
from kafka_marshal.errors import ClientFenced
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


def test_a_client_ends_if_it_was_fenced_while_its_stream_was_broken(sidecar, link):
    """PROTOCOL 4.13: it missed the event; every later request is refused."""
    sidecar.last = sidecar.stream()
    sidecar.answers["GET", "events"] = [(409, failure("ClientFenced", holder="admin"))]
    sidecar.last.end()
    with link.engine.changed:
        link.engine.changed.wait_for(lambda: link.session.failure is not None, WAIT_S)
    assert isinstance(link.session.failure, ClientFenced)
    assert link.session.failure.by == "admin"
