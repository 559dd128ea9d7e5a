"""Fewer garbage collections while tests run; both conftest.py import the hook.

Python looks through the newest objects after each 700 that are made. Searches of small
worlds, Hypothesis and thousands of collected tests make millions that stay.
"""

import gc

# As many objects are some 10 MB of worlds.
NEWEST_MAX = 100_000


def pytest_collection_finish() -> None:
    """Leave alone what was imported and collected, and look at the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEWEST_MAX, *gc.get_threshold()[1:])
