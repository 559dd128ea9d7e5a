"""Texts that explain the state of a key, and its events."""

import msgspec
import pytest
from logkit import (
    KEY,
    OP,
    START_MS,
    H,
    Log,
    beat,
    claim,
    config,
    fence,
    forgetting,
    ident,
    pause,
    release,
    resets,
    resolve,
    stage,
)

from kafka_marshal.history.chain import KeyChain, KeyEvent
from kafka_marshal.history.wording import (
    _TEXTS,
    REFUSALS,
    state_of,
    text_of,
    why,
)
from kafka_marshal.protocol.codec import person_to_tags
from kafka_marshal.protocol.records import SECOND_LEVEL, SUPPORTED_LEVEL
from kafka_marshal.protocol.snapshot import digest, to_bytes
from kafka_marshal.protocol.state import why_to_tags

UNTIL = START_MS + 50_000
AT = "1970-01-01T00:16:40.000Z"
UNTIL_AT = "1970-01-01T00:17:30.000Z"


class Bench:
    def __init__(self, **settings):
        self.log, self.chain = Log(configured=False), KeyChain(KEY)
        self.append(config(**settings))

    def append(self, record, **where):
        transitions = self.log.append(record, **where)
        entry = self.log.entries[-1]
        self.chain.take(self.log.state, entry, transitions=transitions)
        return entry.offset

    def why(self, elapsed_ms=0):
        return why(self.chain, self.log.state, elapsed_ms=elapsed_ms)

    def state(self, elapsed_ms=0):
        return state_of(self.chain, self.log.state, elapsed_ms=elapsed_ms)


def replaced(record, **fields):
    return msgspec.structs.replace(record, **fields)


def test_an_unclaimed_key_shows_the_last_refused_attempt():
    bench = Bench()
    assert bench.state() == "unclaimed"
    assert bench.why() == "unclaimed: no claim has been accepted since the log began"
    bench.append(claim(generation=9))
    assert bench.why() == (
        "unclaimed: no claim has been accepted since the log began; the last attempt: "
        "a claim by c1 was refused as wrong_generation: the record named another "
        "Config than the one in force"
    )


def test_an_owned_key_shows_owner_token_and_renewal():
    bench = Bench()
    bench.append(replaced(claim(), tags=why_to_tags("free")))
    assert bench.state() == "owned"
    assert bench.why(elapsed_ms=500) == (
        f"owned by c1 since {AT} (offset 1), token 1.0.1: c1 claimed the free "
        "partition; renewed 0.5 s ago"
    )


def test_a_stale_owner_is_explained():
    bench = Bench()
    bench.append(claim())
    assert bench.state(elapsed_ms=2 * H + 1) == "stale"
    assert bench.why(elapsed_ms=2 * H + 1).endswith(
        "; stale: not renewed for 2.0 s, which is more than two intervals of 1.0 s, so "
        "any member may take over the partition"
    )


def test_a_takeover_names_both_owners():
    bench = Bench()
    bench.append(beat(bench.append(claim()), 5))
    bench.append(claim("c2"), after=2 * H + 1)
    assert (
        ": c2 took over the partition at position 5 from c1, which had gone stale; "
        in (bench.why())
    )


def test_a_fenced_owner_is_explained():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(claim())
    bench.append(fence())
    assert bench.why().endswith(
        "; the owner's process is fenced, and cannot renew the claim; renewed 0.0 s ago"
    )


def test_a_released_key_names_its_successor():
    bench = Bench()
    epoch = bench.append(claim())
    bench.append(replaced(release(epoch, 7, successor="c2"), reason="surplus"))
    assert bench.state() == "free"
    assert bench.why() == (
        f"free since {AT} (offset 2): c1 released the partition at position 7, "
        "reserved for c2: surplus; reserved for c2 for another 0.5 s"
    )
    bench.append(b"?", after=H)
    assert not bench.why().endswith("another 0.5 s")


def test_a_paused_group_is_named_with_the_person_and_the_reason():
    bench = Bench()
    bench.append(release(bench.append(claim())))
    tags = person_to_tags("alice")
    bench.append(replaced(pause(UNTIL), reason="deploy", tags=tags))
    assert bench.why().endswith(
        "; no member can claim the partition: the group is paused until "
        f"{UNTIL_AT} by admin (alice): deploy"
    )


def test_a_locked_key_names_its_operation():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(release(bench.append(claim()), 9))
    bench.append(pause(UNTIL))
    bench.append(stage((0, 4)))
    assert bench.state() == "locked"
    assert bench.why().startswith(
        f"locked since {AT} (offset 4), by admin: operation {OP.hex()} sets the "
        "position to 4, and is neither committed nor aborted here yet; until then no "
        "member can claim the partition"
    )


def test_an_aborted_set_position_is_not_mentioned():
    bench = Bench(level=SECOND_LEVEL)
    bench.append(release(bench.append(claim()), 9))
    bench.append(pause(UNTIL))
    bench.append(stage((0, 4)))
    bench.append(resolve(commit=False))
    assert (
        bench.why()
        == f"free since {AT} (offset 2): c1 released the partition at position 9"
    )


def test_a_committed_set_position_is_mentioned_after_the_release(monkeypatch):
    log = Bench(level=SECOND_LEVEL, k=2)
    log.log.state.partition = 1  # not the home, which would require a Decide
    monkeypatch.setattr(
        "kafka_marshal.protocol.judging.is_misplaced", lambda *_, **__: False
    )
    log.append(release(log.append(claim()), 9))
    log.append(pause(UNTIL))
    log.append(stage((0, 4)))
    log.append(resolve(commit=True))
    assert log.why() == (
        f"free since {AT} (offset 2): c1 released the partition at position 9; admin "
        f"set the position to 4 (before: 9) by operation {OP.hex()} at {AT} (offset 5)"
    )


def test_a_forgotten_and_a_dropped_key_are_explained():
    bench = Bench(forget_ms=10)
    epoch = bench.append(claim())
    bench.append(release(epoch, 9))
    bench.append(forgetting(epoch))
    assert bench.state() == "unclaimed"
    assert bench.why() == (
        f"unclaimed since {AT} (offset 3): admin forgot the partition, with its "
        "position 9 and granted offsets; the next claim begins as a first claim does"
    )
    bench.append(release(bench.append(claim())))
    bench.append(b"?", after=11)
    assert "(offset 6): the state of the partition was dropped, because" in bench.why()


def test_a_reset_and_its_quiet_time_are_explained():
    bench = Bench()
    bench.append(claim())
    for record in resets(to_bytes(bench.log.state), digest(bench.log.state)):
        bench.append(record)
    assert "admin reset the state of coordinating partition 0 by operation" in (
        bench.why()
    )
    assert bench.why().endswith(
        "; no member can claim a partition in this coordinating partition for another "
        "2.0 s after the Reset"
    )


def test_a_free_key_restored_by_a_reset_shows_its_release():
    bench = Bench()
    epoch = bench.append(claim())
    bench.append(release(epoch))
    value, name = to_bytes(bench.log.state), digest(bench.log.state)
    bench.append(forgetting(epoch))
    for record in resets(value, name):
        bench.append(record)
    assert bench.why().startswith(
        f"free since {AT} (offset 2): c1 released the partition"
    )


def test_a_halted_partition_is_unknown_from_there_on():
    bench = Bench()
    bench.append(config(2, era=2, level=SUPPORTED_LEVEL + 1))
    assert bench.state() == "halted"
    assert bench.why() == (
        f"unknown from offset 1 on: a Config there needs feature level "
        f"{SUPPORTED_LEVEL + 1}, which this release does not know"
    )


# --- from a checkpoint


def begun(log):
    chain = KeyChain(KEY)
    chain.begin(log.state)
    return chain


def test_the_checkpoint_where_reading_begins_is_named():
    log = Log()
    assert why(begun(log), log.state) == (
        "unclaimed: no claim has been accepted since the checkpoint at offset 0"
    )
    epoch = log.claimed()
    assert why(begun(log), log.state).startswith(
        "owned by c1 since offset 1 (token 1.0.1), before the "
        "checkpoint at offset 1, where this reading begins; "
    )
    log.append(release(epoch))
    assert why(begun(log), log.state) == (
        "free: the partition had no owner at the checkpoint at offset 2, and earlier "
        "records were not read"
    )


def test_a_pause_that_another_admin_renewed_names_both():
    bench = Bench()
    bench.append(pause(UNTIL - 5))
    bench.append(pause(UNTIL, client="other"))
    assert bench.log.state.active_pause("g").client_id == "other"
    text = f"paused until {UNTIL_AT} by admin; renewed by other"
    assert why(bench.chain, bench.log.state).endswith(text)


def test_a_pause_from_before_the_checkpoint_has_no_person():
    log = Log()
    log.append(pause(UNTIL))
    assert why(begun(log), log.state).endswith(f"paused until {UNTIL_AT} by admin")


# --- one event


@pytest.mark.parametrize("what", sorted(_TEXTS))
def test_every_event_has_a_text(what):
    event = KeyEvent(
        what=what,
        partition=0,
        offset=1,
        at_ms=5,
        record="Reset",
        client_id="c1",
        reason="a reason",
        owner="c0",
        position=4,
        op_id=ident("op"),
    )
    text = text_of(event)
    assert text
    assert "None" not in text


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(
            {"what": "refused", "record": "ClaimingPartition", "owner": "c1"},
            "a claim by c2 was refused 3 times as held: c1 owned the partition",
            id="held",
        ),
        pytest.param(
            {"what": "ignored", "record": "Heartbeat", "reason": "not_owner"},
            "a Heartbeat of c2 was ignored 3 times as not_owner: the sender's process "
            "does not own the partition",
            id="free",
        ),
        pytest.param(
            {
                "what": "ignored",
                "record": "Heartbeat",
                "reason": "not_owner",
                "owner": "c1",
            },
            "a Heartbeat of c2 was ignored 3 times as not_owner: c1 owns the partition "
            "now",
            id="zombie",
        ),
        pytest.param(
            {"what": "paused", "until_ms": 5, "person": "bob", "reason": "x"},
            "c2 (bob) paused the group until 1970-01-01T00:00:00.005Z, renewed 2 "
            "times: x",
            id="paused",
        ),
        pytest.param(
            {"what": "scheduled", "begin_ms": 2, "until_ms": 5, "reason": "x"},
            "c2 scheduled a pause of the group from 1970-01-01T00:00:00.002Z until "
            "1970-01-01T00:00:00.005Z: x",
            id="scheduled",
        ),
        pytest.param(
            {"what": "unscheduled", "reason": "x"},
            "c2 cancelled a scheduled pause of the group: x",
            id="unscheduled",
        ),
        pytest.param(
            {"what": "unscheduled", "topics": ("t:0", "u")},
            "c2 cancelled a scheduled pause of t:0, u: held",
            id="unscheduled-in-a-scope",
        ),
        pytest.param(
            {"what": "unpaused", "topics": ("t:0",), "reason": "x"},
            "c2 ended the pause of t:0: x",
            id="unpaused-in-a-scope",
        ),
        pytest.param(
            {"what": "pause_expired", "topics": ("t:0",)},
            "the pause of t:0 reached its end",
            id="expired-in-a-scope",
        ),
        pytest.param(
            {"what": "taken_over", "owner": "c1", "reason": "c1 is stale"},
            "c2 took over the partition from c1, which had gone stale",
            id="taken",
        ),
        pytest.param(
            {"what": "taken_over", "owner": "c1", "reason": "planned; c1 is stale"},
            "c2 took over the partition from c1, which had gone stale: planned",
            id="taken-for-a-reason",
        ),
        pytest.param(
            {"what": "restored", "position": 4},
            "earlier records were not read; at this checkpoint c2 owned the partition "
            "at position 4",
            id="restored",
        ),
        pytest.param(
            {"what": "restored", "client_id": None},
            "earlier records were not read; at this checkpoint the partition had no "
            "owner",
            id="restored-free",
        ),
    ],
)
def test_the_text_of_an_event_has_its_fields(event, expected):
    fields = {"client_id": "c2", "reason": "held", "count": 3} | event
    if event["what"] == "restored":
        fields["reason"] = None
    assert text_of(KeyEvent(partition=0, offset=1, at_ms=5, **fields)) == expected


def test_common_reasons_of_refusals_have_texts():
    names = {"held", "cas", "paused", "quiet", "locked", "handoff", "not_owner", "span"}
    assert names <= REFUSALS.keys()
