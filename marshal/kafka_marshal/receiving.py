"""What a service checks of requests that write for the holder of a claim.

A sink that writes by HTTP sends with each request where its rows come from and under
which claim they were read: ``Marshal-Source`` (group/topic/partition),
``Marshal-Offsets`` (first-last, inclusive) and ``Marshal-Fencing-Token``. The service
keeps the largest token and the next offset of each source, changed with what it writes,
and so refuses whoever slept through the end of its claim and whatever comes twice
(PROTOCOL 6.5).

``judge`` is the rule, for a transaction of your own; ``FencedApp`` keeps it around a
WSGI application, by ``SqliteFences`` or whatever stores fences.
"""

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.codec import is_identifier, is_topic
from kafka_marshal.protocol.types import Key, Token

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

TOKEN_HEADER = "Marshal-Fencing-Token"  # noqa: S105 - no secret
SOURCE_HEADER = "Marshal-Source"
OFFSETS_HEADER = "Marshal-Offsets"
NEXT_HEADER = "Marshal-Next-Offset"

ACCEPTED, DONE, OVERLAPS, STALE = "accepted", "done", "overlaps", "stale"
BODY_BYTES_MAX = 16 * 2**20
LOCK_MS_MAX = 30_000

_NUMBER = r"(0|[1-9][0-9]{0,18})"
_OFFSETS = re.compile(f"{_NUMBER}-{_NUMBER}")
_PARTITION = re.compile(_NUMBER)
_ANSWERS = {
    DONE: "200 OK",
    OVERLAPS: "409 Conflict",
    STALE: "412 Precondition Failed",
}


class Known(NamedTuple):
    """What is known of a source: the largest token, and the next offset to write."""

    token: Token
    next_offset: int


class Write(NamedTuple):
    """A request to write the rows of a source with offsets from ``first`` to ``last``.

    Rows may be missing in between; there are none of the source beside it.
    """

    source: Key
    token: Token
    first: int
    last: int


class Verdict(NamedTuple):
    """What is to become of a request.

    Attributes:
        outcome: ``accepted``: do it; ``done``: it was done before; ``overlaps``: a part
            of it was, send the rest; ``stale``: another claim came later.
        known: What is known from then on; to be kept if the work is done, too.
    """

    outcome: str
    known: Known


class Slot(Protocol):
    """One source in a store, while nobody else may write for it."""

    @property
    def known(self) -> Known | None:
        """What was kept of it, None where it is new."""
        ...

    def keep(self, known: Known) -> None:
        """Keep this, once the slot is left without an error."""
        ...


class FenceStore(Protocol):
    """Where a service keeps what it knows of each source, across restarts."""

    def entered(self, source: Key) -> AbstractContextManager[Slot]:
        """Look at a source, and keep everybody else from it meanwhile.

        Raises:
            Exception: Somebody else was in it for too long.
        """
        ...


def judge(known: Known | None, write: Write) -> Verdict:
    """Return what is to become of a request. Pure.

    Args:
        known: What is known of its source, None where that is new.
        write: What it asks for.
    """
    if known is None:
        return Verdict(ACCEPTED, Known(write.token, write.last + 1))
    if write.token < known.token:
        return Verdict(STALE, known)
    at = known.next_offset
    if write.first >= at:
        return Verdict(ACCEPTED, Known(write.token, write.last + 1))
    # Whoever holds the later claim is known from now on, whatever it has to send.
    return Verdict(OVERLAPS if write.last >= at else DONE, Known(write.token, at))


def headers_of(write: Write) -> dict[str, str]:
    """Return the headers that say what a request writes."""
    group, topic, partition = write.source
    return {
        SOURCE_HEADER: f"{group}/{topic}/{partition}",
        OFFSETS_HEADER: f"{write.first}-{write.last}",
        TOKEN_HEADER: str(write.token),
    }


def read_headers(headers: Mapping[str, str]) -> Write | None:
    """Return what a request writes, by its headers; None where it has none of them.

    Raises:
        ConfigurationError: One is missing, or says nothing that makes sense.
    """
    found = {name.lower(): value.strip() for name, value in headers.items()}
    names = (SOURCE_HEADER, OFFSETS_HEADER, TOKEN_HEADER)
    if not any(name.lower() in found for name in names):
        return None
    source, offsets, token = (found.get(name.lower(), "") for name in names)
    group, _, rest = source.partition("/")
    topic, _, partition = rest.partition("/")
    if not (
        is_identifier(group) and is_topic(topic) and _PARTITION.fullmatch(partition)
    ):
        raise _senseless(SOURCE_HEADER, source, "billing/payments/3")
    run = _OFFSETS.fullmatch(offsets)
    if run is None or int(run[2]) < int(run[1]):
        raise _senseless(OFFSETS_HEADER, offsets, "40-59")
    key = Key(group, topic, int(partition))
    return Write(key, parse_token(token), int(run[1]), int(run[2]))


def parse_token(text: str) -> Token:
    """Return the token that a dotted text means; tokens order like tuples.

    Raises:
        ConfigurationError: It is none.
    """
    parts = text.split(".")
    if len(parts) != len(Token._fields) or not all(
        part.isascii() and part.isdecimal() for part in parts
    ):
        raise ConfigurationError(
            f"{text!r} is no fencing token, which reads like 1763718000.0.42",
            setting="token",
        )
    return Token(*map(int, parts))


def _senseless(name: str, value: str, example: str) -> ConfigurationError:
    return ConfigurationError(
        f"header {name} says {value!r}, and should read like {example}", setting=name
    )


class SqliteFences:
    """Keeps fences in a file of SQLite, for all processes of one machine.

    One source is written at a time, whichever it is. For more at once, or several
    machines, keep the rows in the database of the service (``FenceStore``).
    """

    def __init__(self, path: str, *, lock_ms_max: int = LOCK_MS_MAX) -> None:
        """Make the file where it is not there.

        Args:
            path: The file.
            lock_ms_max: How long a request waits for the one before it.
        """
        self._path = path
        self._lock_s = lock_ms_max / 1000
        with self._transaction() as db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS fences (source TEXT PRIMARY KEY,"
                " era INT, leader_epoch INT, epoch INT, next_offset INT)"
            )

    @contextmanager
    def entered(self, source: Key) -> Iterator[Slot]:
        """Look at a source; see ``FenceStore``.

        Raises:
            sqlite3.OperationalError: Others were in it for ``lock_ms_max``.
        """
        name = "/".join(map(str, source))
        with self._transaction() as db:
            row = db.execute(
                "SELECT era, leader_epoch, epoch, next_offset FROM fences"
                " WHERE source = ?",
                (name,),
            ).fetchone()
            slot = _Row(db, name, row and Known(Token(*row[:3]), row[3]))
            yield slot

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(
            sqlite3.connect(self._path, timeout=self._lock_s, isolation_level=None)
        ) as db:
            db.execute("BEGIN IMMEDIATE")
            yield db  # left by an error, it is closed and nothing is kept
            db.execute("COMMIT")


@attrs.frozen
class _Row:
    """A source within a transaction."""

    db: sqlite3.Connection
    name: str
    known: Known | None

    def keep(self, known: Known) -> None:
        row = (self.name, *known.token, known.next_offset)
        self.db.execute("INSERT OR REPLACE INTO fences VALUES (?, ?, ?, ?, ?)", row)


@attrs.frozen
class FencedApp:
    """A WSGI application that is asked nothing stale and nothing twice.

    It answers itself: 412 to a token older than one that it has seen, 409 where a part
    was written before (``Marshal-Next-Offset`` says from where to send again), and 200
    where everything was. What the application answers with 2xx counts as written; an
    answer of any other kind changes nothing.

    The application works while its source is locked, so a request under a later claim
    waits for it. If the process dies between its work and the note of it, the request
    is worked on again: whoever must not keeps the fence in the transaction of the work,
    by ``judge``.

    Attributes:
        app: The application.
        store: Where fences are kept.
        is_optional: Whether requests without the headers pass; otherwise 428.
        body_bytes_max: Longest body; it is read before anything is locked, since who
            sends it may be stopped in the midst of it.
    """

    app: "WSGIApplication"
    store: FenceStore
    is_optional: bool = attrs.field(default=False, kw_only=True)
    body_bytes_max: int = attrs.field(default=BODY_BYTES_MAX, kw_only=True)

    def __call__(
        self, environ: dict[str, Any], start_response: "StartResponse"
    ) -> Iterable[bytes]:
        """Answer one request."""
        try:
            write = read_headers(_headers(environ))
        except ConfigurationError as error:
            return _answer(start_response, "400 Bad Request", said=str(error))
        if write is None:
            if self.is_optional:
                return self.app(environ, start_response)
            said = f"the headers {SOURCE_HEADER}, {OFFSETS_HEADER} and {TOKEN_HEADER}"
            status = "428 Precondition Required"
            return _answer(start_response, status, said=f"{said} are needed")
        length = environ.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or int(length) > self.body_bytes_max:
            said = f"bodies have {self.body_bytes_max} bytes at most"
            return _answer(start_response, "413 Content Too Large", said=said)
        body = environ["wsgi.input"].read(int(length))
        if len(body) != int(length):
            said = "the body ended before its length"
            return _answer(start_response, "400 Bad Request", said=said)
        return self._judged(
            environ | {"wsgi.input": BytesIO(body)}, start_response, write
        )

    def _judged(
        self, environ: dict[str, Any], start_response: "StartResponse", write: Write
    ) -> Iterable[bytes]:
        with self.store.entered(write.source) as slot:
            verdict = judge(slot.known, write)
            if verdict.outcome != ACCEPTED:
                slot.keep(verdict.known)
            else:
                status, headers, body = _run(self.app, environ)
                if status.startswith("2"):
                    slot.keep(verdict.known)
        if verdict.outcome == ACCEPTED:
            start_response(status, headers)
            return [body]
        said = f"{write.source} is written to {verdict.known.next_offset}, exclusive"
        if verdict.outcome == STALE:
            said = f"the claim {write.token} is over: {verdict.known.token} came later"
        return _answer(
            start_response,
            _ANSWERS[verdict.outcome],
            said=said,
            next_offset=verdict.known.next_offset,
        )


def _headers(environ: Mapping[str, Any]) -> dict[str, str]:
    return {
        name[len("HTTP_") :].replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }


def _run(
    app: "WSGIApplication", environ: dict[str, Any]
) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return the whole answer of an application."""
    told: list[tuple[str, list[tuple[str, str]]]] = []
    parts: list[bytes] = []

    def start(
        status: str, headers: list[tuple[str, str]], exc_info: object = None
    ) -> Callable[[bytes], object]:
        del exc_info  # nothing was sent yet, so the last answer counts
        told.append((status, headers))
        return parts.append

    answer = app(environ, start)
    try:
        parts.extend(answer)
    finally:
        close = getattr(answer, "close", None)
        if close is not None:
            close()
    status, headers = told[-1]
    return status, headers, b"".join(parts)


def _answer(
    start_response: "StartResponse",
    status: str,
    *,
    said: str,
    next_offset: int | None = None,
) -> Iterable[bytes]:
    body = said.encode()
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
    ]
    if next_offset is not None:
        headers.append((NEXT_HEADER, str(next_offset)))
    start_response(status, headers)
    return [body]
