"""Compare tokens in a service whose clients send topic, partition and token.

Compare the token only *after* authentication, and only if this client may write for
the group: a client that can store a token excludes all clients with smaller ones. The
token is stored in the transaction that does the work, so a request that fails stores
nothing. To drop repeated requests as well, store the position too, as in ``table.py``.
"""

import sqlite3
from http import HTTPStatus

from kafka_marshal import Token

db = sqlite3.connect(":memory:")
db.execute("CREATE TABLE fences (source TEXT PRIMARY KEY, token BLOB)")
db.execute("CREATE TABLE bills (source TEXT, body TEXT)")


def handle(user: str | None, source: str, *, header: str, body: str) -> HTTPStatus:
    """Answer a request; ``user`` is None if authentication failed."""
    if user != "billing":
        return HTTPStatus.FORBIDDEN
    try:
        token = Token.parse(header)
    except ValueError:
        return HTTPStatus.BAD_REQUEST
    with db:  # one transaction
        stored = db.execute(
            "INSERT INTO fences VALUES (?, ?) ON CONFLICT DO UPDATE"
            " SET token = excluded.token WHERE fences.token <= excluded.token",
            (source, bytes(token)),
        )
        if stored.rowcount == 0:
            return HTTPStatus.PRECONDITION_FAILED
        db.execute("INSERT INTO bills VALUES (?, ?)", (source, body))
    return HTTPStatus.NO_CONTENT
