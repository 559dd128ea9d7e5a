"""A query whose claims are held by the sidecar of its host, and whose tasks use it.

The heartbeat interval is a minute: partitions move because the sidecar notices a death,
not because a lease ended.
"""

import json
import socket
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from domain import opened
from sidecars import start_sidecar
from sparkkit import RUN_S, Far, cells, every, failing
from waiting import WAIT_MS
from waiting import eventually as soon

from kafka_marshal import ClaimLost, Delivery, Marshal
from kafka_marshal.config import ConsumerConfig
from kafka_marshal.spark.claims import Claims, Limit, Rules

H_MS = 60_000
# A session of its own takes long to start on a busy machine.
START_MS = 150_000
PARTITIONS, EACH = 4, 30
KINDS = ("alo", "amo")


@pytest.fixture(scope="module")
def domain(broker, unique):
    with opened(broker, unique, h_ms=H_MS) as domain:
        yield domain


@pytest.fixture(scope="module")
def sidecar(domain):
    with start_sidecar(domain, client_id="host-a") as found:
        yield found


# Two queries of two groups in one process. Each prints its rows; while the file `hold`
# exists, a batch does not end.
PROGRAM = """
import json, sys, threading
from functools import partial
from pathlib import Path
from pyspark.sql import SparkSession
from kafka_marshal.spark import register

queries, checkpoint, hold = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.memory", "500m").getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
register(spark)

def write(rows, batch_id, kind):
    lines = [[kind, r.partition, r.offset] for r in rows.collect()]
    print("".join(json.dumps(line) + "\\n" for line in lines), end="", flush=True)
    if lines and hold.exists():
        # At once, with its end: the other query writes beside it.
        print(json.dumps([kind, "held"]) + "\\n", end="", flush=True)
        threading.Event().wait(600)

for kind, options in queries.items():
    frame = spark.readStream.format("marshal").options(**options).load()
    writer = frame.writeStream.foreachBatch(partial(write, kind=kind))
    writer.option("checkpointLocation", f"{checkpoint}/{kind}").start()
spark.streams.awaitAnyTermination()
"""


class FarQueries(Far):
    """Both queries, in a process that can be killed.

    Attributes:
        rows: How often each row reached a query, by delivery.
        held: The deliveries whose batch does not end.
    """

    def __init__(self, queries, checkpoint: str, hold: Path) -> None:
        self.rows = {kind: Counter() for kind in KINDS}
        self.held = set()
        arguments = (json.dumps(queries), checkpoint, str(hold))
        super().__init__(PROGRAM, *arguments, on_line=self._take)

    def _take(self, line):
        kind, *place = json.loads(line)
        if place == ["held"]:
            self.held.add(kind)
        else:
            self.rows[kind][tuple(place)] += 1


class Plain(threading.Thread):
    """A plain consumer of one group, without a sidecar, until it is stopped."""

    def __init__(self, domain, group, topic, *, kind):
        super().__init__(daemon=True)
        self.rows = Counter()
        self._of = (domain, group, topic, Delivery(kind))
        self._end = threading.Event()
        self.start()

    def run(self):
        domain, group, topic, delivery = self._of
        with domain.marshal(group, "plain") as marshal:
            consumer = marshal.consumer(
                topic, delivery=delivery, on_lost=lambda *_: None
            )
            while not self._end.is_set():
                for place, records in consumer.poll(100, 10).items():
                    self.rows.update((place.partition, r.offset) for r in records)
                    try:
                        consumer.commit(records)
                    except ClaimLost:
                        continue

    def stop(self):
        self._end.set()
        self.join(timeout=RUN_S)


def owners(domain, group):
    return sorted(str(owner) for owner in domain.owners(group).values())


def judge_log(history, sidecar, groups):
    """Check that the driver's death released claims, and tasks used the sidecar."""

    def of_the_sidecar(effect, group):
        steps = history.of(effect, group_id=group)
        return [step for step in steps if step.client_id == "host-a"]

    for kind, group in groups.items():
        freed = of_the_sidecar("released", group)
        assert {step.record.reason for step in freed} == {"client_died"}, kind
    # Tasks of both deliveries sent their requests to the sidecar.
    granted = of_the_sidecar("granted", groups["amo"])
    assert sidecar.answered("grant") >= len(granted) > 0
    assert sidecar.answered("fence") > 0


def end_all(far, plains):
    if far.process.poll() is None:
        far.kill()
    for plain in plains.values():
        plain.stop()


@pytest.mark.proof
@pytest.mark.slow
def test_consumers_take_over_early_from_a_killed_driver(kit, domain, sidecar, tmp_path):
    """Its sidecar releases its claims; a restart repeats none of its records."""
    topic = domain.data_topic(PARTITIONS, records_each=EACH)
    groups = {kind: domain.unique(kind) for kind in KINDS}
    common = {
        "subscribe": topic,
        "sidecar": sidecar.address,
        "clientId": "driver",
        "startingOffsets": "earliest",
    }
    queries = {
        kind: kit.cluster | common | {"group": groups[kind], "delivery": kind}
        for kind in KINDS
    }
    hold = tmp_path / "hold"
    plains = {k: Plain(domain, groups[k], topic, kind=k) for k in KINDS}
    far = FarQueries(queries, kit.checkpoint("far"), hold)

    def rows(kind):
        return far.rows[kind] + plains[kind].rows

    def await_rows(count):
        wanted = set(every(*[count] * PARTITIONS))
        soon(
            lambda: all(set(rows(kind)) >= wanted for kind in KINDS),
            f"{count} of each partition are processed",
            START_MS,
        )

    try:
        shared = ["host-a", "host-a", "plain", "plain"]
        soon(
            lambda: all(owners(domain, g) == shared for g in groups.values()),
            "the query's sidecar and the plain consumer share",
            START_MS,
        )
        await_rows(EACH)
        hold.touch()
        domain.produce(topic, EACH)
        soon(lambda: far.held == set(KINDS), "both queries are in a batch", START_MS)
        await_rows(2 * EACH)
        unfinished = far.rows["alo"] - Counter(every(*[EACH] * PARTITIONS))
        far.kill()
        # Long before the owner would be stale.
        soon(
            lambda: all(owners(domain, g) == ["plain"] * 4 for g in groups.values()),
            "the plain consumers have it all",
            H_MS // 2,
        )
        domain.produce(topic, EACH)
        await_rows(3 * EACH)
        # The next owner repeated the uncommitted records of the killed query.
        soon(
            lambda: set(unfinished) <= set(plains["alo"].rows),
            "the unfinished batch is done again",
            START_MS,
        )
        assert unfinished
    finally:
        end_all(far, plains)
    assert set(rows("amo").values()) == {1}, "at most once, and nothing was lost"
    judge_log(domain.history(), sidecar, groups)
    domain.produce(topic, 5)
    new = [(p, o) for p in range(PARTITIONS) for o in range(3 * EACH, 3 * EACH + 5)]
    for kind in KINDS:
        options = {**common, "delivery": kind}
        frame = kit.stream(groups[kind], **options)
        found = kit.drained(frame, name=f"far/{kind}")
        assert cells(found) == new, kind


def test_a_restart_repeats_an_unfinished_batch_if_no_owner_came_between(
    kit, domain, sidecar
):
    """The sidecar reports the last claim, which the restart recognizes as its own."""
    topic = domain.data_topic(2, records_each=10)
    group = domain.unique("again")
    options = {"subscribe": topic, "sidecar": sidecar.address, "clientId": "driver"}
    with pytest.raises(Exception, match="the sink is down"):
        kit.ended(kit.stream(group, **options), failing)
    found = kit.drained(kit.stream(group, **options))
    assert cells(found) == every(10, 10)
    assert {row[0] for row in found} == {0}, "the very same batch"


def test_planning_waits_for_events_of_claims_that_the_log_shows(domain, sidecar):
    """The log shows a claim of the sidecar before its event arrives."""
    topic = domain.data_topic(2, records_each=10)
    rules = Rules(
        is_at_most_once=False,
        fails_on_data_loss=True,
        max_delay_ms=0,
        outcome_ms=2 * H_MS,
    )

    def planned(marks):
        """Open a query that plans all records, or reads the planned ranges again."""
        with Marshal(
            domain.servers,
            group_id=group,
            client_id="driver",
            coordination_topic=domain.topic,
            sidecar=sidecar.address,
        ) as marshal:
            data = marshal.engine.context.ports.data
            logs = SimpleNamespace(
                starts=lambda partitions: dict.fromkeys(partitions, 0),
                ends=lambda partitions: {
                    each: found.end
                    for each, found in data.ranges(list(partitions), WAIT_MS).items()
                },
                topic_ids=lambda topics: {
                    topic: found.topic_id.hex()
                    for topic, found in data.describe(list(topics), WAIT_MS).items()
                },
            )
            config = ConsumerConfig(
                topics=(topic,), max_handling_ms=0, release_behind=False
            )
            claims = Claims(ranges=marshal.ranges(config), logs=logs, rules=rules)
            claims.fix_target()
            marks = marks or claims.latest({}, Limit())
            parts = claims.parts({}, marks)
            return marks, [(part.planned.first, part.planned.end) for part in parts]

    for _ in range(5):
        group = domain.unique("told")
        marks, found = planned({})
        assert found == [(0, 10)] * 2
        assert planned(marks) == (marks, found), "the very same batch"


def test_over_tcp_the_token_is_read_by_driver_and_tasks_and_never_shown(
    kit, domain, tmp_path, capfd
):
    """No plan, no line of output and no checkpoint contains it."""
    topic = domain.data_topic(1, records_each=10)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    wrong.write_text("w" * 32)
    options = {"subscribe": topic, "sidecar": f"http://{place}", "delivery": "amo"}

    def drained(file, name):
        frame = kit.stream("tcp", sidecarTokenFile=str(file), **options)
        frame.explain(extended=True)
        return kit.drained(frame, name=f"checkpoint-{name}")

    listen = ("--tcp", place, "--token-file", str(token))
    with start_sidecar(domain, client_id="host-tcp", arguments=listen) as host:
        with pytest.raises(Exception, match="the token is not that of this sidecar"):
            drained(wrong, "wrong")
        with pytest.raises(Exception, match="token cannot be read from"):
            drained(tmp_path / "missing", "missing")
        assert cells(drained(token, "right")) == every(10)
        assert host.answered("grant") > 0
        output = "".join(capfd.readouterr()) + host.log
    secret = token.read_text().strip()
    assert len(secret) >= 32
    assert secret not in output
    for path in Path(kit.checkpoint("checkpoint-right")).rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()
