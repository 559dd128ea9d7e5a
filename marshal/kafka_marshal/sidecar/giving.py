"""Gives out what a group's session holds, and asks for what should be elsewhere."""

from collections.abc import Iterable, Iterator, Mapping

from kafka_marshal.engine import Context, Holding, Subscription
from kafka_marshal.protocol.claiming import Phase
from kafka_marshal.protocol.types import Key
from kafka_marshal.sidecar.books import Books
from kafka_marshal.sidecar.clients import Client, Loan, lend
from kafka_marshal.sidecar.hosting import HostSession
from kafka_marshal.sidecar.placing import place
from kafka_marshal.sidecar.pools import Moving, Pool

MOVED = "moved"
SURPLUS = "surplus"


class Giver:
    """Follows the plan of who should have what. Called under the engine's lock."""

    __slots__ = ("_books", "_context", "_session")

    def __init__(self, context: Context, session: HostSession, books: Books) -> None:
        self._context = context
        self._session = session
        self._books = books

    def give(self, now_ms: int) -> list[Loan]:
        """Lend what can be lent, ask for what should be elsewhere.

        Returns:
            What was lent just now; nobody was told yet.
        """
        books = self._books
        lent: list[Loan] = []
        held: dict[int, list[Holding]] = {}
        # Giving up what nobody has room for changes what is held.
        for holding in list(self._session.holdings.values()):
            if holding.claim.phase is not Phase.HELD:
                continue
            if holding.drain is not None and holding.drain.reason != MOVED:
                continue
            pool = books.pool_at(holding.key)
            if pool is not None:
                held.setdefault(id(pool), []).append(holding)
            elif holding.key in books.explicit and holding.key not in books.loans:
                lent += self._lend_explicit(holding, now_ms)
        for pool in books.pools:
            lent += self._give_pool(pool, held.get(id(pool), []), now_ms)
        return lent

    def _lend_explicit(self, holding: Holding, now_ms: int) -> list[Loan]:
        books = self._books
        for name in books.explicit[holding.key]:
            client = books.clients.get(name)
            # Who is silent is given it when it is back, if it is soon enough.
            if client is None or client.is_leaving or client.is_away(now_ms):
                continue
            if books.may_have(holding.key, client):
                return [self._lend(holding, client, name="")]
        return []

    def _give_pool(
        self, pool: Pool, held: list[Holding], now_ms: int
    ) -> Iterator[Loan]:
        books = self._books
        pool.forget_moving(self._is_settled, now_ms)
        present = self._present(pool, [holding.key for holding in held])
        seats = pool.seats(books.clients, present=present, now_ms=now_ms)
        wanted = place(
            {*present, *(holding.key for holding in held)},
            seats,
            present=present,
            whole_topics=pool.counts_topics,
        )
        taking = {
            seat.name: client
            for seat in seats
            if pool.is_taking(client := books.clients[seat.name], now_ms)
        }
        for holding in sorted(held, key=lambda each: each.key):
            key = holding.key
            name, loan = wanted.get(key), books.loans.get(key)
            if holding.drain is not None:
                continue
            if loan is not None:
                if name != loan.client.client_id:
                    self._move(pool, loan, to=name, now_ms=now_ms)
            elif name is None:
                # Who is silent may have room for it when it is back.
                if len(taking) == len(seats) and key not in books.reserves:
                    self._session.release(holding, reason=SURPLUS)
            elif name in taking and books.may_have(key, taking[name]):
                member = pool.members[name]
                yield self._lend(holding, taking[name], name=member.name)

    def _is_settled(self, key: Key, to: str) -> bool:
        """Return whether a key has come to a client, or went to another host."""
        loan = self._books.loans.get(key)
        known = self._context.replica_of(key).world.keys.get(key)
        owner = None if known is None else known.owner
        is_elsewhere = owner not in {None, self._session.claimant.owner}
        return is_elsewhere or (loan is not None and loan.client.client_id == to)

    def _present(self, pool: Pool, keys: Iterable[Key]) -> dict[Key, str]:
        """Return who has what, or will have it."""
        books = self._books
        present = {}
        for key in keys:
            loan, reserve = books.loans.get(key), books.reserves.get(key)
            if loan is not None:
                present[key] = loan.client.client_id
            elif reserve is not None:
                present[key] = reserve.client_id
        return present | {key: each.to for key, each in pool.moving.items()}

    def _move(self, pool: Pool, loan: Loan, *, to: str | None, now_ms: int) -> None:
        """Ask a client for what another should have, or what is too much."""
        if to is None:
            self._session.drain(loan.holding, reason=SURPLUS)
            return
        until_ms = now_ms + 2 * self._context.heartbeat_interval_ms
        pool.moving[loan.key] = Moving(to, until_ms)
        own_name = self._session.claimant.owner.client_id
        self._session.drain(loan.holding, reason=MOVED, successor=own_name)

    def _lend(self, holding: Holding, client: Client, *, name: str) -> Loan:
        epoch = holding.claim.epoch
        assert epoch is not None
        loan = Loan(holding.key, client, holding, epoch, name)
        lend(holding)
        self._books.begin_loan(loan)
        return loan

    def foresee(self, sub: Subscription, keys: Iterable[Key]) -> Mapping[Key, str]:
        """Return who will probably have what is about to be claimed: for people."""
        books = self._books
        pool = next((p for p in books.pools if p.subscription is sub), None)
        if pool is None:
            return {}
        ours = [key for key in books.loans if key.topic in sub.topics]
        present = self._present(pool, [*keys, *ours])
        now_ms = self._context.now_ms
        seats = pool.seats(books.clients, present=present, now_ms=now_ms)
        return place(
            {*keys, *present},
            seats,
            present=present,
            whole_topics=pool.counts_topics,
        )
