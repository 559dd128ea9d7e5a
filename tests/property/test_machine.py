"""The fold and the naive twin in a state machine that Hypothesis drives.

Unlike the author of random logs, Hypothesis prefers no records. Most rules append one
record; times are near one and two heartbeat intervals.
"""

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)
from logkit import (
    OP,
    SECRET,
    START_MS,
    Log,
    batch,
    beat,
    claim,
    config,
    decide,
    fence,
    hashed,
    ident,
    messages,
    pause,
    planned,
    release,
    resolve,
    resume,
    schedule,
    stage,
)
from msgspec.structs import replace
from naive import Naive
from slices import slice_of
from twins import operations

from kafka_marshal.protocol.snapshot import digest, from_bytes, to_bytes
from kafka_marshal.protocol.text import (
    entry_to_object,
    state_to_object,
    transition_to_object,
)
from kafka_marshal.protocol.types import Key

H = 10
KEYS = [Key("g", "t", 0), Key("g", "t", 1), Key("g", "/planner", 0)]
clients = st.sampled_from(["c1", "c2"])
lives = st.sampled_from(["one", "two"])
positions = st.none() | st.integers(0, 6)
waits = st.sampled_from([0, 1, H - 1, H, H + 1, 2 * H - 1, 2 * H, 2 * H + 1, -1])
keys = st.sampled_from(KEYS)
ops = st.sampled_from([OP, ident("other")])
plans = st.sampled_from([ident("plan"), ident("plan"), ident("another")])


class Fold(RuleBasedStateMachine):
    claims = Bundle("claims")

    @initialize(forget=st.sampled_from([3 * H, 2**40]))
    def format(self, forget):
        self.log = Log(configured=False)
        self.naive = Naive(0)
        self.granted = {}
        self.leased = {}
        self.era = 1
        limits = {"span": 4, "operations": 2, "locks": 1, "max_pause_ms": 4 * H}
        self.append_to_both(config(h=H, level=2, forget_ms=forget, **limits))

    def append_to_both(self, record, **where):
        """Append a record; both folds must return the same transitions."""
        state = self.log.state
        transitions = self.log.append(record, **where)
        line = entry_to_object(0, self.log.entries[-1])
        expected = self.naive.apply(json.loads(json.dumps(line)))
        assert [transition_to_object(0, one) for one in transitions] == expected
        document = state_to_object(state)
        naive = self.naive.world()
        assert {name: document.get(name) for name in naive} == naive
        assert operations(state) == self.naive.operations()
        self.note_grants(transitions)

    def note_grants(self, transitions):
        """Check S3: no offset is granted twice, unless the key started again."""
        for one in transitions:
            is_new = one.effect == "claimed" and self.log.key(one.key).granted is None
            if is_new or one.effect == "position_set":
                self.granted.pop(one.key, None)
            if one.effect == "granted":
                given = one.detail
                assert self.granted.get(one.key, -1) < given["first"] <= given["last"]
                self.granted[one.key] = given["last"]

    @rule(
        target=claims,
        client=clients,
        life=lives,
        key=keys,
        topic=st.sampled_from([None, "x", "y"]),
        fence=st.booleans(),
        after=waits,
    )
    def claim(self, client, life, key, topic, fence, after):  # noqa: PLR0917
        known = self.log.state.keys.get(key)
        self.append_to_both(
            claim(
                client,
                key=key,
                inc=ident(client + life),
                generation=self.era,
                topic_id=topic and ident(topic),
                expected=known.epoch if fence and known else None,
                resume_hash=hashed(SECRET),
            ),
            after=after,
        )
        return client, ident(client + life), key, self.log.state.next_offset - 1

    @rule(client=clients, ahead=st.sampled_from([0, 0, 1]), after=waits)
    def plan(self, client, ahead, after):
        follows = self.log.state.groups.get("g")
        planned_before = follows.planned if follows else None
        count = planned_before.generation if planned_before else 0
        self.append_to_both(planned(count + ahead, client=client), after=after)

    @rule(target=claims, former=consumes(claims), life=lives, after=waits)
    def resume(self, former, life, after):
        client, inc, key, epoch = former
        again = resume(
            epoch,
            client=client,
            inc=ident(client + life),
            before=inc,
            key=key,
            generation=self.era,
            resume_hash=hashed(SECRET),
        )
        self.append_to_both(again, after=after)
        return client, ident(client + life), key, self.log.state.next_offset - 1

    @rule(
        who=claims,
        life=st.none() | lives,
        position=positions,
        rewind=st.booleans(),
        after=waits,
    )
    def beat(self, who, life, position, rewind, after):
        client, inc, key, epoch = who
        # Another process of this client may know the epoch.
        inc = inc if life is None else ident(client + life)
        record = beat(epoch, position, client=client, key=key, inc=inc, rewind=rewind)
        self.append_to_both(record, after=after)

    @rule(who=claims, other=claims, position=positions, after=waits)
    def batch(self, who, other, position, after):
        client, inc, _, epoch = who
        beats = [(epoch, position), (other[3], None)]
        self.append_to_both(batch(*beats, client=client, inc=inc), after=after)

    @rule(who=claims, position=positions, successor=st.none() | clients)
    def release(self, who, position, successor):
        client, inc, key, epoch = who
        record = release(
            epoch, position, client=client, key=key, inc=inc, successor=successor
        )
        self.append_to_both(record)

    @rule(who=claims, first=st.integers(0, 6), more=st.integers(-2, 5))
    def messages(self, who, first, more):
        client, inc, key, epoch = who
        last = max(0, self.granted.get(key, first) + more)
        self.append_to_both(
            messages(epoch, first, last, client=client, key=key, inc=inc)
        )

    @rule(client=clients, life=lives, who=st.none() | claims, after=waits)
    def fence(self, client, life, who, after):
        inc = ident(client + life)
        if who is not None:
            client, inc = who[:2]
        self.append_to_both(fence(client, inc=inc), after=after)

    @rule(
        op=ops,
        seq=st.integers(0, 3),
        inc=lives,
        until=st.sampled_from([-1, 0, 1, H, 5 * H]),
        after=waits,
    )
    def pause(self, op, seq, inc, until, after):
        m = self.log.state.append_time_ms
        self.append_to_both(
            pause(max(0, m + until), op=op, seq=seq, inc=ident(inc)), after=after
        )

    @rule(
        op=ops,
        begin=st.sampled_from([0, 0, 1, H]),
        lasts=st.sampled_from([5 * H, 5 * H, H, 1, 0]),
        scope=st.sampled_from([None, {"t": (0,)}, {"t": (), "u": (1,)}]),
        seq=st.integers(0, 2),
        renewed=st.booleans(),
        after=waits,
    )
    def schedule(self, op, begin, lasts, scope, seq, renewed, after):  # noqa: PLR0917
        begin += self.log.state.append_time_ms
        record = schedule(begin, begin + lasts, op=op, scope=scope, seq=seq)
        self.append_to_both(record, after=after)
        if renewed:
            self.renew_all(after=max(0, begin - self.log.state.append_time_ms))

    @rule(
        key=st.sampled_from(KEYS[:2]),
        op=ops,
        position=st.integers(0, 6),
        count=st.integers(1, 4),
        is_drained=st.sampled_from([True, True, False]),
    )
    def set_position(self, key, op, position, count, is_drained):
        """Set a position, or do only the first steps; drain before or not."""
        known = self.log.state.keys.get(key)
        if known is None or known.owner is None:
            self.append_to_both(claim("c1", key=key, generation=self.era))
        known = self.log.state.keys.get(key)
        if known is not None and known.owner is not None:
            client, inc = known.owner
            sender = {"client": client, "key": key, "inc": inc}
            head = self.granted.get(key, -1) + 1
            self.append_to_both(messages(known.epoch, head, head + 1, **sender))
            if is_drained:
                self.append_to_both(release(known.epoch, None, **sender))
        m = self.log.state.append_time_ms
        steps = [
            pause(m + 4 * H, op=op, seq=1, inc=ident("admin")),
            stage((key.partition, position), op=op),
            decide(op=op),
            resolve(commit=True, op=op),
        ]
        for record in steps[:count]:
            self.append_to_both(record)

    @rule(
        key=st.sampled_from(KEYS[:2]),
        both=st.booleans(),
        topic=st.sampled_from([None, None, "x", "y"]),
        op=ops,
        plan=plans,
        position=st.integers(0, 2),
        after=waits,
    )
    def stage(self, key, both, topic, op, plan, position, after):  # noqa: PLR0917
        places = [(key.partition, position)]
        if both:
            places.append((1 - key.partition, position))
        record = stage(*places, topic_id=topic and ident(topic), op=op, plan=plan)
        self.append_to_both(record, after=after)

    @rule(
        op=ops,
        step=st.sampled_from(["decide", "commit", "abort"]),
        plan=plans,
        after=waits,
    )
    def decide_or_resolve(self, op, step, plan, after):
        record = resolve(commit=step == "commit", op=op)
        if step == "decide":
            record = decide(op=op, plan=plan)
        self.append_to_both(record, after=after)

    @rule(h=st.sampled_from([H, H // 2, 2 * H]), is_renewed=st.booleans(), after=waits)
    def configure(self, h, is_renewed, after):
        settled = self.log.state.config
        self.era += 1
        again = config(self.era, era=self.era, h=h, level=settled.feature_level)
        self.append_to_both(replace(again, limits=settled.limits), after=after)
        if is_renewed:
            self.renew_all()

    def renew_all(self, after=0):
        """Let all owners send heartbeats: only these meet scopes and intervals."""
        for key, known in list(self.log.state.keys.items()):
            if known.owner is not None:
                client, inc = known.owner
                record = beat(known.epoch, client=client, key=key, inc=inc)
                self.append_to_both(record, after=after)
                after = 0

    @rule(skew=st.sampled_from([0, -3 * H, 5 * H]))
    def elect(self, skew):
        self.append_to_both(b"?", after=skew, epoch=self.log.leader_epoch + 1)

    @rule(after=waits, kind=st.sampled_from([0, 1]))
    def noise(self, after, kind):
        self.append_to_both(b"\x01\x01\x00?", after=after, kind=kind)

    @rule()
    def restart(self):
        state = self.log.state
        back = from_bytes(to_bytes(state))
        assert digest(back) == digest(state)
        back.soft.counters = state.soft.counters
        self.log.state = back

    @invariant()
    def one_owner_and_epochs_of_the_past(self):
        state = self.log.state
        assert state.now_ms >= START_MS
        for key, known in state.keys.items():
            assert known.epoch < state.next_offset
            assert state.epochs[known.epoch] == key
            assert known.renewed_ms <= known.active_ms <= state.now_ms
            assert known.lock is None or known.owner is None

    @invariant()
    def no_claim_loses_its_token_or_what_its_lease_was_granted(self):
        state, before = self.log.state, self.leased
        self.leased = {
            (key, known.epoch): (
                state.token(key),
                known.renewed_ms + 2 * known.heartbeat_interval_ms,
            )
            for key, known in state.keys.items()
        }
        for claim_, (token, until_ms) in self.leased.items():
            token_before, until_before_ms = before.get(claim_, (token, until_ms))
            assert token == token_before
            assert until_ms >= until_before_ms


Fold.TestCase.settings = settings(
    max_examples=slice_of(quick=100, full=3_000), stateful_step_count=40
)
TestFold = Fold.TestCase
