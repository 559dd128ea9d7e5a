"""Commands whose modules are imported when they are invoked.

A group lists its commands, in its help and in completions, without importing them:
imports of unused modules would take most of the time of a short command.

Users of kubectl write ``marshal -o json claims list``. typer would refuse this, because
the option belongs to ``list``. So shared options are moved behind the command's name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

PACKAGE = "kafka_marshal_cli.commands"
NO_COMMAND = 2  # the exit code of wrong usage
# Python's int() would also take spaces, underscores and all digits of Unicode.
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_LARGEST = 2**63 - 1  # the largest offset
# Shared options, which each command has.
FLAGS = frozenset({"--debug"})
WITH_VALUE = frozenset(
    {
        *("-b", "--bootstrap-server", "--coordination-topic"),
        *("-C", "--command-property", "--command-config"),
        *("--transport", "--timeout", "-o", "--output", "--as"),
    }
)
PROFILE = frozenset({"--config", "--profile"})
"""Options that ``marshal`` and its commands both have."""
OF_ROOT = frozenset({"--version", "--help", "-h"})


class Split(NamedTuple):
    """Arguments of ``marshal``, split by what they belong to.

    Attributes:
        own: Options of ``marshal`` itself.
        words: The name of the command, of one word or two.
        moved: Shared options that were before or within the name.
        rest: The remaining arguments.
        is_complete: Whether ``words`` is a complete name.
    """

    own: list[str]
    words: list[str]
    moved: list[str]
    rest: list[str]
    is_complete: bool = False

    @property
    def joined(self) -> list[str]:
        """The arguments with the moved options behind the name of the command.

        If the name is incomplete, as for help, the moved options are dropped.
        """
        moved = self.moved if self.is_complete else []
        return [*self.own, *self.words, *moved, *self.rest]


def split(args: list[str], commands: Mapping[str, Any]) -> Split:
    """Split the arguments of ``marshal`` by what they belong to.

    Args:
        args: The arguments.
        commands: The commands and groups of ``marshal``, by name. The name of one with
            ``is_group`` is followed by a second word.
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
    """Return how many arguments an option fills; 0 if it is in neither set."""
    if text in flags:
        return 1
    if text in with_value:
        return 2
    is_long = text.startswith("--")
    name = text.partition("=")[0] if is_long else text[:2]
    return int(name in with_value)


class Conversion:
    """Converts the value of a parameter; calls typer only for uncommon types.

    To convert any value, typer imports pydantic, which takes as long as all other
    imports of a short command.

    Args:
        wanted: typer's description of the type.
        by_typer: Returns typer's conversion.
    """

    def __init__(
        self,
        wanted: Any,  # noqa: ANN401 - typer's
        by_typer: Callable[[], Any],
    ) -> None:
        self._annotation = wanted.annotation
        self._has_parser = wanted.parameter_info.parser is not None
        self._least, self._most = wanted.parameter_info.min, wanted.parameter_info.max
        self._by_typer = by_typer

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:  # noqa: ANN401
        """Return the value, converted to the type; called by typer.

        Raises the errors of typer's conversion for an invalid value.
        """
        kind = self._annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if self._has_parser:
            pass
        elif kind is str and type(value) is str:
            return value
        elif isinstance(kind, type) and issubclass(kind, Enum):
            found = [each for each in kind if value in (each, each.value)]
            if found:
                return found[0]
            names = ", ".join(each.value for each in kind)
            raise typer.BadParameter(
                f"{value!r} is not one of {names}", ctx=ctx, param=param
            )
        elif kind is int and type(value) is str:
            wrong = self._wrong_number(value)
            if wrong is not None:
                raise typer.BadParameter(wrong, ctx=ctx, param=param)
            return int(value)
        elif kind == list[str] and all(type(each) is str for each in value):
            return list(value)
        return self._by_typer().coerce(value, param=param, ctx=ctx)

    def _wrong_number(self, text: str) -> str | None:
        """Return why text is not a number in the range; None if it is one."""
        if not _WHOLE.fullmatch(text):
            return f"{text!r} is not a whole number"
        if abs(int(text)) > _LARGEST:
            return f"{text} is out of range"
        if self._least is not None and int(text) < self._least:
            return f"{text} is less than {self._least}"
        if self._most is not None and int(text) > self._most:
            return f"{text} is more than {self._most}"
        return None


# The placeholder that typer shows for an option that names none.
_NUMBER = re.compile(r"<int( range)?>")


class Option(TyperOption):
    """An option whose value is converted without pydantic if possible."""

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:  # noqa: ANN401
        """Return names and text for the help, with N for a number."""
        found = super().get_help_record(ctx)
        return found and (_NUMBER.sub("N", found[0]), found[1])

    def get_runtime_param(self) -> Any:  # noqa: ANN401 - typer's
        """Return the converter of the value."""
        return Conversion(self.type_descriptor, super().get_runtime_param)


class Argument(TyperArgument):
    """An argument whose value is converted without pydantic if possible.

    Help and usage show only its placeholder; typer would add braces and a Python type.
    """

    def get_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's
        """Return the words for the usage line."""
        if self.metavar is None:
            return super().get_usage_pieces(ctx)
        return [f"{self.metavar}{'...' if self.nargs == -1 else ''}"]

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:  # noqa: ANN401
        """Return name and text for the help."""
        found = super().get_help_record(ctx)
        return found and (self.metavar or found[0], found[1])

    def get_runtime_param(self) -> Any:  # noqa: ANN401 - typer's
        """Return the converter of the value."""
        return Conversion(self.type_descriptor, super().get_runtime_param)


_KINDS: dict[type, Any] = {TyperOption: Option, TyperArgument: Argument}


def _quick(param: Any) -> Any:  # noqa: ANN401 - typer's
    kind = _KINDS.get(type(param))
    if kind is None:
        return param
    quick = kind.__new__(kind)
    vars(quick).update(vars(param))
    return quick


def convert_quickly(command: Any) -> None:  # noqa: ANN401 - typer's
    """Make the parameters of a command convert values without pydantic."""
    command.params = [_quick(each) for each in command.params]
    if not hasattr(command.get_help_option, "cache_info"):
        command.get_help_option = cache(_help_option(command.get_help_option))


def _help_option(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda ctx: _quick(find(ctx))


_ARGUMENT_OPTIONS = {"group": ("--group", "-g"), "topics": ("--topic",)}
"""Options of Kafka's tools for first arguments, by the names of these."""


def _take_argument_option(command: Any) -> None:  # noqa: ANN401 - click's
    """Let a command take its first argument as an option, as Kafka's tools do."""
    names = [each.name for each in command.params if each.param_type_name == "argument"]
    options = _ARGUMENT_OPTIONS.get(names[0]) if names else None
    if options is not None:
        parse = command.parse_args
        command.parse_args = lambda ctx, args: parse(ctx, option_first(args, options))


def _list_commands(command: Any) -> None:  # noqa: ANN401 - click's
    """Make a group of commands list its commands if the given one is unknown."""
    commands = getattr(command, "commands", None)
    if commands is None:
        return
    resolve = command.resolve_command

    def resolve_or_list(ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - click's
        first = args[0]
        if not (first in commands or first.startswith("-") or ctx.resilient_parsing):
            shown = [name for name, each in commands.items() if not each.hidden]
            ctx.fail(f"No such command {first!r}; there are {', '.join(shown)}")
        return resolve(ctx, args)

    command.resolve_command = resolve_or_list


def option_first(args: list[str], options: Sequence[str]) -> list[str]:
    """Return arguments with the values of an option before all others.

    Args:
        args: The arguments.
        options: The names of the option, first the long one.
    """
    long = f"{options[0]}="
    for at, each in enumerate(args):
        if each == "--":
            break
        if each.startswith(long):
            rest = [*args[:at], *args[at + 1 :]]
            return [each.removeprefix(long), *option_first(rest, options)]
        if each in options and at + 1 < len(args):
            rest = [*args[:at], *args[at + 2 :]]
            return [args[at + 1], *option_first(rest, options)]
    return args


class LazyCommand(TyperCommand):
    """Stands for a command, or for a group of commands, until it is invoked.

    Args:
        name: Name of the command.
        module: Name of its module in ``commands``. The module's ``app`` is the group,
            or contains the command.
        help: First paragraph of the help text.
        is_group: Whether it stands for a group.

    Attributes:
        is_group: Whether it stands for a group.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        help: str,  # noqa: A002 - as typer names it
        is_group: bool = False,
    ) -> None:
        super().__init__(name=name, help=help)
        self._module = module
        self.is_group = is_group

    def load(self) -> TyperCommand | TyperGroup:
        """Import the module and return the command itself."""
        app = import_module(f"{PACKAGE}.{self._module}").app
        group = get_group(app)
        _prepare(group)
        if self.is_group:
            group.name, group.help = self.name, self.help
            return group
        found = group.commands[str(self.name)]
        assert isinstance(found, TyperCommand | TyperGroup)
        return found


def _prepare(command: Any) -> None:  # noqa: ANN401 - click's
    """Replace slow parts of typer in a command and its subcommands."""
    convert_quickly(command)
    command.format_help = partial(_show_help, command)
    _take_argument_option(command)
    _list_commands(command)
    for each in getattr(command, "commands", {}).values():
        _prepare(each)


def _show_help(command: Any, ctx: Any, _: object) -> None:  # noqa: ANN401 - click's
    from kafka_marshal_cli.help_pages import show

    show(command, ctx)


def lazy_group(*commands: LazyCommand) -> type[TyperGroup]:
    """Return a class of groups that list these commands before their own."""

    class LazyGroup(TyperGroup):
        """A group in which some commands are imported when they are invoked."""

        def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's
            super().__init__(**settings)
            first = {str(each.name): each for each in commands}
            self.commands = {**first, **self.commands}

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
            """Parse the options of the group."""
            _prepare(self)
            if not args and self.no_args_is_help and not ctx.resilient_parsing:
                # typer would do the same, but would import rich for it.
                _show_help(self, ctx, None)
                raise typer.Exit(NO_COMMAND)
            return super().parse_args(ctx, self._with_options_behind(ctx, args))

        def _with_options_behind(
            self,
            ctx: Any,  # noqa: ANN401
            args: list[str],
        ) -> list[str]:
            """Move shared options behind the name of the command."""
            found = split(args, self.commands)
            name = found.rest[0].partition("=")[0] if found.rest else ""
            known = [each for param in self.get_params(ctx) for each in param.opts]
            is_other = name.startswith("-") and not found.words
            if is_other and not get_close_matches(name, known):
                ctx.fail(
                    f"No such option: {name}; options that only some commands have "
                    "follow the name of the command"
                )
            return found.joined

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
            """Return name, command and arguments; the command is imported here."""
            name, command, rest = super().resolve_command(ctx, args)
            if isinstance(command, LazyCommand):
                command = command.load()
            return name, command, rest

    return LazyGroup


def load_all(group: TyperGroup) -> TyperGroup:
    """Replace each ``LazyCommand`` by the command itself, and return the group."""
    for name, command in list(group.commands.items()):
        found = command.load() if isinstance(command, LazyCommand) else command
        group.commands[name] = (
            load_all(found) if isinstance(found, TyperGroup) else found
        )
    return group
