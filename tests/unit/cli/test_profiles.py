"""The profile file: path, keys, precedence, secrets and errors."""

import os
import re
from pathlib import Path

import pytest

from kafka_marshal import ConfigurationError
from kafka_marshal_cli.profiles import (
    FILE_BYTES_MAX,
    KEYS,
    Value,
    config_path,
    is_secret,
    load,
)

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
    """Isolate the test from the user's profile file and variables."""
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


@pytest.mark.parametrize(
    ("text", "option"),
    [(None, "--config"), ("[default.options]\na_password_file = '~nosuch/x'", "a_p")],
)
def test_a_path_in_the_home_of_an_unknown_user_is_refused(file, text, option):
    with pytest.raises(
        ConfigurationError, match=f"^{option}.* '~nosuch/x' begins with ~"
    ):
        load("~nosuch/x" if text is None else file(text), None)


def texts(values):
    return {name: value.text for name, value in values.items()}


def test_a_file_names_its_default_profile(file):
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


def test_a_profile_overrides_the_default_table(file, tmp_path):
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


def test_the_path_of_the_file_is_an_argument_variable_or_default(monkeypatch, tmp_path):
    assert config_path("/a") == (tmp_path / "/a", True)
    default = tmp_path / "xdg" / "kafka-marshal" / "config.toml"
    assert config_path(None) == (default, False)
    monkeypatch.setenv("MARSHAL_CONFIG", "~/b")
    monkeypatch.setenv("HOME", "/home/x")
    assert str(config_path(None)[0]) == "/home/x/b"
    monkeypatch.delenv("MARSHAL_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert str(config_path(None)[0]) == "/home/x/.config/kafka-marshal/config.toml"


def test_without_a_file_there_are_no_settings(tmp_path):
    found = load(None, None)
    assert (found.settings, found.options, found.name) == ({}, {}, None)


def test_variables_choose_the_file_and_the_profile(monkeypatch, file):
    monkeypatch.setenv("MARSHAL_CONFIG", file(TEXT))
    monkeypatch.setenv("MARSHAL_PROFILE", "prod")
    assert load(None, None).name == "prod"
    assert load(None, "dev").name == "dev"


def test_a_profile_overrides_an_option_under_another_name(file):
    text = (
        '[default.options]\nssl_cafile = "/a"\nclient_id = "x"\n'
        '[profiles.p.options]\n"ssl.ca.location" = "/b"\n'
    )
    found = load(file(text), "p").options
    assert texts(found) == {"client_id": "x", "ssl.ca.location": "/b"}


def test_secrets_are_read_from_variables_and_files(monkeypatch, tmp_path, file):
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
def test_a_secret_in_a_file_that_others_can_read_gives_a_warning(
    file, mode, option, warns
):
    found = load(file(f"[default.options]\n{option}\n", mode=mode), None)
    assert (found.warning is not None) == warns
    if warns:
        assert "chmod 600" in found.warning


@pytest.mark.parametrize(("mode", "warns"), [(0o640, False), (0o644, True)])
def test_the_group_of_another_owners_file_may_read_its_secrets(
    file, monkeypatch, mode, warns
):
    # As with deploy/systemd: a file of root, for the group of the daemon.
    path = file("[default.options]\n'sasl.password' = 'x'\n", mode=mode)
    monkeypatch.setattr(os, "geteuid", lambda: Path(path).stat().st_uid + 1)
    warning = load(path, None).warning
    assert (warning is not None) == warns
    assert not warns or f"run: chmod o-r {path}" in warning


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("sasl.password", True),
        ("sasl_plain_password", True),
        ("sasl.oauthbearer.client.secret", True),
        ("ssl.key.pem", True),
        ("ssl.keystore.key", True),
        ("ssl.key.location", False),
        ("sasl.username", False),
    ],
)
def test_passwords_and_private_keys_are_secrets(name, secret):
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
def test_unknown_keys_and_wrong_values_are_refused(file, text, message):
    with pytest.raises(ConfigurationError, match=message):
        load(file(text), None)


def test_a_named_file_or_profile_must_exist(tmp_path):
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


def test_a_directory_that_may_not_be_searched_has_no_file(monkeypatch):
    # For example the home directory of root, in a container that runs another user.
    def forbid(_path, **_how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", forbid)
    assert load(None, None).settings == {}
    with pytest.raises(ConfigurationError, match="no profile 'dev': there is no file"):
        load(None, "dev")


def test_a_user_without_a_home_directory_has_no_file(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("MARSHAL_CONFIG", raising=False)

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    path, is_named = config_path(None)
    assert not path.exists()
    assert not is_named
