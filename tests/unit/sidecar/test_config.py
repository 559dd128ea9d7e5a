"""Settings: invalid ones are refused before anything is opened."""

import grp
import os
import resource
import socket
from pathlib import Path

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.codec import is_identifier
from kafka_marshal.sidecar import config
from kafka_marshal.sidecar.config import Settings, tcp_address, token_of


def test_the_defaults_are_valid(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = Settings()
    settings.check()
    assert settings.socket == tmp_path / "kafka-marshal" / "sidecar.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert Settings().socket == Path("/run/kafka-marshal/sidecar.sock")


@pytest.mark.parametrize(
    ("files", "connections"),
    [(1_024, 512), (128, 64), (1_000_000, 8_192), (resource.RLIM_INFINITY, 8_192)],
)
def test_the_connection_limit_leaves_file_descriptors(monkeypatch, files, connections):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))
    assert Settings().connections_max == connections


def test_a_limit_of_open_files_that_is_too_low_is_refused(monkeypatch):
    """A sidecar would start, and then lack descriptors for clients and brokers."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (127, 1_024))
    with pytest.raises(ConfigurationError, match=r"needs 128 at least.*ulimit -n"):
        Settings(socket=Path("/run/own/s.sock")).check()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (128, 1_024))
    Settings(socket=Path("/run/own/s.sock")).check()


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("node-7.example.com", "node-7.example.com"),
        ("bad host/ü", "bad-host--"),
        ("x" * 300, "x" * 200),
        ("", "sidecar"),
    ],
)
def test_the_client_id_defaults_to_the_host_name(monkeypatch, host, name):
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert config.default_client_id() == name
    assert is_identifier(name)


@pytest.mark.parametrize(
    ("given", "setting", "words"),
    [
        ({"client_id": "a b"}, "client-id", "no valid name"),
        ({"socket": Path("here.sock")}, "socket", "absolute"),
        ({"socket": Path("/" + "x" * 107)}, "socket", "longer than the 107 bytes"),
        ({"log_format": "xml"}, "log-format", "text or json"),
        ({"checkpoint_interval_ms": 10}, "checkpoint-interval", "at least 1000 ms"),
        ({"socket_group": "no such group"}, "socket-group", "no group of this"),
        ({"socket_group": ""}, "socket-group", "no group of this"),
        ({"tcp": "127.0.0.1:1"}, "token-file", "go together"),
        ({"token_file": Path("/t")}, "tcp", "go together"),
        ({"tcp": "x", "token_file": Path("/t")}, "tcp", "like 127.0.0.1:7070"),
    ],
)
def test_an_invalid_setting_is_named(given, setting, words):
    with pytest.raises(ConfigurationError, match=words) as found:
        Settings(**given).check()
    assert found.value.setting == setting


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("127.5.0.1:0", ("127.5.0.1", 0)),
        ("[::1]:7070", ("::1", 7070)),
    ],
)
def test_loopback_addresses_are_accepted(text, address):
    assert tcp_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1", "7070", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536"),
        *("::1:7070", "0.0.0.0:1", "10.0.0.1:1", "localhost:1", "[::]:1"),
        "127.0.0.1:٣",
    ],
)
def test_invalid_and_non_loopback_addresses_are_refused(text):
    with pytest.raises(ConfigurationError) as found:
        tcp_address(text)
    assert found.value.setting == "tcp"


def test_the_socket_group_is_given_by_name_or_id():
    assert Settings().socket_gid is None
    assert Settings(socket_group="4711").socket_gid == 4711
    name = grp.getgrgid(os.getgid()).gr_name
    assert Settings(socket_group=name).socket_gid == os.getgid()


def test_an_empty_state_dir_keeps_no_state(monkeypatch, tmp_path):
    monkeypatch.setenv("MARSHAL_STATE_DIR", str(tmp_path))
    assert Settings().state_path == tmp_path
    assert Settings(state_dir="").state_path is None
    assert Settings(state_dir="/x").state_path == Path("/x")


def test_a_missing_token_is_created_once_for_its_owner_only(tmp_path):
    path = tmp_path / "token"
    token = token_of(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_of(path) == token


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"0123456789abcdef\n", 0o640, "chmod 600"),
        (b"short", 0o600, "no token"),
        (b"", 0o600, "no token"),
        (b"\xff" * 32, 0o600, "no token"),
        (b"0123456789\n0123456789", 0o600, "no token"),
        (b"x" * 10_000, 0o600, "no token"),
    ],
)
def test_an_invalid_token_is_refused(tmp_path, content, mode, words):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=words) as found:
        token_of(path)
    assert found.value.setting == "token-file"


def test_a_token_file_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be used"):
        token_of(tmp_path / "nowhere" / "token")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        token_of(tmp_path / "folder")


@pytest.mark.parametrize(
    ("mode", "words"), [(0o777, "may be written by others"), (0o500, "not writable")]
)
def test_a_state_directory_that_cannot_be_used_is_refused_at_the_start(
    monkeypatch, tmp_path, mode, words
):
    home = tmp_path / "state"
    settings = Settings(state_dir=home)
    settings.require_state_path()
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(mode)
    # The superuser may write everywhere but to a read-only file system.
    monkeypatch.setattr(os, "access", lambda path, _mode: mode == 0o777)
    with pytest.raises(ConfigurationError, match=words) as raised:
        settings.require_state_path()
    assert raised.value.setting == "state-dir"
    Settings(state_dir="").require_state_path()


def test_without_a_home_directory_the_state_directory_has_to_be_named(monkeypatch):
    for name in ("MARSHAL_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigurationError, match="MARSHAL_STATE_DIR"):
        Settings().require_state_path()
