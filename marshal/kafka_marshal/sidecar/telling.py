"""What clients are told: each event names the entry of the log that it follows from."""

from collections.abc import Iterable

from kafka_marshal.engine import Context
from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.claiming import Ending
from kafka_marshal.protocol.notes import stuck_count
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.sidecar.clients import Client, Loan, assigned
from kafka_marshal.sidecar.failures import answered
from kafka_marshal.sidecar.feed import Place


class Teller:
    """Tells the clients of one group. Called under the engine's lock."""

    __slots__ = ("_context", "_group_id", "_is_paused")

    def __init__(self, context: Context, group_id: str) -> None:
        self._context = context
        self._group_id = group_id
        self._is_paused = False

    def assigned(self, loan: Loan) -> None:
        """Tell a client of what it has, and until when."""
        loan.client.ring.push(self._assigned(loan), self._at(loan.key, loan.epoch))

    def drains(self, loans: Iterable[Loan]) -> None:
        """Ask for what is to be given back, each once."""
        for loan in loans:
            drain = loan.holding.drain
            if drain is None or loan.releasing is not None:
                continue
            loan.releasing = api.Releasing(
                topic=loan.key.topic,
                partition=loan.key.partition,
                epoch=loan.epoch,
                reason=drain.reason,
                successor=drain.successor,
                until_ms=drain.until_ms,
            )
            loan.client.ring.push(loan.releasing, self._at(loan.key))

    def lost(self, loan: Loan, ending: Ending) -> None:
        """Tell a client of what it has no more."""
        said = api.Lost(
            topic=loan.key.topic,
            partition=loan.key.partition,
            epoch=loan.epoch,
            reason=ending.reason,
            winner=ending.winner,
            at_offset=ending.at_offset,
            was_lost=ending.was_lost,
        )
        loan.client.ring.push(said, self._at(loan.key, ending.at_offset))

    def pause(self, clients: Iterable[Client]) -> None:
        """Tell of a pause, once it begins and once it ends."""
        said = self._pause()
        if said.is_paused != self._is_paused:
            self._is_paused = said.is_paused
            for client in clients:
                client.ring.push(said, self._home())

    def failed(self, clients: Iterable[Client], failure: MarshalError) -> None:
        """Tell that it is all over."""
        said = api.Failed(failure=answered(failure).failure)
        for client in clients:
            client.ring.push(said, self._home())

    def snapshot(self, client: Client) -> tuple[api.Snapshot, Place]:
        """Return everything that a client has (row FR01)."""
        loans = client.loans.values()
        said = api.Snapshot(
            assigned=tuple(self._assigned(loan) for loan in loans),
            releasing=tuple(x.releasing for x in loans if x.releasing is not None),
            paused=self._pause(),
            subscriptions=tuple(sorted(client.wants)),
        )
        return said, self._home()

    def _assigned(self, loan: Loan) -> api.Assigned:
        known = self._context.replica_of(loan.key).world.keys.get(loan.key)
        if known is None:
            return assigned(loan, head=None)
        note = self._context.replica_of(loan.key).world.soft.notes.get(loan.key)
        stuck = stuck_count(note, known)
        is_noted = note is not None and note.offset == loan.epoch
        follows = note.follows if note is not None and is_noted else None
        head = known.next_unclaimed()
        return assigned(loan, head=head, stuck=stuck, follows=follows)

    def _pause(self) -> api.Paused:
        pauses = [
            pause
            for replica in self._context.replicas.values()
            if (pause := replica.world.active_pause(self._group_id)) is not None
        ]
        if not pauses:
            return api.Paused(is_paused=False)
        last = max(pauses, key=lambda pause: pause.until_ms)
        return api.Paused(
            is_paused=True,
            until_wall_ms=last.until_ms,
            reason=f"paused by {last.client_id}",
        )

    def _at(self, key: Key, offset: int | None = None) -> Place:
        world = self._context.replica_of(key).world
        last = max(0, world.next_offset - 1)
        return world.partition, last if offset is None else offset

    def _home(self) -> Place:
        world = self._context.replicas[self._context.home_of(self._group_id)].world
        return world.partition, max(0, world.next_offset - 1)
