"""Addresses of sidecars, and the tokens of those that want one."""

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.remote.address import Address


@pytest.mark.parametrize(
    ("text", "socket", "url"),
    [
        pytest.param("unix:/run/s.sock", "/run/s.sock", "http://sidecar", id="unix"),
        pytest.param("unix:///run/s", "/run/s", "http://sidecar", id="unix-url"),
        pytest.param(
            "http://127.0.0.1:9876", None, "http://127.0.0.1:9876", id="loopback"
        ),
        pytest.param("http://[::1]:80/", None, "http://[::1]:80", id="loopback-6"),
        pytest.param("http://localhost:1", None, "http://localhost:1", id="name"),
    ],
)
def test_an_address(text, socket, url):
    found = Address.parse(text)
    assert (found.socket, found.base_url) == (socket, url)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("unix:s.sock", "must be absolute", id="relative"),
        pytest.param("unix:", "must be absolute", id="empty-path"),
        pytest.param("http://10.0.0.1:80", "not this machine", id="elsewhere"),
        pytest.param("http://example.org:80", "not this machine", id="a-name"),
        pytest.param("https://127.0.0.1:80", "neither form", id="scheme"),
        pytest.param("http://127.0.0.1", "neither form", id="no-port"),
        pytest.param("http://127.0.0.1:0", "no port", id="port-0"),
        pytest.param("http://127.0.0.1:99999", "no port", id="port"),
        pytest.param("http://u@127.0.0.1:80", "not this machine", id="user"),
        pytest.param("", "neither form", id="nothing"),
    ],
)
def test_no_address(text, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        Address.parse(text)
    assert caught.value.setting == "sidecar"


def test_tokens(tmp_path):
    file = tmp_path / "token"
    file.write_text("abc\n")
    tcp, unix = Address.parse("http://127.0.0.1:1"), Address.parse("unix:/s")
    assert (tcp.token(file), unix.token(file), unix.token(None)) == ("abc", "abc", None)
    with pytest.raises(ConfigurationError, match="asks for a token"):
        tcp.token(None)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"a\nb", id="two-lines"),
        pytest.param(b"\xff", id="no-text"),
        pytest.param(None, id="no-file"),
    ],
)
def test_no_token(tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="token") as caught:
        Address.parse("http://127.0.0.1:1").token(file)
    assert caught.value.setting == "sidecar_token_file"
