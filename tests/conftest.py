"""Time limits of tests, and Hypothesis profiles; the default one is repeatable."""

import os

from collecting import pytest_collection_finish  # noqa: F401 - hook
from hypothesis import HealthCheck, settings
from limits import (  # noqa: F401 - hooks
    pytest_runtest_teardown,
    pytest_sessionstart,
    pytest_timeout_set_timer,
)
from slices import deselect_proof as pytest_collection_modifyitems  # noqa: F401

# The same examples in each run: a failed build fails again.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# New examples in each run, to find more failures: HYPOTHESIS_PROFILE=dev.
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what transcripts print into their files; read the diff then",
    )
