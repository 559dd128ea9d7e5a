"""Profiles give defaults of options: precedence, and refused values."""

from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kafka_marshal_cli.profile_options import RootConfig, RootProfile, complete_profile
from kafka_marshal_cli.shared import Call, Output, command

DEFAULTS_TEXT = """
[default]
bootstrap-server = "base:9092"
timeout = "5s"
group = "from-profile"
[default.options]
"client.id" = "base"
[profiles.json]
output = "json"
[profiles.json.options]
"client.id" = "json"
"ssl.ca.location" = "/ca"
[profiles.bad]
output = "xml"
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.delenv("MARSHAL_PROFILE", raising=False)
    monkeypatch.delenv("MARSHAL_BOOTSTRAP_SERVER", raising=False)
    path = tmp_path / "c.toml"
    path.write_text(DEFAULTS_TEXT)
    monkeypatch.setenv("MARSHAL_CONFIG", str(path))
    calls = []
    app = typer.Typer()

    @app.callback()
    def root(config: RootConfig = None, profile: RootProfile = None) -> None:
        del config, profile

    @app.command()
    @command()
    def act(
        call: Call,
        *,
        group: Annotated[str | None, typer.Option()] = None,
        member: Annotated[str | None, typer.Option(envvar="MARSHAL_GROUP")] = None,
    ) -> None:
        calls.append((call, group, member))

    def invoke(*arguments, env=None):
        outcome = CliRunner().invoke(
            app, list(arguments), env={"COLUMNS": "200", **(env or {})}
        )
        return outcome, (calls.pop() if calls else None)

    return invoke


def test_a_profile_replaces_the_defaults_of_options(run):
    _, (call, _, _) = run("--profile", "json", "act")
    assert call.bootstrap_servers == "base:9092"
    assert (call.output, call.timeout_ms) == (Output.JSON, 5_000)
    assert call.options == {"client.id": "json", "ssl.ca.location": "/ca"}


def test_a_timeout_of_a_profile_does_not_count_as_given(run):
    _, (call, _, _) = run("act")
    assert not call.is_timeout_given
    _, (call, _, _) = run("act", "--timeout", "5s")
    assert call.is_timeout_given


def test_a_variable_overrides_a_profile_and_an_option_overrides_both(run):
    env = {"MARSHAL_BOOTSTRAP_SERVER": "env:1"}
    _, (call, _, _) = run("act", env=env)
    assert call.bootstrap_servers == "env:1"
    _, (call, _, _) = run("act", "-b", "flag:1", "-C", "client.id=flag", env=env)
    assert call.bootstrap_servers == "flag:1"
    assert call.options == {"client.id": "flag"}


def test_a_profile_applies_only_to_an_option_with_the_variable(run):
    _, (_, group, member) = run("act")
    assert (group, member) == (None, "from-profile")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile", "json", "act"],
        ["act", "--profile", "json"],
        ["--profile", "bad", "act", "--profile", "json"],
    ],
    ids=" ".join,
)
def test_the_profile_option_can_precede_or_follow_the_command(run, arguments):
    _, (call, _, _) = run(*arguments)
    assert call.output is Output.JSON


def test_config_and_profile_can_be_given_in_any_order(run, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('[profiles.p]\nbootstrap-server = "other:1"\n')
    for arguments in (
        ["act", "--profile", "p", "--config", str(other)],
        ["act", "--config", str(other), "--profile", "p"],
        ["--config", str(other), "act", "--profile", "p"],
    ):
        _, (call, _, _) = run(*arguments)
        assert call.bootstrap_servers == "other:1"


def test_a_wrong_profile_value_or_file_is_wrong_usage(run):
    outcome, _ = run("act", "--profile", "jsno")
    assert outcome.exit_code == 2
    assert "--profile" in outcome.stderr
    assert "did you mean 'json'" in outcome.stderr
    outcome, _ = run("act", "--profile", "bad")
    assert outcome.exit_code == 2
    assert "xml" in outcome.stderr
    outcome, _ = run("act", env={"MARSHAL_CONFIG": "/no/such/file"})
    assert outcome.exit_code == 2
    assert "--config" in outcome.stderr


def test_help_does_not_need_the_profile_file(run):
    outcome, _ = run("act", "--help", env={"MARSHAL_CONFIG": "/no/such/file"})
    assert outcome.exit_code == 0


def test_profiles_are_completed_from_the_file(tmp_path, monkeypatch):
    path = tmp_path / "c.toml"
    path.write_text("[profiles.prod]\n[profiles.'$(x)']\n")
    given = SimpleNamespace(params={"config": str(path)})
    assert complete_profile(given, "p") == ["prod"]
    assert complete_profile(given, "$") == []
    path.write_text("nonsense")
    assert complete_profile(given, "") == []


@pytest.mark.parametrize(
    ("file", "why"),
    [("/missing", "'/missing' cannot be read"), ("~nosuch/x", "'~nosuch/x' begins")],
)
def test_an_error_of_the_file_names_the_option_once(run, file, why):
    outcome, _ = run("act", "--config", file)
    assert f"Invalid value for --config: {why}" in outcome.stderr
