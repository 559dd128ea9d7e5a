"""A process that writes to a sink, and is stopped in the middle of a write.

Run as ``python zombie_program.py SETTINGS``, settings being one JSON object; see
``integration/spark/test_sinks_zombies.py``. It takes one batch after the other and
writes it by one of the library's sinks. With ``stops`` it reports the middle of its
first write, and resumes when a line arrives on its standard input.
"""

import json
import sys
from types import SimpleNamespace

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from kafka_marshal import ClaimLost, Marshal, MarshalError
from kafka_marshal.kafka_io.settings import ConnectionConfig
from kafka_marshal.protocol.types import TopicPartition
from kafka_marshal.spark.fencing import Fence
from kafka_marshal.spark.sinks_files import DATA, FileSink, Link
from kafka_marshal.spark.sinks_kafka import KafkaSink
from kafka_marshal.spark.sinks_table import TableSink, write_rows


def report(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Program:
    """One process with one sink."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.must_stop = settings["stops"]
        connection = {
            "bootstrap_servers": settings["servers"],
            "coordination_topic": settings["coordination_topic"],
        }
        self.fence = Fence(settings["group"], connection)
        self.write = getattr(self, f"write_{settings['sink']}")

    def run(self) -> None:
        s = self.settings
        with (
            Marshal(
                s["servers"],
                group_id=s["group"],
                client_id=s["client_id"],
                coordination_topic=s["coordination_topic"],
                state_dir="",
            ) as marshal,
            marshal.consumer(s["topic"], max_poll_records=s["batch"]) as consumer,
        ):
            for batch in consumer.batches():
                rows = [
                    SimpleNamespace(offset=r.offset, key=r.key, value=r.value)
                    for r in batch.records
                ]
                place = TopicPartition(*batch.partition)
                self.hand(consumer, batch, place=place, rows=rows)
                if rows[-1].offset + 1 == s["end"]:
                    return

    def hand(self, consumer, batch, *, place, rows) -> None:
        token = str(batch.token)
        try:
            written = self.write(place, token, rows)
        except (MarshalError, psycopg.Error) as error:
            report(event="refused", error=type(error).__name__, says=str(error))
            sys.exit(0)
        report(event="written", count=written, first=rows[0].offset)
        try:
            consumer.commit(batch.records)
        except ClaimLost:
            report(event="lost")
            sys.exit(0)

    def stop_here(self) -> None:
        """Report this point; continue when a line arrives on standard input."""
        if self.must_stop:
            self.must_stop = False
            report(event="in_hand")
            sys.stdin.readline()

    def rows_with_a_stop(self, rows):
        for number, row in enumerate(rows):
            if number == len(rows) // 2 and self.settings["where"] == "midst":
                self.stop_here()
            yield row

    # --- sinks

    def write_table(self, place, token, rows) -> int:
        dsn = self.settings["dsn"]

        def insert(cursor, some) -> None:
            cursor.executemany(
                "INSERT INTO zombies VALUES (%s, %s)",
                [(row.offset, row.value) for row in some],
            )

        sink = TableSink(
            lambda: psycopg.connect(dsn),
            insert,
            self.settings["group"],
            rows_at_once=5,
            # Less than two intervals, so that no owner waits for it; enough on a busy
            # machine.
            idle_ms_max=3_000,
        )
        if self.settings["where"] == "before":
            self.stop_here()
        with psycopg.connect(dsn) as connection:
            return write_rows(
                sink,
                connection.cursor(),
                place=(sink.group, *place),
                token=token,
                rows=self.rows_with_a_stop(rows),
            )

    def write_files(self, place, token, rows) -> int:
        from pathlib import Path

        sink = FileSink(Path(self.settings["path"]), self.fence)
        first, end = rows[0].offset, rows[-1].offset + 1
        folder = f"{DATA}/{self.settings['client_id']}-{first}"
        (sink.path / folder).mkdir(parents=True)
        table = pa.table({"offset": [row.offset for row in rows]})
        pq.write_table(table, sink.path / folder / "rows.parquet")
        self.stop_here()
        link = Link(first=first, end=end, token=token, folder=folder)
        return end - sink.publish(None, place, link=link, batch_id=0)

    def write_kafka(self, place, token, rows) -> int:
        s = self.settings
        settings = ConnectionConfig(
            s["servers"], coordination_topic=s["coordination_topic"]
        )
        sink = KafkaSink(
            topic=s["out"],
            fence=self.fence,
            settings=settings,
            name=f"{s['group']}.{s['out']}",
        )
        if s["where"] == "before":
            self.stop_here()
        return sink.write(place, token=token, rows=self.rows_with_a_stop(rows))


if __name__ == "__main__":
    Program(json.loads(sys.argv[1])).run()
