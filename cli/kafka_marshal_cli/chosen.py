"""How a profile reaches the options of a command.

``--config`` and ``--profile`` are looked at before all others; what the profile
says then stands in for defaults, and typer keeps account of what came from where.
The file is read when the first default is asked for, and only once.
"""

from functools import cached_property
from typing import Annotated, Any

import typer

from kafka_marshal import ConfigurationError
from kafka_marshal_cli import names, profiles
from kafka_marshal_cli.profiles import Profile, Value
from kafka_marshal_cli.render import escape

PROFILE_PANEL = "Profile"
_BY_ENVVAR = {setting.envvar: setting.key for setting in profiles.SETTINGS}


class Chosen:
    """The profile of one call, read when it is needed.

    Args:
        context: Of the command.
    """

    def __init__(self, context: typer.Context) -> None:
        self.context = context

    @cached_property
    def profile(self) -> Profile:
        """The profile.

        Raises:
            ConfigurationError: The file, or what is asked of it, makes no sense.
        """
        given = self.context.meta
        return profiles.load(given.get(_name("config")), given.get(_name("profile")))

    def origin(self, name: str) -> str:
        """Return where the value of an option came from, for people."""
        source = self.context.get_parameter_source(name)
        what = "" if source is None else source.name
        param = next(p for p in self.context.command.params if p.name == name)
        match what:
            case "COMMANDLINE":
                return f"option {param.opts[-1]}"
            case "ENVIRONMENT":
                return f"environment {param.envvar}"
            case "DEFAULT_MAP":
                return self.profile.settings[_BY_ENVVAR[str(param.envvar)]].origin
            case _:
                return "default"

    def is_given(self, name: str) -> bool:
        """Return whether an option stands on the command line."""
        return self.origin(name).startswith("option ")


class Defaults(dict[str, Any]):
    """What a profile says of a command's options, looked up when asked for."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__()
        self._chosen = chosen
        self._keys = {
            param.name: _BY_ENVVAR[param.envvar]
            for param in chosen.context.command.params
            if isinstance(param.envvar, str) and param.envvar in _BY_ENVVAR
        }

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return what the profile says of an option.

        Raises:
            BadParameter: The profile cannot be read.
        """
        key = self._keys.get(name)
        if key is None:
            return default
        try:
            found: Value | None = self._chosen.profile.settings.get(key)
        except ConfigurationError as error:
            hint = "--profile" if error.setting == "--profile" else "--config"
            raise typer.BadParameter(escape(str(error)), param_hint=hint) from error
        return default if found is None else found.text


def _name(option: str) -> str:
    return f"{__name__}.{option}"


def _note(
    context: typer.Context, param: typer.CallbackParam, value: str | None
) -> str | None:
    """Note what was given; a command's own option wins over that before it."""
    if value is not None and param.name is not None:
        context.meta[_name(param.name)] = value
    return value


def _choose(
    context: typer.Context, param: typer.CallbackParam, value: str | None
) -> Chosen:
    """Let the profile stand in for the defaults of all options to come."""
    _note(context, param, value)
    chosen = Chosen(context)
    context.default_map = Defaults(chosen)
    return chosen


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
        autocompletion=names.profile_names,
        help="Which of its profiles. Environment: MARSHAL_PROFILE.",
        rich_help_panel=PROFILE_PANEL,
    )


# In front of the command's name, and behind it.
RootConfig = Annotated[str | None, _config(_note)]
RootProfile = Annotated[str | None, _profile(_note)]
Config = Annotated[str | None, _config(_note)]
ProfileName = Annotated[str | None, _profile(_choose)]
