"""Workers of both guarantees under a steady stream, while something breaks.

One ordeal is one fault: start, break, heal, settle, check. The checks use the log and
the journals of workers; figures go into a `Finding`, for the report.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import attrs
from cluster_history import ClusterHistory, Sender, as_figures, judge
from domain import Domain
from failover import Failover
from fleet import Fleet, Worker
from journal import judge_duplicates, judge_grants, judge_overlaps
from stream import PythonPair, Stream, longest_gap_ms
from waiting import eventually, wall_ms

from kafka_marshal import Delivery
from kafka_marshal import TopicPartition as Place
from kafka_marshal.protocol.lease import Lease

BATCH = 40
GRANTED = 64
AT_RISK = GRANTED * BATCH
DELIVERIES = ("alo", "amo")
TEAM = {"w1": "fast", "w2": "kafka-python"}
WORK_MS = 120_000
LOOK_BACK_MS = 5_000
# From the check of the lease to the line in the journal, on a busy machine.
GRACE_MS = 300


@attrs.define
class Finding:
    """What one fault did, in figures.

    Attributes:
        name: The scenario, in one word.
        title: What was broken, for people.
        h_ms: The heartbeat interval.
        runs: How often it was broken.
        takeover_ms: From each death of an owner to the claim of its successor.
        handed_ms: From each death of an owner to the first record of its successor.
        gap_ms: Longest time without work in any partition, each run.
        gaps: The same by guarantee and transport, and that of bare clients of each
            transport (``alone``), each run.
        own_ms: How long the brokers themselves took to replace a leader, each run.
        bare_gap_ms: The same as ``gap_ms`` of bare producers and consumers, each run.
        kept: In how many runs no owner lost a claim; None where owners had to.
        owners: Healthy owners, each counted in each of these runs.
        owners_kept: How many of them kept all their claims.
        records: Records processed.
        duplicates: At least once: repeats, all within the bound.
        unprocessed: At most once: records granted and never processed.
        unprocessed_max: The most of one claim; the bound is ``AT_RISK``.
        stale_hands: Records processed under a token after a newer one was used.
        losses: At least once: records that no worker processed.
        history: Findings of the checker of histories, by guarantee.
        notes: Whatever else should be reported.
    """

    name: str
    title: str
    h_ms: int
    runs: int = 1
    takeover_ms: list[int] = attrs.field(factory=list)
    handed_ms: list[int] = attrs.field(factory=list)
    gap_ms: list[int] = attrs.field(factory=list)
    gaps: list[dict[str, int]] = attrs.field(factory=list)
    own_ms: list[int] = attrs.field(factory=list)
    bare_gap_ms: list[int] = attrs.field(factory=list)
    kept: int | None = None
    owners: int = 0
    owners_kept: int = 0
    records: int = 0
    duplicates: int = 0
    unprocessed: int = 0
    unprocessed_max: int = 0
    stale_hands: int = 0
    losses: int = 0
    history: dict[str, dict] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)


class Ordeal:
    """Two fleets, the stream that they process, and the checks.

    Without ``has_gaps`` there is no bare client of kafka-python, which costs as much
    processor time as a worker, and `note_gaps` has nothing to compare with.

    Attributes:
        domain: Their coordination domain.
        finding: What has been found so far.
        fleets: The fleets by guarantee.
    """

    def __init__(
        self,
        finding: Finding,
        servers: str,
        unique: Callable[[str], str],
        home: Path,
        *,
        partitions: int = 3,
        replication: int = 3,
        team: dict[str, str] = TEAM,
        deliveries: Sequence[str] = DELIVERIES,
        has_true_time: bool = True,
        is_exclusive: bool = True,
        has_gaps: bool = True,
        prepare: Callable[[Domain], None] = lambda domain: None,
        domain_settings: dict | None = None,
        **settings: object,
    ) -> None:
        self.finding = finding
        self._team = team
        self._has_true_time = has_true_time
        self._is_exclusive = is_exclusive
        self._stack = ExitStack()
        self._replaced: set[int] = set()
        self.domain = Domain(
            servers,
            unique,
            h_ms=finding.h_ms,
            replication=replication,
            **(domain_settings or {}),
        )
        self._stack.callback(self.domain.close)
        prepare(self.domain)
        self.fleets: dict[str, Fleet] = {}
        for delivery in deliveries:
            (home / delivery).mkdir()
            usual = {
                "group_id": unique(f"chaos-{delivery}"),
                "topics": [self.domain.data_topic(partitions)],
                "delivery": delivery,
                "max_poll_records": BATCH,
                "max_granted_batches": GRANTED,
                "handle_ms": 1,
                "notes": True,
            }
            fleet = Fleet(self.domain, home / delivery, **(usual | settings))
            self.fleets[delivery] = self._stack.enter_context(fleet)
        data = list(self.domain.produced)
        self.stream = self._stack.enter_context(Stream(servers, data))
        self._python: PythonPair | None = None
        if has_gaps:
            bare = list(self.domain.of(self.domain.data_topic(partitions)))
            pair = PythonPair(servers, bare, [*data, *bare])
            self._python = self._stack.enter_context(pair)
        self.failover = Failover(
            servers, self.domain.topic, {place.topic for place in data}
        )
        self._stack.callback(self.failover.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- course of an ordeal

    def start(self, launchers: dict[str, list[str]] | None = None) -> None:
        """Start the team in both groups and wait until all workers process records."""
        for fleet in self.fleets.values():
            for name, transport in self._team.items():
                launcher = (launchers or {}).get(name, ())
                fleet.start(name, transport=transport, launcher=launcher)
        self.wait_all_work(set(self._team))

    def workers(self, name: str) -> list[Worker]:
        """Return the processes of one name that were started last, of both groups."""
        return [
            [each for each in fleet.workers if each.client_id == name][-1]
            for fleet in self.fleets.values()
        ]

    def kill(self, name: str) -> list[Worker]:
        """Kill the processes of one name, which need not run from now on."""
        killed = self.workers(name)
        for worker in killed:
            worker.kill()
            self._replaced.add(worker.pid)
        return killed

    def restart(self, name: str) -> None:
        """Start processes of a name again."""
        for fleet in self.fleets.values():
            fleet.start(name, transport=self._team[name])

    def wait_all_work(self, names: set[str], timeout_ms: int = WORK_MS) -> None:
        """Wait until these clients, in both groups, have processed later records."""
        since = wall_ms()
        for fleet in self.fleets.values():

            def look(fleet=fleet):
                self.require_running(names)
                seen = {each["client_id"] for each in fleet.handled_since(since)}
                return seen >= names

            what = f"{sorted(names)} work; {fleet.settings['group_id']}"
            eventually(look, what, timeout_ms)

    def require_running(self, names: set[str]) -> None:
        """Fail with the error output of a process that ended by itself."""
        for fleet in self.fleets.values():
            for worker in fleet.workers:
                is_well = worker.is_running or worker.client_id not in names
                assert is_well or worker.pid in self._replaced, worker.last_words()

    def wait_flowing(
        self, timeout_ms: int = WORK_MS, *, is_replacing: bool = False
    ) -> None:
        """Wait until records flow and are worked on in every partition again.

        ``is_replacing`` restarts workers that ended with an error, as an operator
        would do.
        """
        since = wall_ms()
        self.stream.wait_flowing(since, timeout_ms)
        for fleet in self.fleets.values():
            (topic,) = self.topics(fleet)
            wanted = {place.partition for place in self.domain.of(topic)}

            def look(fleet=fleet, wanted=wanted):
                if is_replacing:
                    self.replace_ended_workers()
                seen = {each["partition"] for each in fleet.handled_since(since)}
                return seen >= wanted

            what = f"all partitions are worked on; {fleet.settings['group_id']}"
            eventually(look, what, timeout_ms)

    @staticmethod
    def topics(fleet: Fleet) -> list[str]:
        return fleet.settings["topics"]

    def claims(self) -> dict:
        """Return owner and epoch of each key of both groups."""
        return {
            key: (known.owner, known.epoch)
            for fleet in self.fleets.values()
            for key, known in self.domain.states(fleet.settings["group_id"]).items()
        }

    def note_gaps(self, since_ms: int) -> None:
        """Note the longest pauses of workers and of bare clients from then on."""
        assert self._python is not None
        row = {
            f"alone {name}": max(
                longest_gap_ms(seen, since_ms) for seen in each.values()
            )
            for name, each in (
                ("fast", self.stream.arrived),
                ("kafka-python", self._python.arrived),
            )
        }
        self.finding.bare_gap_ms.append(max(row.values()))
        ours: dict[str, int] = {}
        for delivery, fleet in self.fleets.items():
            times: dict = {}
            for each in fleet.handled_since(since_ms - LOOK_BACK_MS):
                seen = times.setdefault(each["partition"], [])
                seen.append((each["at_ms"], each["client_id"]))
            for seen in times.values():
                seen.sort()
                gap_ms = longest_gap_ms([at for at, _ in seen], since_ms)
                # The pause is attributed to the present owner.
                who = f"{delivery} {self._team.get(seen[-1][1], 'another')}"
                ours[who] = max(gap_ms, ours.get(who, 0))
        self.finding.gap_ms.append(max(ours.values()))
        self.finding.gaps.append(row | ours)

    def note_own(self, since_ms: int) -> None:
        """Note how long the brokers took to replace a leader."""
        taken = max(longest_gap_ms(at, since_ms) for at in self.stream.taken.values())
        self.finding.own_ms.append(max(self.failover.took_ms(), taken))

    def note_kept(self, before: dict) -> None:
        """Note whether all claims are unchanged, and which owners kept theirs."""
        now = self.claims()
        self.finding.kept = (self.finding.kept or 0) + (now == before)
        had, lost = set(), set()
        for key, claim in before.items():
            owner = (key.group_id, claim[0])
            had.add(owner)
            if now.get(key) != claim:
                lost.add(owner)
        self.finding.owners += len(had)
        self.finding.owners_kept += len(had - lost)

    def note_takeover(self, since_ms: int, names: set[str], before: dict) -> None:
        """Note how long the keys of these owners had no owner, and no work.

        Several keys of one death count as one: the last.
        """
        history = self.domain.history()
        for fleet in self.fleets.values():
            group_id = fleet.settings["group_id"]
            lost = {
                key: epoch
                for key, (owner, epoch) in before.items()
                if key.group_id == group_id and owner and owner.client_id in names
            }
            if not lost:
                continue
            claimed, handed = [], []
            tenures = history.tenures(group_id)
            for key, epoch in lost.items():
                (following,) = [t for t in tenures[key] if t.epoch > epoch][:1]
                claimed.append(following.begun_ms - since_ms)
                at = [
                    each.at_ms
                    for each in fleet.journal.handled
                    if each.place == key.topic_partition
                    and each.token == following.token
                ]
                # The successor may have released the key before it had records.
                handed += [at[0] - since_ms] if at else []
            self.finding.takeover_ms.append(max(claimed))
            self.finding.handed_ms += [max(handed)] if handed else []

    def judge_silence(self, since_ms: int, until_ms: int) -> None:
        """Check that workers which could not renew stopped by their leases (5.2).

        One record of each partition may have been in progress.
        """
        first_ms = since_ms + Lease.since(0, self.finding.h_ms).soft_until_ms + GRACE_MS
        assert first_ms < until_ms
        for fleet in self.fleets.values():
            late = Counter(
                (each.client_id, each.place)
                for each in fleet.journal.handled
                if first_ms < each.at_ms < until_ms
            )
            assert max(late.values(), default=0) <= 1, late
        self.finding.notes.append(
            f"no work from {first_ms - since_ms} ms after the log stood still to its "
            f"return after {until_ms - since_ms} ms"
        )

    def settle(self) -> None:
        """Stop the stream, wait until all is processed, and end the workers."""
        self.domain.produced.update(self.stream.stop())
        for fleet in self.fleets.values():
            (topic,) = self.topics(fleet)
            produced = self.domain.of(topic)
            group_id = fleet.settings["group_id"]

            def is_done(group_id=group_id, produced=produced):
                states = self.domain.states(group_id)
                ends = {
                    k.topic_partition: s.next_unclaimed() for k, s in states.items()
                }
                return ends == produced

            eventually(is_done, f"{group_id} reaches the end", WORK_MS)
        for fleet in self.fleets.values():
            for worker in fleet.workers:
                if worker.pid not in self._replaced:
                    worker.ask_to_end()

    # --- workers that end, and logs that lose records

    def replace_ended_workers(self) -> None:
        """Restart workers that ended with an error under other names; note why."""
        for delivery, fleet in self.fleets.items():
            for worker in list(fleet.workers):
                if worker.is_running or worker.pid in self._replaced:
                    continue
                failed = worker.journal.of("failed")
                reason = failed[-1]["kind"] if failed else worker.last_words()
                self.finding.notes.append(
                    f"{delivery} {worker.client_id} ended: {reason}"
                )
                self._replaced.add(worker.pid)
                fleet.start(
                    f"{worker.client_id}-again", transport=worker.settings["transport"]
                )

    def noticed(self, event: str) -> set[tuple[str, str]]:
        """Return delivery and client_id of the workers that reported an event."""
        return {
            (delivery, line["client_id"])
            for delivery, fleet in self.fleets.items()
            for line in fleet.journal.of("observed", name=event)
        }

    def end_of(self, t: int) -> int:
        """Return where a coordinating partition ends now."""
        return self.stream.end(Place(self.domain.topic, t))

    def settle_truncated(self) -> None:
        """Settle, and check after the log has lost acknowledged records.

        Committed records may be repeated, because the commit is lost; at most once
        only those that an event `grant_exposed` names (PROTOCOL 7.5).
        """
        self.domain.forget_history()
        self.settle()
        for delivery, fleet in self.fleets.items():
            journal, (topic,) = fleet.journal, self.topics(fleet)
            self.finding.records += len(journal.handled)
            doubled = journal.duplicated()
            if delivery == "alo":
                assert journal.lost(self.domain.of(topic)) == {}
                self.finding.duplicates += sum(map(len, doubled.values()))
                continue
            exposed = [
                line["fields"] for line in journal.of("observed", name="grant_exposed")
            ]
            unalarmed = Counter(
                place
                for place, offsets in doubled.items()
                for offset in offsets
                if not any(
                    place.topic in str(each["key"])
                    and place.partition in each["key"]
                    and each["first"] <= offset <= each["last"]
                    for each in exposed
                )
            )
            count = sum(map(len, doubled.values()))
            self.finding.notes.append(
                f"at most once: {count} twice; alarms: {len(exposed)}"
            )
            assert not unalarmed, f"processed twice without alarm: {unalarmed}"

    # --- checks

    def judge(self) -> Finding:
        """Check every guarantee; return the figures.

        Raises:
            AssertionError: A guarantee was broken; the message says where.
        """
        found, history = self.finding, self.domain.history()
        judge_histories(
            found, self.domain, self.fleets, is_exclusive=self._is_exclusive
        )
        for delivery, fleet in self.fleets.items():
            group_id, journal = fleet.settings["group_id"], fleet.journal
            (topic,) = self.topics(fleet)
            found.records += len(journal.handled)
            found.stale_hands += judge_overlaps(
                journal, history, group_id, late_max=1 if self._is_exclusive else None
            )
            lost = journal.lost(self.domain.of(topic))
            if delivery == "alo":
                found.losses += sum(map(len, lost.values()))
                assert lost == {}, "at least once, and yet nobody processed these"
                found.duplicates += judge_duplicates(
                    journal, history, group_id, has_true_time=self._has_true_time
                )
                continue
            granted = judge_grants(journal, history, group_id)
            gone = {key.topic_partition: sorted(rows) for key, rows in granted.items()}
            assert gone == lost, "at most once: only what was granted may be lost"
            found.unprocessed += sum(map(len, lost.values()))
            by_claim = Counter(
                (key, grant.token)
                for key, grants in history.grants(group_id).items()
                for grant in grants
                for offset in range(grant.first, grant.last + 1)
                if offset in granted.get(key, ())
            )
            most = max(by_claim.values(), default=0)
            found.unprocessed_max = max(found.unprocessed_max, most)
            assert most <= AT_RISK, by_claim
        return found


def judge_histories(
    found: Finding,
    domain: Domain,
    fleets: dict[str, Fleet],
    *,
    is_exclusive: bool = True,
) -> None:
    """Check the notes of workers with the checker of simulations.

    Args:
        found: Gets the results of the checker.
        domain: Where they worked; all of its work is done.
        fleets: By name, which begins with the delivery.
        is_exclusive: Whether S4 must hold; otherwise it is only counted.

    Raises:
        AssertionError: A rule was broken; ``found`` has every case.
    """
    senders = [
        Sender.of(worker.notes_path, fleet.settings["group_id"])
        for fleet in fleets.values()
        for worker in fleet.workers
    ]
    operations = ClusterHistory(domain.history().entries, senders).operations()
    figures = []
    for name, fleet in fleets.items():
        (topic,) = fleet.settings["topics"]
        verdict = judge(
            operations,
            group_id=fleet.settings["group_id"],
            delivery=Delivery(name[:3]),
            ends=domain.of(topic),
            h_ms=found.h_ms,
        )
        found.history[name] = as_figures(verdict)
        figures += [
            finding
            for finding in verdict.findings
            if is_exclusive or finding.invariant != "S4"
        ]
    assert not figures, f"by the history: {figures[:3]}"
