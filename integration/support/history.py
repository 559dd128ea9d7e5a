"""The history by the coordination log itself, to check guarantees.

Reads the topic with a plain Kafka client and folds it with the production fold;
it relies on no engine and no consumer of the product.
"""

import time
from collections import defaultdict
from itertools import pairwise

import attrs
from kafka import KafkaConsumer
from kafka import TopicPartition as Place
from kafka.errors import KafkaError, KafkaTimeoutError

from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import Member
from kafka_marshal.protocol.state import ACCEPTED, KeyState, Transition, WorldState
from kafka_marshal.protocol.types import Key, LogEntry

READ_MS = 10_000
QUESTION_MS = 5_000
READ_S_MAX = 30
ATTEMPTS = 4


@attrs.frozen
class Step:
    """One entry's effect on one key or group.

    Attributes:
        t: Coordinating partition.
        offset: Offset there.
        leader_epoch: Leader epoch of the entry.
        timestamp_ms: When the broker appended it.
        transition: The transition that the fold returned.
        position: The key's position afterwards, None without a key.
    """

    t: int
    offset: int
    leader_epoch: int
    timestamp_ms: int
    transition: Transition
    position: int | None = None

    @property
    def effect(self):
        return self.transition.effect

    @property
    def key(self):
        return self.transition.key

    @property
    def record(self):
        return self.transition.record

    @property
    def client_id(self):
        return None if self.record is None else self.record.client_id


@attrs.frozen
class Tenure:
    """One claim from its winning record to its end.

    Attributes:
        key: What was held.
        client_id: Who held it.
        epoch: Offset of the winning record.
        token: Fencing token, as text.
        effect: ``claimed`` or ``resumed``.
        begun_ms: When the winning record was appended.
        renewed_ms: When the last record that renewed it was appended.
        start: Position when it began.
        position: Position when it ended.
        ended_ms: When it ended, None while it lasts.
        ended_by: ``released``, ``claimed`` or ``resumed``, None while it lasts.
        reason: Why it was released, as the record has it, None if it was not.
    """

    key: Key
    client_id: str
    epoch: int
    token: str
    effect: str
    begun_ms: int
    renewed_ms: int
    start: int | None
    position: int | None
    ended_ms: int | None = None
    ended_by: str | None = None
    reason: str | None = None


@attrs.frozen
class Grant:
    """A range of offsets that was granted, at most once."""

    key: Key
    client_id: str
    token: str
    first: int
    last: int
    timestamp_ms: int


def parsed(token: str) -> tuple[int, ...]:
    """Return the numbers by which a token is compared."""
    return tuple(map(int, token.split(".")))


class History:
    """The whole coordination log, folded; ``read`` continues where it stopped.

    Attributes:
        steps: Every transition, by coordinating partition and offset.
        worlds: The state of every coordinating partition at the end.
        entries: The log itself, by coordinating partition.
    """

    def __init__(self, servers: str, topic: str) -> None:
        self.steps: list[Step] = []
        self.entries: dict[int, list[LogEntry]] = defaultdict(list)
        self.worlds: dict[int, WorldState] = {}
        self._servers, self._topic = servers, topic
        self._next: dict[Place, int] = {}
        self._consumer: KafkaConsumer | None = self._connect()

    def _connect(self) -> KafkaConsumer:
        consumer = KafkaConsumer(
            bootstrap_servers=self._servers,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            bootstrap_timeout_ms=READ_MS,
            # A request to a broker that is gone is repeated in time.
            request_timeout_ms=QUESTION_MS,
        )
        partitions = sorted(consumer.partitions_for_topic(self._topic))
        self._places = [Place(self._topic, t) for t in partitions]
        consumer.assign(self._places)
        consumer.seek_to_beginning(*(p for p in self._places if p not in self._next))
        for place, offset in self._next.items():
            consumer.seek(place, offset)
        return consumer

    def read(self) -> "History":
        """Read to the end as of now, and fold."""
        known_count = len(self.steps)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if self._consumer is None:
                    self._consumer = self._connect()
                self._read_on()
                break
            except KafkaError:
                # This client may still use a leader that has been replaced.
                self.close()
                if attempt == ATTEMPTS:
                    raise
        if len(self.steps) > known_count:
            self.steps.sort(key=lambda step: (step.t, step.offset))
        return self

    def _read_on(self) -> None:
        ends = self._consumer.end_offsets(self._places)
        at = self._consumer.position
        deadline = time.monotonic() + READ_S_MAX
        while any(at(place) < ends[place] for place in self._places):
            if time.monotonic() > deadline:
                raise KafkaTimeoutError(f"the end of {self._topic} was not reached")
            for place, records in self._consumer.poll(timeout_ms=200).items():
                for record in records:
                    self._fold(place.partition, record)
                    self._next[place] = record.offset + 1

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False)
            self._consumer = None

    def _fold(self, t: int, record) -> None:
        world = self.worlds.setdefault(t, WorldState(t))
        entry = LogEntry(
            offset=record.offset,
            leader_epoch=record.leader_epoch,
            timestamp_ms=record.timestamp,
            timestamp_type=record.timestamp_type,
            value=record.value,
        )
        self.entries[t].append(entry)
        for transition in apply(world, entry):
            known = world.keys.get(transition.key) if transition.key else None
            self.steps.append(
                Step(
                    t=t,
                    offset=entry.offset,
                    leader_epoch=entry.leader_epoch,
                    timestamp_ms=entry.timestamp_ms,
                    transition=transition,
                    position=None if known is None else known.next_unclaimed(),
                )
            )

    def states(self, group_id: str) -> dict[Key, KeyState]:
        """Return every key of a group that was ever claimed, sorted."""
        found = [
            (key, known)
            for world in self.worlds.values()
            for key, known in world.keys.items()
            if key.group_id == group_id
        ]
        return dict(sorted(found, key=lambda row: row[0]))

    def of(self, *effects: str, group_id: str | None = None) -> list[Step]:
        """Return the accepted steps with one of these effects, in time order."""
        found = [
            step
            for step in self.steps
            if step.transition.outcome == ACCEPTED
            and step.effect in effects
            and (group_id is None or step.record.group_id == group_id)
        ]
        return sorted(found, key=lambda step: (step.timestamp_ms, step.t, step.offset))

    def reasons(self, *, client_id: str | None = None) -> list[str]:
        """Return why records were refused or ignored, of one client or of all."""
        return [
            step.transition.reason
            for step in self.steps
            if step.transition.reason is not None
            and (client_id is None or step.client_id == client_id)
        ]

    def tenures(self, group_id: str) -> dict[Key, list[Tenure]]:
        """Return the claims of each key in order, over all coordinating partitions.

        In one partition they do not overlap, by construction of the fold (S1). A key
        may move if the partition count changes; tokens define the order.
        """
        found: dict[Key, list[Tenure]] = defaultdict(list)
        for (_, key), tenures in self._tenures_by_place(group_id).items():
            found[key] += tenures
        for tenures in found.values():
            tenures.sort(key=lambda tenure: parsed(tenure.token))
            for index, (one, two) in enumerate(pairwise(tenures)):
                if one.ended_ms is None:
                    tenures[index] = attrs.evolve(
                        one, ended_ms=two.begun_ms, ended_by=two.effect
                    )
        return dict(found)

    def _tenures_by_place(self, group_id: str) -> dict[tuple[int, Key], list[Tenure]]:
        """Return the claims by coordinating partition and key."""
        found: dict[tuple[int, Key], list[Tenure]] = defaultdict(list)
        open_now: dict[tuple[int, Key], Tenure] = {}
        for step in self.steps:
            key = step.key
            if (
                step.transition.outcome != ACCEPTED
                or key is None
                or key.group_id != group_id
            ):
                continue
            place = step.t, key
            now = open_now.get(place)
            if step.effect in {"claimed", "resumed"}:
                if now is not None:
                    found[place][-1] = attrs.evolve(
                        now, ended_ms=step.timestamp_ms, ended_by=step.effect
                    )
                open_now[place] = Tenure(
                    key=key,
                    client_id=step.client_id,
                    epoch=step.offset,
                    token=self._token(step),
                    effect=step.effect,
                    begun_ms=step.timestamp_ms,
                    renewed_ms=step.timestamp_ms,
                    start=step.position,
                    position=step.position,
                )
                found[place].append(open_now[place])
                continue
            if step.effect == "imported":
                # The key was in another partition meanwhile: its earlier owner
                # here does not hold it any more.
                open_now.pop(place, None)
                continue
            if now is None:
                continue
            now = attrs.evolve(now, position=step.position)
            if step.effect == "renewed":
                now = attrs.evolve(now, renewed_ms=step.timestamp_ms)
            if step.effect == "released":
                now = attrs.evolve(
                    now,
                    ended_ms=step.timestamp_ms,
                    ended_by="released",
                    reason=step.record.reason,
                )
            found[place][-1] = now
            if step.effect == "released":
                del open_now[place]
            else:
                open_now[place] = now
        return found

    def grants(self, group_id: str) -> dict[Key, list[Grant]]:
        """Return every granted range, in the order of tokens."""
        found: dict[Key, list[Grant]] = defaultdict(list)
        tokens: dict[tuple[int, Key], str] = {}
        for step in self.steps:
            if step.effect in {"claimed", "resumed"}:
                tokens[step.t, step.key] = self._token(step)
            if step.transition.outcome == ACCEPTED and step.effect == "granted":
                key, detail = step.key, step.transition.detail
                if key.group_id == group_id:
                    found[key].append(
                        Grant(
                            key=key,
                            client_id=step.client_id,
                            token=tokens[step.t, key],
                            first=detail["first"],
                            last=detail["last"],
                            timestamp_ms=step.timestamp_ms,
                        )
                    )
        for grants in found.values():
            grants.sort(key=lambda grant: (parsed(grant.token), grant.first))
        return dict(found)

    def _token(self, step: Step) -> str:
        era = self.worlds[step.t].era_at(step.offset)
        return f"{era}.{step.leader_epoch}.{step.offset}"

    def members(self, group_id: str) -> list[Member]:
        """Return every announcement of a group's members."""
        return [step.record for step in self.of("member", group_id=group_id)]

    def counters(self) -> dict[str, int]:
        """Return the counters of all coordinating partitions, added up."""
        total: dict[str, int] = defaultdict(int)
        for world in self.worlds.values():
            for name, count in world.soft.counters.items():
                total[name] += count
        return dict(total)
