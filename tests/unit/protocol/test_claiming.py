from hashlib import sha256

import attrs
import pytest
from logkit import (
    INC,
    INC_AGAIN,
    KEY,
    LOCK,
    SECRET,
    START_MS,
    H,
    Log,
    beat,
    claim,
    ident,
    pause,
    release,
    resume,
    schedule,
    transition,
)

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import (
    CLAIMS_IN_FLIGHT_MAX,
    NO_LEASE,
    Claim,
    Claimant,
    Ending,
    Lease,
    Phase,
    PreviousLife,
    Sublease,
    estimate,
    grant_secret,
    key_secret,
    resumable,
)
from kafka_marshal.protocol.records import Resume
from kafka_marshal.protocol.state import WorldState
from kafka_marshal.protocol.types import Key, Owner, Token

ME = Owner("c1", INC)
TOKEN = Token(1, 0, 7)
EPOCH = 7
MASTER = b"m" * 32
ANSWER_MS = H // 2


def verdict(
    outcome="accepted", effect=None, reason=None, *, offset=EPOCH, detail=None, of=None
):
    given = {"offset": offset, "epoch": EPOCH, "detail": detail, "record": of}
    return transition(effect, outcome=outcome, reason=reason, **given)


WON = verdict(effect="claimed")
RENEWED = verdict(effect="renewed", offset=9)
POSITION_ONLY = verdict(effect="position_only", offset=9)
IGNORED = verdict("ignored", reason="not_owner", offset=9)
TAKEN = verdict(effect="claimed", offset=9, of=claim("c2"))
TWIN = verdict(effect="resumed", offset=9, of=claim("c1", inc=INC_AGAIN))
OTHERS_BEAT = verdict(effect="renewed", offset=9, of=beat(9, client="c2"))


def held_by_other(remaining_ms=None):
    detail = None if remaining_ms is None else {"remaining_ms": remaining_ms}
    return verdict("refused", reason="held", detail=detail)


def new_claim():
    return Claim(Claimant(ME, "g", master=MASTER), KEY)


def judge(it, transition, *, seq=1, now_ms=10, h=H):
    return it.on_claim_verdict(
        transition, seq=seq, now_ms=now_ms, heartbeat_interval_ms=h, token=TOKEN
    )


def wants(it, now_ms, wait_ms, *, jitter_ms=0):
    return it.wants_to_claim(now_ms, wait_ms, jitter_ms=jitter_ms, answer_ms=ANSWER_MS)


def at(phase):
    """Return a claim in a phase; its claiming record was sent at 0 as number 1."""
    it = new_claim()
    if phase is Phase.WAITING:
        return it
    it.claim_sent(1, 0)
    if phase in {Phase.STARTING, Phase.HELD}:
        assert judge(it, WON)
    if phase is Phase.HELD:
        it.start(5)
    if phase is Phase.ENDED:
        it.end(Ending("released", was_lost=False))
    assert it.phase is phase
    return it


LATER = Lease(50_000, 60_000)
SIDECAR = Claimant(Owner("host", b"s" * 16), "g", master=b"")


def sublease(epoch=EPOCH, lease=LATER):
    return Sublease(
        claimant=SIDECAR,
        epoch=epoch,
        token=Token(1, 0, epoch),
        secret=b"secret",
        lease=lease,
        heartbeat_interval_ms=H,
    )


# --- Every input in every phase ---

W, C, S, D, E = Phase  # waiting, claiming, starting, held (D), ended
SOFT_MS = 7 * H // 4
HARD_MS = 2 * H - 2 - 100
INPUTS = {
    "wants, not answered": lambda it: wants(it, ANSWER_MS - 1, 0),
    "wants, answer overdue": lambda it: wants(it, ANSWER_MS, 0),
    "wants, must wait": lambda it: wants(it, ANSWER_MS, 1),
    "wants, hopeless": lambda it: wants(it, ANSWER_MS, None),
    "sent": lambda it: it.claim_sent(2, 20),
    "won": lambda it: judge(it, WON),
    "won, unknown number": lambda it: judge(it, WON, seq=99),
    "won too late": lambda it: judge(it, WON, now_ms=HARD_MS),
    "held by another": lambda it: judge(it, held_by_other(5)),
    "duplicate": lambda it: judge(it, verdict("refused", reason="duplicate")),
    "start": lambda it: it.start(3),
    "renewed": lambda it: renew(it, RENEWED),
    "position only": lambda it: renew(it, POSITION_ONLY),
    "beat ignored": lambda it: renew(it, IGNORED),
    "taken over": lambda it: it.on_foreign(TAKEN),
    "twin resumed": lambda it: it.on_foreign(TWIN),
    "beat of another": lambda it: it.on_foreign(OTHERS_BEAT),
    "lease stands": lambda it: it.check_lease(HARD_MS - 1),
    "lease over": lambda it: it.check_lease(HARD_MS),
    "clock stepped": lambda it: it.shorten(1),
    "ended": lambda it: it.end(Ending("fenced")),
    "assigned": lambda it: it.assign(sublease()),
    "reassigned": lambda it: it.reassign(sublease(EPOCH + 1)),
    "reassigned, not later": lambda it: it.reassign(sublease(EPOCH)),
    "renewed elsewhere": lambda it: it.renew_until(LATER),
    "limited": lambda it: it.limit(LATER),
}
BAD = InvalidTransition
AFTER = {
    # Phases before: waiting, claiming, starting, held, ended.
    "wants, not answered": (W, C, S, D, E),
    "wants, answer overdue": (W, W, S, D, E),
    "wants, must wait": (W, W, S, D, E),
    "wants, hopeless": (W, W, S, D, E),
    "sent": (C, BAD, BAD, BAD, BAD),
    "won": (W, S, S, D, E),
    "won, unknown number": (W, C, S, D, E),
    "won too late": (W, C, S, D, E),
    "held by another": (W, W, S, D, E),
    "duplicate": (W, C, S, D, E),
    "start": (BAD, BAD, D, BAD, BAD),
    "renewed": (W, C, S, D, E),
    "position only": (W, C, S, D, E),
    "beat ignored": (W, C, E, E, E),
    "taken over": (W, C, E, E, E),
    "twin resumed": (W, C, E, E, E),
    "beat of another": (W, C, S, D, E),
    "lease stands": (W, C, S, D, E),
    "lease over": (W, C, E, E, E),
    "clock stepped": (W, C, S, D, E),
    "ended": (E, E, E, E, E),
    "assigned": (S, BAD, BAD, BAD, BAD),
    "reassigned": (BAD, BAD, S, D, BAD),
    "reassigned, not later": (BAD, BAD, BAD, BAD, BAD),
    "renewed elsewhere": (W, C, S, D, E),
    "limited": (W, C, S, D, E),
}


def renew(it, transition, *, sent_ms=100, h=H):
    it.on_beat_verdict(transition, sent_ms=sent_ms, heartbeat_interval_ms=h)


def test_the_table_covers_every_input_and_phase():
    assert INPUTS.keys() == AFTER.keys()
    assert all(len(row) == len(Phase) for row in AFTER.values())


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
@pytest.mark.parametrize("name", INPUTS)
def test_each_input_in_each_phase_leads_to_the_phase_of_the_table(phase, name):
    it = at(phase)
    after = AFTER[name][list(Phase).index(phase)]
    before = {slot: getattr(it, slot) for slot in Claim.__slots__}
    if after is BAD:
        with pytest.raises(InvalidTransition):
            INPUTS[name](it)
        # A refused input leaves the claim unchanged.
        assert {slot: getattr(it, slot) for slot in Claim.__slots__} == before
        return
    INPUTS[name](it)
    assert it.phase is after
    assert it.is_owned == (after in {S, D})
    assert it.is_verdict_pending == (after is C)
    assert (it.ending is not None) == (after is E)
    if not it.is_owned:
        assert it.lease == NO_LEASE
        assert not it.is_valid(-1)
        assert not it.may_hand_out(-1)


# --- Claims of another process ---


def test_an_assigned_sublease_sets_epoch_token_secret_and_lease():
    it = new_claim()
    it.assign(sublease(5))
    assert (it.epoch, it.token, it.secret) == (5, Token(1, 0, 5), b"secret")
    assert (it.lease, it.claimant) == (LATER, SIDECAR)
    assert it.heartbeat_interval_ms == H
    assert not it.may_hand_out(0)
    it.start(3)
    assert it.may_hand_out(LATER.soft_until_ms - 1)
    assert not it.may_hand_out(LATER.soft_until_ms)


def test_a_later_sublease_replaces_the_one_in_use():
    it = new_claim()
    it.assign(sublease(5))
    it.start(3)
    it.reassign(sublease(6, Lease(70_000, 80_000)))
    assert (it.phase, it.epoch, it.token) == (Phase.HELD, 6, Token(1, 0, 6))
    assert it.lease == Lease(70_000, 80_000)


def test_subleases_are_ordered_by_token():
    """In another coordinating partition a later epoch may be lower (PROTOCOL 10)."""
    it = new_claim()
    it.assign(sublease(5))
    later = attrs.evolve(sublease(2), token=Token(2, 0, 2))
    it.reassign(later)
    assert (it.epoch, it.token) == (2, Token(2, 0, 2))
    with pytest.raises(InvalidTransition, match=r"reassigned to 1\.0\.9"):
        it.reassign(sublease(9))


def test_renew_until_sets_any_deadline_and_limit_only_shortens_it():
    it = new_claim()
    it.assign(sublease())
    it.renew_until(Lease(10, 20))
    assert it.lease == Lease(10, 20)
    it.limit(Lease(5, 30))
    assert it.lease == Lease(5, 20)
    it.renew_until(LATER)
    assert it.lease == LATER


# --- Leases ---


def test_hand_outs_end_at_the_soft_deadline_and_the_claim_at_the_hard_one():
    it = at(Phase.HELD)
    assert it.lease == Lease(SOFT_MS, HARD_MS)
    assert it.may_hand_out(SOFT_MS - 1)
    assert not it.may_hand_out(SOFT_MS)
    assert it.is_valid(HARD_MS - 1)
    assert not it.is_valid(HARD_MS)


def test_a_claim_that_has_not_started_hands_out_no_records():
    it = at(Phase.STARTING)
    assert it.is_valid(20)
    assert not it.may_hand_out(20)


def test_a_lease_counts_from_the_send_time_of_its_record():
    it = new_claim()
    it.claim_sent(1, 1_000)
    assert judge(it, WON, now_ms=1_700)
    assert it.lease == Lease.since(1_000, H)
    assert it.base_ms == 1_000
    renew(it, RENEWED, sent_ms=1_500)
    assert it.lease == Lease.since(1_500, H)
    assert it.base_ms == 1_500


def test_a_beat_sent_earlier_does_not_shorten_the_lease():
    it = at(Phase.HELD)
    renew(it, RENEWED, sent_ms=500)
    renew(it, RENEWED, sent_ms=300)
    assert it.lease == Lease.since(500, H)


def test_a_renewal_under_a_lower_interval_does_not_shorten_the_lease():
    """Other processes may have been sent the later deadline, and rely on it."""
    it = at(Phase.HELD)
    was = it.lease
    renew(it, RENEWED, sent_ms=H, h=H // 4)
    assert (it.lease, it.base_ms, it.heartbeat_interval_ms) == (was, 0, H)
    renew(it, RENEWED, sent_ms=2 * H, h=H // 4)
    assert it.lease.hard_until_ms > was.hard_until_ms
    assert (it.base_ms, it.heartbeat_interval_ms) == (2 * H, H // 4)


def test_a_renewal_without_effect_in_the_fold_does_not_extend_the_lease():
    it = at(Phase.HELD)
    was = it.lease
    renew(it, RENEWED, sent_ms=2 * H, h=None)
    assert (it.lease, it.base_ms, it.heartbeat_interval_ms) == (was, 0, H)
    assert it.phase is Phase.HELD


def test_a_beat_in_a_paused_group_does_not_renew_the_lease():
    it = at(Phase.HELD)
    renew(it, POSITION_ONLY, sent_ms=500)
    assert it.lease == Lease.since(0, H)


def test_a_lease_uses_the_interval_of_its_renewal():
    it = at(Phase.HELD)
    renew(it, RENEWED, sent_ms=500, h=2_000)
    assert it.lease == Lease.since(500, 2_000)
    it.shorten(7)
    assert it.lease == Lease.since(493, 2_000)


@pytest.mark.parametrize(
    ("now_ms", "log_elapsed_ms", "surplus_ms"),
    [
        pytest.param(100, 100, 0, id="in-step"),
        pytest.param(100, 40, 0, id="read-late"),
        pytest.param(100, 101, 1, id="outran"),
        pytest.param(100, 5_000, 4_900, id="stepped"),
    ],
)
def test_log_time_that_outruns_local_time_is_a_step(now_ms, log_elapsed_ms, surplus_ms):
    it = at(Phase.HELD)
    assert it.surplus_ms(now_ms, log_elapsed_ms=log_elapsed_ms) == surplus_ms


def test_a_clock_step_shortens_the_lease_until_the_next_renewal():
    it = at(Phase.HELD)
    it.shorten(300)
    assert it.lease == Lease.since(-300, H)
    renew(it, RENEWED, sent_ms=100)
    assert it.lease == Lease.since(100, H)


# --- Contending ---


def test_a_claimant_waits_for_the_jitter_that_it_drew_first():
    it = new_claim()
    assert not wants(it, 100, 0, jitter_ms=30)
    assert not wants(it, 129, 0, jitter_ms=0)
    assert wants(it, 130, 0, jitter_ms=999)


def test_jitter_is_drawn_again_if_the_key_was_held_meanwhile():
    it = new_claim()
    assert not wants(it, 100, 0, jitter_ms=30)
    assert not wants(it, 110, 5)
    assert not wants(it, 140, 0, jitter_ms=10)
    assert wants(it, 150, 0)


def test_a_refused_claim_waits_for_the_remaining_time():
    it = at(Phase.CLAIMING)
    assert not judge(it, held_by_other(700), now_ms=50)
    assert it.retry_at_ms == 750
    assert it.refusal.reason == "held"
    assert not wants(it, 749, 0)
    assert wants(it, 750, 0)


def test_a_refused_claim_without_a_remaining_time_may_be_repeated_at_once():
    it = at(Phase.CLAIMING)
    judge(it, verdict("refused", reason="handoff"), now_ms=50)
    assert wants(it, 50, 0)


def test_a_later_estimate_replaces_the_retry_time_of_a_refusal():
    """The owner may release the key long before the time of the refusal."""
    it = at(Phase.CLAIMING)
    judge(it, held_by_other(2 * H), now_ms=50)
    assert not wants(it, 60, 2 * H - 10)
    assert wants(it, 70, 0)


def test_a_refusal_outside_the_claiming_phase_is_ignored():
    it = at(Phase.CLAIMING)
    assert wants(it, ANSWER_MS, 0)
    judge(it, held_by_other(10**6))
    assert it.retry_at_ms == 0
    assert it.refusal is None


def test_a_claim_without_a_verdict_in_time_may_still_win():
    it = at(Phase.CLAIMING)
    assert wants(it, ANSWER_MS, 0)
    assert judge(it, WON, now_ms=ANSWER_MS)
    assert (it.epoch, it.token, it.refusal) == (EPOCH, TOKEN, None)
    assert it.lease == Lease.since(0, H)


def test_an_earlier_claim_may_win_while_a_later_one_is_in_flight():
    it = at(Phase.CLAIMING)
    assert wants(it, ANSWER_MS, 0)
    it.claim_sent(2, ANSWER_MS)
    assert not wants(it, 2 * ANSWER_MS - 1, 0)
    assert judge(it, WON, seq=1, now_ms=ANSWER_MS + 1)
    assert it.lease == Lease.since(0, H)
    assert not judge(it, verdict("refused", reason="duplicate"), seq=2)
    assert it.phase is Phase.STARTING


def test_a_claim_read_back_after_its_lease_is_not_used():
    it = at(Phase.CLAIMING)
    assert not judge(it, WON, now_ms=HARD_MS)
    assert it.epoch is None
    it = at(Phase.CLAIMING)
    assert judge(it, WON, now_ms=HARD_MS - 1)


def test_the_oldest_claim_in_flight_is_forgotten_at_the_limit():
    it = new_claim()
    for seq in range(CLAIMS_IN_FLIGHT_MAX + 1):
        it.claim_sent(seq, seq)
        assert wants(it, seq + ANSWER_MS, 0)
    assert not judge(it, WON, seq=0)
    assert judge(it, WON, seq=1)


def test_a_claiming_record_has_the_hash_of_the_secret_of_its_key():
    it = new_claim()
    past = Resume(INC_AGAIN, 3, SECRET)
    record = it.claim_record(
        4, 2, topic_id=ident("topic"), expected_epoch=9, resume=past
    )
    digest = sha256(key_secret(MASTER, KEY)).digest()
    assert record == claim(
        seq=4,
        generation=2,
        topic_id=ident("topic"),
        resume_hash=digest,
        expected=9,
        resume=past,
    )


def test_secrets_differ_by_key_and_by_master_secret():
    others = [KEY._replace(group_id="h"), KEY._replace(topic="u"), Key("g", "t", 1)]
    secrets = {key_secret(MASTER, key) for key in [KEY, *others]}
    secrets.add(key_secret(b"n" * 32, KEY))
    assert len(secrets) == 5
    assert {len(secret) for secret in secrets} == {16}


def test_the_grant_secret_of_a_claim_derives_from_its_resume_hash():
    """Every reader of the log can compute it (PROTOCOL 12)."""
    it = new_claim()
    assert it.secret == b""
    record = it.claim_record(4, 2)
    it.claim_sent(0, 0)
    assert judge(it, WON, seq=0)
    assert it.secret == grant_secret(record.resume_hash, KEY, epoch=it.epoch)
    others = [KEY._replace(group_id="h"), KEY._replace(topic="u"), Key("g", "t", 1)]
    found = {grant_secret(record.resume_hash, key, epoch=5) for key in [KEY, *others]}
    found.add(grant_secret(record.resume_hash, KEY, epoch=6))
    found.add(grant_secret(b"h" * 32, KEY, epoch=5))
    found.add(key_secret(MASTER, KEY))
    assert len(found) == 7
    assert {len(secret) for secret in found} == {16}


def test_sequence_numbers_grow():
    claimant = Claimant(ME, "g", master=MASTER)
    assert [claimant.next_seq() for _ in range(3)] == [1, 2, 3]


# --- Endings ---


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        pytest.param(
            lambda it: it.on_foreign(TAKEN), Ending("taken_over", "c2", 9), id="taken"
        ),
        pytest.param(
            lambda it: it.on_foreign(TWIN),
            Ending("identity_conflict", "c1", 9),
            id="twin",
        ),
        pytest.param(
            lambda it: renew(it, IGNORED),
            Ending("beat_ignored", at_offset=9),
            id="beat",
        ),
        pytest.param(
            lambda it: it.check_lease(HARD_MS), Ending("lease_expired"), id="lease"
        ),
    ],
)
def test_a_lost_claim_keeps_the_reason_of_its_first_ending(end, ending):
    it = at(Phase.HELD)
    end(it)
    assert it.ending == ending
    assert it.ending.was_lost
    it.end(Ending("released", was_lost=False))
    assert it.ending == ending  # the first ending stays


def test_check_lease_returns_true_only_when_it_ends_the_claim():
    it = at(Phase.HELD)
    assert not it.check_lease(HARD_MS - 1)
    assert it.check_lease(HARD_MS)
    assert not it.check_lease(HARD_MS)


# --- Estimates (PROTOCOL 4.11) ---


def guess(log, *, elapsed_ms=0, claimant=ME, key=KEY):
    return estimate(log.state, key, elapsed_ms=elapsed_ms, claimant=claimant)


def test_a_key_that_was_never_claimed_is_free():
    it = guess(Log())
    assert (it.known, it.wait_ms) == (None, 0)


def test_the_estimated_wait_lasts_until_the_owner_is_stale():
    log = Log()
    log.claimed("c2")
    assert guess(log).wait_ms == 2 * H + 1
    assert guess(log, elapsed_ms=2 * H).wait_ms == 1
    assert guess(log, elapsed_ms=2 * H + 1).wait_ms == 0
    assert guess(log, elapsed_ms=5 * H).wait_ms == 0


def test_a_claimant_does_not_claim_a_key_that_it_owns():
    log = Log()
    log.claimed("c1")
    assert guess(log, elapsed_ms=H).wait_ms is None


def test_a_claimant_may_claim_its_own_stale_key():
    """A ghost must not keep its own client from the key."""
    log = Log()
    log.claimed("c1")
    assert guess(log, elapsed_ms=2 * H).wait_ms is None
    assert guess(log, elapsed_ms=2 * H + 1).wait_ms == 0


def test_a_locked_key_is_never_estimated_as_claimable():
    log = Log()
    log.append(release(log.claimed("c2"), client="c2"))
    log.key().lock = LOCK
    assert guess(log, elapsed_ms=10 * H).wait_ms is None


def test_other_claimants_wait_for_the_named_successor():
    log = Log()
    epoch = log.claimed("c2")
    log.append(release(epoch, client="c2", successor="c3"))
    assert guess(log).wait_ms == H // 2
    assert guess(log, elapsed_ms=H // 2).wait_ms == 0
    successor = Owner("c3", ident("c3"))
    assert guess(log, claimant=successor).wait_ms == 0
    assert guess(log, claimant=successor, elapsed_ms=H // 2 - 1).is_named
    assert not guess(log, claimant=successor, elapsed_ms=H // 2).is_named
    assert not guess(log).is_named


@pytest.mark.parametrize("is_known", [True, False])
def test_the_estimated_wait_lasts_until_the_pause_ends(is_known):
    log = Log()
    if is_known:
        log.append(release(log.claimed("c2"), client="c2"))
    log.append(pause(START_MS + 300))
    assert guess(log).wait_ms == 300
    assert guess(log, elapsed_ms=299).wait_ms == 1
    assert guess(log, elapsed_ms=301).wait_ms == 0


def test_the_begin_of_a_scheduled_pause_is_estimated():
    log = Log(level=2)
    log.append(schedule(START_MS + 100, START_MS + 300))
    assert guess(log, elapsed_ms=99).wait_ms == 0
    assert guess(log, elapsed_ms=100).wait_ms == 200
    assert guess(log, elapsed_ms=300).wait_ms == 0


def test_the_longest_of_several_waits_counts():
    log = Log()
    log.claimed("c2")
    log.append(pause(START_MS + 300))
    assert guess(log).wait_ms == 2 * H + 1
    log.append(pause(START_MS + 9 * H, seq=1))
    assert guess(log).wait_ms == 9 * H


# --- Resuming ---

LIFE = PreviousLife(INC, MASTER)


def may_resume(known, *, lives=(LIFE,), client_id="c1", after_ms=0):
    return resumable(known, lives, client_id=client_id, log_time_ms=START_MS + after_ms)


def test_a_fresh_key_of_an_earlier_incarnation_is_resumable():
    log = Log()
    log.claimed("c1")
    other = PreviousLife(INC_AGAIN, MASTER)
    assert may_resume(log.key(), lives=(other, LIFE)) is LIFE
    assert may_resume(log.key(), after_ms=H - 1) is LIFE
    assert may_resume(log.key(), after_ms=H) is None
    assert may_resume(log.key(), lives=(other,)) is None
    assert may_resume(log.key(), lives=()) is None
    assert may_resume(log.key(), client_id="c2") is None
    assert may_resume(None) is None
    log.append(release(1))
    assert may_resume(log.key()) is None


def test_a_restarted_claimant_resumes_its_claim():
    log = Log()
    it = new_claim()
    epoch = log.one(it.claim_record(1, 1)).epoch
    life = may_resume(log.key())
    again = Claim(Claimant(Owner("c1", INC_AGAIN), "g", master=b"n" * 32), KEY)
    past = Resume(life.incarnation, epoch, key_secret(life.master, KEY))
    assert log.outcome_of(again.claim_record(1, 1, resume=past)) == "resumed"
    # The old secret is public now; it resumes nothing.
    third = resume(2, inc=ident("third"), before=INC_AGAIN, secret=past.secret)
    assert log.outcome_of(third) == "resume_mismatch"


def test_an_estimate_needs_no_config():
    state = WorldState(0)
    assert estimate(state, KEY, elapsed_ms=0, claimant=ME).wait_ms == 0


def test_the_estimated_wait_lasts_until_the_quiet_time_of_a_reset_ends():
    world = Log(level=2).state
    world.quiet_until_ms = world.now_ms + 50
    owner = Owner("c1", b"i" * 16)
    waits = [
        estimate(world, KEY, elapsed_ms=elapsed, claimant=owner).wait_ms
        for elapsed in (0, 20, 60)
    ]
    assert waits == [50, 30, 0]
