"""The lease of one owner in an outage of its coordinating partition (5.2): every state.

The lease is the product's, as is the verdict on a claim at each age of the owner. The
model adds heartbeats that are in flight, landed but not read, or lost; time, in whole
units; and a leader's clock that runs ahead by the margin and the drift, rounded up to
units. All times are ages, so time is unbounded.

There are two worlds. In a *faulty* one, heartbeats are sent at any time, land late, are
read late or get lost, and the lease must end before another claim can be accepted (S4).
In a *sound* one, a heartbeat is sent three times per interval, with 10 % jitter, and
read back at once, except in outages of up to an interval: then the last heartbeat is
lost or lands at the end, and those before it are lost. There the owner must be able to
hand out at any time (L2).
"""

from functools import cache
from typing import NamedTuple

from logkit import KEY, Log, claim, ident

from kafka_marshal.protocol.claiming import Claim, Claimant, Phase
from kafka_marshal.protocol.lease import Lease
from kafka_marshal.protocol.types import Owner

H_MS = 60_000
NOW_MS = 10**9


class Beat(NamedTuple):
    """A heartbeat that was not read back; ages in units."""

    age: int
    ahead: int
    """By how much the leader's clock has run ahead since it was sent."""
    is_landed: bool


class World(NamedTuple):
    """One state of the model; ages in units."""

    base: int
    """Since the last renewal that was read back was sent."""
    ahead: int
    """By how much the leader's clock has run ahead since then."""
    log: int
    """Log time since the last renewal that landed."""
    since_beat: int
    beat: Beat | None
    """The last one, if it was not read back."""
    outage: int | None
    """Since its begin; None without one."""
    has_recovered: bool


class OutageModel:
    """S4 in a faulty world, L2 in a sound one.

    Args:
        is_sound: Whether the world is the sound one.
        units_per_h: Units of time per heartbeat interval.
        outage: The longest outage, in units; by default a heartbeat interval.
    """

    def __init__(self, *, is_sound, units_per_h, outage=None):
        self.is_sound = is_sound
        self.unit_ms = H_MS // units_per_h
        self.outage_max = units_per_h if outage is None else outage
        third, tenth = units_per_h // 3, units_per_h // 30
        self.beat_after = range(third - tenth, third + tenth + 1)
        # S4 allows a leader's clock to gain this much in a lease: the margin and 0.1 %
        # of two intervals, each rounded up to whole units.
        allowed = (2 * H_MS // 20, 2 * H_MS // 1_000)
        self.ahead_max = sum(-(-each_ms // self.unit_ms) for each_ms in allowed)
        self.stale = 2 * units_per_h + 1  # ages saturate here
        self.is_free = cache(self._is_free)
        self.claim = cache(self._claim)

    def _is_free(self, age):
        """Return whether another claim is accepted at an age of the owner."""
        log = Log(h=H_MS)
        log.claimed("c1")
        return log.one(claim("c2"), after=age * self.unit_ms).effect == "claimed"

    def _claim(self, base):
        """Return the product's ``Claim`` of an owner with a renewal of age ``base``."""
        it = Claim(Claimant(Owner("c1", ident("c1")), "g", master=b"m" * 32), KEY)
        it.phase = Phase.HELD
        it.lease = Lease.since(NOW_MS - base * self.unit_ms, H_MS)
        return it

    def start(self):
        return World(0, 0, 0, 0, None, None, has_recovered=True)

    def broken(self, world):
        claim = self.claim(world.base)
        if self.is_sound and not claim.may_hand_out(NOW_MS):
            return "L2: an outage interrupts an owner"
        if not self.is_sound and claim.is_valid(NOW_MS) and self.is_free(world.log):
            return "S4: two hold the key at one instant"
        return None

    def steps(self, world):
        if not self.claim(world.base).is_valid(NOW_MS):
            return  # the claim has ended
        yield from self._time(world)
        yield from self._sends(world)
        if world.beat is not None:
            yield from self._fate(world, world.beat)
        if self.is_sound:
            yield from self._outage(world)

    def _time(self, world):
        ahead = [0]
        if self.is_sound:
            is_late = world.since_beat >= self.beat_after[-1]
            is_under_way = world.outage is None and world.beat is not None
            is_long = world.outage == self.outage_max
            if is_late or is_under_way or is_long:
                return
        elif world.ahead < self.ahead_max:
            ahead.append(1)
        for more in ahead:
            beat = world.beat
            if beat is not None:
                age = min(beat.age + 1, self.stale)
                beat = beat._replace(age=age, ahead=beat.ahead + more)
            yield (
                f"a unit, the log {more} ahead",
                world._replace(
                    base=world.base + 1,
                    ahead=world.ahead + more,
                    log=min(self.stale, world.log + 1 + more),
                    since_beat=min(world.since_beat + 1, self.beat_after[-1]),
                    beat=beat,
                    outage=None if world.outage is None else world.outage + 1,
                ),
            )

    def _sends(self, world):
        if self.is_sound and world.since_beat not in self.beat_after:
            return
        if not self.is_sound and world.beat is not None:
            return
        beat = Beat(0, 0, is_landed=False)
        yield (
            "a beat is sent",
            world._replace(since_beat=0, beat=beat),
        )

    def _fate(self, world, beat):
        is_away = world.outage is not None
        if beat.is_landed:
            yield "the beat is read back", self._read(world, beat)
        elif not is_away and not self.is_free(world.log):
            landed = world._replace(log=0, beat=beat._replace(is_landed=True))
            after = self._read(landed, beat) if self.is_sound else landed
            yield "the beat lands", after
        if not beat.is_landed and (is_away or not self.is_sound):
            yield "the beat is lost", world._replace(beat=None)

    def _read(self, world, beat):
        read = world._replace(beat=None, has_recovered=True)
        if beat.age < world.base:
            read = read._replace(base=beat.age, ahead=beat.ahead)
        return read

    def _outage(self, world):
        if world.outage is not None:
            yield "the outage ends", world._replace(outage=None)
        elif world.has_recovered:
            yield (
                "an outage begins",
                world._replace(outage=0, has_recovered=False),
            )


# --- mistakes


def patch_leases(patch, change):
    """Replace each lease by ``change(lease, heartbeat interval)``."""
    plain = Lease.since

    def since(base_ms, heartbeat_interval_ms):
        return change(plain(base_ms, heartbeat_interval_ms), heartbeat_interval_ms)

    patch.setattr(Lease, "since", since)


def stop_at_one_interval(patch):
    """An owner hands out until one interval after the last renewal."""

    def change(lease, h_ms):
        soft_ms = lease.soft_until_ms - 7 * h_ms // 4 + h_ms
        return Lease(soft_ms, lease.hard_until_ms)

    patch_leases(patch, change)


def stop_a_thirtieth_early(patch):
    """An owner hands out for a thirtieth of an interval less."""
    patch_leases(
        patch,
        lambda lease, h_ms: Lease(
            lease.soft_until_ms - h_ms // 30, lease.hard_until_ms
        ),
    )


def last_a_thirtieth_longer(patch):
    """A lease lasts a thirtieth of an interval longer."""
    patch_leases(
        patch,
        lambda lease, h_ms: Lease(
            lease.soft_until_ms, lease.hard_until_ms + h_ms // 30
        ),
    )
