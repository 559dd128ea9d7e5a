"""The entry point of the command ``marshal``.

The rest is imported inside: it takes half a second, and a Ctrl-C meanwhile
must not end in a traceback.
"""

import logging
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command; what a terminal cannot write is escaped, never an error."""
    try:
        from kafka_marshal_cli.assembly import app

        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")
        for name in ("kafka", "kafka_marshal"):
            # What matters to people is told as an error or an event; --debug
            # shows the rest.
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
        app(prog_name="marshal")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
