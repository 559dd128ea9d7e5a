"""Crash and restart of a sidecar (PROTOCOL 12): deadlines are kept."""

import errno
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from enginekit import H, fold, spec, world, write
from logkit import fence
from msgspec.structs import replace
from sidecarkit import (
    Local,
    Machine,
    having,
    leaving,
    records,
    releases,
    run,
    run_until,
    sharing,
    sizes,
)

from kafka_marshal import identity
from kafka_marshal.clock import boot_id
from kafka_marshal.errors import (
    ClaimLost,
    ClientFenced,
    CoordinationError,
    IdentityConflict,
    LogUnwritable,
)
from kafka_marshal.protocol.records import ClaimingPartition
from kafka_marshal.protocol.types import Key
from kafka_marshal.remote import api
from kafka_marshal.remote.api import SubscriptionSpec
from kafka_marshal.sidecar import lease_journal, registry
from kafka_marshal.sidecar.lease_journal import (
    FILE_NAME,
    AddedLease,
    JournaledClient,
    JournaledLease,
    LeaseJournal,
)

KEPT = JournaledClient(
    client_id="a",
    instance="00" * 16,
    beat_ms=400,
    pid=7,
    started=99,
    children=(8,),
    specs={"s": SubscriptionSpec(topics=("t",))},
    keys=(JournaledLease(topic="t", partition=0, epoch=5, until_ms=9),),
    claims=(("u", 1),),
)


def wait_for_deadlines(cluster, a, b):
    """Run until the deadlines of ``a`` are over; ``b`` has no partition before."""
    while a.valid:
        assert not b.valid
        run(cluster, [b], 20, step_ms=20)


@pytest.fixture
def cluster():
    return world(partitions=2, records=[5] * 8)


@pytest.fixture
def machine(cluster, tmp_path):
    return Machine(cluster, state_dir=tmp_path)


def file_of(machine, group="g"):
    (found,) = machine.state_dir.glob(f"*/g={group}/c=host-1/{FILE_NAME}")
    return found


def resumes(cluster):
    return [r for r in records(cluster, ClaimingPartition) if r.resume is not None]


# --- The file ---


def test_the_journal_is_read_as_written(tmp_path):
    journal = LeaseJournal(tmp_path, boot_id="boot")
    assert journal.load() == ()
    assert journal.save([KEPT]) is None
    assert journal.load() == (KEPT,)
    assert not journal.is_damaged
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_journal_of_another_boot_is_ignored(tmp_path):
    LeaseJournal(tmp_path, boot_id="boot").save([KEPT])
    after = LeaseJournal(tmp_path, boot_id="another")
    assert after.load() == ()
    assert not after.is_damaged


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"level":2,"boot_id":"boot","clients":[]}', b"\xff"],
)
def test_a_damaged_journal_is_detected(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    journal = LeaseJournal(tmp_path, boot_id="boot")
    assert journal.load() == ()
    assert journal.is_damaged


def test_a_journal_that_cannot_be_read_counts_as_damaged(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    journal = LeaseJournal(tmp_path, boot_id="boot")
    assert journal.load() == ()
    assert journal.is_damaged
    assert isinstance(journal.save([KEPT]), OSError)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def added(partition, *, client="a", epoch=7, until_ms=20):
    lease = JournaledLease(
        topic="t", partition=partition, epoch=epoch, until_ms=until_ms
    )
    return AddedLease(client_id=client, instance="00" * 16, lease=lease)


def loaded(folder):
    """Return epoch and deadline by partition and client, None if it is damaged."""
    journal = LeaseJournal(folder, boot_id="boot")
    found = {
        (key.partition, client.client_id): (key.epoch, key.until_ms)
        for client in journal.load()
        for key in client.keys
    }
    return None if journal.is_damaged else found


def test_appended_leases_are_read_with_their_clients(tmp_path):
    journal = LeaseJournal(tmp_path, boot_id="boot")
    assert journal.save([KEPT]) is None
    assert journal.append([added(1), added(2, client="b")]) is None
    assert journal.append([added(1, until_ms=30)]) is None
    assert loaded(tmp_path) == {(0, "a"): (5, 9), (1, "a"): (7, 30), (2, "b"): (7, 20)}
    # The first client keeps its other fields; of the second only its lease is known.
    first, second = LeaseJournal(tmp_path, boot_id="boot").load()
    assert replace(first, keys=KEPT.keys) == KEPT
    assert (second.specs, second.pid) == ({}, None)
    # A lease appended for another client replaces that of the first.
    assert journal.append([added(0, client="b", epoch=9)]) is None
    assert (0, "a") not in loaded(tmp_path)
    assert loaded(tmp_path)[0, "b"] == (9, 20)
    assert journal.save([KEPT]) is None
    assert loaded(tmp_path) == {(0, "a"): (5, 9)}


def test_a_last_line_that_a_crash_cut_off_is_ignored(tmp_path):
    journal = LeaseJournal(tmp_path, boot_id="boot")
    journal.save([KEPT])
    whole = (tmp_path / FILE_NAME).read_bytes()
    journal.append([added(1)])
    longer = (tmp_path / FILE_NAME).read_bytes()
    for length in range(len(whole), len(longer)):
        (tmp_path / FILE_NAME).write_bytes(longer[:length])
        assert loaded(tmp_path) == {(0, "a"): (5, 9)}
    # A complete line that cannot be read is damage.
    (tmp_path / FILE_NAME).write_bytes(whole + b"{\n" + longer[len(whole) :])
    assert loaded(tmp_path) is None
    # Earlier releases wrote no line feed.
    (tmp_path / FILE_NAME).write_bytes(whole.rstrip())
    assert loaded(tmp_path) == {(0, "a"): (5, 9)}


def test_after_a_failed_append_only_a_save_can_write_again(tmp_path):
    journal = LeaseJournal(tmp_path, boot_id="boot")
    assert isinstance(journal.append([added(1)]), OSError)
    assert loaded(tmp_path) == {}
    journal.save([KEPT])
    (tmp_path / FILE_NAME).rename(tmp_path / "away")
    (tmp_path / FILE_NAME).mkdir()
    assert isinstance(journal.append([added(1)]), IsADirectoryError)
    (tmp_path / FILE_NAME).rmdir()
    (tmp_path / "away").rename(tmp_path / FILE_NAME)
    assert isinstance(journal.append([added(1)]), OSError)
    assert journal.save([KEPT]) is None
    assert journal.append([added(1)]) is None
    assert (1, "a") in loaded(tmp_path)


def test_on_a_full_disk_the_journal_reuses_the_space_of_its_content(
    tmp_path, monkeypatch
):
    journal = LeaseJournal(tmp_path, boot_id="boot")
    journal.save([KEPT])
    make = tempfile.mkstemp

    def mkstemp(**options):
        if (tmp_path / FILE_NAME).stat().st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(**options)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    assert journal.save([replace(KEPT, instance="11" * 16)]) is None
    assert not journal.is_emptied
    assert [each.instance for each in journal.load()] == ["11" * 16]
    assert journal.append([added(1)]) is None


def test_an_emptied_journal_is_private_and_counts_as_damaged(tmp_path, monkeypatch):
    def refuse(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    journal = LeaseJournal(tmp_path / "new", boot_id="boot")
    assert isinstance(journal.save([KEPT]), OSError)
    assert journal.is_emptied
    assert (tmp_path / "new" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    journal.load()
    assert journal.is_damaged


def test_without_a_directory_nothing_is_journaled():
    journal = LeaseJournal(None, boot_id="boot")
    assert journal.save([KEPT]) is None
    assert journal.append([added(1)]) is None
    assert journal.load() == ()


# --- Deadlines are journaled before they are sent ---


def test_a_deadline_is_journaled_before_it_is_sent(cluster, machine):
    a = having(machine)
    for _ in range(20):
        run(cluster, [a], 300)
        found = msgspec.json.decode(file_of(machine).read_bytes())
        (client,) = found["clients"]
        untils = {(k["topic"], k["partition"]): k["until_ms"] for k in client["keys"]}
        for key, (_, until_ms) in a.held.items():
            assert until_ms <= untils[key.topic, key.partition]


def journaled_leases(machine, group="g"):
    """Return the leases in the journal of a group, as a restart would read them."""
    folder = file_of(machine, group).parent
    journal = LeaseJournal(folder, boot_id=boot_id())
    found = {
        Key(group, key.topic, key.partition): (client.client_id, key)
        for client in journal.load()
        for key in client.keys
    }
    assert not journal.is_damaged
    return found


@pytest.fixture
def paced(monkeypatch):
    """Let all clients be written at most once in a heartbeat interval."""
    monkeypatch.setattr(lease_journal, "BYTES_PER_MS", 0.05)


@pytest.mark.usefixtures("paced")
def test_between_rewrites_a_deadline_is_appended_before_it_is_sent(cluster, machine):
    clients = [having(machine)]
    for number in range(2, 9):
        clients.append(Local(machine, f"b{number}", pid=number))
        clients[-1].subscribe()
        for _ in range(5):
            run(cluster, clients, 100)
            journaled = journaled_leases(machine)
            for client in clients:
                for key, (epoch, until_ms) in client.held.items():
                    name, lease = journaled[key]
                    assert (name, lease.epoch) == (client.name, epoch)
                    assert until_ms <= lease.until_ms
    run(cluster, clients, 3 * H)
    assert sizes(*clients) == [1] * 8
    assert b"\n" in file_of(machine).read_bytes().rstrip()


def test_the_journal_is_not_rewritten_for_each_client_that_joins(
    cluster, machine, monkeypatch
):
    monkeypatch.setattr(lease_journal, "BYTES_PER_MS", 1)
    written = []
    save = LeaseJournal.save

    def counted(journal, clients):
        error = save(journal, clients)
        written.append((cluster.clock.now_ms(), journal.rest_ms))
        return error

    monkeypatch.setattr(LeaseJournal, "save", counted)
    clients = []
    for number in range(20):
        clients.append(Local(machine, f"c{number}", pid=number + 1))
        clients[-1].subscribe()
        run(cluster, clients, 20)
    run(cluster, clients, 3 * H)
    assert sum(sizes(*clients)) == 8
    for (before_ms, rest_ms), (at_ms, _) in itertools.pairwise(written):
        assert at_ms - before_ms >= rest_ms
    restarted = {name for name, _ in journaled_leases(machine).values()}
    assert restarted == {client.name for client in clients if client.valid}


@pytest.mark.usefixtures("paced")
def test_a_crash_between_two_rewrites_loses_no_deadline(cluster, machine):
    a = having(machine)
    run(cluster, [a], H)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run_until(cluster, [a, b], lambda: len(b.valid) == 4, 2 * H)
    had = dict(b.held)
    machine.crash()
    cluster.run(100)
    machine.start()
    other = Local(machine, "c", pid=3)
    other.subscribe()
    while any(other.now_ms < until_ms for _, until_ms in had.values()):
        run(cluster, [other], 50)
        assert not other.valid & b.valid
    run_until(cluster, [other], lambda: len(other.valid) == 8, 6 * H)


@pytest.mark.usefixtures("paced")
def test_a_closed_sidecar_leaves_no_returned_lease_in_its_journal(cluster, machine):
    a = having(machine)
    a.give_back(*a.held, timeout_ms=1_000)
    machine.service.close(timeout_ms=1_000)
    assert journaled_leases(machine) == {}


def test_a_deadline_that_cannot_be_journaled_is_not_sent(cluster, machine, monkeypatch):
    a = having(machine)
    journal = machine.service.groups[0].table.journal
    monkeypatch.setattr(journal, "save", lambda clients: OSError("disk full"))
    last_ms = max(until for _, until in a.held.values())
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [a, b], H)
    assert max(until for _, until in a.held.values()) <= last_ms
    assert not b.valid
    assert len(machine.events.named("lease_journal_unwritable")) == 1
    monkeypatch.undo()
    run(cluster, [a, b], H)
    assert sum(sizes(a, b)) == 8
    assert max(until for _, until in a.held.values()) > last_ms


def test_other_hosts_take_over_while_the_journal_cannot_be_written(
    cluster, machine, monkeypatch
):
    """As on a file system that has become read-only."""
    a, other = having(machine), cluster.node("other")
    other.consume(spec())
    run_until(cluster, [a], lambda: len(other.held) == 4, 4 * H)
    run_until(cluster, [a], lambda: len(a.valid) == 4, H)
    journal = machine.service.groups[0].table.journal
    with monkeypatch.context() as patched:
        patched.setattr(journal, "save", lambda clients: OSError("read-only"))
        run_until(cluster, [a], lambda: len(other.held) == 8, 2 * H)
        assert all(each.reason.startswith("drained") for each in releases(cluster)[-4:])
        for _ in range(12):
            run(cluster, [a], H // 2)
            assert len(other.held) == 8
    run_until(cluster, [a], lambda: len(a.valid) == 4, 4 * H)
    home = fold(cluster, machine.node.engine.context.home_of("g"))
    assert not home.directed


def test_a_short_error_of_the_journal_moves_no_partitions(
    cluster, machine, monkeypatch
):
    a, other = having(machine), cluster.node("other")
    other.consume(spec())
    run_until(cluster, [a], lambda: len(other.held) == 4, 4 * H)
    run_until(cluster, [a], lambda: len(a.valid) == 4, H)
    before = len(releases(cluster))
    journal = machine.service.groups[0].table.journal
    with monkeypatch.context() as patched:
        patched.setattr(journal, "save", lambda clients: OSError("read-only"))
        run(cluster, [a], H // 3)
    run(cluster, [a], 3 * H)
    assert len(a.valid) == 4
    assert len(releases(cluster)) == before


@pytest.fixture
def disk(monkeypatch):
    """A disk that can be full: files can be removed and emptied, not written."""
    disk = SimpleNamespace(is_full=False)
    make, write = tempfile.mkstemp, Path.open

    def refuse():
        if disk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def mkstemp(*args, **options):
        refuse()
        return make(*args, **options)

    def opened(path, mode="r", *args, **options):
        if mode == "ab":
            refuse()
        return write(path, mode, *args, **options)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    monkeypatch.setattr(Path, "open", opened)
    return disk


def test_with_a_full_disk_clients_continue(cluster, machine, disk):
    a = having(machine)
    disk.is_full = True
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [a, b], 4 * H)
    assert sizes(a, b) == [4, 4]
    assert len(a.valid) == len(b.valid) == 4
    assert file_of(machine).read_bytes() == b""
    (event,) = machine.events.named("lease_journal_unwritable")
    assert event.fields["clients_continue"]


def test_after_a_crash_with_a_full_disk_old_deadlines_are_kept(cluster, machine, disk):
    """The next process finds the emptied journal damaged, and resumes nothing."""
    a = having(machine)
    disk.is_full = True
    run(cluster, [a], 3 * H)
    machine.restart()
    assert machine.events.named("lease_journal_damaged")
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, 4 * H)
    assert resumes(cluster) == []


def test_after_a_process_without_a_stored_identity_nothing_is_resumed(
    cluster, machine, disk
):
    """Its journal lacks deadlines that an earlier process has sent."""
    a = having(machine)
    disk.is_full = True
    run(cluster, [a], H)
    machine.restart()
    (event,) = machine.events.named("identity_unavailable")
    assert event.fields["group"] == "g"
    disk.is_full = False
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [b], 100)
    machine.restart()
    b.register()
    wait_for_deadlines(cluster, a, b)
    assert resumes(cluster) == []


def test_once_the_disk_has_room_a_restart_resumes_all_claims(cluster, machine, disk):
    a = having(machine)
    disk.is_full = True
    run(cluster, [a], 3 * H)
    disk.is_full = False
    run(cluster, [a], 3 * H)
    assert journaled_leases(machine).keys() == a.held.keys()
    machine.restart()
    run(cluster, [], H)
    assert len(resumes(cluster)) == 8


def test_a_new_group_on_a_full_disk_gets_a_retriable_error(
    cluster, machine, monkeypatch
):
    def refuse(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(identity, "make_private", refuse)
    for _ in range(2):
        with pytest.raises(CoordinationError, match="No space left") as raised:
            Local(machine, "a")
        assert raised.value.retriable
    (event,) = machine.events.named("identity_unavailable")
    assert event.fields["group"] == "g"
    monkeypatch.undo()
    assert having(machine).valid


def test_a_removed_state_directory_is_created_again(cluster, machine):
    """Clients keep their partitions, and get later deadlines."""
    a = having(machine)
    shutil.rmtree(machine.state_dir)
    last_ms = max(until for _, until in a.held.values())
    run(cluster, [a], 3 * H)
    assert a.valid
    assert min(until for _, until in a.held.values()) > last_ms
    assert journaled_leases(machine).keys() == a.held.keys()


def test_a_restart_without_the_old_identity_keeps_old_deadlines(cluster, machine):
    a = having(machine)
    shutil.rmtree(machine.state_dir)
    run(cluster, [a], 3 * H)
    machine.restart()
    assert resumes(cluster) == []
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, 4 * H)


def test_clients_stop_by_their_deadlines_if_journaling_fails(
    cluster, machine, monkeypatch
):
    a = having(machine)
    journal = machine.service.groups[0].table.journal
    monkeypatch.setattr(journal, "save", lambda clients: OSError("disk full"))
    run(cluster, [a], 3 * H)
    assert not a.valid


# --- A crash ---


def test_clients_of_a_crashed_sidecar_stop_by_their_deadline(cluster, machine):
    """No other host holds their partitions before that."""
    a = having(machine)
    other = cluster.node("other", spec=spec())
    run(cluster, [a], 200)
    machine.crash()
    while not other.held:
        cluster.run(20)
        assert not a.valid & set(other.held)
    assert not a.valid & set(other.held)
    cluster.run(2 * H)
    assert not a.valid


def test_a_restarted_sidecar_resumes_its_claims(cluster, machine):
    """The same clients get them, with new tokens."""
    a, b = sharing(cluster, machine)
    other = cluster.node("other", spec=spec(claims_max=1))
    run_until(
        cluster, [a, b], lambda: len(other.held) == 1 and sum(sizes(a, b)) == 7, 2 * H
    )
    had, tokens = (set(a.held), set(b.held)), dict(a.tokens)
    machine.restart()
    assert machine.expected == 2
    assert [c.state for c in machine.service.clients()] == ["silent", "silent"]
    cluster.run(200)
    for client in (a, b):
        client.register()
        assert client.registered.was_known

    def has_new_tokens():
        is_new = all(a.tokens[key] != tokens[key] for key in a.held)
        return is_new and (set(a.held), set(b.held)) == had

    assert run_until(cluster, [a, b], has_new_tokens, H) < 500
    assert len(other.held) == 1
    assert len(resumes(cluster)) >= 7


def claiming(machine, name="a", pid=1):
    """Return a client that claims one partition without consuming it."""
    client = Local(machine, name, pid=pid)
    key = client.claim(3)
    run_until(machine.cluster, [client], lambda: client.valid == {key}, H)
    return client, key


def test_claims_without_consumption_are_resumed_as_well(cluster, machine):
    a, key = claiming(machine)
    b = Local(machine, "b", pid=2)
    b.claim(3)
    a.positions[key] = 4
    a.beat()
    run(cluster, [a, b], H)
    token = a.tokens[key]
    machine.restart()
    assert machine.expected == 2
    cluster.run(200)
    (resumed,) = resumes(cluster)
    assert (resumed.topic, resumed.partition) == ("t", 3)
    for client in (b, a):
        client.register()
        assert client.registered.was_known
    assert run_until(cluster, [a, b], lambda: a.tokens[key] != token, H) < 500
    assert (a.valid, b.valid, a.positions[key]) == ({key}, set(), 4)
    machine.watch.kill(1)
    run_until(cluster, [b], lambda: b.valid == {key}, H)


def test_a_resumed_claim_whose_client_stays_away_becomes_free(cluster, machine):
    a, key = claiming(machine)
    b = Local(machine, "b", pid=2)
    b.claim(3)
    run(cluster, [a, b], 200)
    machine.restart()
    b.register()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: b.valid == {key}, H)


def test_after_a_restart_no_other_client_gets_a_key_before_its_deadline(
    cluster, machine
):
    a = having(machine)
    machine.restart()
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, H)


@pytest.mark.parametrize("how", ["an end in order", "a share for others", "the end"])
def test_a_resumed_claim_is_not_released_before_the_old_deadline(cluster, machine, how):
    """Its client has not reconnected, and may still use it (PROTOCOL 12)."""
    a = having(machine)
    machine.crash()
    machine.start()
    cluster.run_until(lambda: len(resumes(cluster)) == 8, H)
    others = [cluster.node(name, spec=spec()) for name in ("other", "another")]
    if how == "an end in order":
        machine.service.start_drain()
    elif how == "the end":
        machine.service.close(timeout_ms=0)
    while a.valid:
        for other in others:
            assert not a.valid & set(other.held)
        cluster.run(20)
    cluster.run_until(lambda: any(other.held for other in others), 3 * H)


def test_a_client_that_dies_before_it_reconnects_frees_its_keys(cluster, machine):
    having(machine)
    machine.restart()
    machine.watch.kill(1)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    took_ms = run_until(cluster, [b], lambda: len(b.valid) == 8, H)
    assert took_ms < 500


def test_another_process_of_the_name_is_refused_until_the_deadline(cluster, machine):
    having(machine, pid=None)
    machine.restart()
    with pytest.raises(IdentityConflict):
        Local(machine, "a")
    cluster.run(2 * H)
    Local(machine, "a")


def test_deadlines_hold_for_another_client_of_the_same_process(cluster, machine):
    """A process may draw one instance for all its clients."""
    a = having(machine)
    machine.restart()
    b = Local(machine, "b", pid=1, instance=a.instance)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, H)


def test_a_lower_heartbeat_interval_ends_no_deadline_of_before(cluster, machine):
    """Lowered while the sidecar was down: the deadlines are of the old interval."""
    a = having(machine)
    machine.crash()
    for t in (0, 1):
        config = replace(
            cluster.config, generation=2, era=2, heartbeat_interval_ms=H // 3
        )
        write(cluster, config, t)
    machine.start()
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, H)


def test_a_restart_opens_no_group_without_clients(cluster, machine):
    """The directory of each group that was ever used stays."""
    a = having(machine)
    b = Local(machine, "b", group="of-b")
    leaving(Local(machine, "c", group="of-c"))
    run(cluster, [a, b], H)
    machine.restart()
    opened = {host.group_id for host in machine.service.groups}
    assert opened == {"g"}
    assert len(list(machine.state_dir.glob("*/g=*/c=host-1/identity.json"))) == 3


def test_deadlines_survive_two_restarts(cluster, machine):
    a = having(machine)
    machine.restart()
    machine.restart()
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)


def test_with_a_damaged_journal_nothing_is_resumed(cluster, machine):
    a = having(machine)
    machine.crash()
    file_of(machine).write_bytes(b"{")
    machine.start()
    b = Local(machine, "b", pid=2)
    b.subscribe()
    run(cluster, [b], 500)
    machine.restart()
    b.register()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, 2 * H)
    assert not resumes(cluster)


def test_after_a_reboot_any_client_gets_the_resumed_claims(
    cluster, machine, monkeypatch
):
    having(machine)
    machine.crash()
    monkeypatch.setattr("kafka_marshal.sidecar.service.boot_id", lambda: "another boot")
    machine.start()
    assert machine.expected == 0
    b = Local(machine, "b", pid=2)
    b.subscribe()
    took_ms = run_until(cluster, [b], lambda: len(b.valid) == 8, H)
    assert took_ms < 500
    assert len(resumes(cluster)) == 8


def test_without_a_state_directory_a_restart_waits_for_stale_claims(cluster):
    machine = Machine(cluster)
    a = having(machine)
    machine.restart()
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    run_until(cluster, [b], lambda: len(b.valid) == 8, 2 * H)


def test_an_orderly_shutdown_reserves_nothing(cluster, machine):
    a = having(machine)
    machine.service.start_drain()
    a.live()
    cluster.run(100)
    machine.service.close(timeout_ms=1_000)
    machine.restart()
    b = Local(machine, "b", pid=2)
    b.subscribe()
    took_ms = run_until(cluster, [b], lambda: len(b.valid) == 8, H)
    assert took_ms < 500


def test_a_deleted_topic_does_not_block_the_restart(cluster, machine, monkeypatch):
    having(machine)
    machine.crash()

    def gone(*_, **__):
        raise ClaimLost("not there")

    monkeypatch.setattr(registry.ClientRegistry, "subscribe", gone)
    machine.start()
    assert len(machine.events.named("subscription_not_restored")) == 1
    monkeypatch.undo()
    cluster.run(3 * H)
    assert not machine.service.clients()


def test_a_restored_pattern_is_validated(cluster, machine):
    cluster.fill("a" * 249, [0])
    having(machine)
    path = file_of(machine)
    machine.crash()
    kept = msgspec.json.decode(path.read_bytes())
    for pattern, found in ((".*" * 40 + "X", 0), (r"(.*)\1", 1)):
        for client in kept["clients"]:
            client["wants"]["s"] |= {"topics": [], "pattern": pattern}
        path.write_bytes(msgspec.json.encode(kept))
        machine.start()
        assert len(machine.events.named("subscription_not_restored")) == found
        machine.crash()


def test_two_sidecars_with_one_client_id_conflict(cluster, machine):
    Local(machine, "a")
    with pytest.raises(
        IdentityConflict, match="in use by another Marshal of this process"
    ):
        Local(Machine(cluster, state_dir=machine.state_dir), "b")


def test_a_state_directory_that_cannot_be_used_is_refused(cluster, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be used"):
        Local(Machine(cluster, state_dir=tmp_path / "file"), "a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- A failure of the session ---


def test_a_group_fails_if_another_host_uses_its_client_id(cluster, tmp_path):
    machine = Machine(cluster, state_dir=tmp_path / "one")
    a = having(machine)
    run(cluster, [a], H)
    second = Machine(cluster, state_dir=tmp_path / "two")
    b = Local(second, "b", pid=2)
    b.subscribe()
    host = second.service.groups[0]
    run_until(cluster, [a], lambda: host.failure is not None, 3 * H)
    b.take()
    assert isinstance(b.received[-1], api.Failed)
    assert b.received[-1].failure.error == "IdentityConflict"
    with pytest.raises(IdentityConflict):
        b.beat()
    assert len(a.valid) == 8


def test_after_a_session_failure_keys_stay_reserved_at_the_sidecar(cluster, machine):
    a = having(machine)
    with machine.node.engine.changed:
        machine.service.groups[0].session.fail(LogUnwritable("a test"))
    cluster.run(100)
    b = Local(machine, "b", pid=2)
    b.subscribe()
    wait_for_deadlines(cluster, a, b)
    a.take()
    assert isinstance(a.received[-1], api.Failed)
    run_until(cluster, [b], lambda: len(b.valid) == 8, 2 * H)


def test_after_a_session_failure_other_hosts_wait_for_the_deadlines(cluster, machine):
    """Nothing is released while the client may still use it."""
    a = having(machine)
    other = cluster.node("other", spec=spec(policy="greedy"))
    run(cluster, [a], 100)
    with machine.node.engine.changed:
        machine.service.groups[0].session.fail(LogUnwritable("a test"))
    while a.valid:
        cluster.run(20)
        assert not a.valid & set(other.held)
    cluster.run_until(lambda: len(other.held) == 8, 2 * H)
    found = {release.reason.partition(":")[0] for release in releases(cluster)}
    assert found <= {"surplus"}


def test_a_fenced_sidecar_ends_the_claims_of_its_clients(cluster, machine):
    """Its clients stop at their deadlines before another host wins its keys."""
    a = having(machine)
    other = cluster.node("other", spec=spec(policy="greedy"))
    run(cluster, [a], 100)
    name, inc = machine.service.groups[0].session.claimant.owner
    for t in range(2):
        write(cluster, fence(name, inc=inc, reason="moved"), t)
    host = machine.service.groups[0]
    cluster.run_until(lambda: host.failure is not None, H)
    assert a.valid  # it has not read its events yet
    while a.valid:
        cluster.run(20)
        assert not a.valid & set(other.held)
    cluster.run_until(lambda: len(other.held) == 8, 2 * H)
    a.take()
    assert isinstance(a.received[-1], api.Failed)
    failure = a.received[-1].failure
    assert (failure.error, failure.reason) == ("ClientFenced", "moved")
    with pytest.raises(ClientFenced):
        a.beat()
