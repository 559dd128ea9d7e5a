"""`marshal clients`: list, drain, cordon, uncordon, fence and forget."""

import json

import pytest
from attrs import evolve
from logkit import OP, Log, direct, ident, member
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import Key, World
from kafka_marshal.admin.draining import DirectiveResult, Subject
from kafka_marshal.admin.fencing import ClientProcess, FenceResult, OwnedKey
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


def test_forget_removes_the_identity_of_a_closed_client(domain, tmp_path):
    who = {"domain": domain, "group_id": "g", "client_id": "c1"}
    identity = Identity.take(tmp_path, **who)
    identity.remember(bytes(16), master=bytes(16))
    held = forget(tmp_path)
    assert held.exit_code == 4
    assert "in use by another Marshal of this process" in held.stderr
    identity.close()
    removed = forget(tmp_path)
    assert removed.exit_code == 0
    assert "is removed: yes" in removed.stdout
    assert not identity.folder.exists()
    again = forget(tmp_path)
    assert again.exit_code == 0
    assert "is removed: no" in again.stdout
    assert "nothing was removed: this host has no identity of client 'c1'" in (
        again.stderr
    )


def test_forget_finds_the_directory_that_a_profile_names(domain, tmp_path):
    who = {"domain": domain, "group_id": "g", "client_id": "c1"}
    Identity.take(tmp_path / "state", **who).close()
    profile = tmp_path / "config.toml"
    profile.write_text("[default]\nstate-dir = '~/state'\n")
    words = ["clients", "forget", "g", "c1", "--config", str(profile)]
    outcome = CliRunner().invoke(app, words, env={"HOME": str(tmp_path)})
    assert "is removed: yes" in outcome.stdout


def test_an_invalid_client_id_is_refused(domain, tmp_path):
    assert forget(tmp_path, "../x").exit_code == 2


def test_forget_of_a_live_client_needs_confirmation(monkeypatch, tmp_path):
    log = Log(cluster_id="cluster")
    log.append(member("c1"))
    log.append(member("c2"))
    world = World([log.state], {}, cluster_id="cluster", read_at_ms=0)
    monkeypatch.setattr(Call, "world", lambda self: world)
    who = {"domain": world.config().format_id.hex(), "group_id": "g"}
    Identity.take(tmp_path, **who, client_id="c1").close()
    refused = forget(tmp_path)
    assert refused.exit_code == 2
    assert "client c1 of group g is alive on host host" in refused.stderr
    words = ["clients", "forget", "g", "c1", "--state-dir", str(tmp_path), "--yes"]
    assert CliRunner().invoke(app, words).exit_code == 0


# --- clients fence


HELD = OwnedKey(Key("g", "t", 3), 1_500)


def process(name="ab", *, owned=(HELD,), is_announced=True, fenced=None):
    return ClientProcess(
        incarnation=name * 16,
        host="web-1",
        is_announced=is_announced,
        owned=owned,
        fenced=fenced or {},
        is_fenced=bool(fenced),
    )


class FakeAdmin(Opened):
    """An admin of a client with these processes."""

    def __init__(self, *processes, left=()):
        self.processes, self.left = processes, left
        self.asked = None

    def client_processes(self, group_id, client_id):
        return self.processes

    def fence_client(self, group_id, client_id, **asked):
        self.asked = asked
        names = asked["incarnations"] or ()
        chosen = [each for each in self.processes if each.incarnation in names]
        done = (
            chosen
            if asked["dry_run"]
            else [
                evolve(x, owned=self.left, fenced={0: 7}, is_fenced=True)
                for x in chosen
            ]
        )
        return FenceResult(
            group_id=group_id,
            client_id=client_id,
            is_changed=not all(each.is_fenced for each in chosen),
            processes=tuple(done),
        )


# --- clients drain, cordon, uncordon


RESULT = DirectiveResult(
    operation=OP.hex(),
    action="drain",
    subject=Subject(client_id="c1"),
    until_ms=1_600_000,
    members=(("g", "c1"),),
    held=(),
)


class Directing(Opened):
    """An admin that drains, cordons and uncordons."""

    def __init__(self, *held):
        self.held, self.asked = held, None

    def drain(self, client, *, on_progress, **asked):
        for count in (2, len(self.held)):
            on_progress(count)
        return self.result("drain", client, **asked)

    def cordon(self, client, **asked):
        return self.result("cordon", client, **asked)

    def result(self, action, client, **asked):
        self.asked = asked
        return DirectiveResult(
            operation="" if asked["dry_run"] else OP.hex(),
            action=action,
            subject=Subject(
                client_id=client, host=asked["host"], group_id=asked["group_id"]
            ),
            until_ms=1_600_000,
            members=(("g", "c1"), ("h", "c2")),
            held=self.held,
        )

    def uncordon(self, client, **asked):
        self.asked = client, asked
        return 3


@pytest.fixture
def clients(monkeypatch):
    def run(admin, *words):
        monkeypatch.setattr(Call, "admin", lambda self: admin)
        return CliRunner().invoke(app, ["clients", *words])

    return run


def test_drain_of_a_host_waits_for_its_partitions(clients):
    admin = Directing()
    words = ("drain", "--host", "web-1", "--for", "2h", "--wait", "--timeout", "5s")
    done = clients(admin, *words, "--reason", "reboot", "--group", "g")
    assert done.exit_code == 0, done.output
    assert admin.asked == {
        "host": "web-1",
        "group_id": "g",
        "for_ms": 7_200_000,
        "operation": None,
        "reason": "reboot",
        "wait_ms": 5_000,
        "dry_run": False,
    }
    shown = done.stderr.splitlines()
    assert shown == ["2 partitions are still held", "0 partitions are still held"]
    assert "until:       1970-01-01T00:26:40.000Z" in done.stdout
    assert "no held" in done.stdout


def test_a_drain_that_does_not_finish_names_its_operation(clients):
    admin = Directing(Key("g", "t", 3))
    late = clients(admin, "drain", "c1", "--wait")
    assert late.exit_code == 5
    assert f"--operation {OP.hex()}" in late.stderr
    done = clients(admin, "drain", "c1", "-o", "json", "--operation", OP.hex())
    assert (done.exit_code, admin.asked["operation"]) == (0, OP.hex())
    assert admin.asked["wait_ms"] == 0
    found = json.loads(done.stdout)
    assert (found["action"], found["client_id"], found["host"]) == ("drain", "c1", None)
    assert (found["op_id"], found["held_count"]) == (OP.hex(), 1)
    assert found["held"] == [{"group_id": "g", "topic": "t", "partition": 3}]
    assert found["members"][1] == {"group_id": "h", "client_id": "c2"}


@pytest.mark.parametrize("words", [("drain", "c1", "--wait"), ("cordon", "c1")])
def test_a_dry_run_of_a_drain_or_cordon_writes_nothing(clients, words):
    admin = Directing(Key("g", "t", 3))
    done = clients(admin, *words, "--dry-run", "-o", "json")
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("nothing was written\n")
    found = json.loads(done.stdout)
    assert (found["op_id"], found["is_executed"], found["held_count"]) == (
        None,
        False,
        1,
    )
    assert admin.asked["dry_run"]


def test_a_client_is_cordoned_and_uncordoned(clients):
    admin = Directing()
    done = clients(admin, "cordon", "c1", "--for", "1d", "-o", "json")
    assert json.loads(done.stdout)["action"] == "cordon"
    assert admin.asked["for_ms"] == 86_400_000
    ended = clients(admin, "uncordon", "--operation", OP.hex(), "-o", "json")
    found = json.loads(ended.stdout)
    assert (found["op_id"], found["partitions_count"]) == (OP.hex(), 3)
    assert found["is_executed"]
    nothing = {"host": None, "group_id": None, "operation": None, "reason": None}
    nothing["dry_run"] = False
    assert admin.asked == (None, {**nothing, "operation": OP.hex()})
    assert clients(admin, "uncordon", "--host", "web-1").exit_code == 0
    assert admin.asked == (None, {**nothing, "host": "web-1"})
    assert clients(admin, "uncordon", "c1", "--group", "g").exit_code == 0
    assert admin.asked == ("c1", {**nothing, "group_id": "g"})


def test_a_dry_run_of_uncordon_counts_the_partitions(clients):
    admin = Directing()
    shown = clients(admin, "uncordon", "c1", "--dry-run", "-o", "json")
    assert shown.exit_code == 0, shown.output
    assert shown.stderr == (
        "nothing was written; drains and cordons would end in 3 coordinating "
        "partitions\n"
    )
    assert not json.loads(shown.stdout)["is_executed"]
    assert admin.asked[1]["dry_run"]


def test_a_drain_that_matches_no_live_member_is_noted(clients, monkeypatch):
    monkeypatch.setattr(
        Directing, "result", lambda self, *_, **__: evolve(RESULT, members=())
    )
    done = clients(Directing(), "drain", "c1")
    assert done.exit_code == 0, done.output
    assert "no live member matches client 'c1'" in done.stderr
    assert f"marshal clients uncordon --operation {OP.hex()}" in done.stderr


def test_list_shows_the_directive_of_each_member(monkeypatch):
    log = Log(level=2, cluster_id="cluster")
    log.append(member("c1"))
    log.append(member("c2"))
    world = World([log.state], {}, cluster_id="cluster", read_at_ms=0)
    monkeypatch.setattr(Call, "world", lambda self, **_: world)
    words = ["clients", "list"]
    assert "DIRECTIVE" not in CliRunner().invoke(app, words).stdout
    log.append(direct("c2"))
    log.append(direct("c1", action="cordon", group="marshal", op=ident("x")))
    lines = CliRunner().invoke(app, words).stdout.splitlines()[-3:]
    shown = [line.split()[-1] for line in lines]
    assert shown == ["DIRECTIVE", "cordon", "drain"]


@pytest.fixture
def fence(clients):
    return lambda admin, *words: clients(admin, "fence", "g", "c1", *words)


def test_fence_of_a_live_client_needs_confirmation(fence):
    admin = FakeAdmin(process())
    refused = fence(admin)
    assert refused.exit_code == 2
    assert "alive on host web-1 and holds 1 partition;" in refused.stderr
    assert admin.asked is None
    assert fence(admin, "--yes").exit_code == 0
    assert admin.asked == {
        "incarnations": ["ab" * 16],
        "reason": None,
        "wait_ms": 0,
        "dry_run": False,
    }


def test_a_dry_run_of_a_fence_neither_confirms_nor_waits(fence):
    admin = FakeAdmin(process())
    shown = fence(admin, "--dry-run", "--wait", "-o", "json")
    assert shown.exit_code == 0, shown.output
    assert shown.stderr == "nothing was written; 1 claim would end\n"
    found = json.loads(shown.stdout)
    assert (found["is_executed"], found["is_changed"]) == (False, True)
    assert (found["held_count"], found["fenced"][0]["is_fenced"]) == (1, False)
    assert admin.asked["dry_run"]


def test_a_silent_client_is_reported_as_possibly_alive(fence):
    refused = fence(FakeAdmin(evolve(process(), is_silent=True)))
    assert refused.exit_code == 2
    assert "by the clock of this machine" in refused.stderr
    assert "it may be alive on host web-1 and holds 1 partition;" in refused.stderr
    one_lives = fence(FakeAdmin(evolve(process(), is_silent=True), process("cd")))
    assert "g is alive on host web-1 and holds 2 partitions" in one_lives.stderr


def test_fence_of_a_client_that_has_left_needs_no_confirmation(fence):
    stale = OwnedKey(HELD.key, 0)
    admin = FakeAdmin(process(owned=(stale,), is_announced=False))
    assert fence(admin, "--reason", "gone").exit_code == 0
    assert admin.asked["reason"] == "gone"


def test_fence_reports_the_offsets_and_the_held_partitions(fence):
    admin = FakeAdmin(process(), left=(HELD,))
    found = json.loads(fence(admin, "--yes", "-o", "json").stdout)
    assert (found["is_changed"], found["held_count"]) == (True, 1)
    assert found["is_executed"]
    assert found["free_within_ms"] == 1_500
    (row,) = found["fenced"]
    assert (row["incarnation"], row["offsets"]) == ("ab" * 16, {"0": 7})
    assert found["held"] == [{"topic": "t", "partition": 3, "remaining_ms": 1_500}]


def test_a_second_fence_succeeds_and_writes_nothing(fence):
    admin = FakeAdmin(process(owned=(), is_announced=False, fenced={0: 7}))
    again = fence(admin)
    assert again.exit_code == 0
    assert "nothing was written" in again.stderr


def test_fence_with_wait_fails_while_partitions_are_held(fence):
    admin = FakeAdmin(process(), left=(HELD,))
    late = fence(admin, "--yes", "--wait", "--timeout", "5s")
    assert late.exit_code == 5
    assert "1 of its partitions are not free yet" in late.stderr
    assert admin.asked["wait_ms"] == 5_000
    assert fence(FakeAdmin(process()), "--yes", "--wait").exit_code == 0


def test_only_the_given_incarnation_is_confirmed_and_fenced(fence):
    admin = FakeAdmin(process(), process("cd", owned=(), is_announced=False))
    assert fence(admin, "--incarnation", "cd" * 16).exit_code == 0
    assert admin.asked["incarnations"] == ["cd" * 16]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["clients", "fence", "g", "../x"], id="name"),
        pytest.param(
            ["clients", "fence", "g", "c1", "--reason", "x" * 1_025], id="reason"
        ),
        pytest.param(["clients", "drain", "c1", "--for", "long"], id="length"),
        pytest.param(["clients", "drain", "c1", "--reason", "x" * 1_025], id="why"),
        pytest.param(
            ["groups", "pause", "g", "--for", "1m", "--reason", "x" * 1_025],
            id="of a pause",
        ),
        pytest.param(
            ["groups", "undo", OP.hex(), "--reason", "x" * 1_025], id="of an undo"
        ),
        pytest.param(["clients", "uncordon"], id="nobody"),
    ],
)
def test_wrong_usage_neither_reads_nor_writes(monkeypatch, words):
    admin = Directing()  # every other method is missing, which would be another code
    monkeypatch.setattr(Call, "admin", lambda self: admin)
    monkeypatch.delattr(Call, "world")
    assert CliRunner().invoke(app, words).exit_code == 2
    assert admin.asked is None
