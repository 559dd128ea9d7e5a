"""``marshal config``: which settings count, and where each came from."""

from typing import Annotated, Any

import typer

from kafka_marshal_cli import profiles, via
from kafka_marshal_cli.chosen import Chosen, Config
from kafka_marshal_cli.commands import sidecar
from kafka_marshal_cli.profiles import SETTINGS
from kafka_marshal_cli.render import Answer, Row, Section, column
from kafka_marshal_cli.shared import Call, Gathered, command, data, options_of, wall_ms

app = typer.Typer(
    help="Profiles and settings: which count, and where they come from.",
    no_args_is_help=True,
)
MASK = "***"
COLUMNS = (column("SETTING", "setting"), column("VALUE", "value"))
ORIGIN = column("ORIGIN", "origin")

# What `consume` takes beside the shared options, so that it is shown, too.
_OF_CONSUME: dict[str, tuple[Any, Any]] = {
    "group": (
        Annotated[
            str | None,
            typer.Option(
                metavar="GROUP", envvar="MARSHAL_GROUP", help="As of consume."
            ),
        ],
        None,
    ),
    "client_id": (
        Annotated[
            str | None,
            typer.Option(
                metavar="NAME", envvar="MARSHAL_CLIENT_ID", help="As of consume."
            ),
        ],
        None,
    ),
    "state_dir": (
        Annotated[
            str | None,
            typer.Option(
                metavar="DIR", envvar="MARSHAL_STATE_DIR", help="As of consume."
            ),
        ],
        None,
    ),
}
_OTHERS = _OF_CONSUME | via.OPTIONS | sidecar.OPTIONS


def setting_rows(chosen: Chosen) -> list[Row]:
    """Return every setting with its value and where that came from."""
    rows: list[Row] = []
    for setting in SETTINGS:
        name = setting.key.replace("-", "_")
        value = chosen.context.params.get(name)
        rows.append(
            {
                "setting": setting.key,
                "value": str(value) if value is not None else setting.default or None,
                "origin": chosen.origin(name),
            }
        )
    return rows


def option_rows(options: dict[str, profiles.Value]) -> list[Row]:
    """Return every security and connection option; secrets are masked."""
    rows: list[Row] = []
    for name, value in sorted(options.items()):
        origin = value.origin
        if value.kind:
            origin += f", {'variable' if value.kind == 'env' else 'file'} {value.text}"
        shown = MASK if profiles.is_secret(name) else value.resolved(name)
        rows.append({"setting": name, "value": shown, "origin": origin})
    return rows


@app.command("show", epilog="Example: marshal config show --origin --profile prod")
@command(gathers={"others": Gathered(_OTHERS, dict)})
def show(
    call: Call,
    *,
    context: typer.Context,
    others: dict[str, Any],
    origin: Annotated[
        bool, typer.Option("--origin", help="Tell where each came from.")
    ] = False,
) -> None:
    r"""Print every setting that counts, as a command given the same would see it.

    An option wins over the environment, that over the profile, that over the
    file's \[default], that over what is built in. Passwords are never printed.
    """
    del others
    chosen: Chosen = context.params["profile"]
    profile = chosen.profile
    columns = (*COLUMNS, ORIGIN) if origin else COLUMNS
    found = {
        "config": str(profile.path),
        "is_there": profile.path.exists(),
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
    """Print which file is read, whether or not it is there."""
    del call
    data(str(profiles.config_path(config)[0]))
