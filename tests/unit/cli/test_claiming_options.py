"""Options of commands that claim, from arguments, variables and profiles."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kafka_marshal.config import Membership
from kafka_marshal_cli.claiming_options import (
    MEMBER,
    SIDECAR,
    SidecarOption,
    state_dir_of,
)
from kafka_marshal_cli.shared import Call, command

LABELS = {"rack": "r1", "replaces": "old"}
TCP, UNIX, TOKEN = "http://127.0.0.1:1", "unix:/s", Path("token")


def run(arguments, *, env=None):
    """Run a command; return its arguments, or None, and the outcome."""
    app, found = typer.Typer(), []

    @app.command()
    @command(
        waits=False, answers=False, option_groups={"member": MEMBER, "via": SIDECAR}
    )
    def ask(call: Call, *, member: Membership, via: SidecarOption) -> None:
        found.append((call, member, via))

    outcome = CliRunner().invoke(app, list(arguments), env=env or {})
    return (found[0] if found else None), outcome


def test_a_state_directory_may_be_the_default_none_or_in_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    given = [None, "", ".", "~/state"]
    found = [None, "", Path(), Path("/home/ada/state")]
    assert list(map(state_dir_of, given)) == found


# --- The member


def member(*arguments, env=None):
    (_, found, _), _ = run(arguments, env=env)
    return found


def test_by_default_a_member_has_no_labels_and_may_plan():
    assert member() == Membership()


def test_options_and_variables_set_the_same_membership():
    given = Membership(labels=LABELS, can_plan=False, restarts=True)
    labels = "rack=r1, replaces=old"
    assert member("--labels", labels, "--no-plan", "--restarts") == given
    names = {"MARSHAL_NO_PLAN": "1", "MARSHAL_RESTARTS": "true"}
    assert member(env=names | {"MARSHAL_LABELS": labels}) == given


def test_a_profile_has_labels_as_a_list(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        "[default]\nlabels = ['rack=r1', 'replaces=old']\nrestarts = true\n"
    )
    found = member("--config", str(file))
    assert found == Membership(labels=LABELS, restarts=True)


def test_a_label_without_a_name_is_refused():
    found, outcome = run(["--labels", "rack"])
    assert found is None
    assert "--labels must be written name=value" in outcome.stderr


# --- The sidecar


def asked(*arguments, env=None):
    """Return the call and the sidecar option that a command gets."""
    found, outcome = run(arguments, env=env)
    assert outcome.exit_code == 0, outcome.output
    call, _, via = found
    return call, via


def test_without_a_sidecar_the_defaults_apply():
    call, via = asked()
    assert via == SidecarOption()
    assert (via.servers(call), via.topic(call)) == ("localhost:9092", "__marshal")


def test_with_a_sidecar_servers_and_topic_have_no_defaults():
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
def test_given_servers_and_topic_are_used_with_a_sidecar(arguments, env):
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
def test_the_token_is_used_only_for_a_sidecar_over_tcp(sidecar, token):
    assert SidecarOption(sidecar, TOKEN).token == token
