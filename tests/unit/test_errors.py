"""Errors of the library, where a process sends them to another one."""

import copy
import pickle

import pytest

from kafka_marshal import errors

MADE = [
    errors.ClaimLost("m", winner="w", at_offset=7, reason="taken_over"),
    errors.ConfigurationError("m", setting="policy"),
    errors.DeadlineExceeded("m"),
    errors.GroupPaused("m", until_ms=5, by="admin"),
    errors.IdentityConflict("m", holder="w", host="h"),
    errors.PositionError(
        "m", requested=9, log_start=0, log_end=4, partition=("orders", 0)
    ),
    errors.TopicMisconfigured("m", problems=("a", "b")),
    errors.UnknownTopicId("m", partition=("orders", 0)),
]


@pytest.mark.parametrize("error", MADE, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    "pass_on", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_a_pickled_or_copied_error_keeps_its_text_and_attributes(error, pass_on):
    found = pass_on(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == ("m", error.args, vars(error))
