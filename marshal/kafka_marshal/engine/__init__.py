"""Drives the rules of ``protocol`` over ports to Kafka, one ``step`` at a time.

One engine per process reads all coordinating partitions in one session and
drives every claim of every group; the simulator runs this same code.
"""

from importlib import import_module

# Type checkers treat this as typing.TYPE_CHECKING; importing typing takes longer than
# the rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .context import Context as Context
    from .context import Ports as Ports
    from .engine import Engine as Engine
    from .holding import Holding as Holding
    from .holding import OfferedKey as OfferedKey
    from .holding import StartRule as StartRule
    from .session import Session as Session
    from .subscription import Subscription as Subscription

# Names are imported on first use: processes that only follow the log, such as Spark
# tasks, never load the rest of the engine.
_HOMES = {
    "Context": "context",
    "Engine": "engine",
    "Holding": "holding",
    "OfferedKey": "holding",
    "Ports": "context",
    "Session": "session",
    "StartRule": "holding",
    "Subscription": "subscription",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
