"""The entry point of the command ``marshal``.

All else is imported inside ``main``: a Ctrl-C during it must not end in a traceback,
and ``marshal --version`` needs none of it.
"""

import gc
import os
import sys
from collections.abc import Callable

FAILED, INTERRUPTED = 1, 130


def main() -> None:
    """Run the command ``marshal``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-
            from pathlib import Path

            null = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - kept
            setattr(sys, name, null)
    try:
        if sys.argv[1:] == ["--version"]:
            from kafka_marshal import __version__

            sys.stdout.write(f"marshal {__version__}\n")
            sys.stdout.flush()
            return
        from kafka_marshal_cli.assembly import app

        run(app, program="marshal")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit()
    except OSError as error:
        # Commands report their own errors; this is the output of help or version.
        sys.stderr.write(f"marshal: the output cannot be written: {error}\n")
        sys.exit(FAILED)
    finally:
        # Else the interpreter's end looks for garbage in all that was imported.
        gc.freeze()


def run(app: Callable[..., object], *, program: str) -> None:
    """Run a command line; characters that a terminal cannot show are escaped.

    Args:
        app: A typer application.
        program: The name that help and errors show.
    """
    import logging

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    for name in ("kafka", "kafka_marshal"):
        # Errors and events report what matters; --debug shows the rest.
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    app(prog_name=program)
