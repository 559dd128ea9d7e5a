"""Judges get accepted records and hand-outs, and report violations."""

import pytest
from logkit import KEY, OP, beat, claim, decide, messages, pause, resolve, stage

from kafka_marshal.protocol.codec import encode
from simulator.checkers import LOG, OPERATIONS, HandOuts, LogWatcher, Violation
from simulator.node import Cluster


class Scene:
    """One coordinating partition, in which c1 has claimed a key."""

    def __init__(self, *, is_at_most_once):
        self.cluster = Cluster()
        self.other = None
        self.watcher = LogWatcher(self.cluster.kafka, 1, on_fold=self.on_fold)
        self.hand_outs = HandOuts(self.watcher, is_at_most_once=is_at_most_once)
        self.write(claim())
        self.epoch = self.watcher.worlds[0].keys[KEY].epoch
        self.token = self.watcher.worlds[0].token(KEY)

    def on_fold(self, folded):
        self.hand_outs.on_fold(folded, other=self.other)

    def write(self, record):
        self.cluster.kafka.produce(self.cluster.place(0), encode(record))
        self.watcher.catch_up()

    def hand_out(self, *offsets):
        for offset in offsets:
            self.hand_outs.handed_out(KEY, self.token, offset=offset)


@pytest.fixture
def alo():
    return Scene(is_at_most_once=False)


@pytest.fixture
def amo():
    return Scene(is_at_most_once=True)


def test_handed_out_and_processed_offsets_are_counted(alo):
    alo.hand_out(0, 1)
    for offset in (0, 1):
        alo.hand_outs.done(KEY, alo.token, offset=offset)
    alo.write(beat(alo.epoch, 2))
    assert alo.hand_outs.processed == {(KEY, None): {0, 1}}
    assert (alo.hand_outs.count, alo.hand_outs.duplicate_count) == (2, 0)


def test_a_position_above_an_unprocessed_offset_is_a_violation(alo):
    alo.hand_out(0)
    with pytest.raises(Violation, match=r"6\.1.*skips \[0\]") as caught:
        alo.write(beat(alo.epoch, 1))
    assert caught.value.judge == OPERATIONS


def test_a_hand_out_without_a_grant_is_a_violation(amo):
    amo.write(messages(amo.epoch, 0, 3))
    amo.hand_out(0, 3)
    with pytest.raises(Violation, match=r"6\.2"):
        amo.hand_out(4)


def test_a_hand_out_under_a_grant_of_another_process_is_a_violation(amo):
    amo.other = "attempt"
    amo.write(messages(amo.epoch, 0, 3))
    with pytest.raises(Violation, match=r"S3.*handed out twice"):
        amo.hand_out(0)


def test_a_hand_out_under_an_older_token_needs_an_excuse(alo):
    first = alo.token
    alo.cluster.clock.advance(4 * alo.cluster.config.heartbeat_interval_ms)
    alo.write(claim("c2"))
    alo.token = alo.watcher.worlds[0].token(KEY)
    assert alo.token > first
    alo.hand_out(0)
    alo.hand_outs.handed_out(KEY, first, offset=0, is_excused=True)
    assert alo.hand_outs.duplicate_count == 1
    with pytest.raises(Violation, match="S4"):
        alo.hand_outs.handed_out(KEY, first, offset=1)


def test_more_unused_grants_than_allowed_are_a_violation(amo):
    amo.write(messages(amo.epoch, 0, 3))
    amo.hand_outs.check_losses(most=4)
    with pytest.raises(Violation, match=r"6\.3"):
        amo.hand_outs.check_losses(most=3)


def test_the_log_judge_raises_only_if_strict(alo):
    alo.watcher.worlds[0].keys[KEY].owner = ("nobody", b"")
    alo.watcher.is_strict = False
    alo.write(claim("c3"))
    alo.watcher.worlds[0].keys[KEY].position = 9
    alo.watcher.is_strict = True
    with pytest.raises(Violation, match=r"S1.*refused or ignored") as caught:
        alo.write(claim("c4"))
    assert caught.value.judge == LOG


def test_a_set_position_applies_until_the_log_loses_it(alo):
    watcher, log = alo.watcher, alo.cluster.kafka.log(alo.cluster.place(0))
    alo.hand_out(0, 1)
    for offset in (0, 1):
        alo.hand_outs.done(KEY, alo.token, offset=offset)
    alo.write(beat(alo.epoch, 2))
    end = log.end
    alo.write(pause(alo.cluster.clock.wall_ms() + 60_000))
    alo.cluster.clock.advance(4 * alo.cluster.config.heartbeat_interval_ms)
    for record in (stage((0, 5)), decide(), resolve(commit=True), claim("c2")):
        alo.write(record)
    assert watcher.sets_of(KEY, watcher.worlds[0]) == ((OP, 5),)
    tokens = {token: sets for (_, token), sets in watcher.sets.items()}
    assert tokens == {alo.token: (), watcher.worlds[0].token(KEY): ((OP, 5),)}
    alo.cluster.kafka.truncate(alo.cluster.place(0), end=end, leader=1)
    watcher.refold(0)
    assert watcher.sets_of(KEY, watcher.worlds[0]) == ()
    assert (watcher.set_to(KEY), watcher.starts) == (5, {(KEY, ()): 2})
