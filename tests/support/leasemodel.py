"""Two clients and one key: every interleaving of time, appends, reads and crashes.

The fold is the product's ``apply``, a client is the product's ``Claim``. The model adds
records in flight and verdicts not read. Times are ages in ticks and saturate where they
change nothing, and epochs are renamed, so that time and the length of the log are
unbounded; the numbers of records in flight and of unread verdicts are bounded.
"""

from functools import cache, lru_cache
from hashlib import sha256
from itertools import count
from typing import NamedTuple

import msgspec
from logkit import KEY, OP, beat, config, fence, ident, release
from search import Broken

from kafka_marshal.protocol.claiming import (
    NO_LEASE,
    Claim,
    Claimant,
    Ending,
    Lease,
    Phase,
    key_secret,
)
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.items import Fence, Pause
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import (
    SECOND_LEVEL,
    ClaimingPartition,
    ReleaseGroup,
    Resume,
)
from kafka_marshal.protocol.state import (
    ACCEPTED,
    GroupState,
    KeyState,
    Transition,
    WorldState,
)
from kafka_marshal.protocol.types import LogEntry, Owner, Token

H_MS = 1_000
NOW_MS = 10**9
NEXT_OFFSET = 1_000
MASTER = b"m" * 32
TOKEN = Token(1, 0, 0)
CONFIG = config(h=H_MS)
NOBODY = -1
RELEASED_EPOCH = 500  # no record names it, so any will do
CLAIM, BEAT, RELEASE, RESUME, FOREIGN = "claim", "beat", "release", "resume", "foreign"


def life_of(incarnation):
    """Return the life of an incarnation: its number."""
    return int(incarnation.decode().strip(".").split()[1])


class Sent(NamedTuple):
    """A record in flight."""

    kind: str
    life: int  # number of the sender's incarnation
    epoch: int
    age: int  # ticks since it was sent
    is_known: bool  # whether the sending claim still waits for this record


class UnreadVerdict(NamedTuple):
    """A verdict that a client has not read."""

    kind: str
    effect: str | None  # None if refused or ignored
    epoch: int
    age: int
    is_known: bool
    reason: str | None = None
    h: int = 0  # heartbeat interval in force at the record


class Fold(NamedTuple):
    """The state of the log, as ``apply`` left it."""

    owner: int  # a life, or NOBODY
    epoch: int
    age: int  # ticks of log time since the last renewal
    gap: int | None  # ticks since the last entry; None in a new leader epoch
    is_paused: bool
    is_known: bool  # whether the key was ever claimed
    h: int  # heartbeat interval of the Config in force
    renewal_h: int  # heartbeat interval of the last renewal
    fenced: tuple[int, ...] = ()  # fenced lives


class Client(NamedTuple):
    life: int
    phase: Phase
    epoch: int
    age: int  # ticks since the sending of the last renewal
    h: int  # heartbeat interval of that renewal
    sent: tuple[Sent, ...]
    inbox: tuple[UnreadVerdict, ...]
    before: tuple[int, int]  # life and epoch that a restart may resume


class World(NamedTuple):
    fold: Fold
    clients: tuple[Client, ...]
    skew: int


class LeaseModel:
    """S4: at one instant, at most one client passes its lease check.

    Options set the size of the world, and may break a rule of the *clients*;
    ``variants`` plants broken rules of the product.
    """

    def __init__(
        self,
        *,
        ticks_per_h=1,
        in_flight=1,
        unread=1,
        crashes=True,
        resumes=False,
        failovers=False,
        pauses=False,
        fences=False,
        twins=False,
        gives_up=True,
        intervals=(H_MS,),
        acknowledged=False,
        judged_by_sender=False,
        bare_restart=False,
        from_read_back=False,
        by_newest_h=False,
    ):
        self.tick_ms = H_MS // ticks_per_h
        self.in_flight, self.unread = in_flight, unread
        self.crashes, self.resumes = crashes, resumes
        self.failovers, self.pauses = failovers, pauses
        self.fences = fences
        self.twins, self.gives_up = twins, gives_up
        self.acknowledged = acknowledged
        self.judged_by_sender = judged_by_sender
        self.bare_restart = bare_restart
        self.from_read_back = from_read_back
        self.by_newest_h = by_newest_h
        self.intervals = (
            intervals  # intervals that a Config may have, first that of the first
        )
        self.void = 2 * max(intervals) // self.tick_ms  # local ages saturate here
        self.stale = self.void + 1  # log ages saturate here
        self.append = cache(self._append)
        # Most steps lead to known worlds; bounded, as large searches have millions.
        self.named = lru_cache(1 << 16)(self._named)
        self.is_valid = cache(self._is_valid)
        self.claimant = cache(self._claimant)

    # --- clients

    def _claimant(self, life):
        """Return the claimant of a life; client 0 has even lives, client 1 odd ones."""
        name = "c0" if self.twins else f"c{life % 2}"
        return Claimant(Owner(name, ident(f"life {life}")), "g", master=MASTER)

    def owner(self, life):
        return self.claimant(life).owner

    def claim(self, client, waits=None):
        """Return the product's ``Claim`` of a client, in its current state."""
        it = Claim(self.claimant(client.life), KEY)
        it.phase = client.phase
        if it.is_owned:
            it.epoch = client.epoch
            it.heartbeat_interval_ms = client.h
            it._base_ms = NOW_MS - client.age * self.tick_ms
            it.lease = Lease.since(it._base_ms, client.h)
        if waits is not None and waits.is_known:
            it._sent_ms[1] = NOW_MS - waits.age * self.tick_ms
        return it

    def after(self, client, it, **rest):
        """Return the client after a step of its claim; after an end it starts again."""
        if it.phase is Phase.STARTING:
            it.start(None)
        if it.phase is Phase.ENDED:
            assert it.lease == NO_LEASE
            forgotten = [s._replace(is_known=False) for s in client.sent]
            unconfirmed = [h._replace(is_known=False) for h in client.inbox]
            rest.setdefault("sent", tuple(forgotten))
            rest.setdefault("inbox", tuple(unconfirmed))
            rest.setdefault("phase", Phase.WAITING)
        if not it.is_owned:
            rest.setdefault("phase", it.phase)
            return client._replace(epoch=NOBODY, age=0, h=0, **rest)
        h = it.heartbeat_interval_ms
        age = min(2 * h // self.tick_ms, (NOW_MS - it._base_ms) // self.tick_ms)
        return client._replace(phase=it.phase, epoch=it.epoch, age=age, h=h, **rest)

    # --- the world

    def start(self):
        fold = Fold(
            owner=NOBODY,
            epoch=NOBODY,
            age=0,
            gap=0,
            is_paused=False,
            is_known=False,
            h=self.intervals[0],
            renewal_h=0,
        )
        clients = tuple(
            Client(
                life=n,
                phase=Phase.WAITING,
                epoch=NOBODY,
                age=0,
                h=0,
                sent=(),
                inbox=(),
                before=(NOBODY, NOBODY),
            )
            for n in range(2)
        )
        return World(fold, clients, 0)

    def broken(self, world):
        holders = sum(self.is_valid(c.phase, c.age, c.h) for c in world.clients)
        return "S4: two hold the key at one instant" if holders > 1 else None

    def _is_valid(self, phase, age, h):
        client = Client(
            life=0,
            phase=phase,
            epoch=NOBODY,
            age=age,
            h=h,
            sent=(),
            inbox=(),
            before=(NOBODY, NOBODY),
        )
        return self.claim(client).is_valid(NOW_MS)

    def steps(self, world):
        for label, after in self._steps(world):
            swap, named = self.named(after)
            yield label + swap, named

    def _named(self, world):
        """Return the renamed world, and an addition to the label of the step."""
        is_swapped = _shape(world, 1) < _shape(world, 0)
        swap = "; P0 and P1 swap names" if is_swapped else ""
        return swap, self.renamed(world, is_swapped=is_swapped)

    def _steps(self, world):
        yield "a tick", self._tick(world)
        fold = world.fold
        if self.failovers and fold.gap is not None:
            after = fold._replace(gap=None)
            skew = 5 - world.skew
            yield (
                f"the leader fails over, skew {skew}",
                World(after, world.clients, skew),
            )
        if self.pauses:
            after, _ = self.append(fold, None, world.skew)
            name = "the pause ends" if fold.is_paused else "the group is paused"
            yield name, world._replace(fold=after)
        if self.fences:
            for index, client in enumerate(world.clients):
                after, _ = self.append(fold, ("fence", client.life), world.skew)
                yield f"P{index} is fenced", world._replace(fold=after)
        for interval in self.intervals:
            if interval != fold.h:
                after, _ = self.append(fold, interval, world.skew)
                yield f"a Config says H = {interval}", world._replace(fold=after)
        for index, client in enumerate(world.clients):
            yield from self._acts(world, index, client)
            yield from self._lands(world, index, client)
            if client.inbox:
                yield self._reads(world, index, client)

    def _tick(self, world):
        fold = world.fold
        gap = None if fold.gap is None else min(self.stale, fold.gap + 1)
        older = tuple(
            c._replace(
                age=min(2 * c.h // self.tick_ms, c.age + 1),
                sent=tuple(s._replace(age=min(self.void, s.age + 1)) for s in c.sent),
                inbox=tuple(h._replace(age=min(self.void, h.age + 1)) for h in c.inbox),
            )
            for c in world.clients
        )
        return world._replace(fold=fold._replace(gap=gap), clients=older)

    def _put(self, world, index, client):
        clients = list(world.clients)
        clients[index] = client
        return world._replace(clients=tuple(clients))

    # --- steps of a client

    def _acts(self, world, index, client):
        name = f"P{index}"
        it = self.claim(client)
        room = len(client.sent) < self.in_flight
        if it.is_owned:
            if it.check_lease(NOW_MS):
                yield (
                    f"{name} stops: hard stop",
                    self._release(world, index, client, it),
                )
            else:
                if room:
                    beat = Sent(
                        kind=BEAT,
                        life=client.life,
                        epoch=client.epoch,
                        age=0,
                        is_known=True,
                    )
                    beating = client._replace(sent=(*client.sent, beat))
                    yield f"{name} sends a beat", self._put(world, index, beating)
                if self.gives_up:
                    it.end(Ending("released", was_lost=False))
                    yield f"{name} lets go", self._release(world, index, client, it)
        elif room:
            yield from self._contends(world, index, client)
        if self.crashes and (client.phase is not Phase.WAITING or client.sent):
            yield f"{name} crashes and restarts", self._restart(world, index, client)
        for number, sent in enumerate(client.sent):
            left = client.sent[:number] + client.sent[number + 1 :]
            lost = self._put(world, index, client._replace(sent=left))
            yield f"P{index}'s {sent.kind} is lost", lost

    def _contends(self, world, index, client):
        name = f"P{index}"
        it = self.claim(client)
        if self.judged_by_sender and not self._looks_free(world, client):
            return
        it.phase = Phase.WAITING  # as ``wants_to_claim`` does without a verdict
        it.claim_sent(1, NOW_MS)
        sent = Sent(kind=CLAIM, life=client.life, epoch=NOBODY, age=0, is_known=True)
        claiming = self.after(client, it, sent=(*client.sent, sent))
        yield f"{name} sends a claim", self._put(world, index, claiming)
        if self.resumes and client.before[0] != NOBODY:
            sent = Sent(
                kind=RESUME,
                life=client.life,
                epoch=client.before[1],
                age=0,
                is_known=True,
            )
            resuming = self.after(client, it, sent=(*client.sent, sent))
            yield f"{name} asks to resume", self._put(world, index, resuming)
        if self.bare_restart and world.fold.owner != NOBODY:
            sent = Sent(
                kind=BEAT,
                life=client.life,
                epoch=world.fold.epoch,
                age=0,
                is_known=True,
            )
            beating = client._replace(sent=(*client.sent, sent))
            yield f"{name} sends a bare heartbeat", self._put(world, index, beating)

    def _looks_free(self, world, client):
        fold = world.fold
        gap = 0 if fold.gap is None else fold.gap
        return fold.owner == NOBODY or fold.age + gap >= self.stale

    def _release(self, world, index, client, it):
        epoch = client.epoch
        ended = self.after(client, it)
        if len(ended.sent) < self.in_flight:
            sent = Sent(
                kind=RELEASE,
                life=client.life,
                epoch=epoch,
                age=self.void,
                is_known=False,
            )
            ended = ended._replace(sent=(*ended.sent, sent))
        return self._put(world, index, ended)

    def _restart(self, world, index, client):
        life = next(n for n in count(index, 2) if n not in self._lives(world))
        ghosts = tuple(s._replace(is_known=False, age=self.void) for s in client.sent)
        before = (NOBODY, NOBODY)
        if self.resumes and client.phase is Phase.HELD:
            before = (client.life, client.epoch)
        reborn = Client(
            life=life,
            phase=Phase.WAITING,
            epoch=NOBODY,
            age=0,
            h=0,
            sent=ghosts,
            inbox=(),
            before=before,
        )
        return self._put(world, index, reborn)

    def _lives(self, world):
        lives = {world.fold.owner}
        for client in world.clients:
            lives |= {client.life, client.before[0]} | {s.life for s in client.sent}
        return lives

    # --- records that land

    def _lands(self, world, index, client):
        for number, sent in enumerate(client.sent):
            left = client.sent[:number] + client.sent[number + 1 :]
            # The fold depends neither on the age nor on the waiting claim.
            record = sent._replace(age=0, is_known=False)
            before = client.before if sent.kind == RESUME else None
            fold, transition = self.append(world.fold, (record, before), world.skew)
            effect, reason, _ = transition
            after = self._put(world, index, client._replace(sent=left))
            after = after._replace(fold=fold)
            received = self._deliver(after, index, sent, transition)
            if received is None:
                continue
            label = f"P{index}'s {sent.kind} lands: {effect or reason}"
            yield label, received

    def _deliver(self, world, index, sent, transition):
        """Queue the verdict for the clients it concerns; None if a queue is full."""
        effect, reason, epoch = transition
        clients = list(world.clients)
        mine = clients[index]
        if sent.life == mine.life and sent.kind != RELEASE:
            kind = BEAT if sent.kind == BEAT else CLAIM
            at = sent.epoch if sent.kind == BEAT else epoch
            h = world.fold.h if effect else 0
            if effect == "renewed" and world.fold.renewal_h != h:
                h = 0  # 4.5: the key kept a longer lease
            received = UnreadVerdict(
                kind=kind,
                effect=effect,
                epoch=at,
                age=sent.age,
                is_known=sent.is_known,
                reason=reason,
                h=h,
            )
            clients[index] = mine._replace(inbox=(*mine.inbox, received))
            if self.acknowledged and sent.kind == BEAT:
                clients[index] = self._acknowledge(clients[index], sent)
        other = clients[1 - index]
        if effect in {"claimed", "resumed"} and other.phase in {
            Phase.STARTING,
            Phase.HELD,
            Phase.CLAIMING,
        }:
            received = UnreadVerdict(
                kind=FOREIGN, effect=effect, epoch=epoch, age=self.void, is_known=False
            )
            clients[1 - index] = other._replace(inbox=(*other.inbox, received))
        if any(len(client.inbox) > self.unread for client in clients):
            return None
        return world._replace(clients=tuple(clients))

    def _acknowledge(self, client, sent):
        it = self.claim(client)
        if it.is_owned and it.epoch == sent.epoch and sent.age < client.age:
            return client._replace(age=sent.age)
        return client

    def _reads(self, world, index, client):
        received = client.inbox[0]
        if self.by_newest_h:
            received = received._replace(h=world.fold.h)
        client = client._replace(inbox=client.inbox[1:])
        it = self.claim(client, received)
        owner = self.owner(client.life)
        record = ClaimingPartition(
            client_id=owner.client_id,
            group_id="g",
            incarnation=owner.incarnation,
            seq=1,
            generation=1,
            topic="t",
            partition=0,
            topic_id=None,
            resume_hash=None,
            expected_epoch=None,
            resume=None,
        )
        outcome = ACCEPTED if received.effect else "refused"
        if received.kind == BEAT:
            outcome = ACCEPTED if received.effect else "ignored"
        transition = Transition(
            offset=received.epoch,
            outcome=outcome,
            effect=received.effect,
            reason=received.reason,
            key=KEY,
            epoch=received.epoch,
            detail=None,
            record=record,
        )
        label = (
            f"P{index} reads its {received.kind}: {received.effect or received.reason}"
        )
        if received.kind == FOREIGN:
            other = self.owner(1 - index)
            it.on_foreign(_of(transition, other))
            return f"P{index} reads of the other's claim", self._put(
                world, index, self.after(client, it)
            )
        if received.kind == BEAT:
            return label, self._put(
                world, index, self._read_beat(client, it, received, transition)
            )
        if self.from_read_back and received.is_known:
            it._sent_ms[1] = NOW_MS
        won = it.on_claim_verdict(
            transition,
            seq=1,
            now_ms=NOW_MS,
            heartbeat_interval_ms=received.h,
            token=TOKEN,
        )
        after = self.after(client, it)
        if received.effect and not won and len(after.sent) < self.in_flight:
            # PROTOCOL 5.3: a client releases a claim at once that it did not expect.
            ghost = Sent(
                kind=RELEASE,
                life=client.life,
                epoch=received.epoch,
                age=self.void,
                is_known=False,
            )
            after = after._replace(sent=(*after.sent, ghost))
        return label, self._put(world, index, after)

    def _read_beat(self, client, it, received, transition):
        sent_ms = NOW_MS - received.age * self.tick_ms
        if self.from_read_back:
            sent_ms = NOW_MS
        if self.bare_restart and received.effect == "renewed" and not it.is_owned:
            it.phase, it.epoch, it._base_ms = Phase.HELD, received.epoch, sent_ms
            it.heartbeat_interval_ms = received.h
            return self.after(client, it)
        if it.epoch == received.epoch:
            it.on_beat_verdict(
                transition, sent_ms=sent_ms, heartbeat_interval_ms=received.h or None
            )
        return self.after(client, it)

    # --- the fold

    def _append(self, fold, what, skew):
        """Fold one record with the product; return the new state and the verdict."""
        state = self._state(fold, skew)
        now_ms = NOW_MS + skew * H_MS
        known = state.keys.get(KEY)
        was = None if known is None else known.epoch
        if what is None:
            record = self._pause(fold)
        elif isinstance(what, int):
            record = config(2, era=2, h=what, level=SECOND_LEVEL)
        elif what[0] == "fence":
            name, inc = self.owner(what[1])
            record = fence(name, inc=inc)
        else:
            record = self._record(*what)
        entry = LogEntry(
            offset=NEXT_OFFSET,
            leader_epoch=7,
            timestamp_ms=now_ms,
            timestamp_type=1,
            value=encode(record),
        )
        (transition,) = apply(state, entry)
        after = state.keys.get(KEY)
        pause = state.active_pause("g")
        owner, age, epoch, h = NOBODY, 0, NOBODY, 0
        if after is not None and after.owner is not None:
            h = after.heartbeat_interval_ms
            owner = life_of(after.owner.incarnation)
            age = after.age_ms(state.now_ms) // self.tick_ms
            age = min(2 * h // self.tick_ms + 1, age)
            epoch = after.epoch
            if was is not None and epoch < was:
                raise Broken("S1, S7: epochs and tokens grow")
        folded = Fold(
            *(owner, epoch, age, 0, pause is not None, after is not None),
            *(state.config.heartbeat_interval_ms, h),
            tuple(sorted(life_of(name[2]) for name in state.fences)),
        )
        return folded, (transition.effect, transition.reason, epoch)

    def _state(self, fold, skew):
        leader = 6 if fold.gap is None else 7
        since_ms = (fold.gap or 0) * self.tick_ms
        now_ms = NOW_MS + skew * H_MS
        state = WorldState(
            0,
            next_offset=NEXT_OFFSET,
            leader_epoch=leader,
            epoch_time_ms=None if fold.gap is None else now_ms - since_ms,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
            config=config(h=fold.h, level=SECOND_LEVEL),
        )
        group = GroupState(key_count=int(fold.is_known))
        if fold.is_paused:
            group.pause = Pause(
                op_id=OP,
                client_id="admin",
                incarnation=ident("admin"),
                seq=1,
                incarnations=(ident("admin"),),
                until_ms=2**60,
            )
            state.lapses_ms = 2**60
        group.fences = tuple(
            Fence(number, *self.owner(life)) for number, life in enumerate(fold.fenced)
        )
        state.fences = {("g", *each[1:]): each.offset for each in group.fences}
        state.groups["g"] = group
        if fold.is_known:
            owner = None if fold.owner == NOBODY else self.owner(fold.owner)
            renewed_ms = NOW_MS - fold.age * self.tick_ms
            epoch = RELEASED_EPOCH if owner is None else fold.epoch
            known = KeyState(
                owner=owner,
                epoch=epoch,
                epoch_leader_epoch=0,
                renewed_ms=renewed_ms,
                heartbeat_interval_ms=fold.renewal_h,
                active_ms=renewed_ms,
            )
            if owner is not None:
                known.resume_hash = sha256(key_secret(MASTER, KEY)).digest()
            state.keys[KEY] = known
            state.epochs[epoch] = KEY
        return state

    def _record(self, sent, before):
        owner = self.owner(sent.life)
        it = Claim(self.claimant(sent.life), KEY)
        if sent.kind == CLAIM:
            return it.claim_record(1, 1)
        if sent.kind == RESUME:
            past = Resume(
                self.owner(before[0]).incarnation, sent.epoch, key_secret(MASTER, KEY)
            )
            return it.claim_record(1, 1, resume=past)
        who = {"client": owner.client_id, "inc": owner.incarnation, "seq": 1}
        if sent.kind == BEAT:
            return beat(sent.epoch, **who)
        return release(sent.epoch, **who)

    def _pause(self, fold):
        until_ms = 0 if fold.is_paused else 2**60
        return ReleaseGroup(
            client_id="admin",
            group_id="g",
            incarnation=ident("admin"),
            seq=2,
            op_id=OP,
            msg_expire_time=until_ms,
            reason=None,
        )

    # --- names

    def renamed(self, world, *, is_swapped):
        """Number epochs and lives as they appear, so that equal worlds are equal.

        Clients are alike, so a world with swapped clients is equal, too.
        """
        epochs, lives = {NOBODY: NOBODY}, {NOBODY: NOBODY}

        def epoch(number):
            return epochs.setdefault(number, len(epochs) - 1)

        def life(number):
            if number not in lives:
                lives[number] = (number + is_swapped) % 2 + 2 * sum(
                    other >= 0 and other % 2 == number % 2 for other in lives
                )
            return lives[number]

        # Positional arguments: field names would cost an eighth of the search.
        clients = tuple(
            Client(
                life(c.life),
                self._phase(c),
                epoch(c.epoch),
                c.age,
                c.h,
                tuple(
                    Sent(s.kind, life(s.life), epoch(s.epoch), s.age, s.is_known)
                    for s in c.sent
                ),
                tuple(
                    UnreadVerdict(kind, effect, epoch(number), *rest)
                    for kind, effect, number, *rest in self._unread(c)
                ),
                (life(c.before[0]), epoch(c.before[1])),
            )
            for c in (world.clients[::-1] if is_swapped else world.clients)
        )
        fold = world.fold
        owner, number = life(fold.owner), epoch(fold.epoch)
        # The fence of a life that occurs nowhere else changes nothing.
        fenced = tuple(sorted(lives[each] for each in fold.fenced if each in lives))
        fold = fold._replace(owner=owner, epoch=number, fenced=fenced)
        return World(fold, clients, world.skew)

    def _phase(self, client):
        """Return the client's phase; a claim without a pending verdict is none."""
        if client.phase is not Phase.CLAIMING:
            return client.phase
        waits = any(s.is_known for s in client.sent + client.inbox if s.kind == CLAIM)
        return Phase.CLAIMING if waits else Phase.WAITING

    def _unread(self, client):
        """Drop leading verdicts that change nothing when they are read."""
        received = client.inbox
        while received and not self._matters(client, received[0]):
            received = received[1:]
        return received

    def _matters(self, client, received):
        is_held = client.phase is Phase.HELD
        if received.kind == BEAT:
            return self.bare_restart or (is_held and received.epoch == client.epoch)
        if received.kind == FOREIGN:
            return is_held
        return received.effect is not None or client.phase is Phase.CLAIMING


def _shape(world, index):
    """Return a client without names, as a key to order clients by."""
    client = world.clients[index]
    return (
        world.fold.owner == client.life,
        *(client.phase.value, client.age, client.h),
        [(each.kind, each.age, each.is_known) for each in client.sent],
        [(each.kind, each.age, each.is_known) for each in client.inbox],
    )


def _of(transition, owner):
    """Return the transition as one of another client's record."""
    record = msgspec.structs.replace(
        transition.record, client_id=owner.client_id, incarnation=ident("other")
    )
    return msgspec.structs.replace(transition, record=record)
