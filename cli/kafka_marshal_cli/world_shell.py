"""The commands of ``marshal shell`` for the tree of a world. They only read.

A session parses lines of input, walks the tree and emits lines of output.
``commands.shell`` reads the worlds and handles the terminal.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import attrs

from kafka_marshal.errors import MarshalError
from kafka_marshal.protocol.types import whole_number
from kafka_marshal_cli.exits import message
from kafka_marshal_cli.render import escape, to_json
from kafka_marshal_cli.world_tree import Directory, File, Node, path_of

Path = tuple[str, ...]
"""Names on the way from the root to a node."""

LINES_MAX = 1_000
"""Most lines that a terminal shows of the output of one command."""
HISTORY_MAX = 1_000


class ShellError(Exception):
    """A command cannot do what was requested; the session continues."""


@attrs.frozen
class Source:
    """Functions through which a session reads worlds.

    Attributes:
        read: Returns the root of the tree, read again; raises ``MarshalError``.
        differences: Returns how the tree differs from another state, as rows of
            ``log_states.difference``; raises ``MarshalError``.
    """

    read: Callable[[], Directory]
    differences: Callable[[str], Iterable[Mapping[str, Any]]]


@attrs.frozen
class _Command:
    usage: str
    help: str
    run: Callable[["Session", Sequence[str]], Iterable[str]]


class Session:
    """One session: the tree, the current directory and the history.

    Attributes:
        cwd: The current directory.
        is_over: Whether ``exit`` was called.
        is_failed: Whether a command failed, or ``diff`` found differences.
    """

    def __init__(
        self,
        source: Source,
        *,
        emit: Callable[[str], None],
        notify: Callable[[str], None],
        lines_max: int | None = None,
    ) -> None:
        """Read the tree.

        Args:
            source: Where the tree comes from.
            emit: Receives each line of output, escaped.
            notify: Receives messages for people, not escaped.
            lines_max: Lines that one command may emit; None for no limit.
        """
        self.cwd: Path = ()
        self.is_over = self.is_failed = False
        self._root = source.read()
        self._source = source
        self._emit = emit
        self._notify = notify
        self._lines_max = lines_max
        self._history: list[str] = []

    def run(self, line: str) -> None:
        """Run a line: a command and its arguments, quoted as in a POSIX shell.

        Errors become messages. A blank line and a comment do nothing.
        """
        name = ""
        try:
            words = _words(line)
            if not words:
                return
            self._history = [*self._history, line.strip()][-HISTORY_MAX:]
            command = _command(words[0])
            name = words[0]
            self._show(command.run(self, words[1:]))
        except ShellError as error:
            self._fail(f"{name}: {error}" if name else str(error))
        except MarshalError as error:
            self._fail(f"{name}: {message(error)}")

    def refresh(self) -> None:
        """Read the tree again; raises ``MarshalError``."""
        self._root = self._source.read()

    def _fail(self, text: str) -> None:
        self.is_failed = True
        self._notify(text)

    def _show(self, lines: Iterable[str]) -> None:
        left = iter(lines)
        for line in islice(left, self._lines_max):
            self._emit(line)
        if next(left, None) is not None:
            self._notify(
                f"... cut after {self._lines_max} lines; name a part of it, or write "
                "all of it to a file with: marshal shell -c"
            )

    # --- paths

    def _matches(self, text: str) -> Iterator[tuple[Path, Node]]:
        """Yield the nodes that match a path; names in it may have ``*``, ``?``, ``[``.

        Raises:
            ShellError: No node matches.
        """
        begin = () if text.startswith("/") else self.cwd
        found = self._walk(begin, [name for name in text.split("/") if name])
        first = next(found, None)
        if first is None:
            raise ShellError(f"{text}: no such file or directory")
        yield first
        yield from found

    def _walk(self, at: Path, names: Sequence[str]) -> Iterator[tuple[Path, Node]]:
        names = list(names)
        while names and names[0] in {".", ".."}:
            at = at[:-1] if names.pop(0) == ".." else at
        node = self._node(at)
        if not names:
            if node is not None:
                yield at, node
        elif isinstance(node, Directory):
            first, *rest = names
            for name in _fitting(node, first):
                yield from self._walk((*at, name), rest)

    def _node(self, path: Path) -> Node | None:
        node: Node | None = self._root
        for name in path:
            node = node.child(name) if isinstance(node, Directory) else None
        return node

    def _absolute(self, text: str) -> Path:
        path = [] if text.startswith("/") else list(self.cwd)
        for name in text.split("/"):
            if name == "..":
                del path[-1:]
            elif name not in {"", "."}:
                path.append(name)
        return tuple(path)

    def _one(self, text: str) -> tuple[Path, Node]:
        found = list(islice(self._matches(text), 2))
        if len(found) > 1:
            raise ShellError(f"{text}: fits several nodes; name one")
        return found[0]

    # --- commands

    def ls(self, arguments: Sequence[str]) -> Iterator[str]:
        """List directories."""
        found = [each for text in arguments or ["."] for each in self._matches(text)]
        files = [path for path, node in found if isinstance(node, File)]
        yield from map(_text, files)
        for number, (path, node) in enumerate(found):
            if not isinstance(node, Directory):
                continue
            if len(found) > 1:
                yield from ([""] if number or files else [])
                yield f"{_text(path)}:"
            yield from node.names()

    def cat(self, arguments: Sequence[str]) -> Iterator[str]:
        """Show values."""
        _require(arguments, 1, None)
        found = [each for text in arguments for each in self._matches(text)]
        for path, node in found:
            if isinstance(node, Directory):
                raise ShellError(f"{_text(path)}: is a directory; see: ls, tree")
        for number, (path, node) in enumerate(found):
            if len(found) > 1:
                yield from ([""] if number else [])
                yield f"==> {_text(path)} <=="
            if isinstance(node, File):
                yield from to_json(node.read(), is_pretty=True).split("\n")

    def cd(self, arguments: Sequence[str]) -> Iterator[str]:
        """Change the current directory."""
        _require(arguments, 0, 1)
        path, node = self._one(*(arguments or ["/"]))
        if not isinstance(node, Directory):
            raise ShellError(f"{_text(path)}: not a directory")
        self.cwd = path
        return iter(())

    def pwd(self, arguments: Sequence[str]) -> Iterator[str]:
        """Print the current directory."""
        _require(arguments, 0, 0)
        yield _text(self.cwd)

    def find(self, arguments: Sequence[str]) -> Iterator[str]:
        """List everything below a directory."""
        words, options = _options(arguments, "-name")
        glob = options.get("-name", "*")
        for text in words or ["."]:
            for path, node in self._matches(text):
                for below, _ in _below(path, node):
                    if fnmatchcase(below[-1] if below else "/", glob):
                        yield _text(below)

    def tree(self, arguments: Sequence[str]) -> Iterator[str]:
        """Show a directory with all values below it."""
        words, options = _options(arguments, "-L")
        depth = _whole("-L", options.get("-L", "100"))
        for text in words or ["."]:
            for path, node in self._matches(text):
                yield from _branch(_text(path), node, depth=depth)

    def diff(self, arguments: Sequence[str]) -> Iterator[str]:
        """Compare with another state."""
        _require(arguments, 1, 2)
        # The path need not exist here: the other state may have it.
        below = self._absolute(arguments[1]) if len(arguments) > 1 else ()
        for row in self._source.differences(arguments[0]):
            path = path_of(row)
            if path[: len(below)] == below:
                self.is_failed = True
                yield f"{_text(path)}: {to_json(row['one'])} -> {to_json(row['other'])}"

    def history(self, arguments: Sequence[str]) -> Iterator[str]:
        """List the commands of this session."""
        _require(arguments, 0, 1)
        count = _whole("history", *(arguments or [str(HISTORY_MAX)]))
        numbered = list(enumerate(self._history, 1))
        for number, line in numbered[max(0, len(numbered) - count) :]:
            yield f"{number:5}  {escape(line)}"

    def man(self, arguments: Sequence[str]) -> Iterator[str]:
        """Show how to use the commands, or one of them."""
        for name in arguments:
            command = _command(name)
            yield command.usage
            yield from (f"    {line}" for line in command.help.split("\n"))
        if not arguments:
            wide = max(len(command.usage) for command in COMMANDS.values())
            for command in COMMANDS.values():
                yield f"{command.usage:<{wide}}  {command.help.splitlines()[0]}"

    def reread(self, arguments: Sequence[str]) -> Iterator[str]:
        """Read the log again."""
        _require(arguments, 0, 0)
        self.refresh()
        return iter(())

    def exit(self, arguments: Sequence[str]) -> Iterator[str]:
        """End the session."""
        _require(arguments, 0, 0)
        self.is_over = True
        return iter(())

    # --- completion

    def candidates(self, before: str, word: str) -> list[str]:
        """Return the possible completions of a word.

        Commands and paths of files end in a space, paths of directories in a slash.

        Args:
            before: The line before the word.
            word: The word so far.
        """
        words = before.split()
        if not words or words[0] in {"help", "man"}:
            return [f"{name} " for name in COMMANDS if name.startswith(word)]
        place, slash, begun = word.rpartition("/")
        begin = () if word.startswith("/") else self.cwd
        names = [name for name in place.split("/") if name]
        _, node = next(self._walk(begin, names), (begin, None))
        if not isinstance(node, Directory):
            return []
        found = []
        for name in node.names():
            if name.startswith(begun):
                is_directory = isinstance(node.child(name), Directory)
                if is_directory or words[0] != "cd":
                    found.append(f"{place}{slash}{name}{'/' if is_directory else ' '}")
        return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ShellError(f"{str(error).lower()}: {line.strip()}") from error


def _command(name: str) -> _Command:
    command = COMMANDS.get(name)
    if command is None:
        raise ShellError(f"{name}: no such command; see: help")
    return command


def _require(arguments: Sequence[str], least: int, most: int | None) -> None:
    if len(arguments) < least or (most is not None and len(arguments) > most):
        raise ShellError("wrong number of arguments; see: help")


def _options(arguments: Sequence[str], name: str) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command, and the value of its one option if given."""
    words, options = list(arguments), {}
    while name in words:
        at = words.index(name)
        if at + 1 == len(words):
            raise ShellError(f"{name} needs a value; see: help")
        options[name] = words[at + 1]
        del words[at : at + 2]
    return words, options


def _whole(name: str, text: str) -> int:
    found = whole_number(text)
    if found is None:
        raise ShellError(f"{name} is {text!r}, which is not a whole number")
    return found


def _fitting(directory: Directory, name: str) -> Iterable[str]:
    if not any(special in name for special in "*?["):
        return () if directory.child(name) is None else (name,)
    return (each for each in directory.names() if fnmatchcase(each, name))


def _text(path: Path) -> str:
    return "/" + "/".join(path)


def _below(path: Path, node: Node) -> Iterator[tuple[Path, Node]]:
    yield path, node
    if isinstance(node, Directory):
        for name in node.names():
            child = node.child(name)
            if child is not None:
                yield from _below((*path, name), child)


def _branch(name: str, node: Node, *, depth: int, indent: str = "") -> Iterator[str]:
    if isinstance(node, File):
        yield f"{indent}{name}: {to_json(node.read())}"
        return
    yield f"{indent}{name}" if name == "/" else f"{indent}{name}/"
    if depth:
        for each in node.names():
            child = node.child(each)
            if child is not None:
                yield from _branch(each, child, depth=depth - 1, indent=indent + "  ")


COMMANDS = {
    "cat": _Command(
        "cat PATH...", "Show values, as JSON. Paths may have *, ? and [].", Session.cat
    ),
    "cd": _Command("cd [PATH]", "Change the current directory.", Session.cd),
    "diff": _Command(
        "diff OTHER [PATH]",
        "Compare with another state.\n"
        "Each line is a path, the value here and there.\n"
        "OTHER is a file of `log snapshot` or `log dump`, `live`, or a moment:\n"
        "an ISO time, a time ago like -5m, or the last offset of a coordinating\n"
        "partition, like 3:100.\nPATH: only the differences below it.",
        Session.diff,
    ),
    "exit": _Command("exit", "End the session, as Ctrl-D does.", Session.exit),
    "find": _Command(
        "find [PATH...] [-name GLOB]",
        "List all paths below a directory.",
        Session.find,
    ),
    "help": _Command(
        "help [COMMAND...]", "Show all commands, or how to use some.", Session.man
    ),
    "history": _Command(
        "history [COUNT]", "List the last commands of this session.", Session.history
    ),
    "ls": _Command("ls [PATH...]", "List directories, one name a line.", Session.ls),
    "man": _Command("man [COMMAND...]", "The same as help.", Session.man),
    "pwd": _Command("pwd", "Show the current directory.", Session.pwd),
    "refresh": _Command("refresh", "Read the log again.", Session.reread),
    "tree": _Command(
        "tree [PATH...] [-L DEPTH]",
        "Show directories with all values below them.",
        Session.tree,
    ),
}
