"""The checker of histories of workers on a cluster, with and without violations."""

import json

import pytest
from cluster_history import LATE_MS, ClusterHistory, Sender, as_figures, judge
from logkit import (
    KEY,
    LOG_APPEND_TIME,
    START_MS,
    H,
    beat,
    claim,
    config,
    layout_import,
    messages,
)

from kafka_marshal.config import Delivery
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.types import LogEntry

ALO, AMO = Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE
NS_PER_MS = 1_000_000


class Recorded:
    """A log of one partition, and the notes of two workers, written by hand."""

    def __init__(self, home):
        self.home = home
        self.at_ms = 0
        self.entries = []
        self.sent = []
        self.append(config(h=H))

    def append(self, record):
        offset = len(self.entries)
        moment_ms = START_MS + self.at_ms
        entry = LogEntry(
            offset=offset,
            leader_epoch=0,
            timestamp_ms=moment_ms,
            timestamp_type=LOG_APPEND_TIME,
            value=encode(record),
        )
        self.entries.append(entry)
        return offset

    def note(self, who, event, *, ms=None, **fields):
        ns = (self.at_ms if ms is None else ms) * NS_PER_MS
        with (self.home / f"{who}.notes").open("a") as file:
            file.write(json.dumps({"event": event, "ns": ns} | fields) + "\n")

    def send(self, who, record, *, reads=True, notes=True):
        """Send, append, and read back, each a millisecond later."""
        self.sent.append(record)
        if notes:
            number, value = len(self.sent), encode(record).hex()
            self.note(who, "sent", number=number, t=0, value=value)
        self.at_ms += 1
        offset = self.append(record)
        self.at_ms += 1
        if reads:
            self.note(who, "read", ends={"0": offset})
        self.at_ms += 1
        return offset

    def handle(self, who, epoch, first, last, *, is_done=True):
        """Hand records out one by one, and process them."""
        for offset in range(first, last + 1):
            at = {"topic": KEY.topic, "partition": KEY.partition, "first": offset}
            at |= {"last": offset, "token": f"1.0.{epoch}"}
            looked_ns = self.at_ms * NS_PER_MS
            self.note(who, "handed", looked_ns=looked_ns, **at)
            if is_done:
                self.note(who, "done", **at)

    def verdict(self, delivery=ALO, end=10):
        names = ("a", "b")
        senders = [Sender.of(self.home / f"{n}.notes", KEY.group_id) for n in names]
        reported = ClusterHistory({0: self.entries}, senders).operations()
        ends = {KEY.topic_partition: end}
        return judge(
            reported, group_id=KEY.group_id, delivery=delivery, ends=ends, h_ms=H
        )


@pytest.fixture
def recorded(tmp_path):
    return Recorded(tmp_path)


def taken_over(it, *, kept=True):
    """Let worker a stop after a few records and b take over; return both epochs."""
    one = it.send("a", claim("a", seq=1))
    it.handle("a", one, 0, 6)
    it.send("a", beat(one, 5, client="a", seq=2))
    it.at_ms += 2 * H + 1
    two = it.send("b", claim("b", seq=1))
    it.handle("b", two, 5, 9)
    if kept:
        it.send("b", beat(two, 10, client="b", seq=2))
    return one, two


def invariants(verdict):
    return [found.invariant for found in verdict.findings]


def test_a_takeover_is_reported_with_its_duplicates(recorded):
    taken_over(recorded)
    verdict = recorded.verdict()
    assert verdict.findings == ()
    assert (verdict.handed, verdict.processed, verdict.takeovers) == (12, 10, 1)
    figures = as_figures(verdict)
    assert (figures["duplicates"], figures["violations"], figures["told"]) == (2, 0, [])


def test_records_that_an_import_has_read_count_as_appended_before_it(recorded):
    """Although no worker reads the end of a partition that is no longer used."""
    recorded.send("a", claim("a", seq=1))
    recorded.send("a", beat(1, 5, client="a", seq=2), reads=False)
    source, recorded.entries, recorded.at_ms = recorded.entries, [], 20
    recorded.append(layout_import())
    record = claim("b", seq=1)
    recorded.note("b", "sent", number=9, t=1, value=encode(record).hex())
    recorded.append(record)
    recorded.note("b", "read", ends={"1": 1}, ms=30)
    recorded.note("b", "read", ends={}, ms=500)
    names = ("a", "b")
    senders = [Sender.of(recorded.home / f"{n}.notes", KEY.group_id) for n in names]
    history = ClusterHistory({0: source, 1: recorded.entries}, senders)
    times = history.append_times()
    assert times[1] == [30 * NS_PER_MS] * 2
    assert times[0] == [2 * NS_PER_MS] * 2 + [30 * NS_PER_MS - 1]


def test_two_owners_that_hand_out_at_once_are_found(recorded):
    one, _ = taken_over(recorded)
    recorded.at_ms += LATE_MS
    recorded.handle("a", one, 7, 7)
    verdict = recorded.verdict()
    # Handed out under an older token than before, and long after the lease.
    assert invariants(verdict) == ["S4", "S4"]
    assert as_figures(verdict)["told"][0].startswith("S4: g/t-0: handed out under")


@pytest.mark.parametrize(("over_ms", "found"), [(0, []), (LATE_MS + 50, ["S4"])])
def test_a_hand_out_after_the_soft_end_of_the_lease_is_found(recorded, over_ms, found):
    one = recorded.send("a", claim("a", seq=1))
    # The claim is sent at 0, and the lease checked this much later.
    recorded.at_ms = 7 * H // 4 + over_ms
    recorded.handle("a", one, 0, 9)
    assert set(invariants(recorded.verdict())) == set(found)


def test_a_late_note_counts_at_the_time_of_the_lease_check(recorded):
    one, _ = taken_over(recorded)
    at = {"topic": "t", "partition": 0, "first": 7, "last": 7, "token": f"1.0.{one}"}
    # The process stood still between the check of the lease and the note.
    recorded.note("a", "handed", looked_ns=9 * NS_PER_MS, **at)
    assert recorded.verdict().findings == ()


def test_records_handled_before_the_claim_is_read_back_are_found(recorded):
    recorded.handle("a", 1, 0, 0)
    recorded.send("a", claim("a", seq=1))
    recorded.handle("a", 1, 1, 9)
    assert invariants(recorded.verdict()) == ["S4"]


def test_an_accepted_record_without_a_sender_is_found(recorded):
    one = recorded.send("a", claim("a", seq=1))
    recorded.send("a", beat(one, None, client="a", seq=2), notes=False)
    assert invariants(recorded.verdict(end=0)) == ["1.4"]


def test_only_an_accepted_claim_of_an_unknown_client_is_found(recorded):
    one = recorded.send("a", claim("a", seq=1))
    recorded.handle("a", one, 0, 9)
    recorded.append(claim("x", seq=7))
    recorded.append(beat(one, 1 << 40, client="x", seq=8))
    assert recorded.verdict().findings == ()
    recorded.at_ms += 2 * H + 1
    recorded.append(claim("x", seq=9))
    assert invariants(recorded.verdict()) == ["1.4"]


def test_a_position_beyond_processed_records_is_found(recorded):
    one = recorded.send("a", claim("a", seq=1))
    recorded.handle("a", one, 0, 8)
    recorded.handle("a", one, 9, 9, is_done=False)
    recorded.send("a", beat(one, 10, client="a", seq=2))
    # When it was sent, when it was accepted, and at the end.
    assert set(invariants(recorded.verdict())) == {"6.1"}


def test_an_unprocessed_record_is_found(recorded):
    taken_over(recorded)
    assert invariants(recorded.verdict(end=11)) == ["6.1"]


def test_at_most_once_ungranted_and_repeated_records_are_found(recorded):
    one = recorded.send("a", claim("a", seq=1))
    recorded.send("a", messages(one, 0, 4, client="a", seq=2))
    recorded.handle("a", one, 0, 4)
    assert recorded.verdict(AMO).findings == ()
    recorded.handle("a", one, 5, 5)
    assert invariants(recorded.verdict(AMO)) == ["6.2"]
    recorded.handle("a", one, 4, 4)
    assert "S3" in invariants(recorded.verdict(AMO))


def test_an_append_with_a_failed_acknowledgment_may_be_in_the_log(recorded):
    """A send reported as failed is unknown; the log decides (1.4)."""
    one = recorded.send("a", claim("a", seq=1), reads=False)
    recorded.note("a", "failed", number=1)
    recorded.note("a", "read", ends={"0": one})
    recorded.send("a", beat(one, None, client="a", seq=2))
    recorded.handle("a", one, 0, 9)
    assert recorded.verdict().findings == ()


def test_a_line_cut_off_by_a_kill_does_not_count(recorded, tmp_path):
    taken_over(recorded)
    with (tmp_path / "a.notes").open("a") as file:
        file.write('{"event": "handed", "ns"')
    assert recorded.verdict().findings == ()
