"""The chain of one key: its events and claims, record by record."""

import msgspec
import pytest
from author import write_log
from logkit import (
    INC,
    KEY,
    OP,
    SECRET,
    START_MS,
    H,
    Log,
    batch,
    beat,
    claim,
    config,
    decide,
    fence,
    forgetting,
    hashed,
    ident,
    messages,
    offer,
    pause,
    ready,
    release,
    resets,
    resolve,
    schedule,
    stage,
)
from logkit import resume as resume_record
from msgspec.structs import replace

from kafka_marshal.history import chain as chain_of
from kafka_marshal.history.chain import KeyChain
from kafka_marshal.history.reading import fold_run
from kafka_marshal.history.rows import RESTORED
from kafka_marshal.history.wording import text_of
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SECOND_LEVEL
from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.state import WorldState, why_to_tags
from kafka_marshal.protocol.types import Key

OTHER = Key("g", "u", 0)


class Bench:
    """A log, and the chain of one key that observes its fold."""

    def __init__(self, **settings):
        self.log = Log(configured=False)
        self.chain = KeyChain(KEY)
        self.append(config(**settings))

    def append(self, record, **where):
        transitions = self.log.append(record, **where)
        entry = self.log.entries[-1]
        self.chain.take(self.log.state, entry, transitions=transitions)
        return entry.offset

    def whats(self):
        return [event.what for event in self.chain.events][1:]  # without the Config

    def last(self, what):
        return [event for event in self.chain.events if event.what == what][-1]


def with_reason(record, reason):
    return msgspec.structs.replace(record, reason=reason)


def test_a_claim_a_takeover_and_a_release_are_events():
    bench = Bench()
    why = why_to_tags("free")
    first = bench.append(msgspec.structs.replace(claim(), tags=why))
    bench.append(beat(first, 5), after=1)
    second = bench.append(claim("c2"), after=2 * H + 1)
    bench.append(
        with_reason(release(second, 7, client="c2", successor="c1"), "surplus"), after=5
    )
    assert bench.whats() == ["claimed", "stale", "taken_over", "released"]
    begun, taken, ended = map(bench.last, ("claimed", "taken_over", "released"))
    assert (begun.client_id, begun.reason, begun.owner) == ("c1", "free", None)
    assert str(begun.token) == f"1.0.{first}"
    assert (taken.client_id, taken.owner, taken.position) == ("c2", "c1", 5)
    assert (ended.client_id, ended.reason, ended.position) == ("c2", "surplus", 7)
    assert (ended.successor, ended.until_ms) == ("c1", bench.log.state.now_ms + H // 2)
    assert bench.last("stale").at_ms == START_MS + 1 + 2 * H + 1


def test_the_chain_has_each_claim_with_its_ending():
    bench = Bench()
    first = bench.append(claim())
    bench.append(release(first, 3))
    second = bench.append(claim("c2"))
    claims = bench.chain.claims
    assert [(c.client_id, c.ending) for c in claims] == [
        ("c1", "released"),
        ("c2", "open"),
    ]
    assert [c.token.offset for c in claims] == [first, second]
    assert bench.chain.claims_count == 2


def test_refused_claims_are_one_event_until_the_next_change():
    bench = Bench()
    epoch = bench.append(claim())
    for _ in range(3):
        last = bench.append(claim("c2"), after=1)
    bench.append(claim("c3"))
    held, third = [e for e in bench.chain.events if e.what == "refused"]
    assert (held.client_id, held.reason, held.owner) == ("c2", "held", "c1")
    assert (held.count, held.offset, held.last_offset) == (3, epoch + 1, last)
    assert held.until_ms == START_MS + 2 * H + 1
    assert (third.client_id, third.count) == ("c3", 1)
    bench.append(release(epoch))
    bench.append(claim("c3"))
    bench.append(claim("c2"))
    assert bench.whats()[-3:] == ["released", "claimed", "refused"]
    assert bench.chain.refused_count == 5


def test_an_owner_that_renews_late_keeps_the_key():
    bench = Bench()
    epoch = bench.append(claim())
    bench.append(claim("c2", generation=9), after=2 * H + 1)
    bench.append(beat(epoch, 1))
    assert bench.whats() == ["claimed", "stale", "refused", "renewed_late"]
    bench.append(beat(epoch, 2), after=1)
    assert bench.whats()[-1] == "renewed_late"


def test_a_restart_resumes_the_claim():
    bench = Bench()
    epoch = bench.append(claim(resume_hash=hashed(SECRET)))
    bench.append(resume_record(epoch), after=1)
    assert bench.whats() == ["claimed", "resumed"]
    assert [c.ending for c in bench.chain.claims] == ["resumed", "open"]


def test_offers_and_readiness_of_a_handoff_are_events():
    bench = Bench(level=2)
    epoch = bench.append(claim())
    bench.append(offer(epoch, "c2"), after=1)
    bench.append(ready(epoch), after=1)
    bench.append(ready(epoch, client="c3"))
    bench.append(offer(epoch, None))
    whats = ["claimed", "offered", "ready", "refused", "offer_withdrawn"]
    assert bench.whats() == whats
    assert bench.last("refused").reason == "not_successor"
    for event in (bench.last("offered"), bench.last("ready")):
        assert (event.successor, event.until_ms) == ("c2", START_MS + 1 + H)
    (row,) = bench.chain.claims
    assert (row.stray_count, row.ending) == (0, "open")


def test_heartbeats_of_a_former_owner_are_ignored():
    bench = Bench()
    first = bench.append(claim())
    bench.append(claim("c2"), after=2 * H + 1)
    bench.append(beat(first, 9))
    bench.append(batch((first, 9), inc=INC))
    bench.append(batch((first, 9), (99, 0), inc=INC))
    single, batched = [e for e in bench.chain.events if e.what == "ignored"]
    assert (single.record, single.reason, single.owner) == (
        *("Heartbeat", "not_owner"),
        "c2",
    )
    assert (batched.record, batched.count) == ("BatchHeartbeat", 2)


def test_the_number_of_remembered_epochs_is_bounded(monkeypatch):
    monkeypatch.setattr(chain_of, "EPOCHS_MAX", 2)
    bench = Bench()
    epochs = []
    for _ in range(3):
        epochs.append(bench.append(claim()))
        bench.append(release(epochs[-1]))
    bench.append(batch((epochs[0], 1)))
    assert "ignored" not in bench.whats()
    bench.append(batch((epochs[1], 1)))
    assert bench.whats()[-1] == "ignored"


def test_a_pause_with_its_renewals_and_its_end_are_events():
    bench = Bench()
    until = START_MS + 5_000
    bench.append(with_reason(pause(until), "deploy"))
    bench.append(pause(until + 10, seq=1), after=1)
    bench.append(claim())
    bench.append(claim(key=Key("h", "t", 0)))
    assert bench.chain.pause.until_ms == until + 10
    bench.append(with_reason(pause(0, seq=2, client="eve"), "done"))
    assert bench.whats() == ["paused", "refused", "unpaused"]
    begun, ended = bench.last("paused"), bench.last("unpaused")
    assert (begun.client_id, begun.reason, begun.count) == ("admin", "deploy", 2)
    assert (begun.until_ms, begun.last_offset) == (until + 10, begun.offset + 1)
    assert (ended.client_id, ended.reason) == ("eve", "done")
    assert bench.last("refused").reason == "paused"
    assert bench.chain.pause is None


def test_the_expiry_of_a_pause_is_an_event():
    bench = Bench()
    bench.append(pause(START_MS + 10))
    bench.append(b"?", after=10)
    assert bench.whats() == ["paused", "pause_expired"]


def test_a_scheduled_pause_its_begin_and_its_end_are_events():
    bench = Bench(level=2)
    plan = with_reason(schedule(START_MS + 10, START_MS + 30), "rest")
    plan = replace(plan, tags=person_to_tags("ada"))
    bench.append(plan)
    bench.append(plan)
    begun_at = bench.append(b"?", after=10)
    assert bench.chain.pause.start.offset == begun_at
    bench.append(b"?", after=20)
    assert bench.whats() == ["scheduled", "paused", "pause_expired"]
    planned, begun = bench.last("scheduled"), bench.last("paused")
    assert (planned.begin_ms, planned.until_ms) == (START_MS + 10, START_MS + 30)
    assert (planned.person, planned.reason) == ("ada", "rest")
    assert (begun.person, begun.reason, begun.client_id) == ("ada", "rest", "admin")
    assert (begun.record, begun.until_ms) == (None, START_MS + 30)


def test_a_cancelled_scheduled_pause_never_begins():
    bench = Bench(level=2)
    bench.append(schedule(START_MS + 10, START_MS + 30))
    bench.append(with_reason(pause(0), "not today"))
    bench.append(b"?", after=10)
    assert bench.whats() == ["scheduled", "unscheduled"]
    assert bench.last("unscheduled").reason == "not today"


def test_the_cancellation_of_a_scheduled_pause_names_its_topics():
    bench = Bench(level=2)
    bench.append(schedule(START_MS + 10, START_MS + 30, scope={"t": ()}))
    bench.append(pause(0))
    assert bench.last("unscheduled").topics == ("t",)


def test_cancelling_a_scheduled_pause_does_not_end_the_present_one():
    bench = Bench(level=2)
    bench.append(pause(START_MS + 90, op=ident("lasts")))
    bench.append(schedule(START_MS + 10, START_MS + 30))
    bench.append(pause(0))
    bench.append(b"?", after=10)
    assert bench.whats() == ["paused", "scheduled", "unscheduled"]
    assert bench.last("unscheduled").op_id == OP
    assert bench.chain.pause.op_id == ident("lasts")


def test_an_admin_may_begin_a_scheduled_pause_early():
    bench = Bench(level=2)
    bench.append(schedule(START_MS + 10, START_MS + 30))
    bench.append(pause(START_MS + 30))
    assert bench.whats() == ["scheduled", "paused"]


def test_scheduled_pauses_of_a_checkpoint_begin_without_a_person():
    log = Log(level=2)
    log.append(schedule(START_MS + 10, START_MS + 30, group="h"))
    log.append(schedule(START_MS + 10, START_MS + 30))
    chain = KeyChain(KEY)
    chain.begin(log.state)
    log.append(b"?", after=10)
    entry = log.entries[-1]
    chain.take(log.state, entry, transitions=())
    begun = chain.events[-1]
    assert (begun.what, begun.client_id, begun.person) == ("paused", "admin", None)


def test_a_pause_of_another_group_is_no_event():
    bench = Bench()
    bench.append(pause(START_MS + 10, group="h"))
    bench.append(b"?", after=10)
    assert bench.whats() == []


def test_a_pause_of_some_partitions_appears_only_in_their_chains():
    bench = Bench(level=2)
    one, two = ident("one"), ident("two")
    bench.append(schedule(0, START_MS + 30, op=one, scope={"t": (1,), "u": ()}))
    bench.append(schedule(0, START_MS + 20, op=two, scope={"t": ()}))
    bench.append(pause(START_MS + 10))
    assert bench.chain.pause.op_id == two
    bench.append(pause(0, op=one, seq=1))
    bench.append(b"?", after=10)
    bench.append(b"?", after=10)
    assert bench.whats() == ["paused", "paused", "pause_expired", "pause_expired"]
    assert [each.topics for each in list(bench.chain.events)[1:]] == [
        ("t",),
        (),
        (),
        ("t",),
    ]
    assert text_of(bench.chain.events[1]).startswith("admin paused t until ")
    assert bench.chain.pause is None


def test_a_refused_pause_is_no_event():
    bench = Bench()
    bench.append(pause(START_MS - 1))
    assert bench.whats() == []


def test_the_steps_of_a_committed_set_position_are_events():
    bench = Bench(level=SECOND_LEVEL)
    epoch = bench.append(claim())
    bench.append(release(epoch, 9))
    bench.append(pause(START_MS + 5_000))
    bench.append(stage((0, 4)))
    bench.append(claim("c2"))
    bench.append(decide())
    bench.append(with_reason(resolve(commit=True), "replay"))
    assert bench.whats() == [
        *("claimed", "released", "paused", "staged", "refused"),
        *("decided", "unpaused", "position_set"),
    ]
    staged, moved = bench.last("staged"), bench.last("position_set")
    assert (staged.position, staged.before, staged.op_id) == (4, 9, ident("op"))
    assert (moved.position, moved.before, moved.reason) == (4, 9, "replay")


def test_a_stage_ends_the_claim_of_a_stale_owner_even_if_aborted():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(claim())
    bench.append(pause(START_MS + 50_000))
    bench.append(stage((0, 4)), after=2 * H + 1)
    bench.append(resolve(commit=False))
    assert bench.whats()[2:] == ["stale", "staged", "unpaused", "unlocked"]
    assert bench.last("staged").owner == "c1"
    assert [c.ending for c in bench.chain.claims] == ["released"]


def test_a_stage_is_refused_as_a_whole():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(release(bench.append(claim()), 9))
    bench.append(pause(START_MS + 5_000))
    bench.append(stage((0, 4), (1, 4)))
    refused = bench.last("refused")
    assert (refused.record, refused.reason) == ("StagePosition", "unknown_key")
    bench.append(stage((1, 4)))
    assert refused.count == 1


def test_a_resolve_of_other_keys_ends_the_pause():
    bench = Bench(level=SECOND_LEVEL)
    other = Key("g", "t", 1)
    bench.append(release(bench.append(claim(key=other)), 3, key=other))
    bench.append(pause(START_MS + 5_000))
    bench.append(stage((1, 4)))
    bench.append(resolve(commit=False))
    assert bench.whats() == ["paused", "unpaused"]
    assert bench.chain.pause is None


def test_a_key_that_was_forgotten_or_dropped_can_be_claimed_again():
    bench = Bench(forget_ms=10)
    epoch = bench.append(claim())
    bench.append(release(epoch, 9))
    bench.append(forgetting(epoch))
    assert bench.last("forgotten").before == 9
    bench.append(release(bench.append(claim())))
    bench.append(b"?", after=11)
    assert bench.whats() == [
        *("claimed", "released", "forgotten"),
        *("claimed", "released", "dropped"),
    ]
    bench.append(claim())
    assert bench.whats()[-1] == "claimed"


def test_a_refused_forget_is_an_event():
    bench = Bench()
    bench.append(forgetting(bench.append(claim())))
    refused = bench.last("refused")
    assert (refused.record, refused.reason) == ("ForgettingPartition", "held")


def test_a_fence_of_the_owner_and_its_refused_claim_are_events():
    bench = Bench(level=SECOND_LEVEL)
    epoch = bench.append(claim())
    bench.append(fence("c2"))
    bench.append(fence(reason="hangs"))
    bench.append(beat(epoch, 5), after=1)
    bench.append(release(epoch))
    bench.append(claim())
    assert bench.whats() == ["claimed", "fenced", "released", "refused"]
    fenced = bench.last("fenced")
    assert (fenced.client_id, fenced.owner, fenced.reason) == ("admin", "c1", "hangs")
    assert bench.last("refused").reason == "sender_fenced"


def test_a_reset_takes_the_key_from_its_owner():
    bench = Bench()
    bench.append(pause(START_MS + 50_000))
    bench.append(claim(key=OTHER))
    state = bench.log.state
    value, name = to_bytes(state), digest(state)
    bench.append(pause(0, seq=1))
    bench.append(claim())
    for record in resets(value, name):
        bench.append(record)
    # The carried state does not have the key, and has the pause.
    assert bench.whats()[-2:] == ["claimed", "reset"]
    assert bench.chain.pause is not None
    assert bench.chain.claims[-1].reason == "reset"
    bench.append(claim("c2"), after=1)
    assert bench.last("refused").reason == "paused"


def test_a_reset_ends_a_pause_that_its_state_does_not_have():
    bench = Bench()
    bench.append(claim())
    value, name = to_bytes(bench.log.state), digest(bench.log.state)
    bench.append(pause(START_MS + 50_000))
    for record in resets(value, name):
        bench.append(record)
    assert bench.whats()[-2:] == ["paused", "reset"]
    assert bench.chain.pause is None
    assert bench.last("reset").until_ms == bench.log.state.quiet_until_ms


def test_grants_renewals_and_records_of_other_keys_are_no_events():
    bench = Bench()
    epoch = bench.append(claim())
    bench.append(claim("c2", key=OTHER))
    bench.append(messages(epoch, 0, 9))
    bench.append(batch((epoch, 12)))
    bench.append(batch((99, 12)))
    assert bench.whats() == ["claimed"]


def test_a_config_is_an_event_and_a_refused_one_is_not():
    bench = Bench()
    bench.append(config(2, era=2, h=3 * H))
    bench.append(config(9, era=3))
    configured = [e for e in bench.chain.events if e.what == "configured"]
    assert [e.reason for e in configured] == [
        "generation 1, heartbeat interval 1000 ms, level 1",
        "generation 2, heartbeat interval 3000 ms, level 1",
    ]


def test_events_and_claims_are_bounded_and_counted(monkeypatch):
    monkeypatch.setattr(chain_of, "EVENTS_MAX", 3)
    monkeypatch.setattr(chain_of, "CLAIMS_MAX", 2)
    bench = Bench()
    for _ in range(4):
        bench.append(release(bench.append(claim())))
    assert (len(bench.chain.events), bench.chain.events_count) == (3, 9)
    assert (len(bench.chain.claims), bench.chain.claims_count) == (2, 4)


# --- from a checkpoint


def test_a_chain_that_begins_at_a_checkpoint_has_the_claim_in_it():
    log = Log(level=SECOND_LEVEL)
    epoch = log.claimed()
    log.append(beat(epoch, 7))
    log.claimed("c2", key=OTHER)
    chain = KeyChain(KEY)
    chain.begin(log.state)
    (event,) = chain.events
    assert (event.what, event.client_id, event.position) == (RESTORED, "c1", 7)
    assert event.offset == log.state.next_offset - 1 == chain.began_at - 1
    assert [c.effect for c in chain.claims] == [RESTORED]


def test_a_lock_at_the_checkpoint_is_known():
    log = Log(level=SECOND_LEVEL)
    log.append(release(log.claimed(), 9))
    log.append(pause(START_MS + 5_000))
    log.append(stage((0, 4)))
    chain = KeyChain(KEY)
    chain.begin(log.state)
    assert chain.events[0].op_id == ident("op")
    assert chain.events[0].client_id is None
    resolved = log.append(resolve(commit=False))
    chain.take(log.state, log.entries[-1], transitions=resolved)
    assert [e.what for e in chain.events] == [RESTORED, "unpaused", "unlocked"]


# --- the fast fold


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_fold_gives_the_same_chain_and_state(seed):
    entries = write_log(seed)
    keys = {Key("g", "t", 0), Key("g", "t", 1), Key("h", "t", 0), OTHER}
    for key in sorted(keys):
        slow, fast = KeyChain(key), KeyChain(key)
        one, other = WorldState(0), WorldState(0)
        for entry in entries:
            slow.take(one, entry, transitions=apply(one, entry))
        for start in range(0, len(entries), 7):
            fold_run(fast, other, entries=entries[start : start + 7])
        assert one == other
        assert list(slow.events) == list(fast.events)
        assert slow.claims == fast.claims


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_from_a_checkpoint_has_the_same_later_events(seed):
    entries = write_log(seed)
    half = len(entries) // 2
    whole, world = KeyChain(KEY), WorldState(0)
    for entry in entries[:half]:
        whole.take(world, entry, transitions=apply(world, entry))
    begun, later = from_bytes(to_bytes(world)), KeyChain(KEY)
    later.begin(begun)
    for entry in entries[half:]:
        whole.take(world, entry, transitions=apply(world, entry))
        later.take(begun, entry, transitions=apply(begun, entry))
    # Repeated events may have begun before the checkpoint, and so may staleness.
    folded = {"refused", "ignored", "stale", "renewed_late"}
    place = entries[half - 1].offset
    assert [
        (e.what, e.offset, e.client_id, e.reason)
        for e in whole.events
        if e.what not in folded and e.offset > place
    ] == [
        (e.what, e.offset, e.client_id, e.reason)
        for e in list(later.events)[1:]
        if e.what not in folded
    ]
