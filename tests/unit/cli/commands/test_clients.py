"""`marshal clients forget`: what a host keeps of a client."""

import pytest
from logkit import Log
from typer.testing import CliRunner

from kafka_marshal import World
from kafka_marshal.identity import Identity
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.shared import Call


@pytest.fixture
def domain(monkeypatch):
    world = World([Log(cluster_id="cluster").state], {}, cluster_id="cluster")
    monkeypatch.setattr(Call, "world", lambda self: world)
    return world.config().format_id.hex()


def forget(home, client="c1"):
    words = ["clients", "forget", "g", client, "--state-dir", str(home)]
    return CliRunner().invoke(app, words)


def test_a_client_that_is_gone_is_forgotten(domain, tmp_path):
    who = {"domain": domain, "group_id": "g", "client_id": "c1"}
    identity = Identity.take(tmp_path, **who)
    identity.remember(bytes(16), master=bytes(16))
    held = forget(tmp_path)
    assert held.exit_code == 4
    assert "in use by process" in held.stderr
    identity.close()
    assert forget(tmp_path).exit_code == 0
    assert not identity.folder.exists()
    again = forget(tmp_path)
    assert again.exit_code == 3
    assert "has no identity" in again.stderr


def test_a_name_that_is_none_is_refused(domain, tmp_path):
    assert forget(tmp_path, "../x").exit_code == 2
