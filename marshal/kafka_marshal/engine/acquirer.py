"""Acquires keys: sends claims that can be won."""

import msgspec

from kafka_marshal.engine.claim_index import ClaimIndex
from kafka_marshal.engine.context import Context, awaited
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.meters import vacancy
from kafka_marshal.engine.outbox import Outbox
from kafka_marshal.engine.standbys import Standbys
from kafka_marshal.engine.subscription import SubscriptionSet
from kafka_marshal.protocol.claiming import (
    Claimant,
    PreviousLife,
    estimate,
    key_secret,
    resumable,
)
from kafka_marshal.protocol.records import ClaimingPartition, Resume
from kafka_marshal.protocol.state import KeyState, why_to_tags
from kafka_marshal.protocol.types import Key, encodable

JITTER_FREE_MS_MAX = 50
JITTER_TAKEOVER_MS_MAX = 1_000
UNDER_WAY_MIN = 8
UNDER_WAY_MAX = 256
CLAIMS_NOTED_MAX = 100_000


class Acquirer:
    """Drives the claims of all keys that a session wants and does not own."""

    __slots__ = (
        "_claimant",
        "_claimed_ms",
        "_context",
        "_lives",
        "_outbox",
        "_since_ms",
        "_standbys",
        "_unresumable",
        "_window",
        "_won_count",
    )

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        *,
        lives: tuple[PreviousLife, ...],
        standbys: Standbys,
    ) -> None:
        self._context = context
        self._claimant: Claimant = outbox.claimant
        self._outbox = outbox
        self._lives = lives
        self._standbys = standbys
        self._unresumable: set[Key] = set()
        # Local time at which each claim was read back as accepted. Keys without an
        # entry count as claimed at `_since_ms`.
        self._claimed_ms: dict[Key, int] = {}
        self._since_ms: int | None = None
        self._window = UNDER_WAY_MIN
        self._won_count = 0

    def drive(self, index: ClaimIndex, wanted: SubscriptionSet, *, now_ms: int) -> None:
        """Send the claims and resumes that are due.

        The number of claims in flight starts small and grows with each won claim: the
        first verdicts show which other members exist, so members of a fleet that starts
        on thousands of free keys do not each claim all of them. A topic that may be an
        earlier topic of the same name is looked up first.
        """
        if not index.contending:
            return
        if self._since_ms is None:
            self._since_ms = now_ms
        won = index.won_count - self._won_count
        self._won_count = index.won_count
        self._window = min(self._window + won, UNDER_WAY_MAX)
        under_way = 0
        for holding in list(index.contending.values()):
            if under_way < self._window or holding.claim.is_verdict_pending:
                topic_id = wanted.topic_id(holding.key)
                seen_ms = wanted.seen_ms(holding.key)
                if self._may_be_earlier(holding.key, topic_id, seen_ms=seen_ms):
                    wanted.doubt([holding.key.topic])
                    continue
                self._drive(
                    holding,
                    now_ms,
                    topic_id=topic_id,
                    is_planned=wanted.is_named_by_plan(holding.key),
                )
                under_way += holding.claim.is_verdict_pending

    def note_claim(self, key: Key, now_ms: int) -> None:
        """Record that a claim was accepted: its topic existed at that time."""
        if len(self._claimed_ms) >= CLAIMS_NOTED_MAX:
            # The forgotten keys count as claimed now: one metadata look-up clears them.
            self._claimed_ms.clear()
            self._since_ms = now_ms
        self._claimed_ms[key] = now_ms

    def _may_be_earlier(
        self, key: Key, topic_id: bytes | None, *, seen_ms: int
    ) -> bool:
        """Return whether a topic may be older than the topic of the last claim.

        The log refuses claims with an earlier topic id that it knows. If it does not
        know the earlier id, it accepts the claim and retires the id of the later topic:
        nobody can claim that topic from then on.
        """
        known = self._context.replica_of(key).world.keys.get(key)
        if known is None or None in {topic_id, known.topic_id}:
            return False
        if topic_id in known.retired_topic_ids:
            return True
        claimed_ms = self._claimed_ms.get(key, self._since_ms or 0)
        return topic_id != known.topic_id and seen_ms < claimed_ms

    def _drive(
        self,
        holding: Holding,
        now_ms: int,
        *,
        topic_id: bytes | None,
        is_planned: bool,
    ) -> None:
        claim = holding.claim
        context = self._context
        replica = context.replica_of(claim.key)
        if replica.world.partition in context.rebuilding:
            return  # the owner is not known yet
        if context.placement.awaits_import(claim.key) or context.placement.is_torn:
            return  # the log will show the import of the key, or the missing fence
        if awaited(context, claim.key, topic_id=topic_id) is not None:
            return  # PROTOCOL 9.10: another partition has its earlier records
        elapsed_ms = replica.elapsed_ms(now_ms)
        world, owner = replica.world, self._claimant.owner
        guess = estimate(world, claim.key, elapsed_ms=elapsed_ms, claimant=owner)
        known, wait_ms = guess.known, guess.wait_ms
        life = self._life_to_resume(claim.key, known, elapsed_ms=elapsed_ms)
        heartbeat_ms = context.heartbeat_interval_ms
        least_ms = limit_ms = 0  # no competitor: the first claim needs no jitter
        if context.has_company(claim.claimant):
            limit_ms = min(heartbeat_ms // 10, JITTER_FREE_MS_MAX)
        if known is not None and known.owner is not None:
            least_ms, limit_ms = self._standbys.delay_ms(
                claim.key,
                known.owner.client_id,
                limit_ms=min(heartbeat_ms // 10, JITTER_TAKEOVER_MS_MAX),
            )
        if guess.is_named or is_planned:
            least_ms = limit_ms = 0  # other claims are refused, or sent later
        if life is not None:
            wait_ms = least_ms = limit_ms = 0
        jitter_ms = least_ms + context.ports.entropy.below(limit_ms + 1)
        answer_ms = max(heartbeat_ms // 2, 1)
        if claim.wants_to_claim(
            now_ms, wait_ms, jitter_ms=jitter_ms, answer_ms=answer_ms
        ):
            self._send(holding, known, life, topic_id=topic_id)

    def on_refused(self, key: Key, record: ClaimingPartition) -> None:
        """Handle a refused claim: another member was faster.

        After a refused resume the key is claimed without one.
        """
        self._window = UNDER_WAY_MIN
        if record.resume is not None:
            self._unresumable.add(key)

    def _life_to_resume(
        self, key: Key, known: KeyState | None, *, elapsed_ms: int
    ) -> PreviousLife | None:
        world = self._context.replica_of(key).world
        if key in self._unresumable or world.pause_of(key) is not None:
            return None
        return resumable(
            known,
            self._lives,
            client_id=self._claimant.owner.client_id,
            log_time_ms=world.now_ms + elapsed_ms,
        )

    def _send(
        self,
        holding: Holding,
        known: KeyState | None,
        life: PreviousLife | None,
        *,
        topic_id: bytes | None,
    ) -> None:
        claim = holding.claim
        expected_epoch = None
        if topic_id is not None and known is not None and known.topic_id is not None:
            # PROTOCOL 4.3: a claim with another topic_id needs the key's epoch.
            expected_epoch = known.epoch if known.topic_id != topic_id else None
        resume = None
        if life is not None and known is not None:
            secret = key_secret(life.master, claim.key)
            resume = Resume(life.incarnation, known.epoch, secret)
        config = self._context.replica_of(claim.key).world.config
        generation = (config or self._context.settled).generation
        why = self._why(holding, known, resumes=life is not None)
        tags = why_to_tags(why, self._claimant.person)
        seq, sent_ms = self._outbox.send(
            self._context.partition_of(claim.key),
            lambda seq: msgspec.structs.replace(
                claim.claim_record(
                    seq,
                    generation,
                    topic_id=topic_id,
                    expected_epoch=expected_epoch,
                    resume=resume,
                ),
                tags=tags,
            ),
            key=claim.key,
        )
        claim.claim_sent(seq, sent_ms)
        holding.vacancy = vacancy(known, resumes=life is not None)
        holding.predecessor = None if known is None else known.owner

    def _why(self, holding: Holding, known: KeyState | None, *, resumes: bool) -> str:
        """Return the reason for the claim, as the claim record states it."""
        if known is None:
            state = "never claimed before"
        elif resumes:
            state = "held by an earlier process of this client"
        elif known.owner is not None:
            state = f"{known.owner.client_id} is stale"
        else:
            state = "free"
        return encodable(f"{holding.why}; {state}") if holding.why else state
