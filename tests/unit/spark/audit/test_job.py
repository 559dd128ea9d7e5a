"""How errors of a Spark job are translated."""

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
def test_an_error_of_the_package_keeps_its_type_and_message(kind):
    text = TRACE.format(name=kind.__name__, message="partition 3 ends")
    error = translate_error(PySparkException(text))
    assert (type(error), str(error)) == (kind, "partition 3 ends")


def test_an_error_with_more_fields_becomes_a_coordination_error():
    text = TRACE.format(name=PositionError.__name__, message="gone")
    error = translate_error(PySparkException(text))
    assert (type(error), str(error)) == (CoordinationError, "gone")


@pytest.mark.parametrize("name", ["Nothing", "Any"])
def test_unknown_error_names_become_coordination_errors(name):
    error = translate_error(PySparkException(TRACE.format(name=name, message="gone")))
    assert type(error) is CoordinationError


def test_other_errors_are_reduced_to_one_line():
    text = "thrown\nTraceback\n  File x\nModuleNotFoundError: No module named 'y'\n end"
    error = translate_error(PySparkException(text))
    assert str(error) == (
        "the Spark job failed: ModuleNotFoundError: No module named 'y'"
    )
    assert str(translate_error(PySparkException("[CODE] why\nmore"))) == (
        "the Spark job failed: [CODE] why"
    )
    assert "PySparkException" in str(translate_error(PySparkException("")))
