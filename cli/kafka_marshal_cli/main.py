"""The entry point of the command ``marshal``.

Other modules are imported inside ``main``: a Ctrl-C during the imports must not end in
a traceback, and ``marshal --version`` does not need them.
"""

import gc
import os
import sys
from collections.abc import Callable

FAILED, USAGE, INTERRUPTED = 1, 2, 130
_SET_LOCALE = "set a locale of UTF-8, such as `LC_ALL=C.UTF-8`\n"


def main() -> None:
    """Run the command ``marshal``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-
            from pathlib import Path

            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - kept
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
        from kafka_marshal_cli.shared import discard_stdout

        discard_stdout()
    except OSError as error:
        # Commands report their own errors, so help or version caused this one.
        sys.stderr.write(f"marshal: the output cannot be written: {error}\n")
        sys.exit(FAILED)
    finally:
        # Otherwise the interpreter searches all imported modules for garbage at exit.
        gc.freeze()


def _require_text() -> None:
    """Exit with 2 if an argument or a ``MARSHAL_`` variable is not valid text.

    Python decodes bytes that the locale cannot decode to surrogates, and these cannot
    be encoded later.
    """
    given = [("argument", text) for text in sys.argv[1:]]
    settings = sorted(each for each in os.environ if each.startswith("MARSHAL_"))
    given += [(name, os.environ[name]) for name in settings]
    for name, text in given:
        if any("\ud800" <= character <= "\udfff" for character in text):
            encoding = sys.getfilesystemencoding()
            is_utf_8 = encoding.lower().replace("_", "-") == "utf-8"
            places = ("LC_ALL", "LC_CTYPE", "LANG")
            place = next((each for each in places if os.environ.get(each)), "LANG")
            sys.stderr.write(
                f"marshal: {name} {ascii(os.fsencode(text))[1:]} is not valid in "
                f"{encoding}, the encoding of the locale "
                f"({place}={ascii(os.environ.get(place, ''))[1:-1]})\n  next: "
                + ("write it in UTF-8\n" if is_utf_8 else _SET_LOCALE)
            )
            sys.exit(USAGE)


def run(app: Callable[..., object], *, program: str) -> None:
    """Run a command line; characters that a terminal cannot show are escaped.

    Exits with 2 if an argument is not valid in the encoding of the locale.

    Args:
        app: A typer application.
        program: The name that help and errors show.
    """
    import logging
    import signal

    # The parent may have made this process ignore it; then exit codes of processes
    # that it starts would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    _require_text()
    for name in ("kafka", "kafka_marshal"):
        # Errors and events report what matters; --debug shows the rest.
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    app(prog_name=program)
