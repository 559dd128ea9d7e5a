"""Pauses the garbage collector while many objects without cycles are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, leaves_garbage: bool = False) -> Iterator[None]:
    """Disable the garbage collector during the block; restore it afterwards.

    For code that makes many objects without cycles: collections would take longer than
    its work.

    Args:
        leaves_garbage: Whether the block leaves cycles. If so, the youngest generation
            is collected at the end.
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
