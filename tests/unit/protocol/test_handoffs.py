"""When an owner acts on an offer (PROTOCOL 9.5)."""

import pytest
from logkit import INC_AGAIN, KEY, H, Log, ident, offer, ready

from kafka_marshal.protocol.handoffs import is_ready_for, offered_since_ms, phase_of

C2 = ident("c2")


@pytest.fixture
def log():
    log = Log(level=2)
    log.append(offer(log.claimed()))
    return log


def test_an_offer_without_a_handoff_ready_is_not_ready(log):
    assert not is_ready_for(log.key(), epoch=1, living=C2)
    log.append(offer(1, None))
    assert not is_ready_for(log.key(), epoch=1, living=C2)


def test_an_offer_is_ready_only_for_the_live_incarnation(log):
    log.append(ready(1))
    assert is_ready_for(log.key(), epoch=1, living=C2)
    assert not is_ready_for(log.key(), epoch=1, living=INC_AGAIN)
    assert not is_ready_for(log.key(), epoch=1, living=None)


def test_an_offer_is_ready_only_under_the_epoch_that_made_it(log):
    log.append(ready(1))
    assert not is_ready_for(log.key(), epoch=0, living=C2)


def test_an_offer_lasts_until_its_end_and_a_ready_one_until_withdrawn(log):
    now_ms = log.state.now_ms
    assert phase_of(log.key(), now_ms) == "offered"
    assert phase_of(log.key(), now_ms + H) is None
    log.append(ready(1))
    assert phase_of(log.key(), now_ms + H) == "ready"
    log.append(offer(1, None))
    assert phase_of(log.key(), log.state.now_ms) is None


def test_the_log_time_of_the_present_offer_is_known(log):
    first_ms = log.state.now_ms
    assert offered_since_ms(log.state, KEY) == first_ms
    log.append(ready(1), after=10)
    assert offered_since_ms(log.state, KEY) == first_ms
    log.append(offer(1, "c3"), after=10)
    assert offered_since_ms(log.state, KEY) == first_ms + 20
    log.state.soft.offered_ms[KEY] = (0, first_ms)
    assert offered_since_ms(log.state, KEY) is None, "that of another offer"
    log.state.soft.offered_ms.clear()
    assert offered_since_ms(log.state, KEY) is None
    log.append(offer(1, None))
    assert offered_since_ms(log.state, KEY) is None
    assert not log.state.soft.offered_ms
