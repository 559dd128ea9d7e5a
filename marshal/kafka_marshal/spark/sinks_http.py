"""Each row to an HTTP service once, which refuses whoever lost its claim.

Each request says where its rows come from, at which offsets, and under which claim
they were read (``kafka_marshal.receiving``). The service compares that with what it
has seen: a later claim is refused nothing, an earlier one everything, and what was
written before is not written again.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.protocol.types import Key
from kafka_marshal.receiving import NEXT_HEADER, Write, headers_of, parse_token

from .fencing import require_columns

if TYPE_CHECKING:
    import httpx
    from pyspark.sql import DataFrame, Row

OVERLAPS, STALE = 409, 412
TEXT_MAX = 200

_LOGGER = logging.getLogger("kafka_marshal")

Render = Callable[[Sequence["Row"]], bytes]
"""Returns the body of a request for rows of one topic partition, in offset order."""


@attrs.frozen
class HttpSink:
    """A function for ``foreachBatch`` that posts each row once.

    ::

        def render(rows):
            return json.dumps([bytes(row.value).decode() for row in rows]).encode()


        sink = HttpSink("https://bills.example/rows", render, group="billing")
        stream.writeStream.foreachBatch(sink).start()

    The service has to keep to ``kafka_marshal.receiving``, by ``FencedApp`` or in its
    own way. ``render`` travels to the executors.

    Attributes:
        url: Where to post.
        render: Returns the body of a request; the same for the same rows.
        group: Group of the stream; each has positions of its own.
        headers: More headers, such as ``Content-Type``; may hold secrets.
        rows_at_once: Most rows of a request.
        timeout_ms: How long a request may wait: to connect, to send and for each part
            of the answer. A service works off requests of a partition one by one.
    """

    url: str
    render: Render
    group: str
    headers: Mapping[str, str] = attrs.field(factory=dict, kw_only=True, repr=False)
    rows_at_once: int = attrs.field(default=1_000, kw_only=True)
    timeout_ms: int = attrs.field(default=60_000, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Refuse what could never work."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{self.url!r} is no address that begins with http:// or https://",
                setting="url",
            )
        if self.rows_at_once < 1:
            raise ConfigurationError(
                f"rows_at_once is {self.rows_at_once}, and must be at least 1",
                setting="rows_at_once",
            )

    def __call__(self, df: "DataFrame", batch_id: int) -> None:  # noqa: ARG002
        """Write a batch; what was written before, or is stale, is left out.

        Raises:
            ConfigurationError: A column is missing, or the extra ``remote``.
        """
        require_columns(df)
        _extra()
        place = ("topic", "partition")
        # Positions grow: rows of a topic partition go by one task, in order.
        df.repartition(*place).sortWithinPartitions(*place, "offset").foreachPartition(
            partial(_write_task, self)
        )

    def write(
        self, place: tuple[str, int], *, token: str, rows: "Iterator[Row]"
    ) -> int:
        """Post rows of one topic partition and claim, in offset order.

        It serves consumers without Spark, too, and may be repeated after any error.

        Returns:
            How many were written now: fewer where some were before, or where another
            claim came meanwhile.

        Raises:
            CoordinationError: The service did not answer, or refused a request; another
                try writes what is missing.
        """
        httpx = _extra()
        count = 0
        with httpx.Client(timeout=self.timeout_ms / 1000) as client:
            while batch := list(islice(rows, self.rows_at_once)):
                written = self._post(client, Key(self.group, *place), token, batch)
                if written is None:
                    break
                count += written
        return count

    def _post(
        self, client: "httpx.Client", source: Key, token: str, rows: "list[Row]"
    ) -> int | None:
        """Return how many rows were written now, None where the claim is over."""
        while rows:
            write = Write(source, parse_token(token), rows[0].offset, rows[-1].offset)
            answer = self._ask(client, write, rows)
            if answer.status_code == STALE:
                _LOGGER.warning(
                    "rows of %s-%d under token %s are left out: the claim is over",
                    *(source.topic, source.partition, token),
                )
                return None
            position = _position(answer)
            if answer.status_code != OVERLAPS:
                return 0 if position is not None else len(rows)
            left = [row for row in rows if row.offset >= (position or 0)]
            if len(left) == len(rows):
                raise CoordinationError(
                    f"{self.url} answered 409 to {_named(write)}, and names no offset "
                    "among them to go on from; does it keep to kafka_marshal.receiving?"
                )
            rows = left
        return 0

    def _ask(
        self, client: "httpx.Client", write: Write, rows: "Sequence[Row]"
    ) -> "httpx.Response":
        headers = {**self.headers, **headers_of(write)}
        try:
            answer = client.post(self.url, content=self.render(rows), headers=headers)
        except _extra().HTTPError as error:
            raise CoordinationError(
                f"{self.url} did not answer to {_named(write)}: {error!r}. The next "
                "try will show whether they are written"
            ) from error
        if not answer.is_success and answer.status_code not in {OVERLAPS, STALE}:
            raise CoordinationError(
                f"{self.url} answered {answer.status_code} to {_named(write)}: "
                f"{answer.text[:TEXT_MAX]!r}"
            )
        return answer


def _named(write: Write) -> str:
    place = write.source.topic_partition
    return f"offsets {write.first} to {write.last} of {place}"


def _position(answer: "httpx.Response") -> int | None:
    """Return how far the service says that it is, if it did not write."""
    said = answer.headers.get(NEXT_HEADER, "")
    return int(said) if said.isascii() and said.isdecimal() else None


def _write_task(sink: HttpSink, rows: "Iterator[Row]") -> None:
    """Write what one task has; it runs in Spark's Python workers."""
    for place, of_place in groupby(rows, lambda r: (r.topic, r.partition)):
        # Rows of a claim that came later follow in offset order.
        for token, of_claim in groupby(of_place, lambda row: row.token):
            sink.write(place, token=token, rows=of_claim)


def _extra() -> Any:  # noqa: ANN401 - a module
    try:
        return import_module("httpx")
    except ImportError as error:
        raise ConfigurationError(
            "writing by HTTP needs the extra 'remote'; run: pip install "
            "'kafka-marshal[remote]', on the executors as well",
            setting="remote",
        ) from error
