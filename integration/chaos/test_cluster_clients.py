"""Clients die and hang on a cluster of three; judged from log and journals."""

import signal
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import pytest
from domain import opened
from fleet import Fleet
from journal import judge_duplicates, judge_overlaps
from ordeal import Ordeal, judge_histories
from stream import Stream
from waiting import eventually, wall_ms

# Eight processes may start at once, on few cores.
START_MS = 180_000
TRANSPORTS = ("fast", "kafka-python")
# Interval of the stream: slow, so that it does not delay workers that start.
INTERVAL_S = 0.2
PAIRS = 4
# After this time no more kills: rather fewer deaths than no report.
KILLS_MS_MAX = 20 * 60_000
WORK_MS = 120_000


@pytest.mark.proof
def test_client_stop(cluster, unique, tmp_path, record):
    """SIGSTOP of an owner in a hand-out until its claim is stale, then SIGCONT."""
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
        self.topic = domain.data_topic(2)
        self._transport = TRANSPORTS[number % 2]
        self.group = unique("mortal")
        settings = {"group_id": self.group, "topics": [self.topic], "notes": True}
        self.fleet = Fleet(domain, home, handle_ms=1, **settings)
        self.survivor = self.fleet.start("successor", transport=self._transport)
        self.killed: list[tuple[str, int]] = []

    def kill(self, run: int) -> None:
        """Let another client share, and kill it at work."""
        name = f"v{run}"
        victim = self.fleet.start(name, transport=self._transport)
        victim.wait_for("claimed", timeout_ms=START_MS)
        # Each time at another moment between two heartbeats.
        pause_ms = 97 * run % self._domain.h_ms
        since_ms = wall_ms()
        eventually(lambda: wall_ms() > since_ms + pause_ms, "some time has passed")
        victim.kill()
        died_ms = wall_ms()
        self.killed.append((name, died_ms))
        eventually(lambda: len(self._holds()) == 2, "it is taken over", START_MS)

    def _holds(self) -> set:
        """Return the partitions that the survivor has by its own journal."""
        held = set()
        for line in self.survivor.since(0):
            if line["event"] == "claimed":
                held.add(line["partition"])
            elif line["event"] == "lost":
                held.discard(line["partition"])
        return held

    def note_takeovers(self, found, history) -> None:
        """Note how long keys had no owner, and no work, after each death."""
        tenures = history.tenures(self.group)
        times: dict = {}
        for each in self.fleet.journal.handled:
            times.setdefault(each.place, []).append(each.at_ms)
        for name, died_ms in self.killed:
            spans = {
                key: two.begun_ms - died_ms
                for key, row in tenures.items()
                for one, two in pairwise(row)
                if one.client_id == name and one.ended_by == "claimed"
            }
            assert spans, f"{name} had nothing, or nobody took it over"
            found.takeover_ms.append(max(spans.values()))
            before, after = [], []
            for key in spans:
                row = times.get(key.topic_partition, [])
                at = bisect_right(row, died_ms)
                before += row[at - 1 : at] if at else []
                after += row[at : at + 1]
            if before and after:
                found.handed_ms.append(max(after) - died_ms)
                found.gap_ms.append(max(after) - min(before))

    def is_done(self) -> bool:
        """Return whether all is processed."""
        states = self._domain.states(self.group)
        ends = {key.topic_partition: s.next_unclaimed() for key, s in states.items()}
        return ends == self._domain.of(self.topic)

    def judge(self, found, history) -> None:
        """Check what the log and the journals say; add to the figures."""
        journal = self.fleet.journal
        found.records += len(journal.handled)
        lost = journal.lost(self._domain.of(self.topic))
        found.losses += sum(map(len, lost.values()))
        assert lost == {}, "at least once, and yet nobody processed these"
        found.stale_hands += judge_overlaps(journal, history, self.group)
        found.duplicates += judge_duplicates(journal, history, self.group)


@pytest.mark.proof
def test_client_kill(cluster, unique, tmp_path, record, times):
    """SIGKILL of an owner, over and over; half of the pairs on each transport."""
    found = record("client_kill", "an owner with half of the partitions is killed")
    servers = cluster.bootstrap_servers
    with ExitStack() as stack:
        settings = {"h_ms": found.h_ms, "replication": 3}
        domain = stack.enter_context(opened(cluster, unique, **settings))
        # Few at once, so that starts of workers do not delay takeovers.
        pairs = [
            Pair(domain, unique, tmp_path / str(number), number=number)
            for number in range(PAIRS)
        ]
        for pair in pairs:
            stack.callback(pair.fleet.__exit__)
        stream = Stream(servers, domain.produced, interval_s=INTERVAL_S)
        stack.enter_context(stream)
        deadline_ms = wall_ms() + KILLS_MS_MAX
        with ThreadPoolExecutor(PAIRS) as pool:
            work = [
                pool.submit(kill_over_and_over, pair, times(52), deadline_ms)
                for pair in pairs
            ]
            for each in work:
                each.result(timeout=1_700)
        found.runs = sum(len(pair.killed) for pair in pairs)
        domain.produced.update(stream.stop())
        for pair in pairs:
            eventually(pair.is_done, "all is worked off", WORK_MS)
            pair.survivor.ask_to_end()
        history = domain.history()
        for pair in pairs:
            pair.note_takeovers(found, history)
        for pair in pairs:
            pair.judge(found, history)
        fleets = {f"alo {pair.group}": pair.fleet for pair in pairs}
        judge_histories(found, domain, fleets)
    assert len(found.takeover_ms) == found.runs


def kill_over_and_over(pair, rounds, deadline_ms):
    for run in range(rounds):
        if wall_ms() < deadline_ms:
            pair.kill(run)
