"""The cache of Kafka's jars: download, hashes, lock and errors."""

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kafka_marshal.errors import (
    ConfigurationError,
    CoordinationError,
    DeadlineExceeded,
)
from kafka_marshal.testing import jars
from kafka_marshal.testing.java import Java

JAVA = Java(executable=Path("/bin/java"), home=Path("/opt/java"), version=17)

# A fake jgo: makes an environment of one jar, and counts its calls.
CONTENT = "of Kafka"
JGO = f"""
CONTENT = {CONTENT!r}
import pathlib, zipfile
class Environment:
    def __init__(self, path): self.path = path
def build(endpoint, cache_dir):
    place = cache_dir / "envs"
    (place / "jars").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place / "jars" / "kafka.jar", "w") as jar:
        jar.writestr(zipfile.ZipInfo("x"), CONTENT)
    with (cache_dir.parent / "calls").open("a") as calls:
        calls.write("call\\n")
    return Environment(place)
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KAFKA_MARSHAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def jgo(monkeypatch, tmp_path):
    def install(source: str) -> None:
        module = tmp_path / "lib" / "jgo.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(module.parent))
        monkeypatch.setattr(jars, "find_spec", lambda name: object())

    return install


@pytest.fixture(autouse=True)
def locked(monkeypatch, tmp_path):
    """A list with the hash of the jar that the fake jgo makes, and a boot id."""
    jar = tmp_path / "expected.jar"
    with zipfile.ZipFile(jar, "w") as file:
        file.writestr(zipfile.ZipInfo("x"), CONTENT)
    listing = tmp_path / "kafka.sha256"
    listing.write_text(f"{hashlib.sha256(jar.read_bytes()).hexdigest()}  kafka.jar\n")
    boot = tmp_path / "boot_id"
    boot.write_text("1\n")
    monkeypatch.setattr(jars, "_LOCKED", listing)
    monkeypatch.setattr(jars, "_BOOT_ID", boot)
    return SimpleNamespace(listing=listing, boot=boot)


def calls(cache: Path) -> int:
    return len((cache / "calls").read_text().splitlines())


def test_jars_are_downloaded_once(cache, jgo):
    jgo(JGO)
    first = jars.kafka_jars(JAVA)
    assert [jar.name for jar in first] == ["kafka.jar"]
    assert jars.kafka_jars(JAVA) == first
    assert calls(cache) == 1


def test_the_note_of_a_download_appears_until_the_jars_are_cached(cache, jgo):
    jgo(JGO)
    assert f"(120 MB) into {cache}" in jars.fetch_note()
    jars.kafka_jars(JAVA)
    assert jars.fetch_note() is None


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_missing_or_damaged_jar_is_downloaded_again(cache, jgo, damage):
    jgo(JGO)
    (jar,) = jars.kafka_jars(JAVA)
    jar.unlink() if damage == "gone" else jar.write_bytes(b"PK")
    (again,) = jars.kafka_jars(JAVA)
    assert zipfile.is_zipfile(again)
    assert calls(cache) == 2


def changed(jar):
    """Change the content of a jar and keep its size."""
    content = bytearray(jar.read_bytes())
    content[len(content) // 2] ^= 1
    jar.write_bytes(content)


def test_a_jar_with_another_hash_is_refused_and_deleted(cache, jgo):
    jgo(JGO.replace(CONTENT, "of whoever"))
    with pytest.raises(CoordinationError, match=r"differ from .* hashes: kafka\.jar"):
        jars.kafka_jars(JAVA)
    assert not (cache / "jgo").exists()


@pytest.mark.parametrize("line", ["", f"{'0' * 64}  kafka.jar\n{'0' * 64}  more.jar\n"])
def test_an_unlisted_or_missing_jar_is_refused(cache, jgo, locked, line):
    locked.listing.write_text(line)
    jgo(JGO)
    with pytest.raises(CoordinationError, match=r"kafka\.jar"):
        jars.kafka_jars(JAVA)


def test_hashes_are_compared_once_per_boot(cache, jgo, locked):
    jgo(JGO)
    (jar,) = jars.kafka_jars(JAVA)
    changed(jar)
    assert jars.kafka_jars(JAVA) == [jar], "the size is what it was"
    locked.boot.write_text("2\n")
    (again,) = jars.kafka_jars(JAVA)
    assert calls(cache) == 2
    assert jars.kafka_jars(JAVA) == [again]
    assert calls(cache) == 2


def test_hashes_are_compared_each_time_without_a_boot_id(cache, jgo, locked):
    locked.boot.unlink()
    jgo(JGO)
    (jar,) = jars.kafka_jars(JAVA)
    changed(jar)
    jars.kafka_jars(JAVA)
    assert calls(cache) == 2


def test_a_changed_list_of_hashes_is_compared_at_once(cache, jgo, locked):
    jgo(JGO)
    jars.kafka_jars(JAVA)
    locked.listing.write_text(f"{'0' * 64}  kafka.jar\n")
    with pytest.raises(CoordinationError, match="locked"):
        jars.kafka_jars(JAVA)


def test_the_packaged_list_contains_hashes_of_the_jars(monkeypatch):
    monkeypatch.undo()
    listed = jars._locked()
    assert f"kafka_2.13-{jars.KAFKA_VERSION}.jar" in listed
    for name, digest in listed.items():
        assert re.fullmatch("[0-9a-f]{64}", digest), name


def test_a_failed_download_names_the_setting_and_leaves_no_files(cache, jgo):
    jgo(
        "def build(endpoint, cache_dir):\n"
        "    cache_dir.mkdir()\n"
        "    raise OSError('no route')\n"
    )
    with pytest.raises(CoordinationError, match="no route") as caught:
        jars.kafka_jars(JAVA)
    assert "KAFKA_MARSHAL_CACHE" in str(caught.value)
    assert not (cache / "jgo").exists()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("pass", id="nothing"),
        pytest.param("(cache_dir / 'jars' / 'a.jar').write_bytes(b'cut')", id="cut"),
    ],
)
def test_an_invalid_jar_is_refused(cache, jgo, body):
    jgo(
        "class E: pass\n"
        "def build(endpoint, cache_dir):\n"
        "    (cache_dir / 'jars').mkdir(parents=True)\n"
        f"    {body}\n"
        "    e = E(); e.path = cache_dir; return e\n"
    )
    with pytest.raises(CoordinationError, match="damaged files"):
        jars.kafka_jars(JAVA)


def test_a_stuck_download_raises_at_its_timeout(cache, jgo, monkeypatch):
    jgo("import time\ndef build(endpoint, cache_dir): time.sleep(60)")
    monkeypatch.setattr(jars, "RESOLVE_TIMEOUT_S", 0.2)
    with pytest.raises(CoordinationError, match="not done after"):
        jars.kafka_jars(JAVA)


def test_a_missing_jgo_names_the_broker_extra(cache, monkeypatch):
    monkeypatch.setattr(jars, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"kafka-marshal\[broker\]"):
        jars.kafka_jars(JAVA)


HOLDER = """
import pathlib, sys
from kafka_marshal.testing.jars import file_lock
with file_lock(pathlib.Path(sys.argv[1]), timeout_s=5):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_file_lock_excludes_other_processes(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(DeadlineExceeded, match=r"lock"),
            jars.file_lock(path, timeout_s=0.1),
        ):
            pass
        other.stdin.close()
        with jars.file_lock(path, timeout_s=30):
            pass


def test_the_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.delenv("KAFKA_MARSHAL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert jars.cache_dir() == Path("/x/kafka-marshal")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jars.cache_dir() == Path("~/.cache/kafka-marshal").expanduser()
