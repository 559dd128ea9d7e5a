"""Raises KeyboardInterrupt where Python may run a signal handler in a hand-out."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import kafka_marshal

_PACKAGE = Path(kafka_marshal.__file__).parent
_HANDING_OUT = {
    str(_PACKAGE / name)
    for name in (
        *("batches.py", "consumer.py", "ports.py", "engine/dispatcher.py"),
        *("engine/fetch_state.py", "engine/grant_pipeline.py", "engine/holding.py"),
        *("protocol/delivery.py", "protocol/granting.py"),
    )
}
# Python runs handlers as a function begins, and as a built-in one has returned.
_EVENTS = {"call", "c_return"}


def interrupted(call: Callable[[], Any], at: int) -> tuple[bool, Any]:
    """Call a function and raise at the place with this number.

    Args:
        call: Called once, on this thread.
        at: Number of the place, from 0, in the code that hands out records.

    Returns:
        Whether there is such a place, and what the function returned, if anything.
    """
    left, found = at, None

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        del arg
        if event in _EVENTS and frame.f_code.co_filename in _HANDING_OUT:
            left -= 1
            if left == -1:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before, hook = sys.getprofile(), sys.unraisablehook
    # What is raised while a generator is closed is ignored, as by Python.
    sys.unraisablehook = lambda _: None
    sys.setprofile(profile)
    try:
        with suppress(KeyboardInterrupt):
            found = call()
    finally:
        sys.setprofile(before)
        sys.unraisablehook = hook
    return left < 0, found
