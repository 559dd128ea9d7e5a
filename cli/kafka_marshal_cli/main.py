"""The entry point of the command ``marshal``.

The rest is imported inside: it takes half a second, and a Ctrl-C meanwhile
must not end in a traceback.
"""

import logging
import sys
from collections.abc import Callable

INTERRUPTED = 130


def main() -> None:
    """Run the command ``marshal``."""
    try:
        from kafka_marshal_cli.assembly import app

        run(app, program="marshal")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def run(app: Callable[..., object], *, program: str) -> None:
    """Run a command line; what a terminal cannot write is escaped, never an error.

    Args:
        app: A typer application.
        program: The name that help and errors show.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    for name in ("kafka", "kafka_marshal"):
        # What matters to people is told as an error or an event; --debug shows
        # the rest.
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    app(prog_name=program)
