"""Repeated requests for offsets, whose response was lost.

A request that is appended twice is granted twice, and the range of the lost response
would go to nobody. So clients number their requests, and a repeated one is answered
from the record that was appended for it. Numbers belong to one grantee, so that no two
processes ever get the same grant (PROTOCOL 6.2).
"""

from collections import OrderedDict

import attrs

from kafka_marshal.engine.grant_requests import (
    GrantRequests,
    OnGranted,
    RangeRequest,
    Ticket,
)
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.remote.api import GrantRequest

GRANTEES_MAX = 1_000
REQUESTS_MAX = 64

Asker = tuple[str, str, str]
"""Group, grantee, and the secret of the request."""


@attrs.define(eq=False)
class _Asked:
    """A request that was appended.

    Attributes:
        ticket: Its ticket, with the request.
        note: Called with the granted range.
        is_noted: Whether it was called.
    """

    ticket: Ticket
    note: OnGranted
    is_noted: bool = False

    @property
    def is_failed(self) -> bool:
        """Whether the log did not accept it, as far as is known (PROTOCOL 1.4)."""
        ticket = self.ticket
        return ticket.verdict is None and ticket.error is not None

    def take(self, first: int, last: int) -> None:
        """Report the granted range, once."""
        if not self.is_noted:
            self.is_noted = True
            self.note(first, last)

    def revive(self) -> Ticket:
        """Return the ticket for a repeated request."""
        verdict = self.ticket.verdict
        if verdict is None:
            self.ticket.on_granted = self.take
        elif verdict.granted is not None:
            self.take(*verdict.granted)
        return self.ticket


class IdempotencyCache:
    """The last numbered requests of each grantee. Used under the engine's lock.

    A request that was dropped from it is appended again: that costs the range of the
    lost response, and never hands out an offset twice.
    """

    def __init__(self, tickets: GrantRequests) -> None:
        self._tickets = tickets
        self._grantees: OrderedDict[Asker, OrderedDict[int, _Asked]] = OrderedDict()

    def ticket(
        self, ask: GrantRequest, wish: RangeRequest, *, note: OnGranted
    ) -> Ticket:
        """Return the ticket of a request, which is appended the first time.

        Args:
            ask: The request, for its number.
            wish: What it requests.
            note: Called with the granted range.

        Raises:
            ConfigurationError: Its number was used for another request.
            CoordinationError: As ``GrantRequests.ask``.
        """
        if ask.request is None:
            return self._tickets.ask(wish, on_granted=note)
        before = self.find(ask, wish)
        if before is not None:
            return before
        requests = self._requests_of(_asker(ask, wish))
        # A failed append may still land: then its range is lost, as without numbers.
        asked = _Asked(self._tickets.ask(wish), note)
        asked.ticket.on_granted = asked.take
        requests[ask.request] = asked
        while len(requests) > REQUESTS_MAX:
            requests.popitem(last=False)
        return asked.ticket

    def find(self, ask: GrantRequest, wish: RangeRequest) -> Ticket | None:
        """Return the ticket of an earlier request of this number, None without one.

        Raises:
            ConfigurationError: Its number was used for another request.
        """
        requests = self._grantees.get(_asker(ask, wish))
        if requests is None or ask.request is None:
            return None
        before = requests.get(ask.request)
        if before is None:
            return None
        if not _is_same(before.ticket.wish, wish):
            raise ConfigurationError(
                f"request {ask.request} of this grantee asked for something else "
                "before; number requests one by one",
                setting="request",
            )
        if before.is_failed:
            return None
        self._grantees.move_to_end(_asker(ask, wish))
        return before.revive()

    def _requests_of(self, asker: Asker) -> OrderedDict[int, _Asked]:
        requests = self._grantees.setdefault(asker, OrderedDict())
        self._grantees.move_to_end(asker)
        while len(self._grantees) > GRANTEES_MAX:
            self._grantees.popitem(last=False)
        return requests


def _asker(ask: GrantRequest, wish: RangeRequest) -> Asker:
    return wish.key.group_id, ask.grantee, ask.secret


def _is_same(one: RangeRequest, other: RangeRequest) -> bool:
    """Return whether two requests are equal apart from their marks."""
    return attrs.evolve(one, mark=None) == attrs.evolve(other, mark=None)
