"""Drives the pure core over ports, one ``step`` at a time.

One engine per process reads all coordinating partitions in one session and
drives every claim of every group; the simulator runs this same code.
"""

from .context import Context, Ports
from .engine import Engine
from .holding import Delivery, Holding, StartRule
from .session import Session
from .subscription import Subscription

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
