"""Making kafka-python's clients, and learning why one could not be made.

It tries the bootstrap addresses again until its time is up, whatever the reason,
and then raises a timeout that has none: a wrong password looks like a network
that is down. Its log has the reason, as an exception among the arguments. And it
leaves the client's thread and sockets behind, for ever.
"""

import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from kafka import KafkaConsumer
from kafka import errors as kafka_errors

from kafka_marshal.kafka_io.tolerant import change_transports, hear_last_words
from kafka_marshal.kafka_io.untyped import Untyped

_LOGGER = "kafka.net.manager"
# A refusal that no further attempt will change.
REFUSALS = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)


def connected(
    kind: Untyped,
    config: Mapping[str, Untyped],
    *,
    topic: str | None = None,
    watch: "ConnectionWatch | None" = None,
) -> Untyped:
    """Make a client of kafka-python; leave nothing behind where that fails.

    Args:
        kind: ``KafkaConsumer``, ``KafkaProducer`` or ``KafkaAdminClient``.
        config: What it is made with.
        topic: Asked for with the first metadata; for a topic that is named later
            it would wait 100 ms before it asks again.
        watch: Told whose refusals are of this client.

    Returns:
        The client, connected.

    Raises:
        KafkaError: No connection could be made.
    """
    network: list[Untyped] = []

    def make(**options: Untyped) -> Untyped:
        made = KafkaConsumer.DEFAULT_CONFIG["kafka_client"](**options)
        network.append(made)
        change_transports(made, hear_last_words)
        if watch is not None:
            watch.own(made)
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
    less helpful and later, and nothing else changes.

    Attributes:
        refused: Why a client of ours was refused, as it would be again, where it has
            not been let in since.
        refusal: Why any client was refused.
        last: What any client was told last.
        is_ended: Whether ours are not to try again.
    """

    def __init__(self) -> None:
        """Listen for warnings and worse."""
        super().__init__(logging.WARNING)
        self.refused: Exception | None = None
        self.refusal: Exception | None = None
        self.last: Exception | None = None
        self.is_ended = False
        self._networks: list[Untyped] = []

    def own(self, network: Untyped) -> None:
        """Take that what the thread of this network says is about us."""
        self._networks.append(network)

    def end(self) -> None:
        """Have our clients stop trying; return at once.

        Each is told on its own thread, so that whoever makes it fails and closes it.
        """
        self.is_ended = True
        for each in self._networks:
            with suppress(Exception):  # it is over already
                each._net.call_soon_threadsafe(each._manager.close)  # noqa: SLF001

    def emit(self, record: logging.LogRecord) -> None:
        """Note the exception that a log record is about."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        for argument in arguments:
            if isinstance(argument, Exception):
                self.last = argument
            if isinstance(argument, REFUSALS):
                self.refusal = argument
            why = _final(argument)
            if why is not None and self._is_ours(record):
                self.refused = why

    def _is_ours(self, record: logging.LogRecord) -> bool:
        threads = [each._net._io_thread for each in self._networks]  # noqa: SLF001
        return record.thread in {each.ident for each in threads if each is not None}

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


def _final(error: object) -> Exception | None:
    """Return why another attempt would end like this one, where it would."""
    while isinstance(error, Exception):
        if isinstance(error, (*REFUSALS, ssl.SSLCertVerificationError)):
            return error
        error = error.__cause__ or error.__context__
    return None
