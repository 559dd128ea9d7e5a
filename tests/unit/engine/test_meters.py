"""Counters: every figure has an event that changes it."""

from contextlib import suppress

from enginekit import (
    ALO,
    AMO,
    KEY,
    H,
    Stepping,
    fold,
    held_by,
    owning,
    pause_for,
    spec,
)
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.engine import Holding, StartRule
from kafka_marshal.engine.meters import (
    ENTRIES_MAX,
    OTHER,
    REASONS_MAX,
    Histogram,
    SessionMeters,
    Tally,
)
from kafka_marshal.errors import InvalidTransition
from kafka_marshal.protocol.claiming import Claim, Claimant, Ending
from kafka_marshal.protocol.delivery import AtLeastOnce
from kafka_marshal.protocol.types import Key, Owner
from simulator.fakestore import AppendFate


def total(counts):
    return {reason: count for (_, reason), count in counts.items()}


# --- Durations ---


def test_a_histogram_counts_a_bound_in_its_own_bucket():
    figure = Histogram((10, 20))
    for duration_ms in (-5, 0, 10, 11, 20, 21, 1_000):
        figure.observe(duration_ms)
    assert figure.counts == [3, 2, 2]
    assert figure.sum_ms == 0 + 0 + 10 + 11 + 20 + 21 + 1_000


def test_a_copy_of_a_histogram_does_not_change():
    figure = Histogram((10,))
    figure.observe(1)
    before = figure.copy()
    figure.observe(1)
    assert (before.counts, before.sum_ms) == ([1, 0], 1)


def test_own_records_are_timed_from_sending_to_reading_back(cluster):
    node = owning(cluster)
    figure = node.engine.context.meters.read_backs
    sent = node.session.claimant.next_seq() - 1
    pending = len(node.session._outbox._pending)
    assert sum(figure.counts) == sent - pending > 0
    assert figure.sum_ms > 0


def test_every_round_is_timed(cluster):
    node = cluster.node("a")
    before = sum(node.engine.context.meters.rounds.counts)
    node.step()
    node.step()
    assert sum(node.engine.context.meters.rounds.counts) == before + 2
    assert node.engine.context.meters.round_at_ms == node.engine.context.now_ms


# --- Claims ---


def test_a_first_claim_is_not_counted_as_a_takeover(cluster):
    node = owning(cluster)
    assert total(node.session.meters.won) == {"claimed": 1}
    assert node.session.meters.takeovers == {}


def test_a_takeover_counts_from_the_last_renewal_in_log_time(cluster):
    dead = owning(cluster)
    cluster.crash(dead)
    cluster.run(H)
    renewed_ms = fold(cluster).keys[KEY].renewed_ms
    other = cluster.node("b", spec=spec())
    cluster.run_until(held_by(other, 1), 4 * H)
    world_now = fold(cluster).keys[KEY].renewed_ms
    figure = other.session.meters.takeovers["t", "stale"]
    assert sum(figure.counts) == 1
    assert 2 * H < figure.sum_ms <= world_now - renewed_ms


def test_the_takeover_of_a_released_key_counts_from_its_release(cluster):
    first = owning(cluster)
    first.leave()
    cluster.run_until(lambda: first.has_left, H)
    cluster.crash(first)
    assert total(first.session.meters.released) == {"closed": 1}
    released_ms = fold(cluster).keys[KEY].active_ms
    cluster.run(5 * H)
    other = owning(cluster, "b")
    figure = other.session.meters.takeovers["t", "released"]
    assert figure.sum_ms >= 5 * H - 100
    assert figure.sum_ms <= fold(cluster).keys[KEY].renewed_ms - released_ms


def test_a_resumed_takeover_is_counted_separately(cluster):
    first = owning(cluster)
    cluster.crash(first)
    second = cluster.node("a", spec=spec(), lives=first.lives)
    cluster.run_until(held_by(second, 1), H)
    assert total(second.session.meters.won) == {"resumed": 1}
    assert sum(second.session.meters.takeovers["t", "resumed"].counts) == 1


def test_losses_and_releases_are_counted_separately(cluster):
    node = owning(cluster)
    node.cut(is_cut=True)
    cluster.run_until(lambda: not node.held, 3 * H)
    cluster.run(40)
    assert total(node.session.meters.lost) == {"lease_expired": 1}
    node.cut(is_cut=False)
    cluster.run_until(held_by(node, 1), 4 * H)
    pause_for(cluster, 2 * H)
    cluster.run_until(lambda: not node.held, H)
    assert total(node.session.meters.released) == {"paused": 1}


def test_the_number_of_counted_reasons_is_bounded():
    meters = SessionMeters()
    for number in range(REASONS_MAX + 10):
        ending = Ending(f"because-{number}", was_lost=False)
        meters.claim_ended(KEY, ending, tally=Tally())
    meters.claim_ended(KEY, Ending("because-0", was_lost=False), tally=Tally())
    assert len(meters.released) == REASONS_MAX + 1
    assert meters.released["t", OTHER] == 10
    assert meters.released["t", "because-0"] == 2


def test_the_number_of_counted_topics_is_bounded():
    meters = SessionMeters()
    for number in range(ENTRIES_MAX + 5):
        key = Key("g", f"t-{number}", 0)
        meters.claim_ended(key, Ending("closed", was_lost=False), tally=Tally(1, 1))
    assert len(meters.tallies) == len(meters.released) == ENTRIES_MAX
    assert key in meters.tallies
    assert Key("g", "t-0", 0) not in meters.tallies


# --- Records ---


def test_handed_out_and_committed_records_are_counted(cluster):
    node = owning(cluster)
    (records,) = node.consumer.poll(0, 4).values()
    holding = node.session.holdings[KEY]
    assert holding.tally == Tally(4, 0)
    node.consumer.commit(records[1:3])
    assert holding.tally == Tally(4, 2)
    node.consumer.commit(records[0])
    assert holding.tally == Tally(4, 3)
    node.consumer.close(timeout_ms=0)
    assert node.session.meters.tallies == {KEY: Tally(4, 3)}


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["hand", "commit", "all", "forget", "end"]), st.integers(1, 9)
    ),
    max_size=30,
)


@given(ACTS)
def test_totals_never_fall(acts):
    """For any sequence of operations, as Prometheus requires of counters."""
    meters, end, handed, committed = SessionMeters(), 0, 0, 0
    holding = fresh_holding()
    for act, number in acts:
        uncommitted = holding.uncommitted_count
        if act == "hand":
            holding.progress.hand_out(end + 1, end + number)
            holding.handed_count += number
            handed += number
            end += number + 1  # a hole: no record has that offset
        elif act in {"commit", "all"}:
            with suppress(InvalidTransition):
                if act == "all":
                    holding.progress.commit_all()
                else:
                    holding.progress.commit(number, number)
            committed += uncommitted - holding.uncommitted_count
        elif act == "forget":
            holding.forget_hands(holding.progress)
        else:
            meters.claim_ended(KEY, Ending("closed"), tally=holding.tally)
            holding = fresh_holding()
        now = meters.tallies.get(KEY, Tally()).plus(holding.tally)
        assert now == Tally(handed, committed)


def fresh_holding():
    claim = Claim(Claimant(Owner("a", b"i" * 16), "g", master=b"m" * 32), KEY)
    holding = Holding(claim, ALO, StartRule())
    holding.progress = AtLeastOnce(0)
    return holding


def test_records_of_a_closed_consumer_stay_uncommitted(cluster):
    node = owning(cluster)
    node.consumer.poll(0, 4)
    node.consumer.close(release=False, timeout_ms=0)
    assert node.session.holdings[KEY].tally == Tally(4, 0)


def test_at_most_once_handed_out_records_count_as_committed(cluster):
    node = owning(cluster, delivery=AMO)
    node.engine.changed = Stepping(cluster)
    (records,) = node.consumer.poll(H, 4).values()
    assert node.session.holdings[KEY].tally == Tally(len(records), len(records))


# --- The log ---


def test_failed_appends_are_counted(cluster):
    node = owning(cluster)
    assert node.engine.context.meters.failed_appends == 0
    cluster.fates["a"] = AppendFate(fails_after_ms=10)
    cluster.run(H)
    assert node.engine.context.meters.failed_appends > 0


def test_events_are_counted_by_name(cluster):
    node = owning(cluster)
    counted = node.engine.context.meters.events()
    reported = [event.name for event in node.observer.events]
    assert counted == {name: reported.count(name) for name in reported}
    assert counted["claimed"] == 1
