"""Observers: they turn the engine's events into log lines and counters."""

from kafka_marshal.observability.fanout import FanOut
from kafka_marshal.observability.logs import LoggingObserver, NullObserver

__all__ = ["FanOut", "LoggingObserver", "NullObserver"]
