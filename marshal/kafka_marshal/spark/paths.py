"""Paths that are given to Spark's readers and to Hadoop."""

import re

_SPECIAL = re.compile(r"[{}\[\]*?\\]")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def for_reader(path: str) -> str:
    """Return a path for ``spark.read``, which matches unescaped ``*`` and ``[`` etc."""
    return _SPECIAL.sub(r"\\\g<0>", path)


def for_hadoop(path: str) -> str:
    """Return a path or URI for Hadoop, which takes the text before a colon as a scheme.

    A relative path may have one, such as the time in ``audit-12:30``.
    """
    is_relative = ":" in path.split("/", maxsplit=1)[0] and not _URI.match(path)
    return f"./{path}" if is_relative else path
