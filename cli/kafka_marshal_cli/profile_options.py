"""Makes the settings of a profile the defaults of a command's options.

Precedence: an option on the command line, the environment, the profile, the file's
``[default]``, the built-in default. A setting belongs to the options with the same
environment variable, so an option that has the same name but another meaning is not
affected. The file is read once, when the first default is looked up.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kafka_marshal.errors import ConfigurationError

if TYPE_CHECKING:
    # Imported when a command is invoked, not for `marshal --help`.
    from kafka_marshal_cli.profiles import Profile, Value

PROFILE_PANEL = "Profile"
_CONNECTION = (
    *("-b", "--coordination-topic", "-C", "--command-config", "--transport"),
)


class SelectedProfile:
    """The profile of one call, read when it is first needed.

    Args:
        context: Context of the command.
    """

    def __init__(self, context: typer.Context) -> None:
        self.context = context

    @cached_property
    def profile(self) -> "Profile":
        """The profile, read at the first access.

        Raises:
            ConfigurationError: See ``load``.
        """
        from kafka_marshal_cli.profiles import load

        given = self.context.meta
        return load(given.get(_name("config")), given.get(_name("profile")))

    def origin(self, name: str) -> str:
        """Return where the value of an option was set, as text for people."""
        from kafka_marshal_cli.profiles import KEY_BY_ENVVAR

        source = self.context.get_parameter_source(name)
        kind = "" if source is None else source.name
        param = next(p for p in self.context.command.params if p.name == name)
        match kind:
            case "COMMANDLINE":
                return f"option {param.opts[-1]}"
            case "ENVIRONMENT":
                return f"environment {param.envvar}"
            case "DEFAULT_MAP":
                return self.profile.settings[KEY_BY_ENVVAR[str(param.envvar)]].origin
            case _:
                return "default"

    def is_given(self, name: str) -> bool:
        """Return whether an option was given on the command line."""
        return self.origin(name).startswith("option ")


def flags_of(context: typer.Context) -> dict[str, str]:
    """Return how each option and argument of a command is written, by its name."""
    found = {}
    for param in context.command.params:
        long = [each for each in param.opts if each.startswith("--")]
        found[str(param.name)] = long[0] if long else str(param.metavar or param.name)
    return found


def typed_connection(context: typer.Context) -> list[tuple[str, str]]:
    """Return the connection options on the command line, with their values.

    Secrets are replaced by dots.
    """
    found = [
        (f"--{name}", context.meta.get(_name(name))) for name in ("config", "profile")
    ]
    names = {
        each: str(param.name) for param in context.command.params for each in param.opts
    }
    for option in _CONNECTION:
        name = names.get(option, "")
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            values = map(_without_secret, value) if option == "-C" else [value]
            found += [(option, each) for each in values]
    return [(option, str(value)) for option, value in found if value is not None]


def _without_secret(text: str) -> str:
    """Return the NAME=VALUE of a property, without the value if this is a secret."""
    from kafka_marshal_cli.profiles import is_secret

    name, equals, _ = text.partition("=")
    return f"{name}=..." if not equals or is_secret(name) else text


class ProfileDefaults(dict[str, Any]):
    """Defaults of a command's options from its profile, looked up when needed."""

    def __init__(self, selected: SelectedProfile) -> None:
        from kafka_marshal_cli.profiles import KEY_BY_ENVVAR

        super().__init__()
        self._selected = selected
        self._keys = {
            param.name: KEY_BY_ENVVAR[param.envvar]
            for param in selected.context.command.params
            if isinstance(param.envvar, str) and param.envvar in KEY_BY_ENVVAR
        }

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return the profile's value of an option.

        Raises:
            BadParameter: The profile cannot be read.
        """
        key = self._keys.get(name)
        if key is None:
            return default
        try:
            found: Value | None = self._selected.profile.settings.get(key)
        except ConfigurationError as error:
            from kafka_marshal_cli.render import escape

            hint = "--profile" if error.setting == "--profile" else "--config"
            text = escape(str(error).removeprefix(f"{hint} "))  # typer adds the hint
            raise typer.BadParameter(text, param_hint=hint) from error
        return default if found is None else found.text


def _name(option: str) -> str:
    return f"{__name__}.{option}"


def _remember(
    context: typer.Context, param: typer.CallbackParam, value: str | None
) -> str | None:
    """Store the value; a value after the command name replaces one before it."""
    if value is not None and param.name is not None:
        context.meta[_name(param.name)] = value
    return value


def _select_profile(
    context: typer.Context, param: typer.CallbackParam, value: str | None
) -> SelectedProfile:
    """Use the profile for the defaults of all options that are parsed later."""
    _remember(context, param, value)
    selected = SelectedProfile(context)
    context.default_map = ProfileDefaults(selected)
    return selected


def complete_profile(context: typer.Context, incomplete: str) -> list[str]:
    """Return the profiles of the file whose names begin with what was typed."""
    from kafka_marshal_cli.profiles import SAFE_NAME, load

    given = context.params.get("config")
    try:
        names = load(given if isinstance(given, str) else None, None).names
    except ConfigurationError:
        return []
    return [n for n in names if n.startswith(incomplete) and SAFE_NAME.fullmatch(n)]


def _config(callback: Any) -> Any:  # noqa: ANN401 - typer's own types
    return typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=callback,
        help="TOML file with profiles. Environment: MARSHAL_CONFIG; by default "
        "kafka-marshal/config.toml in $XDG_CONFIG_HOME or ~/.config.",
        rich_help_panel=PROFILE_PANEL,
    )


def _profile(callback: Any) -> Any:  # noqa: ANN401 - typer's own types
    return typer.Option(
        "--profile",
        metavar="NAME",
        is_eager=True,
        callback=callback,
        autocompletion=complete_profile,
        help="Profile of that file. Environment: MARSHAL_PROFILE.",
        rich_help_panel=PROFILE_PANEL,
    )


# `Root...` are options before the name of the command, the others after it.
RootConfig = Annotated[str | None, _config(_remember)]
RootProfile = Annotated[str | None, _profile(_remember)]
Config = Annotated[str | None, _config(_remember)]
ProfileName = Annotated[str | None, _profile(_select_profile)]
