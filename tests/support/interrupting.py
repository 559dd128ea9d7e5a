"""Raises KeyboardInterrupt where Python may run a signal handler."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import enginekit

import kafka_marshal
import simulator

_PACKAGE = Path(kafka_marshal.__file__).parent
_HANDING_OUT = {
    str(_PACKAGE / name)
    for name in (
        *("batches.py", "consumer.py", "ports.py", "engine/dispatcher.py"),
        *("engine/fetch_state.py", "engine/grant_pipeline.py", "engine/holding.py"),
        "engine/read_turn.py",
        *("protocol/delivery.py", "protocol/granting.py"),
    )
}
# Code called from these functions stands for other threads, which run no handlers.
_OTHERS = (
    *(str(Path(simulator.__file__).parent), enginekit.__file__),
    str(Path(__file__).with_name("fakesidecar.py")),
)
# Python runs handlers when a function begins, and when a built-in has returned.
_EVENTS = {"call", "c_return"}
_MAY_RUN_ON_ENTRY = sys.version_info >= (3, 14)


def interrupted(
    call: Callable[[], Any], at: int, *, everywhere: bool = False
) -> tuple[bool, Any]:
    """Call a function and raise KeyboardInterrupt at the place with this number.

    Args:
        call: Called once, on this thread.
        at: Number of the place, from 0.
        everywhere: Whether places in all code of the library and in conditions count,
            or only those in code that hands out records.

    Returns:
        Whether there is such a place, and the result of the function, if it returned.
    """
    left, found = at, None
    is_place = _is_anywhere if everywhere else _is_handing_out

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        # From Python 3.14 a handler may also run when ``with`` has entered a lock. No
        # code could release the lock then.
        if _MAY_RUN_ON_ENTRY and getattr(arg, "__name__", None) == "__enter__":
            return
        if event in _EVENTS and is_place(frame):
            left -= 1
            if left == -1:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before, hook = sys.getprofile(), sys.unraisablehook
    # Python ignores errors that are raised while a generator is closed.
    sys.unraisablehook = lambda _: None
    sys.setprofile(profile)
    try:
        found = call()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        # From Python: ``Thread.start`` was interrupted while it waited for its lock.
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
    finally:
        sys.setprofile(before)
        sys.unraisablehook = hook
    return left < 0, found


def _is_handing_out(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _HANDING_OUT


def _is_anywhere(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if not name.startswith(str(_PACKAGE)) and name != threading.__file__:
        return False
    each: FrameType | None = frame
    while each is not None:
        if each.f_code.co_filename.startswith(_OTHERS):
            return False
        each = each.f_back
    return True
