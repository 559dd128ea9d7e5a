"""A bounded slice of the simulation of sidecars: fixed seeds, and broken variants.

Run other seeds with:
SIMULATION_SEEDS=1000:1200 pytest tests/simulation/test_hosted.py
"""

from collections import Counter

import pytest
import slices
import variants

from kafka_marshal.config import Delivery
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.remote import session as remote_session
from kafka_marshal.sidecar.group import LocalGroup
from kafka_marshal.sidecar.lease_table import LeaseTable
from kafka_marshal.sidecar.registry import ClientRegistry
from simulator.base import GROUP
from simulator.outcome import RunFailed
from simulator.sidecar.simulate import HostedSimulation, simulate_hosted
from simulator.sidecar.world import FAULTS, HostedWorld

SEEDS = slices.seeds_of(quick=range(8), full=400)
WARMING_SEEDS = slices.seeds_of(quick=range(8), full=400)
PLANNING_SEEDS = slices.seeds_of(quick=range(4), full=400)
BATCH = 4
FOR_EVER_MS = 10**12
NEAR = 8
# Each seed once showed a fault that is fixed now.
FOUND = [
    pytest.param(2, id="a-late-end-of-a-claim-request-ended-the-next"),
    pytest.param(307, id="ids-of-an-earlier-ring-were-taken-for-new-ones"),
    pytest.param(19, id="what-was-resumed-was-released-while-it-was-used"),
]


def batches():
    return [SEEDS[start : start + BATCH] for start in range(0, len(SEEDS), BATCH)]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", batches(), ids=lambda r: f"{r.start}-{r.stop - 1}")
def test_every_invariant_holds_in_fleets_with_sidecars(seeds, record_property):
    reports = [simulate_hosted(seed) for seed in seeds]
    handed = sum(report.handed for report in reports)
    record_property("seeds", len(seeds))
    record_property("records", handed)
    assert handed > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND)
def test_known_failures_stay_fixed(seed):
    assert simulate_hosted(seed).claims > 0


def test_a_seed_repeats_byte_for_byte():
    first, second = (simulate_hosted(5, rounds=60) for _ in range(2))
    assert first == second
    assert len(first.transcript) > 100


def test_at_most_once_hands_out_all_records_with_a_small_span():
    """The run fails unless all records are handed out, so requests are granted."""
    report = simulate_hosted(5, rounds=60, delivery=Delivery.AT_MOST_ONCE, span=2)
    assert report.handed > 0


@pytest.mark.slow
def test_clients_of_sidecars_warm_up_or_die_while_warming_up():
    seen = Counter()
    for seed in WARMING_SEEDS:
        faults = ("handoffs", "crash", "answers", "line", "stop", "churn")
        seen.update(simulate_hosted(seed, faults=faults).seen)
    assert seen["warmed"]
    assert seen["successor_died_warming"]


@pytest.mark.slow
def test_hosts_write_plans_beside_nonsensical_ones(tmp_path):
    faults = ("plans", "crash", "death", "line", "stop", "churn", "drain")
    written, seen = 0, Counter()
    for seed in PLANNING_SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        world = HostedWorld(seed, folder=folder, faults=faults)
        seen.update(HostedSimulation(world).run().seen)
        written += max(state.plan_generation(GROUP) for state in world.watcher.worlds)
    assert 0 < seen["plans"] < written  # ``plans``: the others are the members' Plans


def test_every_fault_is_drawn(tmp_path):
    drawn = set()
    for seed in range(20):
        drawn |= HostedWorld(seed, folder=tmp_path).faults
    assert drawn == set(FAULTS)


# --- Broken variants ---


def grant_before_the_deadline(patch):
    """A key with an unexpired sublease is granted to the next client at once."""
    patch.setattr(LeaseTable, "is_available", lambda self, key, client: True)
    patch.setattr(LeaseTable, "keep_until_expired", lambda self, lease, now_ms: None)


def release_on_a_lost_connection(patch):
    """A client that is disconnected for a while is treated as dead."""
    plain = LocalGroup._expire

    def expire(self, now_ms):
        for lease in self.table.leases.values():
            if lease.client.is_away(now_ms):
                lease.sent_until_ms = now_ms
        plain(self, now_ms)

    patch.setattr(LocalGroup, "_expire", expire)


def no_deadline(patch):
    """A client continues until it is asked to stop."""
    for_ever = Lease(FOR_EVER_MS, FOR_EVER_MS)
    patch.setattr(remote_session, "Lease", lambda soft_ms, hard_ms: for_ever)


def no_lease_journal(patch):
    """A restarted sidecar ignores the deadlines that it has sent."""
    patch.setattr(
        ClientRegistry, "_restore_unexpired", lambda self, host, journaled: None
    )


def confirm_before_it_has_stopped(patch):
    """A client reports that it has stopped, but continues to process its records."""
    plain = remote_session.RemoteSession._on_releasing

    def on_releasing(self, message):
        holding = self._find(message, message.epoch)
        plain(self, message)
        if holding is not None:
            self.commands.give_back([remote_session._returned(holding, "surplus")])
            holding.drain = None

    patch.setattr(remote_session.RemoteSession, "_on_releasing", on_releasing)


VARIANTS = [
    # The mistake, the faults with which it shows, and the first seed that shows it.
    pytest.param(
        grant_before_the_deadline,
        ("crash", "line", "stop", "churn"),
        2,
        id="lend-before-the-deadline",
    ),
    pytest.param(
        release_on_a_lost_connection,
        ("line", "stop"),
        4,
        id="release-on-a-lost-connection",
    ),
    pytest.param(
        no_deadline, ("hang", "cut", "line"), 1, id="no-deadline-at-the-client"
    ),
    pytest.param(
        no_lease_journal,
        ("crash", "line", "stop"),
        0,
        id="no-lease-journal-after-a-restart",
    ),
    pytest.param(
        confirm_before_it_has_stopped,
        ("churn", "stop"),
        2,
        id="confirm-before-it-has-stopped",
    ),
]


def caught(faults, *, first, rounds=150):
    """Return the first failure of this seed and the few after it, or None."""
    for seed in range(first, first + NEAR):
        try:
            simulate_hosted(seed, faults=faults, rounds=rounds)
        except RunFailed as failure:
            return failure
    return None


BROKEN = variants.listed("broken variants of sidecars")


def test_the_table_lists_every_variant():
    assert set(BROKEN) == {each.values[0].__name__ for each in VARIANTS}


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "faults", "first"), VARIANTS)
def test_a_broken_variant_is_caught(monkeypatch, plant, faults, first):
    plant(monkeypatch)
    failure = caught(faults, first=first)
    assert failure is not None
    assert [failure.judge, failure.invariant] == BROKEN[plant.__name__]
    assert f"simulate_hosted({failure.seed})" in str(failure)
