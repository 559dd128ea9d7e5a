"""`marshal config`: settings, their origins and masked secrets."""

import json

import pytest
from typer.testing import CliRunner

from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.commands.config import MASK

TEXT = """
[default]
bootstrap-server = "base:9092"
[profiles.prod]
group = "billing"
[profiles.prod.options]
"sasl.password" = "hunter2"
"sasl.username" = "u\\u001b[31m"
"ssl.key.password" = { env = "KEY_WORD" }
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(TEXT)
    path.chmod(0o644)
    return path


def invoke(*arguments, **env):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **env})


def show(path, *arguments, **env):
    outcome = invoke("config", "show", "--config", str(path), *arguments, **env)
    assert outcome.exit_code == 0, outcome.stderr
    return outcome


def test_show_lists_every_setting_with_its_origin(path):
    found = json.loads(
        show(
            path,
            "--profile",
            "prod",
            "-o",
            "json",
            "--client-id",
            "w1",
            KEY_WORD="k",
            MARSHAL_TRANSPORT="kafka-python",
        ).stdout
    )
    rows = {row["setting"]: (row["value"], row["origin"]) for row in found["settings"]}
    assert rows["bootstrap-server"] == ("base:9092", f"{path} [default]")
    assert rows["group"] == ("billing", f"{path} [profiles.prod]")
    assert rows["client-id"] == ("w1", "option --client-id")
    assert rows["transport"] == ("kafka-python", "environment MARSHAL_TRANSPORT")
    assert rows["timeout"] == ("30s", "default")
    assert rows["output"] == ("json", "option --output")
    assert (found["profile"], found["profiles"]) == ("prod", ["prod"])


def test_secrets_are_masked(path):
    outcome = show(
        *(path, "--profile", "prod", "--origin", "-C", "x.secret=s3"),
        *("-C", "proxy_url=http://user:pr0xy@host:3128"),
        *("-C", "sasl.oauthbearer.token.endpoint.url=https://u:t0ken@host/a@b"),
        KEY_WORD="k3y",
    )
    for secret in ("hunter2", "s3", "k3y", "pr0xy", "t0ken"):
        assert secret not in outcome.output.replace("x.secret", "")
    assert outcome.stdout.count(MASK) == 5
    assert f"https://{MASK}@host/a@b" in outcome.stdout
    assert "variable KEY_WORD" in outcome.stdout
    assert "\x1b" not in outcome.output
    assert outcome.stderr.count("chmod 600") == 1


def test_origins_are_a_column_on_request(path):
    assert "ORIGIN" not in show(path).stdout
    assert "ORIGIN" in show(path, "--origin").stdout


def test_path_prints_the_path_of_the_profile_file(tmp_path):
    outcome = invoke("config", "path", XDG_CONFIG_HOME=str(tmp_path), MARSHAL_CONFIG="")
    assert outcome.stdout.strip() == str(tmp_path / "kafka-marshal" / "config.toml")
    assert invoke("config", "path", "--config", "/x").stdout == "/x\n"
