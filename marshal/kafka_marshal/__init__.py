"""Kafka-only coordination of consumers: claims, delivery guarantees and pauses."""

from importlib import import_module

# Type checkers treat this like typing's, whose import would double a probe's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kafka_marshal.admin.client import Admin as Admin
    from kafka_marshal.admin.group_reset import PositionSpec as PositionSpec
    from kafka_marshal.aio import AsyncConsumer as AsyncConsumer
    from kafka_marshal.aio import AsyncMarshal as AsyncMarshal
    from kafka_marshal.batches import Batch as Batch
    from kafka_marshal.batches import CommitToken as CommitToken
    from kafka_marshal.claims import HeldClaim as HeldClaim
    from kafka_marshal.client import Marshal as Marshal
    from kafka_marshal.config import Delivery as Delivery
    from kafka_marshal.consumer import Consumer as Consumer
    from kafka_marshal.errors import ClaimError as ClaimError
    from kafka_marshal.errors import ClaimLost as ClaimLost
    from kafka_marshal.errors import ClaimRejected as ClaimRejected
    from kafka_marshal.errors import ClientFenced as ClientFenced
    from kafka_marshal.errors import ConfigurationError as ConfigurationError
    from kafka_marshal.errors import CoordinationError as CoordinationError
    from kafka_marshal.errors import DeadlineExceeded as DeadlineExceeded
    from kafka_marshal.errors import GroupPaused as GroupPaused
    from kafka_marshal.errors import IdentityConflict as IdentityConflict
    from kafka_marshal.errors import InvalidTransition as InvalidTransition
    from kafka_marshal.errors import LogTruncated as LogTruncated
    from kafka_marshal.errors import LogUnreadable as LogUnreadable
    from kafka_marshal.errors import LogUnwritable as LogUnwritable
    from kafka_marshal.errors import MalformedRecord as MalformedRecord
    from kafka_marshal.errors import MarshalError as MarshalError
    from kafka_marshal.errors import PositionError as PositionError
    from kafka_marshal.errors import ProtocolError as ProtocolError
    from kafka_marshal.errors import TopicMisconfigured as TopicMisconfigured
    from kafka_marshal.errors import UnknownTopicId as UnknownTopicId
    from kafka_marshal.errors import WrongCluster as WrongCluster
    from kafka_marshal.history.reading import GroupHistory as GroupHistory
    from kafka_marshal.history.reading import KeyHistory as KeyHistory
    from kafka_marshal.ports import Event as Event
    from kafka_marshal.ports import Observer as Observer
    from kafka_marshal.ports import Record as Record
    from kafka_marshal.protocol.claiming import Ending as Ending
    from kafka_marshal.protocol.losses import Loss as Loss
    from kafka_marshal.protocol.types import Key as Key
    from kafka_marshal.protocol.types import Token as Token
    from kafka_marshal.protocol.types import TopicPartition as TopicPartition
    from kafka_marshal.transactions import Transaction as Transaction
    from kafka_marshal.views.losses import Losses as Losses
    from kafka_marshal.views.watch import WorldWatch as WorldWatch
    from kafka_marshal.views.world import World as World

    __version__: str

# Names are imported on first use, so that the pure core can be imported without a Kafka
# client.
_HOMES = {
    "Admin": "kafka_marshal.admin.client",
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
    "PositionSpec": "kafka_marshal.admin.group_reset",
    "Batch": "kafka_marshal.batches",
    "CommitToken": "kafka_marshal.batches",
    "Event": "kafka_marshal.ports",
    "Observer": "kafka_marshal.ports",
    "Record": "kafka_marshal.ports",
    "Ending": "kafka_marshal.protocol.claiming",
    "Key": "kafka_marshal.protocol.types",
    "Token": "kafka_marshal.protocol.types",
    "TopicPartition": "kafka_marshal.protocol.types",
    "Transaction": "kafka_marshal.transactions",
    "Loss": "kafka_marshal.protocol.losses",
    "GroupHistory": "kafka_marshal.history.reading",
    "KeyHistory": "kafka_marshal.history.reading",
    "Losses": "kafka_marshal.views.losses",
    "World": "kafka_marshal.views.world",
    "WorldWatch": "kafka_marshal.views.watch",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - they are strings


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name == "__version__":
        return _version()
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kafka_marshal' has no attribute {name!r}")
    return getattr(import_module(home), name)


def _version() -> str:
    """Return the installed version; the look-up takes 30 ms."""
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
