"""Store each result once, in SQLite or any other database, with a fencing token.

Token and position are stored with the result, in one transaction. A smaller token
comes from an earlier owner. A position that is not larger comes from a record that was
stored before. ``bytes(token)`` orders like the token.
"""

import sqlite3

from kafka_marshal import Token

db = sqlite3.connect(":memory:")
db.execute(
    "CREATE TABLE progress (topic TEXT, part INT, token BLOB, position INT,"
    " PRIMARY KEY (topic, part))"
)
db.execute("CREATE TABLE results (topic TEXT, part INT, position INT, value BLOB)")


def store(
    topic: str, partition: int, *, offset: int, value: bytes, token: Token
) -> bool:
    """Store one result; return False if it is stored, or the token is too old."""
    with db:  # one transaction
        moved = db.execute(
            "INSERT INTO progress VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE"
            " SET token = excluded.token, position = excluded.position"
            " WHERE progress.token <= excluded.token"
            " AND progress.position < excluded.position",
            (topic, partition, bytes(token), offset + 1),
        )
        if moved.rowcount == 0:
            return False
        row = (topic, partition, offset, value)
        db.execute("INSERT INTO results VALUES (?, ?, ?, ?)", row)
        return True
