"""Who is there, who has what and what was promised, in one group: plain state."""

import attrs

from kafka_marshal.protocol.types import Key
from kafka_marshal.sidecar.clients import Client, Loan
from kafka_marshal.sidecar.pools import Pool
from kafka_marshal.sidecar.promises import PromisedClient, PromisedKey, Promises


@attrs.frozen
class Reserve:
    """A key that somebody was promised and may still be using.

    Attributes:
        client_id: Who.
        instance: Which process of that name.
        epoch: Claim that it had it under.
        until_ms: Largest deadline that it was told.
    """

    client_id: str
    instance: str
    epoch: int
    until_ms: int


@attrs.define(eq=False)
class Books:
    """The state of one group. Called under the engine's lock.

    Attributes:
        promises: The file of what was promised.
        clients: Who is registered, by name.
        pools: What they consume.
        explicit: Keys that are claimed one by one, and by whom: the first has it.
        loans: Who has what.
        reserves: What nobody else may be given yet.
        shuns: What a client is not given again yet, having just returned it.
        is_dirty: Whether something is to be looked at in the next round.
        is_filed: Whether the file says no more and no less than it should.
    """

    promises: Promises
    clients: dict[str, Client] = attrs.field(factory=dict)
    pools: list[Pool] = attrs.field(factory=list)
    explicit: dict[Key, list[str]] = attrs.field(factory=dict)
    loans: dict[Key, Loan] = attrs.field(factory=dict)
    reserves: dict[Key, Reserve] = attrs.field(factory=dict)
    shuns: dict[tuple[Key, str], int] = attrs.field(factory=dict)
    is_dirty: bool = True
    is_filed: bool = True

    def pool_at(self, key: Key) -> Pool | None:
        """Return which clients consume a key."""
        for pool in self.pools:
            if key.topic in pool.subscription.topics:
                return pool
        return None

    def pool_of(self, client: Client, name: str) -> Pool | None:
        """Return where a subscription of a client belongs."""
        for pool in self.pools:
            member = pool.members.get(client.client_id)
            if member is not None and member.name == name:
                return pool
        return None

    # --- loans

    def begin_loan(self, loan: Loan) -> None:
        """Note that a client has a key from now on."""
        self.loans[loan.key] = loan.client.loans[loan.key] = loan
        self.reserves.pop(loan.key, None)
        self.is_filed = False

    def end_loan(self, loan: Loan) -> None:
        """Note that a client has a key no more."""
        self.loans.pop(loan.key, None)
        loan.client.loans.pop(loan.key, None)
        self.is_filed = False
        self.is_dirty = True

    def may_have(self, key: Key, client: Client) -> bool:
        """Return whether nobody else may still be using a key, by what was told."""
        reserve = self.reserves.get(key)
        is_free = reserve is None or reserve.instance == client.instance
        return is_free and (key, client.client_id) not in self.shuns

    # --- promises

    def reserve(self, loan: Loan, now_ms: int) -> None:
        """Keep a key from others until whoever lost it has certainly stopped."""
        if now_ms < loan.told_ms:
            client = loan.client
            self.reserves[loan.key] = Reserve(
                client.client_id, client.instance, loan.epoch, loan.told_ms
            )
            self.is_filed = False

    def is_promised(self, client: Client) -> bool:
        """Return whether a process may still be using what it has lost."""
        return any(x.instance == client.instance for x in self.reserves.values())

    def forget_promises(self, client: Client) -> None:
        """Take that a process uses nothing any more."""
        for key, reserve in list(self.reserves.items()):
            if reserve.instance == client.instance:
                del self.reserves[key]
        self.is_filed = False

    def forget_past(self, now_ms: int) -> None:
        """Forget what is over."""
        past = [key for key, each in self.reserves.items() if now_ms >= each.until_ms]
        for key in past:
            del self.reserves[key]
        names = [name for name, until_ms in self.shuns.items() if now_ms >= until_ms]
        for name in names:
            del self.shuns[name]
        self.is_dirty = self.is_dirty or bool(past or names)

    def file(self) -> OSError | None:
        """Write down what may be told from now on; return why it could not be."""
        error = self.promises.save(self._promised())
        if error is None:
            self.is_filed = True
            for loan in self.loans.values():
                until_ms = loan.holding.claim.lease.hard_until_ms
                loan.filed_ms = max(loan.filed_ms, loan.told_ms, until_ms)
        return error

    def _promised(self) -> list[PromisedClient]:
        """Return what the file has to say, also of those who are gone."""
        kept: dict[tuple[str, str], dict[Key, PromisedKey]] = {}
        for key, each in self.reserves.items():
            kept.setdefault((each.client_id, each.instance), {})[key] = PromisedKey(
                key.topic, key.partition, each.epoch, each.until_ms
            )
        claims: dict[str, list[Key]] = {}
        for key, names in self.explicit.items():
            for name in names:
                claims.setdefault(name, []).append(key)
        said = []
        for client in self.clients.values():
            mine = kept.pop((client.client_id, client.instance), {})
            if client.kept_until_ms is None:
                asked = claims.get(client.client_id, [])
                said.append(client.promised(mine, asked))
        for (client_id, instance), left in kept.items():
            keys = tuple(left.values())
            said.append(
                PromisedClient(client_id, instance, 1, None, None, (), {}, keys)
            )
        return said
