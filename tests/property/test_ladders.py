"""Invariants of ``Claim``, ``AtLeastOnce`` and ``AtMostOnce``, for any inputs."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from logkit import KEY, Log, beat, claim, ident, messages, transition

from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Claim, Claimant, Lease, Phase
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.granting import AtMostOnce, verdict_of
from kafka_marshal.protocol.types import Owner, Token

H = 1_000
ME = Owner("c1", ident("c1"))


def verdict(effect, *, of=None):
    return transition(effect, offset=7, epoch=7, record=of)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 3 * H)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("won"), st.integers(0, 5)),
        st.tuples(st.just("refused"), st.integers(0, 5)),
        st.tuples(st.just("beat"), st.integers(0, 2 * H)),
        st.tuples(st.just("tick"), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, H)),
        st.tuples(st.just("taken"), st.just(0)),
    ),
    max_size=40,
)


class Holder:
    """A claim with arbitrary inputs, and the send time of its last renewal."""

    def __init__(self):
        self.it = Claim(Claimant(ME, "g", master=b"m" * 32), KEY)
        self.now_ms, self.seq, self.proven_ms = 10_000, 0, -1
        self.sent = {}

    def wait(self, value):
        self.now_ms += value

    def send(self, _):
        if self.it.phase is Phase.WAITING:
            self.seq += 1
            self.it.claim_sent(self.seq, self.now_ms)
            self.sent[self.seq] = self.now_ms

    def won(self, value):
        if self._receive(verdict("claimed"), self.seq - value):
            self.proven_ms = self.sent[self.seq - value]
            self.it.start(None)

    def refused(self, value):
        self._receive(verdict(None), self.seq - value)

    def _receive(self, transition, seq):
        return self.it.on_claim_verdict(
            transition,
            seq=seq,
            now_ms=self.now_ms,
            heartbeat_interval_ms=H,
            token=Token(1, 0, 7),
        )

    def beat(self, value):
        sent_ms = self.now_ms - value
        if self.it.is_owned:
            self.proven_ms = max(self.proven_ms, sent_ms)
        self.it.on_beat_verdict(
            verdict("renewed"), sent_ms=sent_ms, heartbeat_interval_ms=H
        )

    def tick(self, _):
        self.it.check_lease(self.now_ms)

    def step(self, value):
        self.it.shorten(value)

    def taken(self, _):
        self.it.on_foreign(verdict("claimed", of=claim("c2")))


@given(STEPS)
def test_a_lease_never_outlasts_the_last_renewal_read_back(steps):
    """A lease counts from the send time of a record whose renewal was read back."""
    holder = Holder()
    for action, value in steps:
        getattr(holder, action)(value)
        now_ms, proven_ms = holder.now_ms, holder.proven_ms
        if holder.it.is_valid(now_ms):
            assert proven_ms >= 0
            assert now_ms < Lease.since(proven_ms, H).hard_until_ms
        if holder.it.may_hand_out(now_ms):
            assert now_ms < Lease.since(proven_ms, H).soft_until_ms
            assert holder.it.is_valid(now_ms)


@given(st.lists(st.integers(0, 12), max_size=60))
def test_a_position_is_never_above_an_uncommitted_offset(actions):
    """Zero hands out the next offset; any other number commits an offset."""
    it, handed, done = AtLeastOnce(0), [], set()
    for action in actions:
        if action == 0:
            handed.append(len(handed) * 2)
            it.hand_out(handed[-1], handed[-1])
            continue
        offset = action * 2
        try:
            it.commit(offset, offset)
        except InvalidTransition:
            assert offset not in handed
        else:
            assert offset in handed
            done.add(offset)
        uncommitted = [o for o in handed if o not in done]
        assert it.position <= min(uncommitted, default=it.position)
        assert set(range(0, it.position, 2)) <= done
        assert it.uncommitted_count == len(uncommitted)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_runs_and_ranges_count_as_their_single_offsets(actions):
    """Runs have holes between them; any ranges are committed."""
    it, model = AtLeastOnce(0), Naive(0)
    end = 0
    for hole, length in actions:
        if hole < 3:
            first, last = end + hole, end + hole + length
            it.hand_out(first, last)
            model.handed += range(first, last + 1)
            end = last + 1
            continue
        first = max(0, end - hole * length)
        last = first + hole * length // 3
        reported = []
        for ladder in (it, model):
            try:
                ladder.commit(first, last)
            except InvalidTransition:
                reported.append("refused")
            else:
                reported.append("taken")
        assert reported[0] == reported[1]
        assert it.position == model.position
        assert it.tracked_count == len(model.handed)
        assert it.uncommitted_count == len(model.handed) - len(model.done)
    it.commit_all()
    expected = end if model.handed else it.position
    assert (it.position, it.uncommitted_count) == (expected, 0)


class Naive:
    """At least once by its definition, with one offset at a time."""

    def __init__(self, start):
        self.position, self.handed, self.done = start, [], set()

    def commit(self, first, last):
        for each in (first, last):
            if each >= self.position and each not in self.handed:
                raise InvalidTransition(str(each))
        self.done |= {o for o in self.handed if first <= o <= last}
        while self.handed and self.handed[0] in self.done:
            self.position = self.handed.pop(0) + 1
        self.done &= set(self.handed)


class Taker:
    """A client that consumes at most once, with several requests in flight."""

    def __init__(self, log, name):
        self.log, self.name, self.seq = log, name, 0
        self.it, self.epoch, self.way = None, None, []

    def claim(self, value):
        won = self.log.one(claim(self.name), after=10 * H)
        assert won.effect == "claimed"
        self.epoch = won.epoch
        head = self.log.key().next_unclaimed()
        self.it = AtMostOnce(head or 0, grantee=ident(self.name))
        if value:
            # The first heartbeat is read back; without a value it never is.
            self.log.one(beat_of(self.name, self.epoch, head or 0))
            self.it.is_anchored = True
        self.way = []

    def ask(self, count):
        if not self.it.may_request(4):
            return
        self.seq += 1
        request = self.it.request(self.seq, self.it.next_first + count)
        self.way.append((self.epoch, request, self.it.done))

    def land(self, number):
        epoch, request, _ = self.way.pop(number % len(self.way))
        record = messages(
            epoch,
            request.offsets.first,
            request.offsets.last,
            client=self.name,
            seq=request.seq,
        )
        record = msgspec.structs.replace(record, grantee=ident(self.name))
        before = self.log.key().next_unclaimed() or 0
        transition = self.log.one(record)
        if transition.effect == "granted":
            # Grants leave no gap, in whatever order requests land.
            assert transition.detail["first"] == before
        head = self.log.key().next_unclaimed()
        verdict = verdict_of(transition, head=head)
        self.it.on_verdict(verdict, grantee=record.grantee, seq=record.seq)

    def hand_out(self):
        first = self.it.granted.first
        self.it.hand_out(first)
        return first


def beat_of(name, epoch, position):
    return beat(epoch, position, client=name)


TAKES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 3)), max_size=60
)


@given(TAKES)
def test_no_offset_is_handed_out_twice(actions):
    log = Log()
    takers = [Taker(log, "a"), Taker(log, "b")]
    handed = []
    for who, what, value in actions:
        taker = takers[who]
        if taker.it is None or what == 0:
            taker.claim(value)
        elif what == 1:
            taker.ask(value)
        elif what == 2 and taker.way:
            taker.land(value)
        elif what == 3 and taker.it.granted is not None:
            handed.append(taker.hand_out())
        elif what == 4:
            taker.it.forget_requests()
        elif what == 5:
            taker.it.mark_processed()
            assert taker.it.done <= taker.it.resume_at
    assert len(handed) == len(set(handed))
