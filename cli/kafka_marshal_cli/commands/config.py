"""``marshal config``: the settings in force, and where each was set."""

import re
from functools import partial
from typing import Annotated, Any

import attrs
import typer

from kafka_marshal_cli import profiles
from kafka_marshal_cli.claiming_options import MEMBER, SIDECAR
from kafka_marshal_cli.commands.sidecar import DAEMON
from kafka_marshal_cli.profile_options import Config, SelectedProfile
from kafka_marshal_cli.profiles import SETTINGS
from kafka_marshal_cli.render import Answer, Row, Section, column
from kafka_marshal_cli.shared import (
    Call,
    OptionGroup,
    command,
    emit,
    options_of,
    wall_ms,
)

app = typer.Typer(no_args_is_help=True)
MASK = "***"
_USER = re.compile(r"://[^/]*@")
COLUMNS = (column("SETTING", "setting"), column("VALUE", "value"))
ORIGIN = column("ORIGIN", "origin")

_consume: Any = partial(typer.Option, help="Option of consume.")


@attrs.frozen(kw_only=True)
class ConsumeOptions:
    """Options of ``consume`` that are not shared, so that ``show`` shows them."""

    group: Annotated[str | None, _consume(metavar="GROUP", envvar="MARSHAL_GROUP")] = (
        None
    )
    client_id: Annotated[
        str | None, _consume(metavar="NAME", envvar="MARSHAL_CLIENT_ID")
    ] = None
    state_dir: Annotated[
        str | None, _consume(metavar="DIR", envvar="MARSHAL_STATE_DIR")
    ] = None


_OTHERS = {
    name: option
    for each in (OptionGroup.of(ConsumeOptions), SIDECAR, MEMBER, DAEMON)
    for name, option in each.options.items()
}


def _text(value: object) -> str:
    """Return a value as text, as a profile file would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_rows(chosen: SelectedProfile) -> list[Row]:
    """Return every setting with its value and its origin."""
    rows: list[Row] = []
    for setting in SETTINGS:
        name = setting.key.replace("-", "_")
        value = chosen.context.params.get(name)
        rows.append(
            {
                "setting": setting.key,
                "value": _text(value) if value is not None else setting.default or None,
                "origin": chosen.origin(name),
            }
        )
    return rows


def option_rows(options: dict[str, profiles.Value]) -> list[Row]:
    """Return every security and connection option, secrets masked."""
    rows: list[Row] = []
    for name, value in sorted(options.items()):
        origin = value.origin
        if value.kind:
            origin += f", {'variable' if value.kind == 'env' else 'file'} {value.text}"
        shown = MASK if profiles.is_secret(name) else value.resolved(name)
        shown = _USER.sub(f"://{MASK}@", shown)
        rows.append({"setting": name, "value": shown, "origin": origin})
    return rows


@app.command("show", epilog="Example: marshal config show --origin --profile prod")
@command(option_groups={"others": OptionGroup(_OTHERS, dict)})
def show(
    call: Call,
    *,
    context: typer.Context,
    others: dict[str, Any],
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each setting was set.")
    ] = False,
) -> None:
    r"""Print every setting in force for a command with the same options.

    Precedence: option, environment, profile, \[default] of the file, built-in
    default. Passwords are never printed.
    """
    del others
    chosen: SelectedProfile = context.params["profile"]
    profile = chosen.profile
    columns = (*COLUMNS, ORIGIN) if origin else COLUMNS
    found = {
        "config": str(profile.path),
        "exists": profiles.exists(profile.path),
        "profile": profile.name,
        "profiles": list(profile.names),
    }
    sections = [Section("settings", setting_rows(chosen), columns)]
    options = option_rows(options_of(context.params))
    if options:
        sections.append(Section("options", options, columns))
    as_of = {"time_ms": wall_ms(), "offsets": {}}
    call.answer(Answer(as_of, found, tuple(sections)))


@app.command("path", epilog="Example: marshal config path")
@command(connects=False, waits=False, answers=False)
def path(call: Call, *, config: Config = None) -> None:
    """Print the path of the profile file, whether or not it exists."""
    del call
    emit(str(profiles.config_path(config)[0]))
