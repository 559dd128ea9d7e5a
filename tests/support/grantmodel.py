"""Two clients that consume a key at most once, for any clocks.

The fold is the product's ``apply``, a client is the product's ``AtMostOnce``. There
are no leases: every claim finds the owner stale, and no client checks a deadline. So
the results hold for any clocks, pauses and delays. Records in flight may be lost,
doubled and reordered; a client may crash between any two steps; verdicts are read one
at a time. A client may have several requests in flight (PROTOCOL 6.3).
"""

from collections import deque
from functools import cache
from typing import NamedTuple

from leasemodel import CONFIG, NEXT_OFFSET, NOBODY, NOW_MS
from logkit import KEY, beat, claim, ident
from search import Broken

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.granting import AtMostOnce, GrantVerdict, SentRequest
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import ClaimingMessages
from kafka_marshal.protocol.state import (
    ACCEPTED,
    GroupState,
    KeyState,
    WorldState,
)
from kafka_marshal.protocol.types import LogEntry, OffsetRange, Owner

CLAIM, BEAT, ASK, TASK, FOREIGN = "claim", "beat", "ask", "task", "foreign"


class Sent(NamedTuple):
    """A record in flight; ``ask`` and ``task`` name a range and an epoch."""

    kind: str
    life: int
    epoch: int = NOBODY
    first: int = 0
    last: int = 0


class UnreadVerdict(NamedTuple):
    """A verdict that a client has not read."""

    sent: Sent
    reason: str | None
    epoch: int
    granted: tuple[int, int] | None
    head: int | None


class Fold(NamedTuple):
    owner: int
    epoch: int
    head: int | None  # next offset that was not granted


class Client(NamedTuple):
    life: int
    epoch: int
    anchored: bool
    next_first: int
    asked: tuple[tuple[int, int], ...]
    granted: tuple[tuple[int, int], ...]
    sent: tuple[Sent, ...]
    inbox: tuple[UnreadVerdict, ...]


class World(NamedTuple):
    fold: Fold
    clients: tuple[Client, ...]
    done: tuple[int, ...]


def owner(life):
    return Owner(f"c{life % 2}", ident(f"life {life}"))


class GrantModel:
    """S3: no offset is processed twice, and no range is granted twice or skipped.

    Options set the size of the world: ``tasks`` adds a process that requests its own
    ranges under its parent's incarnation (PROTOCOL 6.2), ``beats`` the first heartbeat
    of a claim, which gives the log a position (5.1); ``depth`` is the largest number of
    requests of a client in flight.
    """

    def __init__(
        self,
        *,
        offsets=2,
        in_flight=2,
        depth=64,
        unread=1,
        copies=True,
        tasks=False,
        beats=False,
        crashes=True,
        gives_up=True,
        gapless=True,
    ):
        self.offsets, self.in_flight, self.unread = offsets, in_flight, unread
        self.copies, self.tasks, self.beats = copies, tasks, beats
        self.depth, self.crashes, self.gives_up = depth, crashes, gives_up
        self.gapless = gapless
        self.append = cache(self._append)

    def start(self):
        clients = tuple(
            Client(
                life=n,
                epoch=NOBODY,
                anchored=False,
                next_first=0,
                asked=(),
                granted=(),
                sent=(),
                inbox=(),
            )
            for n in range(2)
        )
        return World(Fold(NOBODY, NOBODY, None), clients, (0,) * self.offsets)

    def broken(self, world):
        twice = [n for n, times in enumerate(world.done) if times > 1]
        return f"S3: offset {twice[0]} is processed twice" if twice else None

    def steps(self, world):
        for label, after in self._steps(world):
            yield label, renamed(after)

    def _steps(self, world):
        for index, client in enumerate(world.clients):
            yield from self._acts(world, index, client)
            for number in range(len(client.sent)):
                yield from self._lands(world, index, number)
            if client.inbox:
                yield self._reads(world, index, client)

    def _put(self, world, index, client, **rest):
        clients = list(world.clients)
        clients[index] = client
        return world._replace(clients=tuple(clients), **rest)

    # --- steps of a client

    def ladder(self, client):
        """Return the product's ``AtMostOnce`` of a client, in its current state."""
        it = AtMostOnce(client.next_first, grantee=ident(f"life {client.life}"))
        it.is_anchored = client.anchored
        it._requests = deque(
            SentRequest(last, OffsetRange.through(first, last))
            for first, last in client.asked
        )
        it._grants = deque(
            OffsetRange.through(first, last) for first, last in client.granted
        )
        return it

    def after(self, client, it, **rest):
        return client._replace(
            anchored=it.is_anchored,
            next_first=it.next_first,
            asked=tuple((r.offsets.first, r.offsets.last) for r in it._requests),
            granted=tuple((g.first, g.last) for g in it.unused),
            **rest,
        )

    def _acts(self, world, index, client):
        name = f"P{index}"
        room = len(client.sent) < self.in_flight
        if client.epoch == NOBODY:
            if room and not client.sent:
                sent = (*client.sent, Sent(CLAIM, client.life))
                yield (
                    f"{name} sends a claim",
                    self._put(world, index, client._replace(sent=sent)),
                )
        else:
            yield from self._consumes(world, index, client, room=room)
        if self.crashes and (client.epoch != NOBODY or client.sent):
            life = min(n for n in range(index, 20, 2) if n not in lives(world))
            reborn = Client(
                life=life,
                epoch=NOBODY,
                anchored=False,
                next_first=0,
                asked=(),
                granted=(),
                sent=client.sent,
                inbox=(),
            )
            yield f"{name} crashes and restarts", self._put(world, index, reborn)

    def _consumes(self, world, index, client, *, room):
        name = f"P{index}"
        room = room and self.ladder(client).may_request(self.depth)
        if self.beats and room and not client.anchored:
            sent = (*client.sent, Sent(BEAT, client.life, client.epoch))
            if sent[-1] not in client.sent:
                beating = client._replace(sent=sent)
                yield f"{name} beats", self._put(world, index, beating)
        for last in range(client.next_first, self.offsets if room else 0):
            it = self.ladder(client)
            request = it.request(last, last)
            sent = Sent(
                kind=ASK,
                life=client.life,
                epoch=client.epoch,
                first=request.offsets.first,
                last=last,
            )
            requesting = self.after(client, it, sent=(*client.sent, sent))
            yield (
                f"{name} asks for {request.offsets.first} to {last}",
                self._put(world, index, requesting),
            )
        if self.tasks and room and client.next_first < self.offsets:
            at = client.next_first
            sent = Sent(
                kind=TASK, life=client.life, epoch=client.epoch, first=at, last=at
            )
            requesting = client._replace(sent=(*client.sent, sent))
            yield f"a task of {name} asks for {at}", self._put(world, index, requesting)
        if client.asked and self.gives_up:
            it = self.ladder(client)
            it.forget_requests()
            yield (
                f"{name} gives its requests up",
                self._put(world, index, self.after(client, it)),
            )
        if client.granted:
            it = self.ladder(client)
            offset = client.granted[0][0]
            it.hand_out(offset)
            yield (
                f"{name} processes {offset}",
                self._put(
                    world, index, self.after(client, it), done=self._did(world, offset)
                ),
            )

    def _did(self, world, *offsets):
        return tuple(
            times + offsets.count(number) for number, times in enumerate(world.done)
        )

    # --- records that land

    def _lands(self, world, index, number):
        client = world.clients[index]
        sent = client.sent[number]
        left = client.sent[:number] + client.sent[number + 1 :]
        fold, transition = self.append(world.fold, sent)
        outcome = transition.reason or (
            f"granted {transition.granted[0]} to {transition.granted[1]}"
            if transition.granted
            else "won"
        )
        for stays in (False, True) if self.copies else (False,):
            mine = client._replace(sent=client.sent if stays else left)
            clients = list(world.clients)
            clients[index] = mine
            if sent.life == client.life:
                clients[index] = mine._replace(inbox=(*mine.inbox, transition))
            other = clients[1 - index]
            if (
                sent.kind == CLAIM
                and transition.reason is None
                and other.epoch != NOBODY
            ):
                news = UnreadVerdict(
                    sent=Sent(FOREIGN, 0),
                    reason=None,
                    epoch=NOBODY,
                    granted=None,
                    head=None,
                )
                clients[1 - index] = other._replace(inbox=(*other.inbox, news))
            if all(len(c.inbox) <= self.unread for c in clients):
                copy = " (and is sent again)" if stays else ""
                label = f"P{index}'s {sent.kind} lands: {outcome}{copy}"
                yield label, World(fold, tuple(clients), world.done)
        lost = self._put(world, index, client._replace(sent=left))
        yield f"P{index}'s {sent.kind} is lost", lost

    def _reads(self, world, index, client):
        received = client.inbox[0]
        kind = received.sent.kind
        client = client._replace(inbox=client.inbox[1:])
        label = (
            f"P{index} reads its {kind}: {received.reason or received.granted or 'won'}"
        )
        ended = client._replace(
            epoch=NOBODY, anchored=False, next_first=0, asked=(), granted=()
        )
        if kind == FOREIGN:
            return f"P{index} reads that it was replaced", self._put(
                world, index, ended
            )
        if kind == CLAIM:
            if received.reason is None and client.epoch == NOBODY:
                start = received.head or 0
                client = client._replace(
                    epoch=received.epoch,
                    anchored=received.head is not None,
                    next_first=start,
                )
            return label, self._put(world, index, client)
        if kind == BEAT:
            client = (
                client._replace(anchored=True) if received.reason is None else ended
            )
            return label, self._put(world, index, client)
        if kind == TASK:
            # The task reads its own grant; its parent must not treat it as its own.
            offsets = (
                ()
                if received.granted is None
                else range(received.granted[0], received.granted[1] + 1)
            )
            world = world._replace(done=self._did(world, *offsets))
        if received.sent.epoch != client.epoch:
            return label, self._put(world, index, client)
        it = self.ladder(client)
        verdict = GrantVerdict(
            outcome=ACCEPTED if received.reason is None else "refused",
            reason=received.reason,
            granted=received.granted and OffsetRange.through(*received.granted),
            head=received.head,
            offset=0,
        )
        record = record_of(received.sent)
        reason = it.on_verdict(verdict, grantee=record.grantee, seq=record.seq)
        if reason not in {None, "nothing_left"}:
            return label, self._put(world, index, ended)
        return label, self._put(world, index, self.after(client, it))

    # --- the fold

    def _append(self, fold, sent):
        """Fold one record with the product; return the new state and the verdict."""
        state = WorldState(
            0,
            next_offset=NEXT_OFFSET,
            leader_epoch=1,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
            config=CONFIG,
        )
        if fold.epoch != NOBODY:
            who = owner(fold.owner)
            known = KeyState(
                owner=who,
                epoch=fold.epoch,
                epoch_leader_epoch=0,
                renewed_ms=NOW_MS,
                heartbeat_interval_ms=1_000,
                active_ms=NOW_MS,
            )
            known.position = known.granted = fold.head
            state.keys[KEY], state.epochs[fold.epoch] = known, KEY
        state.groups["g"] = GroupState(key_count=len(state.keys))
        # Every claim finds the owner stale; no other record depends on the time.
        entry = LogEntry(
            offset=NEXT_OFFSET,
            leader_epoch=1,
            timestamp_ms=NOW_MS + 10_000,
            timestamp_type=1,
            value=encode(record_of(sent)),
        )
        (transition,) = apply(state, entry)
        after = state.keys.get(KEY)
        head = None if after is None else max(after.position or 0, after.granted or 0)
        if after is not None and after.granted is None:
            head = after.position
        detail = transition.detail
        granted = None if detail is None else (detail["first"], detail["last"])
        if granted is not None and granted[0] < (fold.head or 0):
            raise Broken(f"S3: {granted} granted again")
        if self.gapless and granted is not None and granted[0] > (fold.head or 0):
            raise Broken(f"6.3: {granted} leaves out what lies before it")
        if (head or 0) < (fold.head or 0):
            raise Broken("S10: the position fell")
        epoch = NOBODY if after is None else after.epoch
        life = NOBODY if after is None else fold.owner
        if transition.effect == "claimed":
            life = sent.life
        return Fold(life, epoch, head), UnreadVerdict(
            sent=sent, reason=transition.reason, epoch=epoch, granted=granted, head=head
        )


def record_of(sent):
    who = owner(sent.life)
    if sent.kind == CLAIM:
        return claim(who.client_id, inc=who.incarnation, seq=1)
    if sent.kind == BEAT:
        return beat(max(0, sent.epoch), 0, client=who.client_id, inc=who.incarnation)
    grantee = who.incarnation if sent.kind == ASK else ident("task")
    return ClaimingMessages(
        client_id=who.client_id,
        group_id="g",
        incarnation=who.incarnation,
        seq=sent.last,
        topic="t",
        partition=0,
        epoch=max(0, sent.epoch),
        grantee=grantee,
        first=sent.first,
        proposed_last_offset=sent.last,
    )


def unread(client):
    """Drop leading verdicts that change nothing when they are read."""
    received = client.inbox
    while received and not _matters(client, received[0]):
        received = received[1:]
    return received


def _matters(client, received):
    kind = received.sent.kind
    if kind == CLAIM:
        return received.reason is None and client.epoch == NOBODY
    if kind == FOREIGN:
        return client.epoch != NOBODY
    is_task = kind == TASK and received.granted is not None
    return is_task or received.sent.epoch == client.epoch


def lives(world):
    found = {world.fold.owner}
    for client in world.clients:
        found |= {client.life} | {s.life for s in client.sent}
        found |= {h.sent.life for h in client.inbox}
    return found


def renamed(world):
    """Number epochs and lives as they appear, so that equal worlds are equal.

    A request under an earlier epoch counts as lost: no epoch returns.
    """
    epochs, names = {NOBODY: NOBODY}, {NOBODY: NOBODY}
    at = world.fold.epoch

    def epoch(number):
        return epochs.setdefault(number, len(epochs) - 1)

    def life(number):
        if number not in names:
            names[number] = number % 2 + 2 * sum(
                n >= 0 and n % 2 == number % 2 for n in names
            )
        return names[number]

    def sent(each):
        return each._replace(life=life(each.life), epoch=epoch(each.epoch))

    clients = tuple(
        Client(
            life=life(c.life),
            epoch=epoch(c.epoch),
            anchored=c.anchored,
            next_first=c.next_first,
            asked=c.asked,
            granted=c.granted,
            sent=tuple(sent(s) for s in c.sent if s.kind == CLAIM or s.epoch == at),
            inbox=tuple(
                h._replace(sent=sent(h.sent), epoch=epoch(h.epoch)) for h in unread(c)
            ),
        )
        for c in world.clients
    )
    fold = Fold(life(world.fold.owner), epoch(world.fold.epoch), world.fold.head)
    return World(fold, clients, world.done)
