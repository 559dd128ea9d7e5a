"""Grants from a sidecar, or from the fallback client if it does not answer."""

import json

import httpx
import msgspec
import pytest
from fakesidecar import RequestsBy

from kafka_marshal.errors import ClaimRejected, CoordinationError, DeadlineExceeded
from kafka_marshal.grants import ClaimRef, ClaimState, GrantClient
from kafka_marshal.grants.sidecar import SidecarGrantClient
from kafka_marshal.protocol.granting import GrantVerdict
from kafka_marshal.protocol.types import OffsetRange, Owner
from kafka_marshal.remote.answers import AsOf, FenceNow
from kafka_marshal.remote.api import Failure, GrantResponse
from kafka_marshal.remote.transport import Address, Connection

REF = ClaimRef(
    group_id="g",
    client_id="a",
    incarnation=b"i" * 16,
    topic="t",
    partition=3,
    epoch=7,
    token="1.0.7",
    secret="5e" * 16,
)
FALLBACK_VERDICT = GrantVerdict(
    outcome="accepted", reason=None, granted=OffsetRange(0, 2), head=2, offset=99
)
NEWEST = ClaimState("1.0.7", 7, REF.owner)


class Fallback(GrantClient):
    def __init__(self):
        self.asked = 0
        self.is_closed = False

    def request(self, ref, wanted, *, timeout_ms):
        self.asked += 1
        return FALLBACK_VERDICT

    def newest(self, key, *, timeout_ms):
        self.asked += 1
        return NEWEST

    def close(self):
        self.is_closed = True


def opened(answer, *, first=()):
    """Return a client, and the list of requests that its fake sidecar receives.

    The sidecar answers with ``first``, then always with ``answer``.
    """
    asked = []

    answers = iter([*first, *[answer] * 9])

    def handle(request):
        asked.append(request)
        now = next(answers)
        if isinstance(now, Exception):
            raise now
        status, body = now
        return httpx.Response(status, content=msgspec.json.encode(body))

    connection = Connection.open(
        Address.parse("unix:/run/some.sock"),
        token=None,
        group_id="x",
        client_id="x",
        instance="00" * 16,
        requests=RequestsBy(httpx.MockTransport(handle)),
    )
    return SidecarGrantClient(connection, Fallback()), asked


def granted(**rest):
    fields = {"outcome": "accepted", "reason": None, "first": 2, "last": 9}
    return GrantResponse(**fields | {"head": 10, "offset": 41} | rest)


def fence(**rest):
    fields = {"token": "1.0.7", "epoch": 7, "client_id": "a", "position": 4}
    of = AsOf(time_ms=0, offsets={})
    return FenceNow(**{"as_of": of, "incarnation": (b"i" * 16).hex()} | fields | rest)


def test_acquire_sends_the_claim_and_returns_the_granted_range():
    client, asked = opened((200, granted()))
    assert client.acquire(
        REF, OffsetRange.through(0, 9), timeout_ms=1_000
    ) == OffsetRange(2, 10)
    assert asked[0].url.path == "/v1/groups/g/grants"
    body = json.loads(asked[0].content)
    assert body["client_id"] == "a"
    assert body["incarnation"] == (b"i" * 16).hex()
    assert (body["topic"], body["partition"], body["epoch"]) == ("t", 3, 7)
    assert (body["first"], body["last"], body["timeout_ms"]) == (0, 9, 1_000)
    assert body["secret"] == REF.secret


def test_each_request_has_its_own_grantee():
    client, asked = opened((200, granted()))
    for _ in range(3):
        client.acquire(REF, OffsetRange.through(0, 9), timeout_ms=1_000)
    assert len({json.loads(each.content)["grantee"] for each in asked}) == 3


@pytest.mark.parametrize("outcome", ["refused", "ignored"])
def test_a_verdict_that_is_not_accepted_grants_no_range(outcome):
    client, _ = opened((200, granted(outcome=outcome, reason="why")))
    verdict = client.request(REF, OffsetRange.through(0, 9), timeout_ms=1_000)
    assert verdict == GrantVerdict(outcome=outcome, reason="why", head=10, offset=41)


def refused(reason, **rest):
    none = {"outcome": "refused", "reason": reason, "first": None, "last": None}
    return 200, granted(**none | rest)


@pytest.mark.parametrize("reason", ["span", "nothing_left"])
def test_a_refusal_because_of_an_old_head_is_requested_again(reason):
    """The sidecar had cut the request by an old head or limit."""
    client, asked = opened((200, granted()), first=[refused(reason, head=5)])
    assert client.acquire(
        REF, OffsetRange.through(2, 9), timeout_ms=1_000
    ) == OffsetRange(2, 10)
    assert len({json.loads(each.content)["grantee"] for each in asked}) == 2


@pytest.mark.parametrize("reason", ["nothing_left", "not_owner", "old_epoch"])
def test_a_final_refusal_is_not_retried(reason):
    client, asked = opened(refused(reason))
    assert client.acquire(REF, OffsetRange.through(2, 9), timeout_ms=1_000) is None
    assert len(asked) == 1


def test_a_paused_group_raises_instead_of_granting_an_empty_range():
    client, asked = opened(refused("paused"))
    with pytest.raises(DeadlineExceeded, match="not granted within 200 ms"):
        client.acquire(REF, OffsetRange.through(2, 9), timeout_ms=200)
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
def test_the_fallback_answers_if_the_sidecar_did_not_get_the_request(answer):
    client, _ = opened(answer)
    assert (
        client.request(REF, OffsetRange.through(0, 1), timeout_ms=1_000)
        == FALLBACK_VERDICT
    )


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(httpx.ReadTimeout("late"), id="no answer"),
        pytest.param(httpx.ReadError("gone"), id="it died"),
    ],
)
def test_a_request_the_sidecar_may_have_granted_skips_the_fallback(answer):
    client, asked = opened(httpx.ConnectError("it is gone"), first=[answer])
    with pytest.raises(CoordinationError):
        client.request(REF, OffsetRange.through(0, 1), timeout_ms=1_000)
    assert len(asked) == 2
    assert client._fallback.asked == 0


def test_a_wrong_secret_raises_without_using_the_fallback():
    body = Failure(error="ClaimRejected", message="no", reason="wrong_secret")
    client, _ = opened((403, body))
    with pytest.raises(ClaimRejected) as caught:
        client.acquire(REF, OffsetRange.through(0, 1), timeout_ms=1_000)
    assert caught.value.reason == "wrong_secret"
    assert client._fallback.asked == 0


def test_a_request_with_a_lost_response_is_repeated_unchanged():
    """With another request number, the sidecar would not find the grant it has made."""
    client, asked = opened((200, granted()), first=[httpx.ReadError("gone")])
    assert client.acquire(
        REF, OffsetRange.through(0, 9), timeout_ms=1_000
    ) == OffsetRange(2, 10)
    one, other = (json.loads(each.content) for each in asked)
    assert one == other
    assert one["request"] is not None


def test_a_request_is_not_repeated_after_its_deadline():
    client, asked = opened((200, granted()), first=[httpx.ReadTimeout("late")])
    with pytest.raises(CoordinationError):
        client.request(REF, OffsetRange.through(0, 1), timeout_ms=0)
    assert len(asked) == 1


def test_an_invalid_response_raises():
    client, _ = opened((200, {"outcome": 1}))
    with pytest.raises(CoordinationError):
        client.request(REF, OffsetRange.through(0, 1), timeout_ms=1_000)


@pytest.mark.parametrize(
    ("found", "is_current"),
    [
        (fence(), True),
        (fence(epoch=8, token="1.0.8"), False),
        (fence(client_id="b"), False),
        (fence(incarnation=(b"j" * 16).hex()), False),
        (fence(client_id=None, incarnation=None), False),
        (fence(token=None, epoch=None), False),
    ],
)
def test_is_current_compares_the_claim_with_the_owner_at_the_sidecar(found, is_current):
    client, asked = opened((200, found))
    assert client.is_current(REF, timeout_ms=1_000) is is_current
    assert asked[0].url.path == "/v1/groups/g/owners/t/3"


@pytest.mark.parametrize("error", [httpx.ConnectError("x"), httpx.ReadTimeout("x")])
def test_a_failed_query_is_answered_by_the_fallback(error):
    client, _ = opened(error)
    assert client.newest(REF.key, timeout_ms=1_000) == NEWEST
    assert Owner(*NEWEST.owner) == REF.owner


def test_close_closes_the_fallback():
    client, _ = opened((200, granted()))
    client.close()
    assert client._fallback.is_closed
