"""Drives the pure core over ports, one ``step`` at a time.

One engine per process reads all coordinating partitions in one session and
drives every claim of every group; the simulator runs this same code.
"""

from importlib import import_module

# Type checkers take it for typing's own, whose import takes longer than all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .context import Context, Ports
    from .engine import Engine
    from .holding import Delivery, Holding, StartRule
    from .session import Session
    from .subscription import Subscription

# Names are imported when they are first used: who only follows the log, as tasks of
# Spark do, does without the rest of the engine.
_HOMES = {
    "Context": "context",
    "Delivery": "holding",
    "Engine": "engine",
    "Holding": "holding",
    "Ports": "context",
    "Session": "session",
    "StartRule": "holding",
    "Subscription": "subscription",
}
__all__ = [
    "Context",
    "Delivery",
    "Engine",
    "Holding",
    "Ports",
    "Session",
    "StartRule",
    "Subscription",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
