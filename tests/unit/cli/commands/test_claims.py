"""`marshal claims`, with a world in memory."""

import json
import re
from typing import ClassVar

import pytest
from changekit import Change
from logkit import KEY, Log, beat, release
from opening import Opened
from typer.testing import CliRunner

from kafka_marshal import Key, LogUnreadable, World
from kafka_marshal.admin.state_reset import ForgetPlan
from kafka_marshal_cli.assembly import app
from kafka_marshal_cli.parsing import Moment
from kafka_marshal_cli.shared import Call


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def asked(monkeypatch):
    log = Log(cluster_id="cluster")
    epoch = log.claimed("c1")
    log.append(beat(epoch, 7))
    released = Key("h", "t", 1)
    log.append(release(log.claimed("c2", key=released), 3, client="c2", key=released))
    world = World([log.state], {0: 0}, cluster_id="cluster", read_at_ms=5)
    asked = []

    def read(self, *at, **which):
        asked.append((at, which))
        return world

    monkeypatch.setattr(Call, "world", read)
    monkeypatch.setattr(Call, "admin", lambda _: Cluster())
    monkeypatch.setattr(Call, "log_ends", log_ends)
    return asked


def log_ends(_, wanted):
    return {each: 9 for each in wanted if each.partition == 0}


class Cluster(Opened):
    """An admin of a cluster with the topics of COUNTS."""

    COUNTS: ClassVar = {"t": 2, "u": 6}

    def partition_count(self, topic):
        if topic == "secret":
            raise LogUnreadable("may not be seen")
        return self.COUNTS.get(topic)


def test_list_shows_claims_with_lag_and_filters_them(asked):
    output = invoke("claims", "list").stdout.splitlines()
    assert [" ".join(line.split()) for line in output] == [
        (
            "GROUP TOPIC PARTITION OWNER STATE AGE AGE NOW CURRENT-OFFSET "
            "LOG-END-OFFSET LAG GRANTED TOKEN WHY"
        ),
        "g t 0 c1 fresh 0ms ~0ms 7 9 2 - 1.0.1 -",
        "h t 1 - - - - 3 - - - 1.0.3 - (released by c2)",
    ]
    assert len(invoke("claims", "list", "--group", "g").stdout.splitlines()) == 2
    assert invoke("claims", "list", "--topic", "u").stdout == "no claims\n"


def test_list_as_json_has_log_ends_and_lag(asked):
    claims = json.loads(invoke("claims", "list", "-o", "json").stdout)["claims"]
    found = [(c["position"], c["log_end_offset"], c["lag"]) for c in claims]
    assert found == [(7, 9, 2), (3, None, None)]


def test_who_shows_the_owner_of_a_partition(asked):
    found = json.loads(invoke("claims", "who", *map(str, KEY), "-o", "json").stdout)
    assert found["owner"]["client_id"] == "c1"
    assert (found["token"], found["position"]) == ("1.0.1", 7)
    assert (found["at_offset"], found["coordinating_partition"]) == (4, 0)
    output = invoke("claims", "who", *map(str, KEY)).stdout
    assert "owner:                  c1\n" in output


def test_a_topic_without_claims_is_noted(asked):
    outcome = invoke("claims", "list", "--topic", "misspelt")
    assert (outcome.exit_code, outcome.stdout) == (0, "no claims\n")
    assert "no such claims of topic 'misspelt'" in outcome.stderr
    assert invoke("claims", "list", "--topic", "t").stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        ("claims", "who", "GROUP", "t", "0"),
        ("claims", "list", "--group", "GROUP"),
        ("clients", "list", "--group", "GROUP"),
    ],
)
def test_an_unknown_group_is_noted(asked, words):
    def stderr_for(group):
        outcome = invoke(*(group if word == "GROUP" else word for word in words))
        assert outcome.exit_code == 0
        return outcome.stderr

    assert "no claims of group 'misspelt'" in stderr_for("misspelt")
    assert stderr_for("g") == ""


def test_who_shows_an_unclaimed_partition_without_an_error(asked):
    outcome = invoke("claims", "who", "g", "u", "0")
    assert outcome.exit_code == 0
    assert "none: the partition was not claimed at that time" in outcome.stdout


@pytest.mark.parametrize(
    ("topic", "partition", "expected"),
    [
        pytest.param("u", 6, "has 6 partitions, 0 to 5", id="partition"),
        pytest.param("v", 0, "'v' does not exist", id="topic"),
    ],
)
def test_who_of_a_missing_topic_or_partition_is_refused(
    asked, topic, partition, expected
):
    outcome = invoke("claims", "who", "g", topic, str(partition))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert expected in outcome.stderr


def test_who_works_without_the_right_to_describe_the_topic(asked):
    outcome = invoke("claims", "who", "g", "secret", "0")
    assert outcome.exit_code == 0
    assert "none: the partition" in outcome.stdout


@pytest.mark.parametrize(
    ("at", "moment"),
    [
        ("2", Moment(text="2", offset=2)),
        ("0:2", Moment(text="0:2", offsets={0: 2})),
        (
            "1970-01-01T00:00:01Z",
            Moment(text="1970-01-01T00:00:01.000Z", time_ms=1_000),
        ),
    ],
)
def test_who_reads_the_world_of_a_past_moment(asked, at, moment):
    output = invoke("claims", "who", *map(str, KEY), "--at", at).stdout
    assert output.startswith(f"as of: {moment.text}\n\ngroup id:")
    assert asked == [((moment,), {"key": KEY})]


def test_list_of_a_past_moment_has_no_estimates_and_no_lag(asked, monkeypatch):
    world = Call().world()
    world.is_past = True
    at = "1970-01-01T00:00:01Z"
    output = invoke("claims", "list", "--at", at).stdout.splitlines()
    assert [" ".join(line.split()) for line in output] == [
        "as of: 1970-01-01T00:00:01.000Z",
        "",
        "GROUP TOPIC PARTITION OWNER STATE AGE CURRENT-OFFSET GRANTED TOKEN WHY",
        "g t 0 c1 fresh 0ms 7 - 1.0.1 -",
        "h t 1 - - - 3 - 1.0.3 - (released by c2)",
    ]
    found = json.loads(invoke("claims", "list", "--at", at, "-o", "json").stdout)
    assert found["as_of"]["at"] == "1970-01-01T00:00:01.000Z"
    now = ("age_estimate_ms", "freshness_estimate", "log_end_offset", "lag")
    assert {row[name] for row in found["claims"] for name in now} == {None}


class FakeAdmin(Opened):
    def __init__(self):
        self.asked = []
        self.held = (Key("g", "t", 0),)

    def forget_keys(self, group_id, **asked):
        self.asked.append((group_id, asked))
        return ForgetPlan(((Key("g", "gone", 1), 7),), self.held, ("t",))


@pytest.fixture
def admin(monkeypatch):
    made = FakeAdmin()
    monkeypatch.setattr(Call, "admin", lambda self: made)
    return made


@pytest.mark.parametrize("is_executed", [False, True])
def test_forget_lists_the_forgotten_keys(admin, is_executed):
    words = ("claims", "forget", "g", "--topic", "gone", "-o", "json")
    outcome = invoke(*words, *(["--execute", "--yes"] if is_executed else []))
    assert outcome.exit_code == 0, outcome.stderr
    asked = {"topic": "gone", "execute": is_executed, "allow_existing": False}
    assert admin.asked[-1] == ("g", asked)
    found = json.loads(outcome.stdout)
    assert (found["held_count"], found["existing_topics"]) == (1, ["t"])
    row = {"group_id": "g", "topic": "gone", "partition": 1, "epoch": 7}
    assert found["forgotten"] == [row]
    assert ("nothing was written" in outcome.stderr) is not is_executed
    assert "kept claims of topics that exist: t" in outcome.stderr


@pytest.mark.parametrize(
    ("force", "effect"),
    [
        pytest.param(False, "1 of its claims have live owners", id="live owners"),
        pytest.param(True, r"topics of group g exist \(t\)", id="a live topic"),
    ],
)
def test_forget_with_live_owners_or_topics_needs_confirmation(admin, force, effect):
    words = ["claims", "forget", "g", "--execute"]
    if force:
        admin.held = ()
        words.append("--force")
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert re.search(effect, refused.stderr)
    assert "Add --yes" in refused.stderr
    assert not any(asked.get("execute") for _, asked in admin.asked)
    done = invoke(*words, "--yes")
    assert done.exit_code == 0, done.stderr
    assert admin.asked[-1][1]["execute"]


def test_forget_without_live_owners_needs_no_confirmation(admin):
    admin.held = ()
    assert invoke("claims", "forget", "g", "--execute").exit_code == 0


def test_who_shows_the_move_of_a_key(monkeypatch):
    change = Change(2, 4, cluster_id="cluster")
    (key,) = change.moving()
    change.claimed(key)
    change.fence()
    world = World(change.states, {}, cluster_id="cluster", read_at_ms=5)
    monkeypatch.setattr(Call, "world", lambda *_, **__: world)
    source, target = (change.place(key, n).state.partition for n in (2, 4))
    found = json.loads(invoke("claims", "who", *map(str, key), "-o", "json").stdout)
    assert found["owner"]["client_id"] == "c1"
    assert found["coordinating_partition"] == source
    assert found["moving"] == {"to": target, "state": "draining"}
    output = invoke("claims", "who", *map(str, key)).stdout
    assert f"draining, to {target}\n" in output
