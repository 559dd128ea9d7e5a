"""Tokens that may become smaller after logs lose Configs (PROTOCOL 10.9)."""

from types import SimpleNamespace

import pytest
from logkit import Log, beat, claim, config, layout_fence

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.types import Owner, Token
from simulator.readings import Readings

FIRST, SECOND = Token(1, 0, 5), Token(2, 0, 9)


def node(*logs, is_ready=True):
    replicas = {t: SimpleNamespace(world=log.state) for t, log in enumerate(logs)}
    context = SimpleNamespace(replicas=replicas)
    engine = SimpleNamespace(is_ready=is_ready, context=context)
    return SimpleNamespace(engine=engine, owner=Owner("c1", claim().incarnation))


def claimed(record=None):
    return SimpleNamespace(record=claim() if record is None else record)


@pytest.fixture(name="readings")
def _readings():
    return Readings()


def test_a_falling_token_is_excused_if_the_sender_had_not_read_the_config(readings):
    log = Log(level=2)
    readings.on_append(node(log), encode(claim()))
    assert readings.is_excused(claimed(), SECOND)
    assert not readings.is_excused(claimed(), FIRST)
    assert not readings.is_excused(claimed(), None)
    assert not readings.is_excused(claimed(beat(5)), SECOND)


def test_a_config_once_read_counts_for_every_later_claim(readings):
    log = Log(level=2)
    log.append(config(2, era=2, level=2))
    readings.on_step(node(Log(configured=False), log))
    readings.on_append(node(Log(level=2)), encode(claim()))
    assert not readings.is_excused(claimed(), SECOND)


def test_a_config_does_not_count_as_read_before_a_process_is_ready(readings):
    log = Log(level=2)
    log.append(config(2, era=2, level=2))
    readings.on_step(node(log, is_ready=False))
    readings.on_append(node(Log(level=2)), encode(claim()))
    assert readings.is_excused(claimed(), SECOND)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_lost_fence_of_partition_0_alone_did_not_begin_the_change(
    readings, has_begun
):
    other = Log(1, k=2, level=2)
    fence = layout_fence(4, 2, era=2)
    if has_begun:
        other.append(fence)
    first = Log(0, k=2, level=2)
    first.append(fence)
    readings.on_append(node(first, other), encode(claim()))
    readings.on_lost(claim(), [other.state])
    readings.on_lost(fence, [other.state, Log(2, configured=False).state])
    assert readings.is_excused(claimed(), SECOND) is not has_begun
