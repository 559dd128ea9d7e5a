"""Options of commands that stand before the name of the command.

Users of kubectl write ``marshal -o json claims list``. typer would refuse it, because
each option belongs to the command. So shared options are moved behind its name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

FLAGS = frozenset({"--debug"})
WITH_VALUE = frozenset(
    {
        *("-b", "--bootstrap-server", "--coordination-topic"),
        *("-C", "--command-property", "--command-config"),
        *("--transport", "--timeout", "-o", "--output", "--as"),
    }
)
PROFILE = frozenset({"--config", "--profile"})
"""Of ``marshal`` and of its commands."""
OF_ROOT = frozenset({"--version", "--help", "-h"})


class Split(NamedTuple):
    """Arguments of ``marshal``, sorted.

    Attributes:
        own: Options of ``marshal`` itself.
        words: The name of the command, of one word or two.
        moved: Shared options that were before or within it.
        rest: What follows.
        is_complete: Whether the name of the command is.
    """

    own: list[str]
    words: list[str]
    moved: list[str]
    rest: list[str]
    is_complete: bool = False

    @property
    def joined(self) -> list[str]:
        """The arguments with the moved options behind the name of the command.

        Without a command, as for help, they have no effect.
        """
        moved = self.moved if self.is_complete else []
        return [*self.own, *self.words, *moved, *self.rest]


def split(args: list[str], commands: Mapping[str, Any]) -> Split:
    """Sort the arguments of ``marshal``.

    Args:
        args: The arguments.
        commands: The commands and groups of ``marshal``; ``is_group`` of one states
            that another word follows.
    """
    found = Split([], [], [], [*args])
    while found.rest:
        first = found.rest[0]
        if not first.startswith("-"):
            found.words.append(found.rest.pop(0))
            if len(found.words) > 1 or not getattr(commands.get(first), "is_group", 0):
                return found._replace(is_complete=True)
            continue
        size = _size(first, WITH_VALUE, FLAGS)
        to = found.moved
        if not size and found.words:
            size = _size(first, PROFILE)
        elif not size:
            size, to = _size(first, PROFILE, OF_ROOT), found.own
        if not size:
            break
        to.extend(found.rest[:size])
        del found.rest[:size]
    return found


def _size(
    text: str, with_value: frozenset[str], flags: frozenset[str] = frozenset()
) -> int:
    """Return how many arguments an option takes, 0 if it is not one of these."""
    if text in flags:
        return 1
    if text in with_value:
        return 2
    is_long = text.startswith("--")
    name = text.partition("=")[0] if is_long else text[:2]
    return int(name in with_value)
