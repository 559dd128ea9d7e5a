"""Errors of a job in words of ours."""

import pytest
from pyspark.errors import PySparkException

from kafka_marshal.errors import (
    CoordinationError,
    DeadlineExceeded,
    LogTruncated,
    PositionError,
)
from kafka_marshal.spark.audit.job import translate_error

TRACE = """An exception was thrown from the Python worker. Please see the stack trace.
Traceback (most recent call last):
  File "folding.py", line 1, in read
kafka_marshal.errors.{name}: {message}

 SQLSTATE: 38000
"""


@pytest.mark.parametrize("kind", [LogTruncated, DeadlineExceeded])
def test_an_error_of_ours_comes_back_as_it_was(kind):
    text = TRACE.format(name=kind.__name__, message="partition 3 ends")
    error = translate_error(PySparkException(text))
    assert (type(error), str(error)) == (kind, "partition 3 ends")


def test_an_error_that_needs_more_than_words_keeps_them():
    text = TRACE.format(name=PositionError.__name__, message="gone")
    error = translate_error(PySparkException(text))
    assert (type(error), str(error)) == (CoordinationError, "gone")


@pytest.mark.parametrize("name", ["Nothing", "Any"])
def test_what_is_no_error_of_ours_is_not_taken_for_one(name):
    error = translate_error(PySparkException(TRACE.format(name=name, message="gone")))
    assert type(error) is CoordinationError


def test_other_errors_are_told_by_their_last_words():
    text = "thrown\nTraceback\n  File x\nModuleNotFoundError: No module named 'y'\n end"
    error = translate_error(PySparkException(text))
    assert str(error) == (
        "the Spark job failed: ModuleNotFoundError: No module named 'y'"
    )
    assert str(translate_error(PySparkException("[CODE] why\nmore"))) == (
        "the Spark job failed: [CODE] why"
    )
    assert "PySparkException" in str(translate_error(PySparkException("")))
