"""Many queries start at once, make progress and stop, and leave nothing behind."""

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from domain import opened
from slices import slice_of
from sparkkit import LATE, RUN_S, cells, every, keeping
from waiting import eventually

# Longer than a busy machine may keep one of so many processes from its heartbeats.
H_MS = 20_000
WAIT_MS = 300_000
QUERIES, EACH, MORE = slice_of(quick=5, full=8), 20, 5
# Queries of each of two sessions.
SHARED = slice_of(quick=5, full=8)


@pytest.fixture(scope="module")
def domain(broker, unique, via):
    with opened(broker, unique, h_ms=H_MS, via=via) as domain:
        yield domain


@pytest.fixture(scope="module")
def through(domain, via):
    """Options for claims by an engine in each process, or by the sidecar."""
    return {} if via == "direct" else {"sidecar": domain.sidecar_address}


def has_owner(domain, group):
    return set(domain.owners(group).values()) != {None}


def identities(state):
    return list(state.glob("*/g=*/c=*"))


def descendants(folder):
    """Return the processes whose temporary folder this is, with their commands."""
    wanted, found = f"TMPDIR={folder}".encode(), {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(path.name)] = command.decode(errors="replace")[:200]
        except OSError:
            continue
    return found


class Running:
    """The queries of one session, started at once.

    A query whose process did not start in time is started again.
    """

    def __init__(self, writers):
        self.writers = writers
        self.queries = [writer.start() for writer in writers]

    def are(self, condition):
        for at, query in enumerate(self.queries):
            if not query.isActive:
                assert LATE in str(query.exception()), query.exception()
                self.queries[at] = self.writers[at].start()
        return condition()

    def stop(self):
        for query in self.queries:
            query.stop()


def test_queries_of_one_session_read_all_records_and_leave_no_claims(
    kit, domain, through, unique, tmp_path
):
    topics = [domain.data_topic(2, records_each=EACH) for _ in range(QUERIES)]
    groups = [unique("group") for _ in topics]
    state, found = tmp_path / "state", [[] for _ in topics]
    running = Running(
        [
            kit.stream(group, subscribe=topic, **{"stateDir": str(state)} | through)
            .writeStream.foreachBatch(keeping(rows))
            .option("checkpointLocation", kit.checkpoint(group))
            for topic, group, rows in zip(topics, groups, found, strict=True)
        ]
    )

    def have(count):
        wanted = every(count, count)
        return lambda: running.are(lambda: all(cells(r) == wanted for r in found))

    try:
        eventually(have(EACH), "all have read their topics", WAIT_MS)
        for topic in topics:
            domain.produce(topic, MORE)
        eventually(have(EACH + MORE), "all have read what came later", WAIT_MS)
    finally:
        running.stop()
    for group in groups:
        eventually(lambda g=group: not has_owner(domain, g), "its claims end", WAIT_MS)
    eventually(lambda: not identities(state), "its identity is removed", WAIT_MS)


# Runs queries until a file appears, and prints what each reads. As an operator would,
# it starts those again that lost a partition to the other session within a batch.
PROGRAM = """
import json, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from kafka_marshal.spark import register

queries, home, end = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.memory", "500m").config("spark.local.dir", f"{home}/local")
    .config("spark.sql.warehouse.dir", f"{home}/warehouse").getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
register(spark)

def started(number):
    def write(rows, _):
        lines = [json.dumps([number, r.partition, r.offset]) for r in rows.collect()]
        print("".join(line + "\\n" for line in lines), end="", flush=True)
    frame = spark.readStream.format("marshal").options(**queries[number]).load()
    writer = frame.writeStream.foreachBatch(write)
    return writer.option("checkpointLocation", f"{home}/{number}").start()

running = [started(number) for number in range(len(queries))]
while not end.exists():
    for number, query in enumerate(running):
        if not query.isActive:
            why = str(query.exception())
            if "failed to connect back" not in why and "ClaimLost" not in why:
                raise query.exception()
            running[number] = started(number)
    time.sleep(0.2)
for query in running:
    query.stop()
spark.stop()
"""


class Session:
    """A session in a process of its own, with temporary files of its own.

    Attributes:
        rows: Partition and offset of what each query read, by its number.
        home: Its folder.
        temporary: Its temporary files.
    """

    def __init__(self, home, python, queries):
        self.rows = defaultdict(list)
        self.home, self.temporary, self.end = home, home / "tmp", home / "end"
        self.temporary.mkdir(parents=True)
        env = {"TMPDIR": str(self.temporary), "PYSPARK_PYTHON": python}
        arguments = (json.dumps(queries), str(home), str(self.end))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env=os.environ | env | {"PYSPARK_DRIVER_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            number, *place = json.loads(line)
            self.rows[number].append(tuple(place))

    def stop(self):
        """End it in order; return its exit code."""
        self.end.touch()
        code = self.process.wait(timeout=RUN_S)
        self._reader.join(timeout=RUN_S)
        self.process.stdout.close()
        return code


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc here")
def test_two_sessions_share_topics_and_leave_no_processes_or_files(
    domain, through, unique, python, tmp_path
):
    """Each has a query of every group: they share the topics."""
    topics = [domain.data_topic(2, records_each=EACH) for _ in range(SHARED)]
    queries = [
        {
            "kafka.bootstrap.servers": domain.servers,
            "coordinationTopic": domain.topic,
            "subscribe": topic,
            "group": unique("group"),
            "startingOffsets": "earliest",
            "stateDir": str(tmp_path / "state"),
        }
        | through
        for topic in topics
    ]
    groups = [query["group"] for query in queries]
    both = [Session(tmp_path / name, python, queries) for name in ("one", "two")]

    def are_shared():
        assert all(each.process.poll() is None for each in both)
        return all(len(set(domain.owners(g).values())) == 2 for g in groups)

    def have_read(count):
        assert all(each.process.poll() is None for each in both)
        found = [{*both[0].rows[n], *both[1].rows[n]} for n in range(SHARED)]
        return all(sorted(rows) == every(count, count) for rows in found)

    try:
        eventually(are_shared, "each session has a partition of each topic", WAIT_MS)
        for topic in topics:
            domain.produce(topic, MORE)
        eventually(lambda: have_read(EACH + MORE), "all is read", WAIT_MS)
        codes = [each.stop() for each in both]
    finally:
        for each in both:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait(timeout=RUN_S)
    assert codes == [0, 0]
    for group in groups:
        eventually(lambda g=group: not has_owner(domain, g), "its claims end", WAIT_MS)
    state = tmp_path / "state"
    eventually(lambda: not identities(state), "its identity is removed", WAIT_MS)
    for each in both:
        folder = each.temporary
        eventually(lambda f=folder: not descendants(f), "its processes end", WAIT_MS)
        left = [path for path in folder.rglob("*") if not path.is_dir()]
        assert left == []
