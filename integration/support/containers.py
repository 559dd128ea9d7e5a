"""A Kafka broker in a container, for ``--broker=container``."""

from typing import Any, Self

from kafka_marshal.errors import ConfigurationError, InvalidTransition


class ContainerBroker:
    """A Kafka broker in a container; needs a Docker engine."""

    def __init__(self) -> None:
        """Prepare a broker; ``start`` starts it."""
        self._container: Any = None

    @property
    def bootstrap_servers(self) -> str:
        """The ``host:port`` to connect to."""
        if self._container is None:
            raise InvalidTransition("The container does not run; start it first.")
        address: str = self._container.get_bootstrap_server()
        return address

    def start(self) -> Self:
        """Start the container and wait until it serves clients.

        Returns:
            This object.

        Raises:
            ConfigurationError: testcontainers or a Docker engine is missing.
        """
        try:
            from testcontainers.community.kafka import KafkaContainer
        except ImportError as error:
            raise ConfigurationError(
                "A broker in a container needs testcontainers 4.9 or later; run "
                "`pip install testcontainers`, or use the embedded broker."
            ) from error
        try:
            self._container = KafkaContainer().with_kraft().start()
        except Exception as error:
            raise ConfigurationError(
                f"No broker could be started in a container: {error}. Start a Docker "
                "engine that this user may reach, or use the embedded broker."
            ) from error
        return self

    def stop(self) -> None:
        """Stop and remove the container. Idempotent."""
        if self._container is not None:
            self._container.stop()
            self._container = None
