"""A repeated request is appended once, for the grantee that made it."""

from types import SimpleNamespace

import pytest

from kafka_marshal.engine.grant_requests import RangeRequest, Ticket, Verdict
from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.protocol.types import Key, Owner
from kafka_marshal.sidecar.idempotency import (
    GRANTEES_MAX,
    REQUESTS_MAX,
    IdempotencyCache,
)

OWNER = Owner("host", bytes(16))


class Appended:
    """Stands in for an engine's requests."""

    def __init__(self):
        self.tickets = []

    def ask(self, wish, *, on_granted=None):
        append = SimpleNamespace(error=lambda: None)
        self.tickets.append(Ticket(wish, 0, append, on_granted))
        return self.tickets[-1]


class Bench:
    """Asks as a service does; notes what is granted."""

    def __init__(self):
        self.appended = Appended()
        self.repeats = IdempotencyCache(self.appended)
        self.noted = []

    def ask(self, number=1, *, first=0, grantee=1, group="g", mark=None, secret="5e"):
        key = Key(group, "t", 0)
        grantee = bytes([grantee % 256, grantee // 256])
        wish = RangeRequest(key, OWNER, 5, grantee, first, first + 9, mark)
        ask = SimpleNamespace(request=number, grantee=grantee.hex(), secret=secret)
        return self.repeats.ticket(ask, wish, note=lambda *run: self.noted.append(run))

    def grant(self, ticket):
        run = (ticket.wish.first, ticket.wish.last)
        ticket.verdict = Verdict("accepted", None, run, run[1] + 1, 40)
        ticket.on_granted(*run)


@pytest.fixture
def bench():
    return Bench()


def test_a_repeat_is_the_same_request(bench):
    first = bench.ask(mark=3)
    assert bench.ask(mark=4) is first
    bench.grant(first)
    assert bench.ask() is first
    assert len(bench.appended.tickets) == 1
    assert bench.noted == [(0, 9)]


def test_an_abandoned_request_is_recorded_for_its_repeat(bench):
    """Whether its verdict comes before or after."""
    late, early = bench.ask(1), bench.ask(2, first=10)
    reported = []
    late.on_granted = early.on_granted = lambda *run: reported.append(run)
    bench.grant(early)
    bench.ask(1)
    bench.ask(2, first=10)
    bench.grant(late)
    assert bench.noted == [(10, 19), (0, 9)]
    assert reported == [(10, 19)]


@pytest.mark.parametrize(
    "other",
    [{"number": 2}, {"grantee": 2}, {"group": "h"}, {"secret": "6f"}],
    ids=str,
)
def test_another_request_is_appended(bench, other):
    assert bench.ask() is not bench.ask(**other)
    assert len(bench.appended.tickets) == 2


def test_without_a_number_each_is_appended(bench):
    assert bench.ask(None) is not bench.ask(None)


def test_a_reused_number_is_refused(bench):
    bench.ask()
    with pytest.raises(ConfigurationError, match="request 1 of this grantee"):
        bench.ask(first=1)


def test_a_failed_append_is_repeated(bench):
    first = bench.ask()
    first.append.error = lambda: CoordinationError("no leader")
    second = bench.ask()
    assert second is not first
    assert bench.ask() is second


def test_an_append_that_landed_late_answers_the_repeat(bench):
    first = bench.ask()
    first.append.error = lambda: CoordinationError("late")
    bench.grant(first)
    assert bench.ask() is first


def test_requests_per_grantee_are_bounded(bench):
    for number in range(REQUESTS_MAX + 1):
        bench.ask(number)
    count = len(bench.appended.tickets)
    bench.ask(1)
    assert len(bench.appended.tickets) == count
    bench.ask(0)
    assert len(bench.appended.tickets) == count + 1


def test_grantees_are_bounded_by_last_use(bench):
    for grantee in range(GRANTEES_MAX):
        bench.ask(grantee=grantee)
    bench.ask(grantee=0)
    bench.ask(grantee=GRANTEES_MAX)
    count = len(bench.appended.tickets)
    bench.ask(grantee=0)
    assert len(bench.appended.tickets) == count
    bench.ask(grantee=1)
    assert len(bench.appended.tickets) == count + 1
