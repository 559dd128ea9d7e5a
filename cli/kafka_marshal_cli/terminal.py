"""Finds out the width of the terminal, and whether it shows color."""

import os
from contextlib import suppress
from typing import TextIO

WIDTH_DEFAULT = 80


def columns(stream: TextIO) -> int:
    """Return the width for text: from ``COLUMNS``, else the terminal's, else 80."""
    given = os.environ.get("COLUMNS", "")
    width = int(given) if given.isdecimal() else 0
    if not width:
        with suppress(OSError, ValueError):
            width = os.get_terminal_size(stream.fileno()).columns
    return width or WIDTH_DEFAULT


def terminal(stream: TextIO) -> tuple[int | None, bool]:
    """Return the width and whether color is shown; None and False in a pipe or file."""
    if not stream.isatty():
        return None, False
    is_dumb = os.environ.get("TERM", "") in {"", "dumb"}
    return columns(stream), not (os.environ.get("NO_COLOR") or is_dumb)
