"""Profiles: what a file may say, what wins, secrets, and what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kafka_marshal import ConfigurationError
from kafka_marshal_cli.profiles import (
    FILE_BYTES_MAX,
    KEYS,
    RootConfig,
    RootProfile,
    Value,
    complete_profile,
    config_path,
    is_secret,
    load,
)
from kafka_marshal_cli.shared import Call, Output, command

TEXT = """
profile = "dev"
[default]
bootstrap-server = "base:9092"
timeout = 5000
[default.options]
"client.dns.lookup" = "use_all_dns_ips"
[profiles.dev]
output = "json"
[profiles.prod]
bootstrap_server = ["a:1", "b:2"]
[profiles.prod.options]
security.protocol = "SASL_SSL"
"sasl.password" = { env = "KAFKA_PASSWORD" }
"ssl.key.password_file" = "key.txt"
ssl_password = { file = "/etc/pw" }
check = true
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Nobody's own file or variables."""
    for name in ("MARSHAL_CONFIG", "MARSHAL_PROFILE", "KAFKA_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def file(tmp_path):
    def write(text, *, mode=0o600):
        path = tmp_path / "config.toml"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def texts(values):
    return {name: value.text for name, value in values.items()}


def test_a_file_chooses_its_own_profile(file):
    path = file(TEXT)
    found = load(path, None)
    assert (found.name, found.names) == ("dev", ("dev", "prod"))
    assert texts(found.settings) == {
        "bootstrap-server": "base:9092",
        "timeout": "5000",
        "output": "json",
    }
    assert found.settings["timeout"].origin == f"{path} [default]"
    assert found.settings["output"].origin == f"{path} [profiles.dev]"


def test_a_profile_wins_over_the_base(file, tmp_path):
    found = load(file(TEXT), "prod")
    assert found.settings["bootstrap-server"].text == "a:1,b:2"
    assert texts(found.options) == {
        "client.dns.lookup": "use_all_dns_ips",
        "security.protocol": "SASL_SSL",
        "sasl.password": "KAFKA_PASSWORD",
        "ssl.key.password": str(tmp_path / "key.txt"),
        "ssl_password": "/etc/pw",
        "check": "true",
    }


def test_the_paths_of_the_profile_file(monkeypatch, tmp_path):
    assert config_path("/a") == (tmp_path / "/a", True)
    default = tmp_path / "xdg" / "kafka-marshal" / "config.toml"
    assert config_path(None) == (default, False)
    monkeypatch.setenv("MARSHAL_CONFIG", "~/b")
    monkeypatch.setenv("HOME", "/home/x")
    assert str(config_path(None)[0]) == "/home/x/b"
    monkeypatch.delenv("MARSHAL_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert str(config_path(None)[0]) == "/home/x/.config/kafka-marshal/config.toml"


def test_no_file_is_no_settings(tmp_path):
    found = load(None, None)
    assert (found.settings, found.options, found.name) == ({}, {}, None)


def test_the_environment_chooses(monkeypatch, file):
    monkeypatch.setenv("MARSHAL_CONFIG", file(TEXT))
    monkeypatch.setenv("MARSHAL_PROFILE", "prod")
    assert load(None, None).name == "prod"
    assert load(None, "dev").name == "dev"


def test_secrets_come_from_where_they_are_kept(monkeypatch, tmp_path, file):
    options = load(file(TEXT), "prod").options
    with pytest.raises(ConfigurationError, match="KAFKA_PASSWORD, which is not set"):
        options["sasl.password"].resolved("sasl.password")
    monkeypatch.setenv("KAFKA_PASSWORD", "s3cret")
    assert options["sasl.password"].resolved("sasl.password") == "s3cret"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        options["ssl.key.password"].resolved("ssl.key.password")
    (tmp_path / "key.txt").write_text("word \n")
    assert options["ssl.key.password"].resolved("ssl.key.password") == "word "
    assert Value("plain", "").resolved("x") == "plain"


@pytest.mark.parametrize(
    ("mode", "option", "warns"),
    [
        (0o644, '"sasl.password" = "x"', True),
        (0o640, '"sasl.password" = "x"', True),
        (0o600, '"sasl.password" = "x"', False),
        (0o644, '"sasl.password" = { env = "X" }', False),
        (0o644, '"ssl.ca.location" = "/ca"', False),
    ],
)
def test_a_secret_that_others_may_read_is_warned_of(file, mode, option, warns):
    found = load(file(f"[default.options]\n{option}\n", mode=mode), None)
    assert (found.warning is not None) == warns
    if warns:
        assert "chmod 600" in found.warning


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("sasl.password", True),
        ("sasl_plain_password", True),
        ("sasl.oauthbearer.client.secret", True),
        ("ssl.key.pem", True),
        ("ssl.key.location", False),
        ("sasl.username", False),
    ],
)
def test_which_options_are_secrets(name, secret):
    assert is_secret(name) == secret


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nbootstrap-sever = 'x'", "did you mean 'bootstrap-server'"),
        ("[profile.dev]", "must be a string"),
        ("[profils.dev]", "did you mean 'profiles'"),
        ("default = 1", "must be a table"),
        ("profiles = 1", "must be a table"),
        ("[default]\noptions = 1", "must be a table"),
        ("[default]\noutput = {}", "must be a string"),
        ("[default.options]\nx = 1979-05-27", "must be a string"),
        ("profile = 'nope'", "there are none"),
        ("profile = 'pord'\n[profiles.prod]", "did you mean 'prod'"),
        ("nonsense", "is not TOML"),
        ("#" * (FILE_BYTES_MAX + 1), "longer than"),
    ],
    ids=lambda text: text[:30],
)
def test_unknown_keys_and_values_are_refused(file, text, message):
    with pytest.raises(ConfigurationError, match=message):
        load(file(text), None)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(str(tmp_path / "none.toml"), None)
    with pytest.raises(ConfigurationError, match="there is no file"):
        load(None, "prod")


def test_the_example_of_the_reference_is_valid(file):
    page = Path(__file__).resolve().parents[3] / "docs" / "reference.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    assert load(file(example), None).name == "dev"
    found = load(file(example), "prod")
    assert set(found.settings) == {"timeout", "bootstrap-server", "group"}
    assert found.options["sasl.password"].kind == "env"
    assert found.options["security.protocol"].text == "SASL_SSL"


def test_every_key_may_be_in_a_profile(file):
    lines = "\n".join(f'{key} = "x"' for key in KEYS)
    assert set(load(file(f"[default]\n{lines}"), None).settings) == set(KEYS)


# --- defaults of options

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


def test_a_profile_replaces_defaults(run):
    _, (call, _, _) = run("--profile", "json", "act")
    assert call.bootstrap_servers == "base:9092"
    assert (call.output, call.timeout_ms) == (Output.JSON, 5_000)
    assert call.options == {"client.id": "json", "ssl.ca.location": "/ca"}


def test_a_timeout_of_a_profile_is_no_word_on_this_call(run):
    _, (call, _, _) = run("act")
    assert not call.is_timeout_given
    _, (call, _, _) = run("act", "--timeout", "5s")
    assert call.is_timeout_given


def test_the_environment_wins_over_it_and_an_option_over_both(run):
    env = {"MARSHAL_BOOTSTRAP_SERVER": "env:1"}
    _, (call, _, _) = run("act", env=env)
    assert call.bootstrap_servers == "env:1"
    _, (call, _, _) = run("act", "-b", "flag:1", "-C", "client.id=flag", env=env)
    assert call.bootstrap_servers == "flag:1"
    assert call.options == {"client.id": "flag"}


def test_an_option_of_another_meaning_is_left_alone(run):
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
def test_the_profile_option_may_stand_before_or_behind_the_command(run, arguments):
    _, (call, _, _) = run(*arguments)
    assert call.output is Output.JSON


def test_the_order_of_the_two_options_does_not_matter(run, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('[profiles.p]\nbootstrap-server = "other:1"\n')
    for arguments in (
        ["act", "--profile", "p", "--config", str(other)],
        ["act", "--config", str(other), "--profile", "p"],
        ["--config", str(other), "act", "--profile", "p"],
    ):
        _, (call, _, _) = run(*arguments)
        assert call.bootstrap_servers == "other:1"


def test_a_wrong_value_is_wrong_usage_that_names_the_option(run):
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


def test_help_needs_no_file(run):
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
