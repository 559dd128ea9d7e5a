"""Clients die and hang on a cluster of three; judged from log and journals."""

import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from domain import opened
from fleet import Fleet
from ordeal import Ordeal
from waiting import eventually, wall_ms

pytestmark = pytest.mark.timeout(1_800)
# Eight processes may start at once, on few cores.
START_MS = 180_000
TRANSPORTS = ("fast", "kafka-python")


@pytest.mark.chaos
def test_client_stop(cluster, unique, tmp_path, record):
    """SIGSTOP of an owner beyond 2H in the middle of a hand-out, then SIGCONT."""
    title = "an owner stands still for 2.5 H within a hand-out (SIGSTOP), then goes on"
    found = record("client_stop", title)
    servers = cluster.bootstrap_servers
    with Ordeal(found, servers, unique, tmp_path, handle_ms=20) as it:
        it.start()
        before = it.claims()
        victims = it.workers("w2")
        for victim in victims:
            victim.signal(signal.SIGSTOP)
        stopped_ms = wall_ms()
        eventually(lambda: wall_ms() > stopped_ms + 2.5 * found.h_ms, "beyond 2H")
        it.wait_flowing()
        it.note_gaps(stopped_ms)
        for victim in victims:
            victim.signal(signal.SIGCONT)
        it.note_takeover(stopped_ms, {"w2"}, before)
        it.wait_all_work({"w1", "w2"})
        it.settle()
        it.judge()


class Pair:
    """Two workers of one group; one of them is killed, over and over."""

    def __init__(self, domain, unique, home, *, number: int) -> None:
        home.mkdir()
        self._domain = domain
        self._topic = domain.data_topic(2)
        self._transport = TRANSPORTS[number % 2]
        self._group = unique("mortal")
        settings = {"group_id": self._group, "topics": [self._topic]}
        self.fleet = Fleet(domain, home, handle_ms=1, **settings)
        self._survivor = self.fleet.start("heir", transport=self._transport)
        self._killed: list[tuple[str, int]] = []

    def kill(self, run: int) -> None:
        """Let another client share, and kill it at work."""
        name = f"v{run}"
        victim = self.fleet.start(name, transport=self._transport)
        victim.wait_for("claimed", timeout_ms=START_MS)
        # Somewhere between two beats, another place each time.
        pause_ms = 97 * run % self._domain.h_ms
        since_ms = wall_ms()
        eventually(lambda: wall_ms() > since_ms + pause_ms, "some time has passed")
        victim.kill()
        died_ms = wall_ms()
        self._killed.append((name, died_ms))
        eventually(lambda: len(self._holds()) == 2, "it is taken over", START_MS)

    def _holds(self) -> set:
        """Return the partitions that the survivor has by its own journal."""
        held = set()
        for line in self._survivor.journal.lines:
            if line["event"] == "claimed":
                held.add(line["partition"])
            elif line["event"] == "lost":
                held.discard(line["partition"])
        return held

    def takeovers(self, history) -> list[int]:
        """Return how long each death left something without an owner."""
        tenures = history.tenures(self._group)
        found = []
        for name, died_ms in self._killed:
            spans = [
                two.begun_ms - died_ms
                for row in tenures.values()
                for one, two in pairwise(row)
                if one.client_id == name and one.ended_by == "claimed"
            ]
            assert spans, f"{name} had nothing, or nobody took it over"
            found.append(max(spans))
        return found


@pytest.mark.chaos
def test_client_kill(cluster, unique, tmp_path, record, times):
    """SIGKILL of an owner, over and over; half of the pairs on each transport."""
    found = record("client_kill", "an owner with half of the partitions is killed")
    # Few at once: that others start must not take the time of those that take over.
    pairs_count = 4
    rounds = times(52)
    found.runs = pairs_count * rounds
    settings = {"h_ms": found.h_ms, "replication": 3}
    with opened(cluster, unique, **settings) as domain:
        pairs = [
            Pair(domain, unique, tmp_path / str(number), number=number)
            for number in range(pairs_count)
        ]
        try:
            with ThreadPoolExecutor(pairs_count) as pool:
                work = [pool.submit(run_pair, pair, rounds) for pair in pairs]
                for each in work:
                    each.result(timeout=1_700)
        finally:
            for pair in pairs:
                pair.fleet.__exit__()
        history = domain.history()
        for pair in pairs:
            found.takeover_ms += pair.takeovers(history)
    assert len(found.takeover_ms) == found.runs


def run_pair(pair, rounds):
    for run in range(rounds):
        pair.kill(run)
