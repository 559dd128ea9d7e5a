"""``--sidecar``: which addresses, topics and tokens go along with it."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kafka_marshal_cli.shared import Call, command
from kafka_marshal_cli.sidecar_option import SIDECAR, SidecarOption

TCP, UNIX, TOKEN = "http://127.0.0.1:1", "unix:/s", Path("token")


def asked(*arguments, env=None):
    """Return what a command is given for these arguments."""
    got = []
    app = typer.Typer()

    @app.command()
    @command(option_groups={"via": SIDECAR})
    def act(call: Call, *, via: SidecarOption) -> None:
        """Do nothing."""
        got.append((call, via))

    outcome = CliRunner().invoke(app, list(arguments), env=env or {})
    assert outcome.exit_code == 0, outcome.output
    return got[0]


def test_without_a_sidecar_the_defaults_apply():
    call, via = asked()
    assert via == SidecarOption()
    assert (via.servers(call), via.topic(call)) == ("localhost:9092", "__marshal")


def test_a_sidecar_supplies_what_was_not_given():
    call, via = asked("--sidecar", UNIX)
    assert (via.sidecar, via.servers(call), via.topic(call)) == (UNIX, None, None)


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        pytest.param(["-b", "h:1", "--coordination-topic", "t"], {}, id="options"),
        pytest.param(
            [],
            {
                "MARSHAL_BOOTSTRAP_SERVER": "h:1",
                "MARSHAL_COORDINATION_TOPIC": "t",
                "MARSHAL_SIDECAR": UNIX,
            },
            id="environment",
        ),
    ],
)
def test_given_options_are_used(arguments, env):
    call, via = asked("--sidecar", UNIX, *arguments, env=env)
    assert (via.servers(call), via.topic(call)) == ("h:1", "t")


def test_a_profile_may_name_the_sidecar(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(f'[default]\nsidecar = "{UNIX}"\nbootstrap-server = "p:1"\n')
    call, via = asked("--config", str(file))
    assert (via.sidecar, via.servers(call), via.topic(call)) == (UNIX, "p:1", None)


@pytest.mark.parametrize(
    ("sidecar", "token"),
    [
        pytest.param(TCP, TOKEN, id="tcp"),
        pytest.param(UNIX, None, id="unix"),
        pytest.param(None, None, id="none"),
    ],
)
def test_a_token_is_shown_over_tcp_only(sidecar, token):
    assert SidecarOption(sidecar, TOKEN).token == token
