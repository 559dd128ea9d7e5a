"""Observers: they turn the engine's events into log lines; names of the metrics."""

from kafka_marshal.observability.fanout import FanOut
from kafka_marshal.observability.logs import LoggingObserver, NullObserver
from kafka_marshal.observability.structured import StructuredObserver

__all__ = ["FanOut", "LoggingObserver", "NullObserver", "StructuredObserver"]
