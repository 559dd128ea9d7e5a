"""Kafka-only coordination of consumers: claims, delivery guarantees and pauses."""

from importlib.metadata import PackageNotFoundError, version

from kafka_marshal.admin import Admin
from kafka_marshal.claims import HeldClaim
from kafka_marshal.client import Marshal
from kafka_marshal.consumer import Batch, Consumer
from kafka_marshal.engine import Delivery
from kafka_marshal.errors import (
    ClaimError,
    ClaimLost,
    ClaimRejected,
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
    GroupPaused,
    IdentityConflict,
    InvalidTransition,
    LogTruncated,
    LogUnreadable,
    LogUnwritable,
    MalformedRecord,
    MarshalError,
    PositionError,
    ProtocolError,
    TopicMisconfigured,
    WrongCluster,
)
from kafka_marshal.ports import Event, Observer, Record
from kafka_marshal.protocol.types import Key, Token, TopicPartition
from kafka_marshal.views import World

try:
    __version__ = version("kafka-marshal")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Admin",
    "Batch",
    "ClaimError",
    "ClaimLost",
    "ClaimRejected",
    "ConfigurationError",
    "Consumer",
    "CoordinationError",
    "DeadlineExceeded",
    "Delivery",
    "Event",
    "GroupPaused",
    "HeldClaim",
    "IdentityConflict",
    "InvalidTransition",
    "Key",
    "LogTruncated",
    "LogUnreadable",
    "LogUnwritable",
    "MalformedRecord",
    "Marshal",
    "MarshalError",
    "Observer",
    "PositionError",
    "ProtocolError",
    "Record",
    "Token",
    "TopicMisconfigured",
    "TopicPartition",
    "World",
    "WrongCluster",
    "__version__",
]
