"""The sidecar's daemon on a real broker, tested over plain HTTP."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from clikit import MARSHAL, Cli
from domain import opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sidecars import START_MS, PlainClient, place, start_sidecar
from slices import HANG_S
from waiting import eventually

from kafka_marshal import TopicPartition
from kafka_marshal.remote import api, paths
from kafka_marshal.sidecar import routes
from kafka_marshal.sidecar.routes import ROUTES
from kafka_marshal_cli.exits import ExitCode

# Long enough for a daemon to start before its subleases expire, and to keep its claims
# without a processor for seconds: on a busy machine both take more than two shorter
# intervals, and then nothing is resumed, or claims are lost in the middle of a test.
H_MS = 30_000
RECORDS = 10
# A sidecar answers an action within 90 s.
ANSWER_S = 100
# The command is started often, which takes its time on a busy machine.
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS, partitions=2) as found:
        yield found


@pytest.fixture(scope="module")
def sidecar(domain):
    """One for all tests that do not end it."""
    with start_sidecar(domain) as found:
        yield found


@pytest.fixture
def group(unique):
    return unique("group")


@pytest.fixture
def client(request, group):
    """Return a function that makes clients with events and heartbeats."""

    def make(sidecar, *topics, name="worker", **wants):
        found = PlainClient(sidecar, group, f"{name}-{next(_numbers)}")
        request.addfinalizer(found.close)
        response = found.register()
        assert response.status_code == 200, response.text
        found.listen()
        found.wait_event("snapshot")
        found.keep_beating()
        if topics:
            response = found.subscribe(*topics, **wants)
            assert response.status_code == 200, response.text
        return found

    return make


def epochs(client):
    return {each: event["epoch"] for each, event in client.has.items()}


def positions(domain, group):
    return {
        key.topic_partition: state.position
        for key, state in domain.states(group).items()
    }


def test_a_client_registers_gets_partitions_commits_releases_and_leaves(
    domain, sidecar, client, group
):
    topic = domain.data_topic(3, RECORDS)
    worker = client(sidecar)
    first = worker.frames[0][1]
    # A snapshot without partitions is sent, too.
    assert (first["type"], first["assigned"]) == ("snapshot", [])
    assert worker.subscribe(topic).json()["topics"] == {topic: 3}
    worker.wait_has(3)
    assert domain.owners(group) == dict.fromkeys(domain.of(topic), "host-1")
    for event in worker.has.values():
        assert event["position"] == 0
        assert event["soft_until_ms"] < event["hard_until_ms"]
    # Positions that a flush reported are in the log.
    progress = [worker.progress(each, 7) for each in worker.has]
    beaten = worker.beat(*progress, flush=True, timeout_ms=10_000)
    assert beaten.status_code == 200, beaten.text
    assert set(worker.deadlines) == set(worker.has)
    assert set(positions(domain, group).values()) == {7}
    # One partition is released.
    returned = worker.progress((topic, 0), 8)
    assert worker.release(returned, timeout_ms=10_000).status_code == 204
    assert positions(domain, group)[TopicPartition(topic, 0)] == 8
    # The only client gets it again, and releases all when it leaves.
    worker.wait_has(3)
    rest = [worker.progress(each, RECORDS) for each in sorted(worker.has)]
    left = worker.leave(returned=rest, timeout_ms=10_000)
    assert (left.status_code, left.json()) == (200, {"action": "shutdown_now"})
    eventually(lambda: set(domain.owners(group).values()) == {None}, "all is free")
    assert positions(domain, group)[TopicPartition(topic, 1)] == RECORDS
    eventually(lambda: worker.beat().status_code in {404, 410}, "nobody knows it")
    assert worker.beat().json()["error"] == "ClaimLost"


def test_two_clients_of_one_host_share_a_topic(domain, sidecar, client, group):
    topic = domain.data_topic(4, RECORDS)
    one = client(sidecar, topic)
    one.wait_has(4)
    two = client(sidecar, topic)
    one.wait_event("release", 2)
    one.release(*(one.progress(place(event), 5) for event in one.events("release")))
    two.wait_has(2)
    one.wait_has(2)
    assert set(one.has).isdisjoint(two.has)
    assert {event["position"] for event in two.has.values()} == {5}
    # Moved partitions are claimed again: no two claims share a token.
    # Tokens of different keys may be equal: each partition counts its own offsets.
    tokens = {(place(event), event["token"]) for event in one.events("assigned")}
    assert tokens.isdisjoint((key, each["token"]) for key, each in two.has.items())


def test_a_client_that_reconnects_gets_the_events_that_it_missed(
    domain, sidecar, client, group
):
    """It gets no event for unchanged partitions, and none moves."""
    topic = domain.data_topic(2, RECORDS)
    worker = client(sidecar, topic)
    worker.wait_has(2)
    before, epochs_before = worker.frames[-1][0], epochs(worker)
    worker.hang_up()
    # Events of another group are not sent to it.
    other = domain.data_topic(1)
    with_others = PlainClient(sidecar, f"{group}-others", "other")
    with_others.register()
    with_others.subscribe(other)
    claim = f"{worker.base}/claims/{other}/0"
    assert worker.http.put(claim).status_code == 204
    worker.listen(before)
    assigned = worker.wait_event("assigned", 3)
    assert (assigned["topic"], assigned["subscription"]) == (other, "")
    assert len(worker.events("snapshot")) == 1
    assert {p: e for p, e in epochs(worker).items() if p[0] == topic} == epochs_before
    # After an unknown id the events start with a snapshot.
    worker.hang_up()
    worker.listen("0" * 8 + ".7.0.0")
    assert len(worker.wait_event("snapshot", 2)["assigned"]) == 3
    with_others.close()


def test_a_connection_cannot_register_a_second_client(sidecar, client, group):
    worker = client(sidecar)
    other = paths.CLIENT.format(group=group, client="other")
    body = {"instance": "ab" * 16, "beat_ms": 100}
    refused = worker.http.put(other, json=body)
    assert (refused.status_code, refused.json()["error"]) == (409, "IdentityConflict")
    assert worker.beat().status_code == 200


def test_grants_are_disjoint_and_require_the_secret_of_the_claim(
    domain, sidecar, client, group
):
    topic = domain.data_topic(1, RECORDS)
    worker = client(sidecar, topic, delivery="amo")
    worker.wait_has(1)
    (event,) = worker.has.values()
    ask = {
        **{name: event[name] for name in ("client_id", "incarnation", "epoch")},
        "secret": event["secret"],
        "topic": topic,
        "partition": 0,
        "first": 0,
        "last": 3,
        "grantee": "cd" * 16,
        "timeout_ms": 10_000,
    }
    grants = paths.GRANTS.format(group=group)
    granted = worker.http.post(grants, json=ask).json()
    assert (granted["outcome"], granted["first"], granted["last"]) == ("accepted", 0, 3)
    # The same offsets are not granted again to another grantee.
    again = worker.http.post(grants, json={**ask, "grantee": "ef" * 16}).json()
    assert again["first"] is None or again["first"] > 3
    stranger = worker.http.post(grants, json={**ask, "last": 9, "secret": "00" * 16})
    assert (stranger.status_code, stranger.json()["reason"]) == (403, "wrong_secret")
    beyond = worker.http.post(grants, json={**ask, "last": 100_000})
    assert (beyond.status_code, beyond.json()["setting"]) == (400, "last")
    stale = worker.http.post(grants, json={**ask, "epoch": event["epoch"] + 1_000})
    assert stale.json().get("outcome") != "accepted"


def test_views_state_the_time_and_offsets_of_their_state(
    domain, sidecar, client, group
):
    topic = domain.data_topic(2, RECORDS)
    worker = client(sidecar, topic)
    worker.wait_has(2)
    for view in (paths.WORLD, paths.GROUPS, paths.GROUP.format(group=group)):
        found = sidecar.get(view).json()
        assert set(found["as_of"]["offsets"]) == {"0", "1"}
        assert found["as_of"]["time_ms"] > 0
    owners = sidecar.get(paths.OWNERS.format(group=group, topic=topic)).json()
    assert owners["owners"] == {"0": "host-1", "1": "host-1"}
    fence = paths.FENCE.format(group=group, topic=topic, partition=1)
    assert sidecar.get(fence).json()["token"] == worker.has[topic, 1]["token"]
    (line,) = [
        each
        for each in sidecar.get(paths.CLIENTS).json()["clients"]
        if each["group"] == group
    ]
    assert line["assigned"] == [f"{topic}-0", f"{topic}-1"]
    figures = sidecar.get(paths.METRICS).text
    assert f'marshal_sidecar_clients{{group="{group}",state="ready"}} 1.0' in figures


def test_sidecar_command_and_library_show_the_same_claims(
    domain, sidecar, client, group, tmp_path
):
    topic = domain.data_topic(2, RECORDS)
    client(sidecar, topic).wait_has(2)

    def rows(claims):
        names = ("topic", "partition", "owner", "epoch", "token", "position", "granted")
        found = [row for row in claims if row["group_id"] == group]
        return sorted([row[name] for name in names] for row in found)

    def everywhere():
        views = (sidecar.get(paths.WORLD).json(), domain.world().to_object())
        yield from (
            rows(row for each in view["partitions"].values() for row in each["claims"])
            for view in views
        )
        yield rows(sidecar.get(paths.GROUP.format(group=group)).json()["claims"])
        yield rows(Cli(domain, tmp_path).json("claims", "list")["claims"])

    def agree():
        one, *others = everywhere()
        return len(one) == 2 and others == [one] * 3

    eventually(agree, "all show the same claims")


def test_the_sidecar_commands_show_status_clients_and_errors(
    domain, sidecar, client, tmp_path
):
    cli = Cli(domain, tmp_path)
    where = ("--socket", str(sidecar.path))
    found = cli.json("sidecar", "status", "--check", "ready", *where)
    assert (found["state"], found["client_id"]) == ("RUNNING", "host-1")
    assert [row["ok"] for row in found["checks"]] == [True] * 3
    client(sidecar)
    assert "worker-" in cli.run("sidecar", "clients", *where).stdout
    taken = cli.run("sidecar", "run", *where, code=ExitCode.USAGE)
    assert "in use by a living sidecar" in taken.stderr
    away = ("-b", "127.0.0.1:1", "--open-timeout", "1s", "--socket")
    lost = cli.run(
        *("sidecar", "run", *away, str(tmp_path / "own" / "s")), code=ExitCode.TIMEOUT
    )
    (line,) = [x for x in lost.stderr.splitlines() if x.startswith("marshal: ")]
    assert "127.0.0.1:1" in line


def test_a_crash_moves_no_claim_and_a_shutdown_releases_all(domain, client, group):
    """Subleases outlive the process; a drain releases all claims."""
    topic = domain.data_topic(3, RECORDS)
    env = {"MARSHAL_SIDECAR_LOG_FORMAT": "json"}
    with start_sidecar(domain, client_id="host-2", env=env) as sidecar:
        worker = client(sidecar, topic)
        worker.wait_has(3)
        progress = [worker.progress(each, 4) for each in worker.has]
        worker.beat(*progress, flush=True, timeout_ms=10_000)
        before = set(worker.has)
        owned = domain.states(group)
        sidecar.kill()
        worker.hang_up()
        sidecar.start()
        registered = worker.register().json()
        assert registered["was_known"]
        worker.listen(worker.frames[-1][0])
        worker.wait_event("snapshot", 2)
        assert set(worker.has) == before
        # The same claims are resumed: there was no other owner in between.
        for key, state in domain.states(group).items():
            assert state.owner.client_id == owned[key].owner.client_id == "host-2"
            assert state.position == 4
        # On a request to end, every key is drained and no client may register.
        sidecar.signal(signal.SIGTERM)
        eventually(lambda: len(worker.events("release")) == 3, "all are to go")
        assert {event["reason"] for event in worker.events("release")} == {"shutdown"}
        late = PlainClient(sidecar, group, "late").register()
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert not sidecar.get(paths.READYZ).is_success
        returned = [worker.progress(each, RECORDS) for each in before]
        assert worker.release(*returned).status_code == 204
        assert sidecar.process.wait(60) == 0
        assert set(domain.owners(group).values()) == {None}
        assert set(positions(domain, group).values()) == {RECORDS}
        lines = [json.loads(line) for line in sidecar.log.splitlines()]
        assert lines[-1]["event"].startswith("sidecar state NOT_RUNNING")
        assert not sidecar.path.exists()


def test_a_group_is_reset_and_its_reset_undone_by_http_requests(domain, client, group):
    topic = domain.data_topic(2, RECORDS)
    base = f"/v1/groups/{group}"
    with start_sidecar(
        domain, client_id="host-4", arguments=["--allow-admin"]
    ) as sidecar:
        worker = client(sidecar, topic)
        worker.wait_has(2)
        progress = [worker.progress(each, 7) for each in worker.has]
        worker.beat(*progress, flush=True, timeout_ms=10_000)

        def release_all():
            """Release the partitions that the pause recalls, each claim once."""
            for event in worker.events("release"):
                had = worker.has.get(place(event))
                # Behind the commit, a later claim of it may have been assigned.
                if had is not None and had["epoch"] == event["epoch"]:
                    worker.release(worker.progress(place(event), 7))

        def act(name, **body):
            """Send a request while the client releases its partitions."""
            with ThreadPoolExecutor(1) as pool, sidecar.http() as http:
                sent = pool.submit(
                    http.post, f"{base}/{name}", json=body, timeout=ANSWER_S
                )
                eventually(lambda: (release_all(), sent.done())[1], "it answers")
                response = sent.result()
            assert response.status_code == 200, response.text
            return response.json()

        rule = {"topics": [topic], "to_offset": 2, "person": "ann"}
        plan = act("reset", **rule)
        assert (plan["is_executed"], plan["undo_id"]) == (False, None)
        assert set(positions(domain, group).values()) == {7}

        done = act("reset", **rule, execute=True, reason="bad deploy")
        assert done["outcome"] == "committed"
        assert {(row["before"], row["after"]) for row in done["rows"]} == {(7, 2)}
        worker.wait_has(2)
        assert {event["position"] for event in worker.has.values()} == {2}
        assert not list((sidecar.state_dir / "plans").iterdir())

        undone = act("undo", op_id=done["undo_id"], execute=True)
        assert (undone["outcome"], undone["undoes"]) == ("committed", done["op_id"])
        assert set(positions(domain, group).values()) == {7}
        assert act("finish")["operations"] == []

        history = sidecar.get(f"{base}/history").raise_for_status().json()
        by_kind = {each["kind"]: each for each in history["actions"]}
        reset, undo = by_kind["reset"], by_kind["undo"]
        assert (reset["person"], reset["reason"]) == ("ann", "bad deploy")
        assert (reset["client_id"], undo["undoes"]) == ("host-4", done["op_id"])
        assert (reset["op_id"], undo["op_id"]) == (done["op_id"], undone["op_id"])
        assert sidecar.stop() == 0, sidecar.log


# --- requests that fit the description

DESCRIPTION = routes.openapi_document()


def fitting(schema, name=""):
    """Values that fit a schema of the description; waits are kept short."""
    match schema:
        case {"$ref": ref}:
            return fitting(DESCRIPTION["components"]["schemas"][ref.split("/")[-1]])
        case {"anyOf": choices}:
            return st.one_of([fitting(each, name) for each in choices])
        case {"enum": values}:
            return st.sampled_from(values)
        case {"type": "object", "properties": fields}:
            needed = {
                field: fitting(each, field)
                for field, each in fields.items()
                if field in schema["required"]
            }
            others = {
                field: fitting(each, field)
                for field, each in fields.items()
                if field not in needed
            }
            return st.fixed_dictionaries(needed, optional=others)
        case {"type": "array"}:
            return st.lists(fitting(schema["items"], name), max_size=3)
        case {"type": "integer"}:
            lowest, highest = schema.get("minimum", 0), schema.get("maximum", 2**63)
            if name == "timeout_ms":
                highest = 50
            few = st.integers(lowest, min(highest, lowest + 20))
            return few | st.integers(lowest, highest)
        case {"type": "string", "pattern": pattern, "maxLength": longest}:
            some = st.from_regex(pattern.replace("(?!\\n)", ""), fullmatch=True)
            return st.sampled_from(["orders", "a"]) if longest > 99 else some
        case {"type": "string"}:
            return st.text(max_size=8)
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "null"}:
            return st.none()
    raise AssertionError(schema)


@st.composite
def requests(draw):
    """A request that the description allows, of a client that may be registered."""
    route = draw(st.sampled_from([x for x in ROUTES if x.name not in NOT_FUZZED]))
    parts = {
        "group": "fuzzed",
        "client": draw(st.sampled_from(["known", "other"])),
        "name": draw(st.sampled_from(["1", "2"])),
        "topic": draw(st.sampled_from(["orders", "nowhere"])),
        "partition": draw(st.integers(0, 5)),
    }
    body = None
    if route.takes is not None:
        body = draw(fitting({"$ref": f"#/components/schemas/{route.takes.__name__}"}))
    return route.method, route.path.format(**parts), body


# Streams have tests of their own; pids of foreign processes must not be watched.
NOT_FUZZED = {"events", "children"}


# Threads of kafka-python draw their pauses from ``random`` while a strategy runs.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
def test_no_request_that_fits_the_description_causes_a_fault(domain):
    """Each request with valid types is answered by success or a documented failure."""
    instance = "ab" * 16
    headers = {api.INSTANCE_HEADER: instance}
    known = paths.CLIENT.format(group="fuzzed", client="known")

    admin = ("--allow-admin",)
    served = set()
    with start_sidecar(domain, client_id="host-3", arguments=admin) as fuzzed:

        @given(request=requests())
        @settings(
            max_examples=300,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        def ask(request):
            method, path, body = request
            with fuzzed.http(headers=headers) as http:
                http.put(known, json={"instance": instance, "beat_ms": 100})
            with fuzzed.http(headers=headers) as http:
                response = http.request(method, path, json=body)
            assert response.status_code in {*range(200, 205), *range(400, 500), *GOOD}
            if response.is_success:
                served.add(path.rpartition("/")[2])
            if not response.is_success:
                msgspec.json.decode(response.content, type=api.Failure)

        ask()
        # Actions on groups are served, not only refused.
        assert served & {"pause", "resume", "reset", "finish", "history"}, served
        assert fuzzed.get(paths.LIVEZ).is_success
        assert "a request to the sidecar failed" not in fuzzed.log
        assert fuzzed.stop() == 0, fuzzed.log


# Kafka does not know the topic; retry later; deadline exceeded.
GOOD = {502, 503, 504}


# --- docs/SIDECAR.md

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "SIDECAR.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCK = r"^<!-- {}: (\w+) -->\n```{}\n(.*?)^```$"
SHELL, PYTHON = (
    dict(re.findall(BLOCK.format(*kind), text, re.MULTILINE | re.DOTALL))
    for text, *kind in ((DOCUMENT, "shell", "sh"), (README, "run", "python"))
)


@pytest.fixture(scope="module")
def documented(domain):
    """The daemon as the document starts it, and the topic that it names."""
    topic = domain.data_topic(2, 2 * RECORDS)
    folder = Path(tempfile.mkdtemp(prefix="sidecar-"))

    def text(code):
        return code.replace("localhost:9092", domain.servers).replace("payments", topic)

    def shell(code, **options):
        env = {
            "MARSHAL_COORDINATION_TOPIC": domain.topic,
            "MARSHAL_STATE_DIR": str(folder / "state"),
            "PATH": f"{MARSHAL.parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(folder / "config"),
        }
        command = ["bash", "-euo", "pipefail", "-c", text(code)]
        return subprocess.Popen(
            command, cwd=folder, env=os.environ | env, text=True, **options
        )

    def start(code):
        socket = str(folder / "own" / "sidecar.sock")
        clean = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
        code = f"{clean}\nexport MARSHAL_SIDECAR_SOCKET={socket}\n{code}"
        process = shell(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, (out, err)
        return out

    *before, last = SHELL["sidecar_run"].splitlines()
    with (folder / "log").open("w") as log:
        daemon = shell("\n".join([*before, f"exec {last}"]), stdout=log, stderr=log)
    try:
        path = folder / "own" / "sidecar.sock"
        eventually(path.exists, "its socket is there", START_MS)
        probe = "until marshal sidecar status --check ready; do sleep 0.1; done"
        start(probe)
        yield SimpleNamespace(start=start, text=text, path=path, folder=folder)
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0
        shutil.rmtree(folder)


def test_the_documented_commands_work(documented, domain):
    output = documented.start(SHELL["sidecar_status"])
    assert "RUNNING" in output
    description = json.loads((documented.folder / "sidecar.json").read_text())
    assert description["openapi"] == "3.1.0"
    names = ("register", "subscribe", "beat", "look", "leave")
    output = documented.start("\n".join(SHELL[f"sidecar_{name}"] for name in names))
    answers = [json.loads(x) for x in output.splitlines() if x.startswith("{")]
    assert answers[0]["client_id"] == "host-1"
    assert answers[1]["was_known"] is False
    assert len(answers[2]["topics"]) == 1
    assert "event: snapshot" in output
    assert any(answer.get("deadlines") for answer in answers)
    as_of = [answer for answer in answers if "as_of" in answer]
    assert len(as_of) == 6
    (planned,) = [answer for answer in as_of if "generation" in answer]
    assert (planned["group_id"], planned["policy"]) == ("billing", "fair")
    (client,) = as_of[-1]["clients"]
    assert (client["client"], len(client["assigned"])) == ("shell-1", 2)
    assert 'marshal_sidecar_state{state="RUNNING"} 1.0' in output
    assert answers[-1] == {"action": "shutdown_now"}
    place = TopicPartition(*next(iter(domain.of(documented.text("payments")))))
    assert positions(domain, "billing")[place] == 5
    # The answer may come before the last release, if the time-out has passed.
    eventually(lambda: set(domain.owners("billing").values()) == {None}, "all is free")
    used = {f"sidecar_{name}" for name in (*names, "run", "status")}
    assert set(SHELL) == used


def test_the_documented_program_works(documented, domain):
    handled = []

    def handle(record, *, token):
        handled.append((record.partition, record.offset))
        assert str(token)
        if len(handled) == RECORDS:
            scope["consumer"].stop()  # type: ignore[attr-defined]

    name = "sidecar_python"
    code = documented.text(PYTHON[name]).replace(
        "/run/kafka-marshal/sidecar.sock", str(documented.path)
    )
    scope = {"handle": handle}
    exec(compile(code.replace("billing", "python"), name, "exec"), scope)
    assert len(set(handled)) == RECORDS
    # A claim without records may be released before its position is known.
    known = [each for each in positions(domain, "python").values() if each is not None]
    assert sum(known) >= RECORDS


def test_the_published_api_level_is_that_of_the_library(sidecar):
    """The daemon and the client are of the same release."""
    found = sidecar.get(paths.OPENAPI).json()
    assert found["openapi"] == "3.1.0"
    assert sidecar.get(paths.INFO).json()["level"] == api.API_LEVEL
