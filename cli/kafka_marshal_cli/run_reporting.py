"""How a long-running command reports: metrics for Prometheus, events on stderr."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal import Event, Marshal
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.observability.logs import flat, level_of, to_line
from kafka_marshal.observability.metrics import Server, prometheus
from kafka_marshal_cli.render import to_json
from kafka_marshal_cli.shared import OptionGroup, notify

HOST_DEFAULT = "127.0.0.1"
_option: Any = partial(typer.Option, rich_help_panel="Metrics and log")


class LogFormat(StrEnum):
    """How events are written to stderr."""

    TEXT = "text"
    JSON = "json"


@attrs.frozen(kw_only=True)
class Reporting:
    """The options of reporting; JSON always has all events."""

    metrics_port: Annotated[
        int | None,
        _option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Serve /metrics for Prometheus; 0 for a free port. Needs the "
            "extra metrics.",
        ),
    ] = None
    metrics_host: Annotated[
        str,
        _option(metavar="ADDRESS", help="0.0.0.0 for access from other machines."),
    ] = HOST_DEFAULT
    log_format: Annotated[
        LogFormat, _option(help="Events on stderr: text, or a JSON object a line.")
    ] = LogFormat.TEXT
    is_verbose: Annotated[
        bool, _option("-v", "--verbose", help="Also write all events.")
    ] = False

    def includes(self, event: Event) -> bool:
        """Return whether an event is written to stderr."""
        return (
            self.is_json or self.is_verbose or level_of(event.name) >= logging.WARNING
        )

    @property
    def is_json(self) -> bool:
        """Whether events are written as JSON, with claims won and lost among them."""
        return self.log_format is LogFormat.JSON

    def line(self, event: Event, wall_ms: int) -> str:
        """Return the line of an event that was observed at a wall time."""
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
        """Serve the client's metrics during the block, if a port was given.

        Raises:
            ConfigurationError: The port or address cannot be used.
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
        notify(f"metrics: port {server.port} of {self.metrics_host}, path /metrics")
        try:
            yield
        finally:
            server.close()
            collector.close()


def _checked(given: Reporting) -> Reporting:
    if given.metrics_port is not None:
        prometheus()  # fail on a missing extra before anything is claimed
    return given


REPORTING = OptionGroup.of(Reporting, _checked)
