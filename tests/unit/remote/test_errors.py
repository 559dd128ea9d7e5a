"""Failures come back as the errors that they were made of."""

import pytest

from kafka_marshal import errors
from kafka_marshal.errors import CoordinationError, MarshalError
from kafka_marshal.remote.api import Failure
from kafka_marshal.remote.errors import error_of
from kafka_marshal.sidecar.http_errors import to_http_error

REAL = [
    pytest.param(each, id=type(each).__name__)
    for each in (
        errors.ConfigurationError("m", setting="policy"),
        errors.ClaimLost("m", winner="w", at_offset=3, reason="taken_over"),
        errors.ClaimRejected("m", holder="h", at_offset=4, reason="paused"),
        errors.IdentityConflict("m", holder="h"),
        errors.ClientFenced("m", by="alice", reason="hung", at_offset=5),
        errors.ClientFenced("m"),
        errors.GroupPaused("m", until_ms=0, by="admin"),
        errors.PositionError("m", requested=-1, log_start=-1, log_end=-1),
        errors.PositionError(
            "m", requested=9, log_start=1, log_end=5, partition=("t", 7)
        ),
        errors.DeadlineExceeded("m"),
        errors.InvalidTransition("m"),
        errors.CoordinationError("m"),
        errors.LogUnreadable("m"),
        errors.TopicMisconfigured("m"),
        errors.WrongCluster("m"),
        errors.LogTruncated("m"),
    )
]


@pytest.mark.parametrize("error", REAL)
def test_an_error_survives_the_way(error):
    found = error_of(to_http_error(error).failure)
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


@pytest.mark.parametrize(
    ("retriable", "kind"),
    [
        pytest.param(True, CoordinationError, id="later"),
        pytest.param(False, MarshalError, id="never"),
    ],
)
@pytest.mark.parametrize("name", ["Unheard", "ClaimError", "annotations", "__doc__"])
def test_an_error_that_is_not_known(retriable, kind, name):
    said = Failure(error=name, message="m", retriable=retriable)
    assert type(error_of(said)) is kind
