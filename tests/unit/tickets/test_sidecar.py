"""Tickets through a sidecar, and what is done where it does not answer."""

import json

import httpx
import msgspec
import pytest

from kafka_marshal.errors import ClaimRejected, CoordinationError, DeadlineExceeded
from kafka_marshal.protocol.types import Owner
from kafka_marshal.remote.answers import AsOf, FenceNow
from kafka_marshal.remote.api import Failure, GrantResponse
from kafka_marshal.remote.transport import Address, Connection
from kafka_marshal.tickets import ClaimRef, Standing, TicketOffice, Verdict
from kafka_marshal.tickets.sidecar import SidecarOffice

REF = ClaimRef("g", "a", b"i" * 16, "t", 3, 7, "1.0.7", "5e" * 16)
ELSEWHERE = Verdict((0, 1), None, 99)
STANDING = Standing("1.0.7", 7, REF.owner)


class Otherwise(TicketOffice):
    def __init__(self):
        self.asked = 0
        self.is_closed = False

    def ask(self, ref, wanted, *, timeout_ms):
        self.asked += 1
        return ELSEWHERE

    def newest(self, key, *, timeout_ms):
        self.asked += 1
        return STANDING

    def close(self):
        self.is_closed = True


def office(answer, *, first=()):
    """An office whose sidecar answers as told; and what it was asked."""
    asked = []

    answers = iter([*first, *[answer] * 9])

    def handle(request):
        asked.append(request)
        now = next(answers)
        if isinstance(now, Exception):
            raise now
        status, said = now
        return httpx.Response(status, content=msgspec.json.encode(said))

    connection = Connection.open(
        Address.parse("unix:/run/some.sock"),
        token=None,
        group_id="x",
        client_id="x",
        instance="00" * 16,
        transport=httpx.MockTransport(handle),
    )
    return SidecarOffice(connection, Otherwise()), asked


def granted(**rest):
    fields = {"outcome": "accepted", "reason": None, "first": 2, "last": 9}
    return GrantResponse(**fields | {"head": 10, "offset": 41} | rest)


def fence(**rest):
    fields = {"token": "1.0.7", "epoch": 7, "client_id": "a", "position": 4}
    of = AsOf(time_ms=0, offsets={})
    return FenceNow(**{"as_of": of, "incarnation": (b"i" * 16).hex()} | fields | rest)


def test_what_is_granted_is_what_the_sidecar_says():
    asker, asked = office((200, granted()))
    assert asker.spend(REF, 0, 9, timeout_ms=1_000) == [(2, 9)]
    assert asked[0].url.path == "/v1/groups/g/grants"
    said = json.loads(asked[0].content)
    assert said["client_id"] == "a"
    assert said["incarnation"] == (b"i" * 16).hex()
    assert (said["topic"], said["partition"], said["epoch"]) == ("t", 3, 7)
    assert (said["first"], said["last"], said["timeout_ms"]) == (0, 9, 1_000)
    assert said["secret"] == REF.secret


def test_each_request_has_a_grantee_of_its_own():
    asker, asked = office((200, granted()))
    for _ in range(3):
        asker.spend(REF, 0, 9, timeout_ms=1_000)
    assert len({json.loads(each.content)["grantee"] for each in asked}) == 3


@pytest.mark.parametrize("outcome", ["refused", "ignored"])
def test_nothing_is_granted_but_by_acceptance(outcome):
    asker, _ = office((200, granted(outcome=outcome, reason="why")))
    assert asker.ask(REF, (0, 9), timeout_ms=1_000) == Verdict(None, "why", 41, 10)


def refused(reason, **rest):
    none = {"outcome": "refused", "reason": reason, "first": None, "last": None}
    return 200, granted(**none | rest)


@pytest.mark.parametrize("reason", ["span", "nothing_left"])
def test_what_may_be_granted_to_the_next_request_is_asked_for_again(reason):
    """The sidecar cut the request by what it had read until then."""
    asker, asked = office((200, granted()), first=[refused(reason, head=5)])
    assert asker.spend(REF, 2, 9, timeout_ms=1_000) == [(2, 9)]
    assert len({json.loads(each.content)["grantee"] for each in asked}) == 2


@pytest.mark.parametrize("reason", ["nothing_left", "not_owner", "old_epoch"])
def test_what_is_not_ours_is_asked_for_once(reason):
    asker, asked = office(refused(reason))
    assert asker.spend(REF, 2, 9, timeout_ms=1_000) == []
    assert len(asked) == 1


def test_a_paused_group_is_an_error_and_not_an_empty_range():
    asker, asked = office(refused("paused"))
    with pytest.raises(DeadlineExceeded, match="not granted within 200 ms"):
        asker.spend(REF, 2, 9, timeout_ms=200)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(httpx.ConnectError("refused"), id="nobody listens"),
        pytest.param(httpx.ConnectTimeout("late"), id="nobody takes the call"),
        pytest.param(
            (503, Failure(error="CoordinationError", message="", retriable=True)),
            id="not ready",
        ),
    ],
)
def test_where_nobody_heard_the_log_is_asked(answer):
    asker, _ = office(answer)
    assert asker.ask(REF, (0, 1), timeout_ms=1_000) == ELSEWHERE


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(httpx.ReadTimeout("late"), id="no answer"),
        pytest.param(httpx.ReadError("gone"), id="it died"),
    ],
)
def test_what_may_have_been_granted_is_not_asked_elsewhere(answer):
    asker, asked = office(httpx.ConnectError("it is gone"), first=[answer])
    with pytest.raises(CoordinationError):
        asker.ask(REF, (0, 1), timeout_ms=1_000)
    assert len(asked) == 2
    assert asker._fallback.asked == 0


def test_a_wrong_secret_is_an_error_and_not_a_reason_to_ask_elsewhere():
    said = Failure(error="ClaimRejected", message="no", reason="wrong_secret")
    asker, _ = office((403, said))
    with pytest.raises(ClaimRejected) as caught:
        asker.spend(REF, 0, 1, timeout_ms=1_000)
    assert caught.value.reason == "wrong_secret"
    assert asker._fallback.asked == 0


def test_an_answer_that_was_lost_is_asked_for_under_the_same_number():
    """What was granted and not heard would be nobody's."""
    asker, asked = office((200, granted()), first=[httpx.ReadError("gone")])
    assert asker.spend(REF, 0, 9, timeout_ms=1_000) == [(2, 9)]
    one, other = (json.loads(each.content) for each in asked)
    assert one == other
    assert one["request"] is not None


def test_without_time_left_it_is_not_asked_again():
    asker, asked = office((200, granted()), first=[httpx.ReadTimeout("late")])
    with pytest.raises(CoordinationError):
        asker.ask(REF, (0, 1), timeout_ms=0)
    assert len(asked) == 1


def test_an_answer_that_is_none_is_no_grant():
    asker, _ = office((200, {"outcome": 1}))
    with pytest.raises(CoordinationError):
        asker.ask(REF, (0, 1), timeout_ms=1_000)


@pytest.mark.parametrize(
    ("said", "is_current"),
    [
        (fence(), True),
        (fence(epoch=8, token="1.0.8"), False),
        (fence(client_id="b"), False),
        (fence(incarnation=(b"j" * 16).hex()), False),
        (fence(client_id=None, incarnation=None), False),
        (fence(token=None, epoch=None), False),
    ],
)
def test_whether_a_claim_stands_is_what_the_sidecar_says(said, is_current):
    asker, asked = office((200, said))
    assert asker.is_current(REF, timeout_ms=1_000) is is_current
    assert asked[0].url.path == "/v1/groups/g/owners/t/3"


@pytest.mark.parametrize("error", [httpx.ConnectError("x"), httpx.ReadTimeout("x")])
def test_looking_may_be_done_elsewhere(error):
    asker, _ = office(error)
    assert asker.newest(REF.key, timeout_ms=1_000) == STANDING
    assert Owner(*STANDING.owner) == REF.owner


def test_both_are_closed():
    asker, _ = office((200, granted()))
    asker.close()
    assert asker._fallback.is_closed
