"""The cache of names that shells complete: content, bounds and errors."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from logkit import Log, member
from typer.testing import CliRunner

from kafka_marshal import Key, World
from kafka_marshal.protocol.checkpoints import checkpoint_key
from kafka_marshal_cli import completion_cache
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.completion_cache import DOMAINS_MAX, NAMES_MAX, cache_path, save


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_path()


def world(*, group="billing", topic="payments", client="w1"):
    log = Log()
    log.claimed(client, key=Key(group, topic, 0))
    log.claimed("w2", key=checkpoint_key(0))
    log.append(member("w2", group="other"))
    return World([log.state], {})


def context(servers="s:1", topic="__marshal"):
    params = {"bootstrap_server": servers, "coordination_topic": topic}
    return SimpleNamespace(params=params)


def test_groups_topics_and_clients_of_a_world_are_completed():
    save(world(), "s:1", topic="__marshal")
    assert completion_cache.groups(context(), "") == ["billing", "other"]
    assert completion_cache.groups(context(), "b") == ["billing"]
    assert completion_cache.topics(context(), "") == ["payments"]
    assert completion_cache.clients(context(), "") == ["w1", "w2"]


def test_names_of_the_given_or_else_the_last_cluster_are_used():
    save(world(group="one"), "s:1", topic="__marshal")
    save(world(group="two"), "s:2", topic="__marshal")
    assert completion_cache.groups(context("s:1"), "o") == ["one", "other"]
    assert completion_cache.groups(context("s:2"), "tw") == ["two"]
    assert completion_cache.groups(context("unknown:1"), "tw") == ["two"]


def test_only_the_user_can_read_the_cache_file(cache):
    save(world(), "s:1", topic="__marshal")
    assert cache.stat().st_mode & 0o777 == 0o600
    assert cache.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_the_cache_file_is_not_rewritten_without_new_names(cache):
    save(world(), "s:1", topic="__marshal")
    before = cache.stat().st_ino
    save(world(), "s:1", topic="__marshal")
    assert cache.stat().st_ino == before


def test_the_completion_cache_is_bounded(cache):
    log = Log()
    for number in range(NAMES_MAX + 5):
        log.claimed(key=Key(f"g{number}", "t", 0))
    many = World([log.state], {})
    for number in range(DOMAINS_MAX + 2):
        save(many, f"s:{number}", topic="t")
    domains = json.loads(cache.read_text())["domains"]
    assert len(domains) == DOMAINS_MAX
    assert domains[0]["servers"] == f"s:{DOMAINS_MAX + 1}"
    assert len(domains[0]["groups"]) == NAMES_MAX


HOSTILE = ["$(reboot)", "a b", "`x`", "a;b", "\x1b[31m", "a\nb", "*", "-", 7, None]


def test_only_valid_names_reach_a_shell(cache):
    domain = {"servers": "s:1", "topic": "__marshal", "groups": [*HOSTILE, "ok"]}
    cache.parent.mkdir()
    cache.write_text(json.dumps({"version": 1, "domains": [domain]}))
    assert completion_cache.groups(context(), "") == ["-", "ok"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "domains": []}',
        '{"version": 1, "domains": 7}',
        '{"version": 1, "domains": [7, {"groups": 7}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_cache_file_has_no_names_and_is_replaced(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert completion_cache.groups(context(), "") == []
    save(world(), "s:1", topic="__marshal")
    assert completion_cache.groups(context(), "b") == ["billing"]


def test_an_unwritable_completion_cache_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    save(world(), "s:1", topic="__marshal")
    assert completion_cache.groups(context(), "") == []


def test_the_placeholder_of_an_option_selects_its_completion():
    group, other = typer.Option(metavar="GROUP"), typer.Option(metavar="X")
    completion_cache.complete("g", Annotated[str, group])
    completion_cache.complete("o", Annotated[str, other, "no description"])
    completion_cache.complete("p", int)
    assert group.autocompletion is completion_cache.groups
    assert other.autocompletion is None


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("claims explain billing pay", "payments"),
        ("groups reset billing --topic pay", "payments"),
        ("groups history bil", "billing"),
        ("clients drain w", "w1"),
        ("clients fence billing w", "w1"),
        ("plan simulate billing --kill w", "w1"),
        ("consume pay", "payments"),
        ("topic info --coordination-topic pay", ""),
    ],
)
def test_names_are_completed_in_arguments_and_options(words, wanted):
    """Also where the placeholder has more than the name, as in ``[CLIENT]``."""
    save(world(), "localhost:9092", topic="__marshal")
    asked = {
        "_MARSHAL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"marshal {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    outcome = CliRunner().invoke(app, prog_name="marshal", env=asked)
    assert wanted in outcome.stdout.split() or not (wanted or outcome.stdout.strip())


def test_a_user_without_a_home_directory_has_no_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    save(world(), "s:1", topic="__marshal")
    assert completion_cache.groups(context(), "") == []
