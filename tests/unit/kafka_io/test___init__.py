"""Effects of the import of the package on warnings of the interpreter."""

import subprocess
import sys

import pytest
from slices import HANG_S


@pytest.mark.parametrize("module", ["data", "record_batches", "fast.coordination"])
def test_the_import_raises_no_warning_of_kafka_python(module):
    line = f"import kafka_marshal.kafka_io.{module}, kafka"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", line],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_warning_of_the_application_is_still_raised():
    line = (
        "import kafka_marshal.kafka_io, warnings\n"
        "warnings.warn('read_text is deprecated', DeprecationWarning)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", line],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "DeprecationWarning: read_text is deprecated" in done.stderr
