"""Consume at least once into SQLite: no record is lost, and none is stored twice.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/at_least_once.py payments billing worker-1 payments.db

Start it several times with different client ids: each process takes its share of the
partitions, and takes over partitions of a process that dies.

With at least once, a record may be handed out again after a crash, and a process that
was suspended until its lease ended may still write when it continues. Both are harmless
here: one transaction stores the result *and* the position, on the condition that the
fencing token is not older than the stored one.
"""

import argparse
import os
import sqlite3

from kafka_marshal import ClaimLost, Delivery, Marshal, Record


def open_database(path: str) -> sqlite3.Connection:
    """Return a database with the tables ``results`` and ``progress``."""
    database = sqlite3.connect(path, timeout=10)
    database.executescript(
        """
        PRAGMA journal_mode = WAL;
        CREATE TABLE IF NOT EXISTS progress (
            topic TEXT, part INT, token BLOB, position INT, PRIMARY KEY (topic, part));
        CREATE TABLE IF NOT EXISTS results (
            topic TEXT, part INT, position INT, value BLOB);
        """
    )
    return database


def store(database: sqlite3.Connection, record: Record) -> bool:
    """Store one record; return False if it is stored, or the token is too old."""
    place = (record.topic, record.partition)
    with database:  # one transaction
        moved = database.execute(
            "INSERT INTO progress VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET token = excluded.token, position = excluded.position"
            " WHERE progress.token <= excluded.token"
            " AND progress.position < excluded.position",
            # Tokens as bytes have the same order as tokens.
            (*place, bytes(record.token or b""), record.offset + 1),
        )
        if moved.rowcount == 0:
            return False
        database.execute(
            "INSERT INTO results VALUES (?, ?, ?, ?)",
            (*place, record.offset, record.value),
        )
    return True


def main() -> None:
    """Consume until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("topic", "group", "client_id", "database"):
        parser.add_argument(name)
    given = parser.parse_args()
    database = open_database(given.database)
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    with (
        Marshal(server, group_id=given.group, client_id=given.client_id) as marshal,
        marshal.consumer(given.topic, delivery=Delivery.AT_LEAST_ONCE) as consumer,
    ):
        marshal.stop_on_signals()
        for record in consumer:
            is_new = store(database, record)
            word = "stored" if is_new else "skipped"
            print(f"{word} {record.topic}-{record.partition} offset {record.offset}")
            try:
                consumer.commit(record)
            except ClaimLost as lost:
                # Another process continues, and skips what is stored already.
                print(f"lost {record.topic}-{record.partition}: {lost}")


if __name__ == "__main__":
    main()
