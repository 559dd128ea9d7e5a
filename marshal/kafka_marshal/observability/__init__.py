"""Observers, which write events as log lines, and the names of the metrics."""

from kafka_marshal.observability.logs import (
    FanOut,
    LoggingObserver,
    NullObserver,
    StructuredObserver,
)

__all__ = ["FanOut", "LoggingObserver", "NullObserver", "StructuredObserver"]
