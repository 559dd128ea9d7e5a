"""Each error has a status, and its values reach the client."""

import pytest

from kafka_marshal import errors
from kafka_marshal.sidecar import http_errors
from kafka_marshal.sidecar.http_errors import GONE, UNKNOWN, status_of, to_http_error

MADE = {
    errors.ConfigurationError: (errors.ConfigurationError("x", setting="topics"), 400),
    errors.MalformedRecord: (errors.MalformedRecord("x"), 400),
    errors.ClaimRejected: (errors.ClaimRejected("x", holder="h", at_offset=3), 409),
    errors.ClaimLost: (errors.ClaimLost("x", winner="w", reason="taken_over"), 409),
    errors.IdentityConflict: (errors.IdentityConflict("x", holder="h"), 409),
    errors.ClientFenced: (errors.ClientFenced("x", by="me", reason="hung"), 409),
    errors.GroupPaused: (errors.GroupPaused("x", until_ms=1, by="me"), 423),
    errors.PositionError: (
        errors.PositionError("x", requested=1, log_start=2, log_end=3),
        409,
    ),
    errors.DeadlineExceeded: (errors.DeadlineExceeded("x"), 504),
    errors.InvalidTransition: (errors.InvalidTransition("x"), 409),
    errors.CoordinationError: (errors.CoordinationError("x"), 503),
    errors.UnknownTopicId: (errors.UnknownTopicId("x", partition=("t", 0)), 503),
    errors.LogUnreadable: (errors.LogUnreadable("x"), 502),
    errors.LogUnwritable: (errors.LogUnwritable("x"), 502),
    errors.TopicMisconfigured: (errors.TopicMisconfigured("x"), 502),
    errors.WrongCluster: (errors.WrongCluster("x"), 502),
    errors.LogTruncated: (errors.LogTruncated("x"), 502),
    errors.ClaimError: (errors.ClaimError("x"), 409),
    errors.ProtocolError: (errors.ProtocolError("x"), 500),
    errors.MarshalError: (errors.MarshalError("x"), 500),
}


def test_every_error_has_a_status():
    assert set(MADE) == {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_a_failure_has_the_error_and_whether_it_is_retriable(kind):
    error, status = MADE[kind]
    found = to_http_error(error)
    assert found.status == status
    assert found.failure.error == kind.__name__
    assert found.failure.retriable is kind.retriable
    assert str(found) == "x"


@pytest.mark.parametrize(("reason", "status"), [(GONE, 410), (UNKNOWN, 404)])
def test_an_unregistered_client_gets_404_or_410(reason, status):
    assert status_of(errors.ClaimLost("x", reason=reason)) == status


def test_a_failure_has_the_values_of_the_error():
    rejected = to_http_error(errors.ClaimRejected("x", holder="h", at_offset=3)).failure
    assert (rejected.holder, rejected.at_offset, rejected.reason) == ("h", 3, "held")
    lost = to_http_error(errors.ClaimLost("x", winner="w", reason="taken_over")).failure
    assert (lost.holder, lost.reason) == ("w", "taken_over")
    setting = to_http_error(errors.ConfigurationError("x", setting="topics")).failure
    assert setting.setting == "topics"
    assert (
        to_http_error(errors.GroupPaused("x", until_ms=1, by="me")).failure.holder
        == "me"
    )


def test_a_wrong_secret_is_forbidden():
    wrong = errors.ClaimRejected("x", reason=http_errors.WRONG_SECRET)
    assert to_http_error(wrong).status == 403
    assert to_http_error(errors.ClaimRejected("x")).status == 409


def test_an_unexpected_error_discloses_nothing():
    found = to_http_error(RuntimeError("password=hunter2"))
    assert found.status == 500
    assert "hunter2" not in found.failure.message


def test_messages_are_bounded():
    found = to_http_error(errors.MarshalError("x" * 1_000_000))
    assert len(found.failure.message) == http_errors.MESSAGE_CHARS_MAX


def test_an_http_error_is_returned_unchanged():
    found = http_errors.unavailable("soon")
    assert to_http_error(found) is found
    assert (found.status, found.failure.retriable) == (503, True)
