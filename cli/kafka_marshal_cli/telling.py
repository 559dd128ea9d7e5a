"""How a command that runs for long tells of itself: metrics, and its events."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import Event, Marshal
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.observability.logs import level_of, to_line
from kafka_marshal.observability.metrics import Server, prometheus
from kafka_marshal.observability.structured import flat
from kafka_marshal_cli.render import to_json
from kafka_marshal_cli.shared import Gathered, tell

PANEL = "Metrics and log"
HOST_DEFAULT = "127.0.0.1"


class LogFormat(StrEnum):
    """How events are written to stderr."""

    TEXT = "text"
    JSON = "json"


@attrs.frozen
class Telling:
    """What was asked for.

    Attributes:
        metrics_port: Where to serve metrics, None for nowhere; 0 for a free port.
        metrics_host: Address to serve them at.
        log_format: How events are written.
        is_verbose: Whether claims that come and go, and events without consequence,
            are written as text too; as JSON they always are.
    """

    metrics_port: int | None = None
    metrics_host: str = HOST_DEFAULT
    log_format: LogFormat = LogFormat.TEXT
    is_verbose: bool = False

    def wants(self, event: Event) -> bool:
        """Return whether an event is written."""
        return (
            self.is_json or self.is_verbose or level_of(event.name) >= logging.WARNING
        )

    @property
    def is_json(self) -> bool:
        """Whether events are written as JSON, claims that come and go among them."""
        return self.log_format is LogFormat.JSON

    def line(self, event: Event, wall_ms: int) -> str:
        """Return the line of an event that came at a wall time."""
        if not self.is_json:
            return f"event: {to_line(event.name, event.fields)}"
        at = datetime.fromtimestamp(wall_ms / 1000, UTC)
        head = {
            "timestamp": at.isoformat(timespec="milliseconds"),
            "level": logging.getLevelName(level_of(event.name)).lower(),
            "event": event.name,
        }
        return to_json(head | flat(event.fields))

    @contextmanager
    def exported(self, marshal: Marshal) -> Iterator[None]:
        """Serve the client's metrics for the time of the block, where asked for.

        Raises:
            ConfigurationError: The port or address cannot be had.
        """
        if self.metrics_port is None:
            yield
            return
        client = prometheus()
        registry = client.CollectorRegistry()
        client.ProcessCollector(registry=registry)
        client.PlatformCollector(registry=registry)
        collector = MarshalCollector(marshal, registry=registry)
        server = Server(registry, self.metrics_port, host=self.metrics_host)
        tell(f"metrics: port {server.port} of {self.metrics_host}, path /metrics")
        try:
            yield
        finally:
            server.close()
            collector.close()


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "metrics_port": (
        Annotated[
            int | None,
            typer.Option(
                min=0,
                max=65_535,
                metavar="PORT",
                help="Serve metrics for Prometheus at this port, path /metrics; 0 "
                "takes a free one. Needs the extra metrics.",
                rich_help_panel=PANEL,
            ),
        ],
        None,
    ),
    "metrics_host": (
        Annotated[
            str,
            typer.Option(
                metavar="ADDRESS",
                help="Address to serve them at; 0.0.0.0 lets other machines ask.",
                rich_help_panel=PANEL,
            ),
        ],
        HOST_DEFAULT,
    ),
    "log_format": (
        Annotated[
            LogFormat,
            typer.Option(
                help="Events on stderr as text, or as one JSON object a line.",
                rich_help_panel=PANEL,
            ),
        ],
        LogFormat.TEXT,
    ),
    "is_verbose": (
        Annotated[
            bool,
            typer.Option(
                "-v",
                "--verbose",
                help="Tell of claims that come and go, and of every event.",
                rich_help_panel=PANEL,
            ),
        ],
        False,
    ),
}


def _told(given: Mapping[str, Any]) -> Telling:
    if given["metrics_port"] is not None:
        prometheus()  # a missing extra is told before anything is claimed
    return Telling(**given)


TELLING = Gathered(_OPTIONS, _told)
