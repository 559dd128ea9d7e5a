"""Kafka-only coordination of consumers: claims, delivery guarantees and pauses."""

from importlib import import_module

# Type checkers treat it as typing's own, whose import doubles the start of a probe.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kafka_marshal.admin import Admin
    from kafka_marshal.aio import AsyncConsumer, AsyncMarshal
    from kafka_marshal.batches import Batch, CommitToken
    from kafka_marshal.claims import HeldClaim
    from kafka_marshal.client import Marshal
    from kafka_marshal.config import Delivery
    from kafka_marshal.consumer import Consumer
    from kafka_marshal.errors import (
        ClaimError,
        ClaimLost,
        ClaimRejected,
        ClientFenced,
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
        UnknownTopicId,
        WrongCluster,
    )
    from kafka_marshal.group_reset import PositionSpec
    from kafka_marshal.history.reading import GroupHistory, KeyHistory
    from kafka_marshal.loss_report import Losses
    from kafka_marshal.ports import Event, Observer, Record
    from kafka_marshal.protocol.claiming import Ending
    from kafka_marshal.protocol.losses import Loss
    from kafka_marshal.protocol.types import Key, Token, TopicPartition
    from kafka_marshal.views import World
    from kafka_marshal.watch import WorldWatch

    __version__: str

# Names are imported on first use: the pure core must be importable without a Kafka
# client.
_HOMES = {
    "Admin": "kafka_marshal.admin",
    "AsyncConsumer": "kafka_marshal.aio",
    "AsyncMarshal": "kafka_marshal.aio",
    "HeldClaim": "kafka_marshal.claims",
    "Marshal": "kafka_marshal.client",
    "Consumer": "kafka_marshal.consumer",
    "Delivery": "kafka_marshal.config",
    "ClaimError": "kafka_marshal.errors",
    "ClaimLost": "kafka_marshal.errors",
    "ClaimRejected": "kafka_marshal.errors",
    "ClientFenced": "kafka_marshal.errors",
    "ConfigurationError": "kafka_marshal.errors",
    "CoordinationError": "kafka_marshal.errors",
    "DeadlineExceeded": "kafka_marshal.errors",
    "GroupPaused": "kafka_marshal.errors",
    "IdentityConflict": "kafka_marshal.errors",
    "InvalidTransition": "kafka_marshal.errors",
    "LogTruncated": "kafka_marshal.errors",
    "LogUnreadable": "kafka_marshal.errors",
    "LogUnwritable": "kafka_marshal.errors",
    "MalformedRecord": "kafka_marshal.errors",
    "MarshalError": "kafka_marshal.errors",
    "PositionError": "kafka_marshal.errors",
    "ProtocolError": "kafka_marshal.errors",
    "TopicMisconfigured": "kafka_marshal.errors",
    "UnknownTopicId": "kafka_marshal.errors",
    "WrongCluster": "kafka_marshal.errors",
    "PositionSpec": "kafka_marshal.group_reset",
    "Batch": "kafka_marshal.batches",
    "CommitToken": "kafka_marshal.batches",
    "Event": "kafka_marshal.ports",
    "Observer": "kafka_marshal.ports",
    "Record": "kafka_marshal.ports",
    "Ending": "kafka_marshal.protocol.claiming",
    "Key": "kafka_marshal.protocol.types",
    "Token": "kafka_marshal.protocol.types",
    "TopicPartition": "kafka_marshal.protocol.types",
    "Loss": "kafka_marshal.protocol.losses",
    "GroupHistory": "kafka_marshal.history.reading",
    "KeyHistory": "kafka_marshal.history.reading",
    "Losses": "kafka_marshal.loss_report",
    "World": "kafka_marshal.views",
    "WorldWatch": "kafka_marshal.watch",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name == "__version__":
        return _version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kafka_marshal' has no attribute {name!r}")
    return getattr(import_module(home), name)


def _version() -> str:
    """Return the installed version; looking it up takes 30 ms."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("kafka-marshal")
    except PackageNotFoundError:  # a source tree that is not installed
        found = "0+unknown"
    globals()["__version__"] = found
    return found


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)


__all__ = [
    "Admin",
    "AsyncConsumer",
    "AsyncMarshal",
    "Batch",
    "ClaimError",
    "ClaimLost",
    "ClaimRejected",
    "ClientFenced",
    "CommitToken",
    "ConfigurationError",
    "Consumer",
    "CoordinationError",
    "DeadlineExceeded",
    "Delivery",
    "Ending",
    "Event",
    "GroupHistory",
    "GroupPaused",
    "HeldClaim",
    "IdentityConflict",
    "InvalidTransition",
    "Key",
    "KeyHistory",
    "LogTruncated",
    "LogUnreadable",
    "LogUnwritable",
    "Loss",
    "Losses",
    "MalformedRecord",
    "Marshal",
    "MarshalError",
    "Observer",
    "PositionError",
    "PositionSpec",
    "ProtocolError",
    "Record",
    "Token",
    "TopicMisconfigured",
    "TopicPartition",
    "UnknownTopicId",
    "World",
    "WorldWatch",
    "WrongCluster",
    "__version__",
]
