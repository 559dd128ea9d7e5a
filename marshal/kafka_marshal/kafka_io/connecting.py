"""Making kafka-python's clients, and learning why one could not be made.

It tries the bootstrap addresses again until its time is up, whatever the reason,
and then raises a timeout that has none: a wrong password looks like a network
that is down. Its log has the reason, as an exception among the arguments. And it
leaves the client's thread and sockets behind, for ever.
"""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from kafka import KafkaConsumer
from kafka import errors as kafka_errors

from kafka_marshal.kafka_io.untyped import Untyped

_LOGGER = "kafka.net.manager"
# A refusal that no further attempt will change.
REFUSALS = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)


def connected(
    kind: Untyped, config: Mapping[str, Untyped], *, topic: str | None = None
) -> Untyped:
    """Make a client of kafka-python; leave nothing behind where that fails.

    Args:
        kind: ``KafkaConsumer``, ``KafkaProducer`` or ``KafkaAdminClient``.
        config: What it is made with.
        topic: Asked for with the first metadata; for a topic that is named later
            it would wait 100 ms before it asks again.

    Returns:
        The client, connected.

    Raises:
        KafkaError: No connection could be made.
    """
    network: list[Untyped] = []

    def make(**options: Untyped) -> Untyped:
        made = KafkaConsumer.DEFAULT_CONFIG["kafka_client"](**options)
        network.append(made)
        if topic is not None:
            made.cluster.add_topic(topic)
        return made

    try:
        return kind(**config, kafka_client=make)
    except BaseException:
        # The object that has a close() was never handed out.
        for each in network:
            each.close()
        raise


class ConnectionWatch(logging.Handler):
    """Notes the reasons that kafka-python logs, while it is entered.

    A logger that the application has turned off tells nothing; messages are then
    less helpful, and nothing else changes.
    """

    def __init__(self) -> None:
        """Listen for warnings and worse."""
        super().__init__(logging.WARNING)
        self.refusal: Exception | None = None
        self.last: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Note the exception that a log record is about."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        for argument in arguments:
            if isinstance(argument, REFUSALS):
                self.refusal = argument
            elif isinstance(argument, Exception):
                self.last = argument

    def reason(self) -> str:
        """Return the last reason as words to put into a message, or nothing."""
        return f" The last attempt ended with: {self.last}." if self.last else ""

    def __enter__(self) -> Self:
        logging.getLogger(_LOGGER).addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)
