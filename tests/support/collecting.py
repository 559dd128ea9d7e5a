"""Fewer garbage collections while tests run; both conftest.py import the hook.

By default, Python collects after each 700 new objects. Searches of small worlds,
Hypothesis and thousands of collected tests create millions of objects that stay.
"""

import gc

# That many objects are some 10 MB of worlds.
NEWEST_MAX = 100_000


def pytest_collection_finish() -> None:
    """Exclude all objects so far from collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEWEST_MAX, *gc.get_threshold()[1:])
