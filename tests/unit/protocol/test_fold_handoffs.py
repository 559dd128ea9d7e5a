"""Offers of a key to a successor, and who is ready (PROTOCOL 9.4)."""

import pytest
from logkit import (
    INC_AGAIN,
    KEY,
    OP,
    SECRET,
    START_MS,
    H,
    Log,
    beat,
    claim,
    fence,
    hashed,
    ident,
    offer,
    pause,
    ready,
    release,
    resets,
    resume,
    stage,
)

from kafka_marshal.protocol.fold_handoffs import FOLDS, WITHIN_MS_MAX
from kafka_marshal.protocol.items import Offer
from kafka_marshal.protocol.records import KINDS, SECOND_LEVEL
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.types import Key

C2 = ident("c2")


def held(**settings):
    """Return a log in which c1 holds a key, and that key's epoch."""
    log = Log(level=SECOND_LEVEL, **settings)
    return log, log.claimed(resume_hash=hashed(SECRET))


def offered(**options):
    log, epoch = held()
    assert log.outcome_of(offer(epoch, **options)) == "offered"
    return log, epoch


def test_all_kinds_of_the_module_have_its_level():
    levels = {kind.record: kind.level for kind in KINDS}
    assert {levels[record] for record in FOLDS} == {SECOND_LEVEL}


def test_an_offer_changes_nothing_else():
    log, epoch = held()
    log.append(beat(epoch, 5))
    before = log.key().renewed_ms
    transition = log.one(offer(epoch, within_ms=700), after=10)
    assert (transition.outcome, transition.effect) == ("accepted", "offered")
    assert (transition.key, transition.epoch, transition.detail) == (KEY, epoch, None)
    known = log.key()
    until_ms = START_MS + 10 + 700
    assert known.offer == Offer("c2", until_ms, transition.offset, None)
    assert (known.renewed_ms, known.position) == (before, 5)
    assert known.active_ms == START_MS + 10


def test_an_offer_lasts_an_hour_at_most():
    log, _ = offered(within_ms=WITHIN_MS_MAX + 1)
    assert log.key().offer.until_ms == START_MS + WITHIN_MS_MAX


def test_a_later_offer_replaces_it_and_its_ready():
    log, epoch = offered()
    log.append(ready(epoch))
    assert log.outcome_of(offer(epoch, "c3")) == "offered"
    assert log.key().offer[0::3] == ("c3", None)
    assert log.outcome_of(offer(epoch, None)) == "offer_withdrawn"
    assert log.key().offer is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"client": "c3"}, "not_owner"),
        ({"inc": INC_AGAIN}, "not_owner"),
        ({"key": Key("g", "t", 1)}, "not_owner"),
        ({"epoch": 0}, "old_epoch"),
    ],
)
def test_only_the_owner_offers(wrong, reason):
    log, epoch = held()
    transition = log.one(offer(**({"epoch": epoch} | wrong)))
    assert (transition.outcome, transition.reason) == ("ignored", reason)
    assert log.key().offer is None


def test_a_fenced_owner_and_a_paused_group_offer_nothing():
    log, epoch = held()
    log.append(pause(START_MS + 9 * H))
    assert log.outcome_of(offer(epoch)) == "paused"
    log.append(fence())
    assert log.outcome_of(offer(epoch)) == "sender_fenced"
    assert log.key().offer is None


def test_below_the_level_both_are_ignored():
    log = Log(level=1)
    epoch = log.claimed()
    assert log.outcome_of(offer(epoch)) == "level"
    assert log.outcome_of(ready(epoch)) == "level"


def test_ready_notes_who_and_changes_nothing_else():
    log, epoch = offered()
    transition = log.one(ready(epoch), after=3)
    assert (transition.outcome, transition.effect) == ("accepted", "ready")
    known = log.key()
    assert known.offer.ready == C2
    assert (known.owner.client_id, known.epoch) == ("c1", epoch)
    assert (known.renewed_ms, known.active_ms) == (START_MS, START_MS + 3)
    assert log.outcome_of(ready(epoch, inc=INC_AGAIN)) == "ready"
    assert log.key().offer.ready == INC_AGAIN


def test_the_order_of_refusals_of_ready():
    log, epoch = held()
    log.append(offer(epoch, within_ms=50))
    log.append(pause(START_MS + 9 * H))
    log.append(fence("c2"))
    log.append(fence("c3"))
    assert log.outcome_of(ready(epoch + 1, client="c3"), after=50) == "old_epoch"
    assert log.outcome_of(ready(epoch, client="c3")) == "not_successor"
    assert log.outcome_of(ready(epoch)) == "late"
    assert log.outcome_of(pause(0, seq=9)) == "unpaused"
    log.append(offer(epoch))
    assert log.outcome_of(ready(epoch)) == "sender_fenced"
    log.append(pause(START_MS + 9 * H, op=ident("again")))
    assert log.outcome_of(ready(epoch, inc=INC_AGAIN)) == "paused"
    assert log.outcome_of(ready(epoch, key=Key("g", "t", 9))) == "old_epoch"


def test_ready_without_an_offer():
    log, epoch = held()
    assert log.outcome_of(ready(epoch)) == "no_offer"


def test_an_offer_counts_until_just_before_its_end_and_stays():
    log, epoch = offered(within_ms=50)
    assert log.outcome_of(ready(epoch), after=49) == "ready"
    assert log.outcome_of(ready(epoch), after=1) == "late"
    assert log.key().offer.ready == C2


def test_an_offer_refuses_nobodys_claim():
    log, epoch = offered(within_ms=WITHIN_MS_MAX)
    log.append(ready(epoch))
    assert log.outcome_of(claim("c3"), after=2 * H) == "held"
    assert log.outcome_of(claim("c3"), after=1) == "claimed"


ENDS = {
    "release": lambda log, epoch: log.append(release(epoch, successor="c2")),
    "resume": lambda log, epoch: log.append(resume(epoch)),
    "claim": lambda log, _: log.append(claim("c3"), after=2 * H + 1),
    "stage": lambda log, _: [
        log.append(pause(START_MS + 9 * H), after=2 * H + 1),
        log.append(stage((0, 8), op=OP)),
    ],
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_claim_ends_its_offer(name):
    log, epoch = offered(within_ms=WITHIN_MS_MAX)
    assert log.key().offer is not None
    ENDS[name](log, epoch)
    assert log.key().offer is None
    assert log.key().owner is None or log.key().epoch > epoch
    assert to_bytes(from_bytes(to_bytes(log.state))) == to_bytes(log.state)


def test_a_reset_takes_offers_back():
    log, epoch = offered(within_ms=WITHIN_MS_MAX)
    value, before = to_bytes(log.state), digest(log.state)
    log.append(ready(epoch))
    (record,) = resets(value, before, bytes_max=10_000)
    assert log.outcome_of(record) == "reset"
    assert log.key().offer is None


def test_state_read_back_knows_its_offers():
    log, epoch = offered()
    log.append(ready(epoch))
    back = from_bytes(to_bytes(log.state))
    assert back == log.state
    assert digest(back) == digest(log.state)


def test_a_key_without_an_offer_keeps_its_digest():
    log, epoch = held()
    before = to_bytes(log.state)
    log.append(offer(epoch))
    log.append(offer(epoch, None))
    back = from_bytes(before)
    assert back.keys == log.state.keys
