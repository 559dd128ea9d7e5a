"""PROTOCOL 9: settings, plans, offers, drains, standbys and growths of topics."""

from hashlib import blake2b

from logkit import (
    START_MS,
    H,
    Log,
    beat,
    claim,
    direct,
    fence,
    growth,
    ident,
    offer,
    pause,
    planned,
    ready,
    release,
    settings,
)

from kafka_marshal.protocol.growths import growth_of, source_of
from kafka_marshal.protocol.hashing import home_partition
from kafka_marshal.protocol.standbys import Candidate, standbys_of
from kafka_marshal.protocol.types import Key

HOUR_MS = 3_600_000


def test_9_1_only_settings_of_the_next_generation_are_accepted():
    log = Log(level=2)
    assert log.outcome_of(settings(2)) == "settings_overtaken"
    assert log.outcome_of(settings(1, policy="fair")) == "group_configured"
    assert log.outcome_of(settings(1)) == "settings_overtaken"
    assert log.outcome_of(settings(2, handoff_ms=7)) == "group_configured"
    # A record has all settings: what it leaves out is the default again.
    assert log.state.settings_of("g") == (2, None, None, None, 7, None, None)


def home_of(name):
    return home_partition(name, partition_count=8)


def test_9_1_settings_get_the_first_reason_that_applies():
    log = Log(level=2, k=8, groups=1)
    names = sorted("abcdefghijklmnopqrstuvwxyz", key=home_of)
    (one, two), away = names[:2], names[-1]
    assert log.outcome_of(settings(9, group=away)) == "wrong_partition"
    assert log.outcome_of(settings(group=one)) == "group_configured"
    assert log.outcome_of(settings(9, group=two)) == "settings_overtaken"
    assert log.outcome_of(settings(1, group=two)) == "limits"


def test_9_1_a_group_with_settings_is_not_dropped():
    log = Log(level=2, operations=1)
    log.append(settings())
    log.append(fence())
    log.append(fence(group="h"))
    assert log.outcome_of(settings(2)) == "group_configured"


def test_9_1_below_level_2_settings_are_ignored():
    log = Log(level=1)
    assert log.outcome_of(settings()) == "level"
    assert log.state.groups == {}


def test_9_2_the_first_plan_that_follows_the_last_one_is_accepted():
    log = Log(level=2)
    assert log.outcome_of(planned(1)) == "plan_overtaken"
    assert log.outcome_of(planned(0)) == "planned"
    assert log.outcome_of(planned(0, client="c2")) == "plan_overtaken"
    assert log.outcome_of(planned(1, client="c2")) == "planned"
    assert log.state.groups["g"].planned == (2, log.now_ms)


def test_9_2_a_plan_gets_the_first_reason_that_applies():
    log = Log(level=2, k=8, groups=1)
    names = sorted("abcdefghijklmnopqrstuvwxyz", key=home_of)
    (one, two), away = names[:2], names[-1]
    assert log.outcome_of(planned(9, group=away)) == "wrong_partition"
    assert log.outcome_of(planned(0, group=one)) == "planned"
    assert log.outcome_of(planned(9, group=two)) == "plan_overtaken"
    assert log.outcome_of(planned(0, group=two)) == "limits"


def test_9_2_below_level_2_a_plan_is_ignored():
    log = Log(level=1)
    assert log.outcome_of(planned()) == "level"
    assert log.state.groups == {}


def test_9_2_a_plan_changes_no_key():
    log, epoch = held()
    before = log.key()
    log.append(planned(0, ("c2", 0, (0, 1, 2))))
    assert log.key() == before
    assert log.outcome_of(claim("c2")) == "held"
    assert log.outcome_of(release(epoch)) == "released"
    assert log.outcome_of(claim("c3")) == "claimed"


def test_9_2_a_group_with_nothing_but_old_plans_is_dropped():
    log = Log(level=2, forget_ms=100)
    log.append(planned())
    log.append(planned(1), after=50)
    log.append(b"", after=100)
    assert log.state.plan_generation("g") == 2
    log.append(b"", after=1)
    assert log.state.groups == log.state.soft.plans == {}
    assert log.outcome_of(planned(0)) == "planned"


def test_9_2_a_group_with_a_key_keeps_its_plan_generation():
    log = Log(level=2, forget_ms=100)
    log.append(planned())
    log.claimed()
    log.append(b"", after=101)
    assert log.state.plan_generation("g") == 1
    log.append(release(2))
    log.append(b"", after=50)
    assert log.state.plan_generation("g") == 1
    # The group is dropped with its last key.
    log.append(b"", after=51)
    assert log.state.groups == {}


def test_9_2_a_dropped_group_no_longer_counts_for_the_limit():
    log = Log(level=2, groups=1, forget_ms=100)
    log.append(planned(group="a"))
    assert log.outcome_of(planned(group="b"), after=100) == "limits"
    log.append(b"", after=1)
    assert log.outcome_of(planned(group="b")) == "planned"


def held():
    log = Log(level=2)
    return log, log.claimed()


def test_9_4_a_handoff_moves_the_key_to_its_successor():
    log, epoch = held()
    assert log.outcome_of(offer(epoch, "c2", within_ms=9 * H)) == "offered"
    assert log.outcome_of(ready(epoch)) == "ready"
    # A Ready does not let the successor claim before the release.
    assert log.outcome_of(claim("c2")) == "held"
    assert log.outcome_of(release(epoch, 5, successor="c2")) == "released"
    assert log.outcome_of(claim("c3"), after=H // 2 - 1) == "handoff"
    assert log.outcome_of(claim("c2")) == "claimed"
    assert (log.key().position, log.key().offer) == (5, None)


def test_9_4_an_offer_not_by_the_owner_or_in_a_pause_is_not_accepted():
    log, epoch = held()
    assert log.outcome_of(offer(epoch, "c3", client="c2")) == "not_owner"
    assert log.outcome_of(offer(epoch - 1)) == "old_epoch"
    log.append(pause(log.now_ms + 9 * H))
    assert log.outcome_of(offer(epoch)) == "paused"


def test_9_4_a_ready_gets_the_first_reason_that_applies():
    log, epoch = held()
    assert log.outcome_of(ready(epoch - 1)) == "old_epoch"
    assert log.outcome_of(ready(epoch)) == "no_offer"
    log.append(offer(epoch, "c2", within_ms=5))
    assert log.outcome_of(ready(epoch, client="c3"), after=5) == "not_successor"
    assert log.outcome_of(ready(epoch)) == "late"
    log.append(offer(epoch, "c2"))
    log.append(pause(log.now_ms + 9 * H))
    assert log.outcome_of(ready(epoch)) == "paused"


def test_9_4_an_offer_is_replaced_by_the_next_and_withdrawn_by_an_empty_one():
    log, epoch = held()
    log.append(offer(epoch, "c2"))
    log.append(ready(epoch))
    log.append(offer(epoch, "c2"))
    assert log.key().offer.ready is None
    assert log.outcome_of(offer(epoch, None)) == "offer_withdrawn"
    assert log.outcome_of(ready(epoch)) == "no_offer"


def test_9_4_an_offer_lasts_an_hour_at_most_and_renews_nothing():
    log, epoch = held()
    log.append(offer(epoch, within_ms=2**31 - 1), after=7)
    assert log.key().offer.until_ms == log.now_ms + HOUR_MS
    assert log.key().renewed_ms == log.now_ms - 7
    log.append(ready(epoch), after=1)
    assert log.key().renewed_ms == log.now_ms - 8


def test_9_4_an_offer_does_not_refuse_the_claim_of_another_client():
    log, epoch = held()
    log.append(offer(epoch, "c2", within_ms=HOUR_MS))
    log.append(ready(epoch))
    assert log.outcome_of(claim("c3"), after=2 * H + 1) == "claimed"
    assert log.key().offer is None


def test_9_4_a_ready_of_another_incarnation_replaces_the_last_one():
    log, epoch = held()
    log.append(offer(epoch, "c2"))
    log.append(ready(epoch))
    assert log.outcome_of(ready(epoch, inc=ident("c2 again"))) == "ready"
    assert log.key().offer.ready == ident("c2 again")


def test_9_7_a_directive_is_in_force_until_its_end():
    log = Log(level=2, max_pause_ms=90)
    assert log.outcome_of(direct("c1", until=START_MS + 50)) == "directed"
    assert log.state.action_for(("g", "c1"), host="") == "drain"
    log.append(b"", after=49)
    assert log.state.groups["g"].directives
    log.append(b"", after=1)
    assert log.state.action_for(("g", "c1"), host="") is None
    assert log.outcome_of(direct("c1")) == "op_over"
    assert log.outcome_of(direct("c1", op=ident("b"))) == "directed"
    assert log.state.groups["g"].directives[0].until_ms == START_MS + 50 + 90


def test_9_7_a_directive_gets_the_first_reason_that_applies():
    log = Log(level=2, operations=1, groups=2)
    log.claimed()
    log.append(direct(group="marshal", host="m1", seq=7))
    assert log.outcome_of(direct(group="h")) == "limits"
    assert log.outcome_of(direct(group="g", until=0)) == "expired"
    assert log.outcome_of(direct(group="g")) == "limits"
    assert log.outcome_of(direct(group="marshal", seq=7)) == "busy"
    assert log.outcome_of(direct(group="marshal", host="m1", seq=7)) == "old_seq"
    ends = direct(group="marshal", until=0, seq=8)
    assert log.outcome_of(ends) == "directive_ended"
    assert log.outcome_of(direct(group="marshal", host="m1", seq=9)) == "op_over"


def test_9_7_a_directive_does_not_refuse_claims():
    log = Log(level=2)
    log.append(direct("c1"))
    log.append(direct(host="m1", group="marshal", op=ident("b")))
    assert log.outcome_of(claim("c1")) == "claimed"


def test_9_9_standbys_are_ordered_by_host_and_digest():
    members = {"a": "h1", "b": "h1", "c": "h2", "d": "h0", "e": "h3"}

    def digest(name):
        text = b"\0".join([b"g", b"t", b"7", name.encode()])
        return blake2b(text, digest_size=8).digest()

    by_digest = sorted(members, key=digest)
    first = next(name for name in by_digest if name in "ab")
    expected = [name for name in by_digest if name in {first, "c", "e"}]
    expected += [name for name in by_digest if name in {"a", "b"} - {first}]
    expected += ["d"]
    found = standbys_of(
        Key("g", "t", 7),
        owner="o",
        host="h0",
        candidates=[Candidate(name, host, 9) for name, host in members.items()],
    )
    assert list(found) == expected


def test_9_10_a_growth_is_announced_and_then_has_ends():
    log = Log(level=2)
    assert log.outcome_of(growth(8, 4, ends=(1,) * 4)) == "growth"
    assert log.outcome_of(growth(8, 4)) == "growing"
    assert log.outcome_of(growth(8, 4)) == "known"
    assert log.outcome_of(growth(16, 4)) == "busy"
    assert log.outcome_of(growth(16, 8)) == "busy"
    assert log.outcome_of(growth(8, 4, ends=(1, 2, 3, 4))) == "grown"
    assert log.outcome_of(growth(8, 4, ends=(9,) * 4)) == "known"
    assert log.outcome_of(growth(12, 6)) == "growth"
    assert log.outcome_of(growth(16, 8)) == "growing"
    assert log.outcome_of(growth(8, 8)) == "growth_withdrawn"
    assert log.outcome_of(growth(8, 8)) == "growth"
    (left,) = log.state.growths
    assert (left.new_count, left.ends) == (8, (1, 2, 3, 4))


def test_9_10_a_growth_of_another_topic_id_drops_earlier_growths():
    log = Log(level=2)
    assert log.outcome_of(growth(topic_id=ident("one"))) == "growing"
    assert log.outcome_of(growth(2, 1, topic_id=ident("two"))) == "growing"
    assert [each.topic_id for each in log.state.growths] == [ident("two")]


def test_9_10_a_new_partition_waits_for_the_position_of_its_source():
    log = Log(level=2)
    log.append(growth(8, 4))
    log.append(growth(8, 4, ends=(9, 9, 9, 9)))
    growths, key = log.state.growths, Key("g", "t", 7)
    assert growth_of(growths, Key("g", "t", 3), topic_id=None) is None
    source = source_of(growth_of(growths, key, topic_id=None), key)
    assert (source.key, source.end) == (Key("g", "t", 3), 9)
    log.append(claim(key=source.key))
    epoch = log.state.keys[source.key].epoch
    for position, has_passed in ((8, False), (9, True)):
        log.append(beat(epoch, position, key=source.key))
        known = log.state.keys[source.key]
        assert source.has_passed(known, topic_id=None) is has_passed
