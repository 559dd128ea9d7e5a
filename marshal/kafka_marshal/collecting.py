"""Keeps the garbage collector away from what it would look at in vain."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, leaves_garbage: bool = False) -> Iterator[None]:
    """Look for no garbage in here; afterwards it is as it was before.

    For what makes many objects that hold no cycles, where looking through them, and
    through all else that is loaded, takes longer than the work.

    Args:
        leaves_garbage: Whether there are cycles in the end, to be collected then; all
            of them are young.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if leaves_garbage:
                gc.collect(0)
            gc.enable()
