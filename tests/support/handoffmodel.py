"""Two clients, one key: every interleaving of a warm handoff (PROTOCOL 9.4, 9.5).

The fold is the product's ``apply``; the product also judges whether an owner may drain
its key for its successor. The clients are modelled: the owner offers and withdraws at
any time; records in flight land late or never; a client crashes and restarts as another
process, and its records still land.

The unit of time is a heartbeat interval: a lease lasts two, an offer and the preference
for a successor one. The model distinguishes only the current epoch from earlier ones,
since no epoch returns, and the running process of a client from earlier ones.
"""

from collections import deque
from functools import cache
from typing import NamedTuple

import msgspec
from logkit import KEY, OP, beat, claim, config, ident, offer, ready, release
from search import Broken

from kafka_marshal.gc_pause import uncollected
from kafka_marshal.protocol import fold_keys, judging
from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.handoffs import is_ready_for
from kafka_marshal.protocol.items import Offer, Pause
from kafka_marshal.protocol.rationalizer import apply
from kafka_marshal.protocol.records import SECOND_LEVEL, ReleasingPartition
from kafka_marshal.protocol.state import GroupState, KeyState, WorldState
from kafka_marshal.protocol.types import LogEntry, Owner

H_MS = 1_000
NOW_MS = 10**9
NEXT_OFFSET = 1_000
EPOCH, OLD_EPOCH, OFFER_AT = 500, 400, 600
LEASE, STALE = 2, 3
CONFIG = config(h=H_MS, level=SECOND_LEVEL)
NOBODY, UNSEEN = -1, -1
IDLE, WORKS, DRAINS = 0, 1, 2
CLAIM, BEAT, OFFER, READY, RELEASE = "claim", "beat", "offer", "ready", "release"
FOREVER_MS = 2**60

# Mistakes of the clients in the model.
WORK_ON_READY = "work_on_ready"  # A successor works on its Ready.
# An owner continues after its release.
GO_ON_AFTER_THE_RELEASE = "go_on_after_the_release"
# The Ready of an earlier process counts: the successor is not warm.
DRAIN_FOR_AN_EARLIER_PROCESS = "drain_for_an_earlier_process"


class Process(NamedTuple):
    """A process of a client: the running one, or any earlier one."""

    client: int
    is_living: bool


class Fold(NamedTuple):
    """The key, as ``apply`` left it; times in heartbeat intervals."""

    owner: Process | None = None
    age: int = 0
    preferred: int = NOBODY
    preferred_for: int = 0
    offered_to: int = NOBODY
    offered_for: int = 0
    ready: Process | None = None
    is_paused: bool = False


class Sent(NamedTuple):
    """A record in flight, of the key's epoch or of an earlier one."""

    kind: str
    is_current: bool
    to: int
    age: int
    is_of_living: bool


class Notice(NamedTuple):
    """A verdict that a client has not read."""

    kind: str
    is_current: bool
    age: int


class Client(NamedTuple):
    phase: int = IDLE
    is_current: bool = False  # whether it holds the key's epoch
    age: int = STALE  # of its lease
    sent: tuple[Sent, ...] = ()
    notices: tuple[Notice, ...] = ()
    sees: int = UNSEEN  # whether an offer to it is of the key's epoch
    is_warm: bool = False  # whether it has warmed up under the key's epoch


class World(NamedTuple):
    fold: Fold
    clients: tuple[Client, ...]


class HandoffModel:
    """S4, and an owner drains only for a warm successor.

    Options set the size of the world; ``mistake`` breaks a rule of the clients.
    """

    def __init__(self, *, crashes=True, pauses=False, in_flight=1, mistake=None):
        self.crashes, self.pauses, self.in_flight = crashes, pauses, in_flight
        self.mistake = mistake
        self.append = cache(self._append)
        self.may_drain = cache(self._may_drain)

    def start(self):
        return World(Fold(), (Client(), Client()))

    def broken(self, world):
        users = sum(c.phase != IDLE and c.age < LEASE for c in world.clients)
        return "S4: two hold the key at one instant" if users > 1 else None

    def steps(self, world):
        return ((label, after) for label, _, after in self.moves(world))

    # --- possible steps

    def moves(self, world):
        """Yield label, actor and outcome: the actor is time, a client, or a fault."""
        yield "a tick", "time", self._tick(world)
        if self.pauses:
            is_paused = not world.fold.is_paused
            actor, name = ("fault", "paused") if is_paused else ("time", "resumed")
            after = world.fold._replace(is_paused=is_paused)
            yield f"the group is {name}", actor, world._replace(fold=after)
        for i, client in enumerate(world.clients):
            if self.crashes:
                yield f"P{i} crashes", "fault", self._crash(world, i)
            yield f"P{i} reads", i, self._read(world, i)
            for sent in client.sent:
                rest = tuple(each for each in client.sent if each is not sent)
                lost = client._replace(sent=rest)
                yield f"P{i}'s {sent.kind} is lost", i, self._put(world, i, lost)
                if len(client.notices) < 2:
                    label = f"P{i}'s {sent.kind} lands, sent {sent.age} ago"
                    yield label, i, self._land(world, i, sent, lost)
            if len(client.sent) < self.in_flight:
                yield from self._sends(world, i)

    def _put(self, world, i, client):
        clients = list(world.clients)
        clients[i] = client
        return world._replace(clients=tuple(clients))

    def _tick(self, world):
        fold = world.fold
        preferred_for = max(0, fold.preferred_for - 1)
        fold = fold._replace(
            age=min(STALE, fold.age + 1) if fold.owner else 0,
            preferred=fold.preferred if preferred_for else NOBODY,
            preferred_for=preferred_for,
            offered_for=max(0, fold.offered_for - 1),
        )
        return World(fold, tuple(map(self._older, world.clients)))

    def _older(self, client):
        age = min(STALE, client.age + 1)
        holds = client.phase != IDLE and age < LEASE
        sent = [
            each._replace(age=min(LEASE, each.age + 1))
            if each.kind in {CLAIM, BEAT} and each.is_of_living
            else each
            for each in client.sent
        ]
        return client._replace(
            phase=client.phase if holds else IDLE,
            is_current=client.is_current and holds,
            age=age if holds else STALE,
            sent=tuple(sorted(sent)),
            notices=tuple(
                each._replace(age=min(LEASE, each.age + 1)) for each in client.notices
            ),
        )

    def _crash(self, world, i):
        ghosts = (
            each._replace(age=0, is_of_living=False) for each in world.clients[i].sent
        )
        fold = world.fold
        living = Process(i, is_living=True)
        earlier = Process(i, is_living=False)
        if fold.owner == living:
            fold = fold._replace(owner=earlier)
        if fold.ready == living:
            fold = fold._replace(ready=earlier)
        restarted = Client(sent=tuple(sorted(ghosts)))
        return self._put(world._replace(fold=fold), i, restarted)

    def _land(self, world, i, sent, lost):
        fold, effect, is_new_epoch = self.append(world.fold, i, sent._replace(age=0))
        after = self._put(world, i, lost)
        if is_new_epoch:
            after = after._replace(clients=tuple(map(self._over, after.clients)))
        client = after.clients[i]
        is_right = effect in {"claimed", "renewed"} or (
            effect == "ready" and self.mistake == WORK_ON_READY
        )
        if is_right and sent.is_of_living:
            is_current = is_new_epoch or sent.is_current
            notice = Notice(sent.kind, is_current, sent.age)
            client = client._replace(notices=(*client.notices, notice))
        return self._put(after._replace(fold=fold), i, client)

    def _over(self, client):
        """Return a client after another claim: all its epochs are earlier ones now."""
        return client._replace(
            is_current=False,
            is_warm=False,
            sees=min(client.sees, 0),
            sent=tuple(sorted(each._replace(is_current=False) for each in client.sent)),
            notices=tuple(
                each._replace(is_current=False)
                for each in client.notices
                if each.kind != BEAT
            ),
        )

    # --- steps of clients

    def _read(self, world, i):
        """Let a client read all its verdicts."""
        client, fold = world.clients[i], world.fold
        phase, is_current, age = client.phase, client.is_current, client.age
        for notice in client.notices:
            if notice.kind != BEAT and phase == IDLE and notice.age < LEASE:
                phase, is_current, age = WORKS, notice.is_current, notice.age
            elif notice.kind == BEAT and phase != IDLE and is_current:
                age = min(age, notice.age)
        is_owner = is_current and fold.owner == Process(i, is_living=True)
        goes_on = self.mistake in {WORK_ON_READY, GO_ON_AFTER_THE_RELEASE}
        if phase != IDLE and not is_owner and not goes_on:
            phase, is_current, age = IDLE, False, STALE
        if phase == WORKS and is_owner and self.may_drain(fold):
            if not world.clients[1 - i].is_warm:
                raise Broken("9.5: an owner drains for a cold successor")
            phase = DRAINS
        sees = UNSEEN
        if fold.offered_to == i and fold.offered_for and fold.ready is None:
            sees = int(fold.owner is not None)
        read = client._replace(
            phase=phase, is_current=is_current, age=age, notices=(), sees=sees
        )
        return self._put(world, i, read)

    def _may_drain(self, fold):
        known = self.state(fold).keys[KEY]
        living = ident(f"c{fold.offered_to} True")
        if self.mistake == DRAIN_FOR_AN_EARLIER_PROCESS and known.offer is not None:
            living = known.offer.ready
        return is_ready_for(known, epoch=EPOCH, living=living)

    def _sends(self, world, i):
        client = world.clients[i]

        def send(kind, *, is_current=client.is_current, to=NOBODY, change=None):
            record = Sent(kind, is_current, to, 0, is_of_living=True)
            sent = tuple(sorted((*client.sent, record)))
            after = client._replace(sent=sent, **(change or {}))
            return f"P{i} sends its {kind}", i, self._put(world, i, after)

        if client.phase != IDLE:
            yield send(BEAT)
        else:
            if not any(
                each.kind == CLAIM and each.is_of_living for each in client.sent
            ):
                yield send(CLAIM, is_current=False)
            if client.sees != UNSEEN:
                is_warm = bool(client.sees)
                change = {"sees": UNSEEN, "is_warm": is_warm}
                yield send(READY, is_current=is_warm, change=change)
        if client.phase == WORKS:
            label, _, after = send(OFFER, to=1 - i)
            yield label, "fault", after  # members may not rely on advice
            yield send(OFFER)
        if client.phase == DRAINS or (client.phase == WORKS and world.fold.is_paused):
            ended = {"phase": IDLE, "is_current": False, "age": STALE}
            if self.mistake == GO_ON_AFTER_THE_RELEASE:
                ended = {}
            to = 1 - i if client.phase == DRAINS else NOBODY
            yield send(RELEASE, to=to, change=ended)

    # --- the fold

    def _append(self, fold, i, sent):
        """Fold one record with the product."""
        state = self.state(fold)
        entry = LogEntry(
            offset=NEXT_OFFSET,
            leader_epoch=1,
            timestamp_ms=NOW_MS,
            timestamp_type=1,
            value=encode(self._record(i, sent)),
        )
        (transition,) = apply(state, entry)
        known = state.keys[KEY]
        if transition.effect == "claimed" and known.offer is not None:
            raise Broken("9.4: an offer outlives its claim")
        is_new_epoch = transition.effect in {"claimed", "released"}
        return self.view(state), transition.effect, is_new_epoch

    def _record(self, i, sent):
        who = {"client": f"c{i}", "inc": ident(f"c{i} {sent.is_of_living}")}
        epoch = EPOCH if sent.is_current else OLD_EPOCH
        to = None if sent.to == NOBODY else f"c{sent.to}"
        if sent.kind == CLAIM:
            return claim(**who)
        if sent.kind == BEAT:
            return beat(epoch, **who)
        if sent.kind == OFFER:
            return offer(epoch, to, within_ms=H_MS, **who)
        if sent.kind == READY:
            return ready(epoch, **who)
        return release(epoch, successor=to, **who)

    def view(self, state):
        known, now_ms = state.keys[KEY], state.now_ms
        fold = Fold(is_paused=state.active_pause("g") is not None)
        if known.owner is not None:
            age = min(STALE, known.age_ms(now_ms) // H_MS)
            fold = fold._replace(owner=_process(known.owner.incarnation), age=age)
        if known.handoff is not None and now_ms < known.handoff[1]:
            preferred = int(known.handoff[0][1:])
            fold = fold._replace(preferred=preferred, preferred_for=1)
        if known.offer is not None:
            process = known.offer.ready
            fold = fold._replace(
                offered_to=int(known.offer.successor[1:]),
                offered_for=max(0, -((now_ms - known.offer.until_ms) // H_MS)),
                ready=None if process is None else _process(process),
            )
        return fold

    def state(self, fold):
        """Return the state of the product for a fold of the model."""
        state = WorldState(
            0,
            next_offset=NEXT_OFFSET,
            leader_epoch=1,
            epoch_time_ms=NOW_MS,
            log_time_ms=NOW_MS,
            append_time_ms=NOW_MS,
            config=CONFIG,
        )
        group = state.groups["g"] = GroupState()
        if fold.is_paused:
            group.pause = Pause(
                op_id=OP,
                client_id="admin",
                incarnation=ident("admin"),
                seq=1,
                incarnations=(ident("admin"),),
                until_ms=FOREVER_MS,
            )
        known = state.keys[KEY] = KeyState(
            owner=None,
            epoch=EPOCH,
            epoch_leader_epoch=0,
            renewed_ms=NOW_MS - fold.age * H_MS,
            heartbeat_interval_ms=H_MS,
            active_ms=NOW_MS,
        )
        if fold.owner is not None:
            known.owner = Owner(f"c{fold.owner.client}", _ident(fold.owner))
        if fold.preferred != NOBODY:
            known.handoff = (f"c{fold.preferred}", NOW_MS + H_MS // 2)
        if fold.offered_to != NOBODY:
            until_ms = NOW_MS + fold.offered_for * H_MS
            process = None if fold.ready is None else _ident(fold.ready)
            known.offer = Offer(f"c{fold.offered_to}", until_ms, OFFER_AT, process)
        state.rebuild_derived()
        return state


def _ident(process):
    return ident(f"c{process.client} {process.is_living}")


def _process(incarnation):
    client, is_living = incarnation.decode().strip(".").split()
    return Process(int(client[1:]), is_living == "True")


class Reached(NamedTuple):
    """All reachable states of a model, and the moves that lead to each."""

    states: dict
    before: dict

    def leading_to(self, goals, actors):
        """Return the states from which these actors alone can reach a goal."""
        found, queue = set(goals), deque(goals)
        while queue:
            for state, actor in self.before.get(queue.popleft(), ()):
                if actor in actors and state not in found:
                    found.add(state)
                    queue.append(state)
        return found


@uncollected()
def explore(model):
    """Return all states and moves that a model can reach."""
    first = model.start()
    states, queue = {first: None}, deque([first])
    before: dict = {}
    while queue:
        state = queue.popleft()
        for _, actor, after in model.moves(state):
            if actor != "fault":
                before.setdefault(after, []).append((state, actor))
            if after not in states:
                states[after] = None
                queue.append(after)
    return Reached(states, before)


def users(world):
    """Return the clients that work, or drain, under a valid lease."""
    return [i for i, c in enumerate(world.clients) if c.phase != IDLE and c.age < LEASE]


def stuck(model):
    """Return the goal that is out of reach, with such a state; None if there is none.

    L: without more faults, one client works and no offer is open; and each client can
    work if the other is silent for ever. Q: after a Ready, the successor can work.
    """
    reached = explore(model)
    everybody = ("time", 0, 1)
    settled = [
        world
        for world in reached.states
        if len(users(world)) == 1
        and world.fold.owner == Process(users(world)[0], is_living=True)
        and world.fold.offered_to == NOBODY
    ]
    goals = [("L", settled, everybody, lambda _: True)]
    for i in (0, 1):
        works = [world for world in reached.states if users(world) == [i]]
        goals.append(("L", works, ("time", i), lambda _: True))
        other = Process(1 - i, is_living=True)

        def is_open(world, i=i, other=other):
            fold = world.fold
            is_ready = fold.ready == Process(i, is_living=True)
            return fold.owner == other and is_ready and users(world) == [1 - i]

        goals.append(("Q", works, everybody, is_open))
    for name, goal, actors, concerns in goals:
        good = reached.leading_to(goal, actors)
        for world in reached.states:
            if concerns(world) and world not in good:
                return name, world
    return None


# --- broken rules of the product, to be planted


def refuse_claims_of_what_is_offered(patch):
    """Other clients can never claim a key that was offered to a successor."""
    plain = judging._judge_known

    def judge_known(state, known, record):
        kept = known.offer is not None and known.offer.successor != record.client_id
        return "handoff" if kept else plain(state, known, record)

    patch.setattr(judging, "_judge_known", judge_known)


def release_any_epoch(patch):
    """A release with an earlier epoch counts, also one by an earlier owner."""
    plain = judging.mismatch

    def mismatch(state, record, *, key):
        known = state.keys.get(key)
        is_owned = known is not None and known.owner is not None
        if isinstance(record, ReleasingPartition) and is_owned:
            return None
        return plain(state, record, key=key)

    patch.setattr(judging, "mismatch", mismatch)


def ready_for_any_epoch(patch):
    """A Ready with an earlier epoch counts."""
    plain = judging.judge_ready

    def judge_ready(state, record, *, key):
        known = state.keys.get(key)
        if known is not None:
            record = msgspec.structs.replace(record, epoch=known.epoch)
        return plain(state, record, key=key)

    patch.setattr(judging, "judge_ready", judge_ready)


def keep_the_offer_of_a_claim(patch):
    """An offer outlives the claim under which it was made."""
    plain = fold_keys._install_owner

    def install_owner(step, record, known):
        kept = known.offer
        plain(step, record, known)
        known.offer = kept

    patch.setattr(fold_keys, "_install_owner", install_owner)
