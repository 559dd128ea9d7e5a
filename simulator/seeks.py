"""Members that seek in their own claims, as faults of a plan (PROTOCOL 6.6)."""

import random

import attrs

from kafka_marshal.config import Delivery
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.session import SEEK_UNCONFIRMED
from kafka_marshal.errors import InvalidTransition, MarshalError
from kafka_marshal.protocol.records import ClaimingPartition, Heartbeat
from kafka_marshal.protocol.types import Key, Owner, Token
from simulator.base import GROUP
from simulator.checkers import Folded, Violation
from simulator.fleet import App, Fleet
from simulator.plan import Fault, chance
from simulator.world import World


@attrs.frozen
class Sought:
    """A seek that its process does not know to be done yet."""

    process: object
    key: Key
    holding: Holding
    token: Token
    offset: int


class OpenSeeks:
    """The seeks that have not ended, at most one of each holding."""

    def __init__(self) -> None:
        """Start without any."""
        self._open: list[Sought] = []

    def add(self, sought: Sought) -> None:
        """Add a seek; it replaces an earlier one of its holding."""
        holding = sought.holding
        self._open = [each for each in self._open if each.holding is not holding]
        self._open.append(sought)

    def take_ended(self, process: object) -> list[Sought]:
        """Remove and return the seeks of a process that are done, or lost the claim."""
        ended = [
            each
            for each in self._open
            if each.process is process
            and (each.holding.claim.ending is not None or each.holding.rewind is None)
        ]
        self._open = [each for each in self._open if each not in ended]
        return ended


class Seeks:
    """Lets members seek back and forward, and watches the ends of their seeks.

    Attributes:
        sought: Incarnations of processes that have sought. Faults must not write copies
            of their earlier records; only late appends may.
    """

    def __init__(self, world: World, fleet: Fleet) -> None:
        """Start without any."""
        self._world = world
        self._fleet = fleet
        self._open = OpenSeeks()
        # Processes that have sought in a key and handed out no record of it since.
        self._last: dict[Key, Owner] = {}
        self.sought: set[bytes] = set()
        fleet.after_step = self._after_step

    def strike(self, fault: Fault) -> None:
        """Let the application of an owner seek in a partition that it holds."""
        world, plan = self._world, self._world.plan
        rng = chance(plan.seed, f"seeks/{fault.number}")
        found = [
            (app, key)
            for app in self._apps()
            for key in sorted(app.node.held)
            if key.group_id == GROUP
        ]
        if not found:
            return
        app, key = found[fault.who % len(found)]
        if world.topic_id is None:
            return  # the topic does not exist, so its end is unknown
        if plan.delivery is Delivery.AT_MOST_ONCE:
            self._require_refusal(app, key)
            return
        position = app.node.held[key].position or 0
        # The claim may be of an earlier topic, which had more records.
        end = max(position, world.cluster.kafka.log(key.topic_partition).end)
        self._seek(app, key, draw_offset(rng, position, end=end))

    def on_fold(self, folded: Folded) -> None:
        """Count the situations of keys in which owners have sought."""
        transition, note = folded.transition, self._world.coverage.note
        key, record = transition.key, transition.record
        if key is None or key not in self._last or not transition.effect:
            return
        if transition.effect == "position_set":
            note("seek_overtaken")
            del self._last[key]
        elif isinstance(record, ClaimingPartition):
            if folded.owner == self._last.pop(key):
                note("taken_after_seek")
        elif not (isinstance(record, Heartbeat) and record.rewind) and folded.moved:
            del self._last[key]

    # --- processes

    def _apps(self) -> list[App]:
        """Return the processes whose applications can make a call now."""
        return [
            app
            for app in self._fleet.apps
            if not app.is_leaving and app.wakes_ms <= self._world.now_ms
        ]

    def _require_refusal(self, app: App, key: Key) -> None:
        """Demand that a seek at most once is refused, and changes nothing."""
        assert app.node.consumer is not None
        for offset in (0, self._world.cluster.kafka.log(key.topic_partition).end):
            try:
                app.node.consumer.seek(key.topic_partition, offset, timeout_ms=0)
            except InvalidTransition:
                self._world.coverage.note("seek_refused")
            except MarshalError:
                return  # the process has failed, or its claim is over
            else:
                raise Violation("6.6", f"{app.name} seeks at most once in {key}")

    def _seek(self, app: App, key: Key, offset: int) -> None:
        """Seek; the log confirms the seek later, and the application continues."""
        world, holding = self._world, app.node.held[key]
        before, token = holding.position or 0, holding.claim.token
        count = holding.seek_count
        assert app.node.consumer is not None
        assert token is not None
        world.hand_outs.seeking(key, token, offset=offset)
        try:
            app.node.consumer.seek(key.topic_partition, offset, timeout_ms=0)
        except MarshalError as error:
            world.trace(f"{app.name} seeks to {offset} in {key}: {error!r}")
        if holding.seek_count == count:
            return
        self.sought.add(app.node.owner.incarnation)
        world.watcher.skips.seeking(key, token, first=before, offset=offset)
        world.trace(f"{app.name} seeks from {before} to {offset} in {key}")
        world.coverage.note("sought_back" if offset < before else "sought_forward")
        if any(each.active_pause(GROUP) for each in world.watcher.worlds):
            world.coverage.note("sought_while_paused")
        # It can no longer commit the records of the key that it has.
        place = key.topic_partition
        app.hand = [
            each for each in app.hand if (each[0].topic, each[0].partition) != place
        ]
        self._open.add(Sought(app, key, holding, token, offset))
        self._last[key] = app.node.owner

    def _after_step(self, app: App) -> None:
        """Find the seeks of a process that were confirmed in its last step."""
        note = self._world.coverage.note
        for each in self._open.take_ended(app):
            ending = each.holding.claim.ending
            if ending is None:
                note("seek_confirmed")
                self._world.on_sought(
                    app.name, each.key, token=each.token, offset=each.offset
                )
            elif ending.reason == SEEK_UNCONFIRMED:
                note("seek_ended_claim")


def draw_offset(rng: random.Random, position: int, *, end: int) -> int:
    """Draw an offset: back, forward, the start or the end."""
    choices = [0, end, rng.randint(0, position), rng.randint(position, end)]
    return rng.choice([choices[2], choices[3], *choices])
