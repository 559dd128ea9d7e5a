"""The fold as a machine that Hypothesis drives, with the naive twin beside it.

The author of random logs prefers some records; Hypothesis searches by itself. Each
rule is one record, and time stops around one and two heartbeat intervals.
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
    hashed,
    ident,
    messages,
    pause,
    release,
    resume,
)
from msgspec.structs import replace
from naive import Naive

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


class Fold(RuleBasedStateMachine):
    claims = Bundle("claims")

    @initialize(forget=st.sampled_from([3 * H, 2**40]))
    def format(self, forget):
        self.log = Log(configured=False)
        self.naive = Naive(0)
        self.granted = {}
        self.promised = {}
        self.era = 1
        self.append_to_both(
            config(h=H, span=4, operations=2, max_pause_ms=4 * H, forget_ms=forget)
        )

    def append_to_both(self, record, **where):
        """Append a record; both folds must return the same transitions."""
        state = self.log.state
        transitions = self.log.append(record, **where)
        line = entry_to_object(0, self.log.entries[-1])
        expected = self.naive.apply(json.loads(json.dumps(line)))
        assert [transition_to_object(0, one) for one in transitions] == expected
        document = state_to_object(state)
        naive = self.naive.world()
        assert {name: document[name] for name in naive} == naive
        return transitions[0]

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
        transition = self.append_to_both(
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
        if transition.effect == "claimed" and self.log.key(key).granted is None:
            self.granted.pop(key, None)
        return client, ident(client + life), key, self.log.state.next_offset - 1

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
        # Perhaps another process of this client, which knows the epoch.
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
        transition = self.append_to_both(
            messages(epoch, first, last, client=client, key=key, inc=inc)
        )
        if transition.effect == "granted":
            given = transition.detail
            assert self.granted.get(key, -1) < given["first"] <= given["last"]
            self.granted[key] = given["last"]

    @rule(
        op=st.sampled_from([OP, ident("other")]),
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

    @rule(h=st.sampled_from([H, H // 2, 2 * H]), after=waits)
    def configure(self, h, after):
        settled = self.log.state.config
        self.era += 1
        again = config(self.era, era=self.era, h=h)
        self.append_to_both(replace(again, limits=settled.limits), after=after)

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

    @invariant()
    def no_claim_loses_its_token_or_what_its_lease_was_promised(self):
        state, before = self.log.state, self.promised
        self.promised = {
            (key, known.epoch): (
                state.token(key),
                known.renewed_ms + 2 * known.heartbeat_interval_ms,
            )
            for key, known in state.keys.items()
        }
        for claim_, (token, until_ms) in self.promised.items():
            token_before, until_before_ms = before.get(claim_, (token, until_ms))
            assert token == token_before
            assert until_ms >= until_before_ms


Fold.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestFold = Fold.TestCase
