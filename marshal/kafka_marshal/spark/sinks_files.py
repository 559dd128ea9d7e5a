"""A sink that writes each row to Parquet files exactly once.

A batch is written to new folders first. A manifest for each topic partition decides
which folders count. It is a chain of small files, the links: each names a folder, with
its end offset and token. A link can be created only once, so of two concurrent writers
one wins, and the other continues at its end. Readers read only the folders in the
chains (``FileSink.read``). A topic that was deleted and created again, which Kafka's id
of the topic shows, starts at offset 0, and its links follow those of the earlier topic.

The folder must be on a local or mounted file system, whose ``link`` fails if the target
exists. For object stores use a table format with conditional commits, and store token
and position as ``sinks_table`` does.
"""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kafka_marshal.errors import ConfigurationError, CoordinationError
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.spark.fencing import (
    SINK_COLUMNS,
    Fence,
    require_columns,
    require_token,
    warn_of_written_rows,
)
from kafka_marshal.spark.paths import for_reader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

DATA, CHAINS = "data", "chains"
# Retries after another writer created the link first.
TRIES_MAX = 100
_DIGITS = 20
# Spark removes the columns that name folders from the files, so these are copies.
_FOLDERS = {
    "marshal_topic": "topic",
    "marshal_partition": "partition",
    "marshal_token": "token",
    "marshal_topic_id": "topicId",
}

# Spark's name of a folder without a value.
_OF_NULL = "__HIVE_DEFAULT_PARTITION__"

_LOGGER = logging.getLogger("kafka_marshal")


@attrs.frozen(kw_only=True)
class Link:
    """One published folder of rows.

    Attributes:
        first: First offset of the folder.
        end: Exclusive end.
        token: Token of the claim under which the rows were read.
        folder: Path of the rows, below the sink's folder.
        topic_id: Kafka's id of the topic in hex, or empty if unknown.
        generation: Number of earlier topics of this name that have links here.
    """

    first: int
    end: int
    token: str
    folder: str
    topic_id: str = ""
    generation: int = 0

    @property
    def name(self) -> str:
        """Name of the link's file; names sort in the order of the chain."""
        number = f"{self.first:0{_DIGITS}}.json"
        return f"r{self.generation:04}-{number}" if self.generation else number

    def after(self, last: "Link | None") -> "Link":
        """Return this link as the successor of the last link of a chain.

        It starts at the end of the last link, or at 0 if that is of an earlier topic.
        """
        if last is None:
            return attrs.evolve(self, first=0)
        if self.topic_id and last.topic_id and self.topic_id != last.topic_id:
            return attrs.evolve(self, first=0, generation=last.generation + 1)
        return attrs.evolve(
            self,
            first=last.end,
            generation=last.generation,
            topic_id=self.topic_id or last.topic_id,
        )


# Last link that this process has seen, by the folder of the chain. Limited, because a
# query may have a sink for each day or hour.
_seen: dict[Path, Link] = {}
SEEN_MAX = 10_000


@attrs.frozen
class Chain:
    """The manifest of one topic partition: links without gaps, each created once.

    Attributes:
        folder: Folder of the links. Their names have the first offset and, if the topic
            was created again, its generation.
    """

    folder: Path

    def links(self) -> list[Link]:
        """Return the links, in order."""
        if not self.folder.is_dir():
            return []
        files = sorted(self.folder.glob("*.json"))
        return [Link(**json.loads(file.read_text())) for file in files]

    def last(self) -> Link | None:
        """Return the last link, None before the first.

        Starts from the last link that this process has seen, because the name of the
        next one follows from it. Listing all links would take longer with each batch.
        """
        seen = _seen.get(self.folder)
        if seen is not None and self._read(seen.name) == seen:
            found: Link | None = self._last_after(seen)
        else:
            files = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
            found = self._read(files[-1].name) if files else None
        if found is not None:
            if len(_seen) >= SEEN_MAX and self.folder not in _seen:
                _seen.clear()
            _seen[self.folder] = found
        return found

    def _last_after(self, link: Link) -> Link:
        while True:
            same = self._read(attrs.evolve(link, first=link.end).name)
            later = attrs.evolve(link, first=0, generation=link.generation + 1)
            found = same or self._read(later.name)
            if found is None:
                return link
            link = found

    def _read(self, name: str) -> Link | None:
        try:
            return Link(**json.loads((self.folder / name).read_text()))
        except FileNotFoundError:
            return None

    def add(self, link: Link) -> bool:
        """Append a link; return False if another writer created it first.

        The link must start at the end of the last link.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / link.name
        half = self.folder / f".{uuid.uuid4().hex}"
        with half.open("w") as file:
            json.dump(attrs.asdict(link), file)
            file.flush()
            os.fsync(file.fileno())
        try:
            # Atomic, and unlike a rename it never replaces a file.
            os.link(half, path)
        except FileExistsError:
            if path.samefile(half):
                # Created by this call: an NFS server repeated it, as after a restart.
                return True
            # A network file system may not have shown that link: list all next time.
            _seen.pop(self.folder, None)
            return False
        finally:
            half.unlink()
        return True


@attrs.frozen
class FileSink:
    """A function for ``foreachBatch`` that writes each row to Parquet files once.

    ::

        sink = FileSink.of(OPTIONS, path="/data/bills")
        stream.writeStream.foreachBatch(sink).start()
        sink.read(spark).count()

    Attributes:
        path: The sink's folder, writable by the driver and every executor. Two sinks in
            one ``foreachBatch`` need a folder each.
        fence: Fence of the stream.
    """

    path: Path
    fence: Fence

    @classmethod
    def of(cls, options: Mapping[str, str], *, path: str | Path) -> "FileSink":
        """Return the sink of a stream, from its options.

        Raises:
            ConfigurationError: An option is wrong, or the path is not a folder.
        """
        text = str(path).removeprefix("file://")
        if "://" in text or not Path(text).is_absolute():
            raise ConfigurationError(
                f"path {str(path)!r} must be absolute and on a file system that is "
                "mounted where tasks run; for object stores see docs/SPARK.md, sinks",
                setting="path",
            )
        return cls(Path(text), Fence.of(options))

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write a batch without rows that are stale or written already.

        Raises:
            ConfigurationError: A column is missing, or a row has no token.
        """
        from pyspark.sql import functions as f

        require_columns(df, SINK_COLUMNS)
        aside = self.path / DATA / uuid.uuid4().hex
        # One folder for each claim; each is published as a whole or not at all.
        copies = df.withColumns({name: f.col(of) for name, of in _FOLDERS.items()})
        try:
            copies.write.partitionBy(*_FOLDERS).parquet(f"file://{aside}")
            found = self._found(df.sparkSession, aside)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        found.sort(key=lambda each: (each[0], each[1].first))
        is_published = False
        try:
            while found:
                place, link = found.pop(0)
                first = self.publish(
                    df.sparkSession, place, link=link, batch_id=batch_id
                )
                is_published = is_published or first < link.end
        except BaseException:
            # Keep the folder that failed: it may have been published.
            for _, link in found:
                self._drop(link)
            raise
        if not is_published:
            shutil.rmtree(aside, ignore_errors=True)

    def _found(
        self, spark: "SparkSession", aside: Path
    ) -> list[tuple[TopicPartition, Link]]:
        """Return the topic partition and an unpublished link for each new folder."""
        from pyspark.sql import functions as f

        if not any(aside.glob("/".join(f"{name}=*" for name in _FOLDERS))):
            return []  # Spark cannot read a folder without rows
        # One job for all folders.
        rows = spark.read.option("recursiveFileLookup", "true").parquet(
            _read_from(aside)
        )
        ranges = rows.groupBy(*_FOLDERS.values()).agg(
            f.min("offset").alias("first"), f.max("offset").alias("last")
        )
        return [self._link(aside, row) for row in ranges.collect()]

    def _link(self, aside: Path, row: "Row") -> tuple[TopicPartition, Link]:
        place = TopicPartition(row["topic"], row["partition"])
        token = require_token(*place, offset=row["first"], token=row["token"])
        values = {name: row[of] for name, of in _FOLDERS.items()}
        leaf = aside.joinpath(
            *(f"{k}={_OF_NULL if v in {None, ''} else v}" for k, v in values.items())
        )
        link = Link(
            first=row["first"],
            end=row["last"] + 1,
            token=token,
            folder=str(leaf.relative_to(self.path)),
            topic_id=row["topicId"] or "",
        )
        return place, link

    def publish(
        self,
        spark: "SparkSession",
        place: TopicPartition,
        *,
        link: Link,
        batch_id: int,
    ) -> int:
        """Publish a folder, without rows below the end of the chain.

        Returns:
            First published offset; ``link.end`` if nothing was published.
        """
        chain = self.chain(place)
        for _ in range(TRIES_MAX):
            last = chain.last()
            next_ = link.after(last)
            first = next_.first
            is_older = last is not None and Token.parse(last.token) > Token.parse(
                link.token
            )
            if is_older or not self.fence.holds(*place, token=link.token):
                _LOGGER.warning(
                    "batch %d: rows of %s under token %s are dropped: the claim has "
                    "ended, and the current owner of the partition processes them",
                    *(batch_id, place, link.token),
                )
                break
            if first >= link.end:
                warn_of_written_rows(place, first, option="path")
                break
            made = self._from(spark, link, first) if first > link.first else link
            is_made = chain.add(attrs.evolve(next_, folder=made.folder))
            unused = link if is_made else made
            if made is not link:
                self._drop(unused)
            if is_made:
                return max(first, link.first)
        else:
            raise CoordinationError(
                f"batch {batch_id}: other writers published rows of {place} "
                f"{TRIES_MAX} times before this one; start the query again"
            )
        self._drop(link)
        return link.end

    def _from(self, spark: "SparkSession", link: Link, first: int) -> Link:
        """Copy the rows from an offset on into a new folder; return its link."""
        folder = f"{DATA}/{uuid.uuid4().hex}"
        rows = spark.read.parquet(_read_from(self.path / link.folder))
        rows.where(f"offset >= {first}").write.parquet(f"file://{self.path / folder}")
        return attrs.evolve(link, folder=folder)

    def _drop(self, link: Link) -> None:
        shutil.rmtree(self.path / link.folder, ignore_errors=True)

    def chain(self, place: TopicPartition) -> Chain:
        """Return the chain of a topic partition."""
        return Chain(self.path / CHAINS / place.topic / str(place.partition))

    def links(self) -> dict[TopicPartition, list[Link]]:
        """Return the published links by topic partition."""
        found = {
            TopicPartition(folder.parent.name, int(folder.name)): Chain(folder).links()
            for folder in sorted(self.path.glob(f"{CHAINS}/*/*"))
        }
        # A chain's folder exists shortly before its first link.
        return {partition: links for partition, links in found.items() if links}

    def read(self, spark: "SparkSession") -> Any:  # noqa: ANN401 - a DataFrame or None
        """Return the published rows as a frame; None before the first.

        The frame has the columns of all batches, null where a batch lacked a column.
        """
        folders = {link.folder for links in self.links().values() for link in links}
        if not folders:
            return None
        reader = spark.read.option("mergeSchema", "true")
        return reader.parquet(*(_read_from(self.path / f) for f in sorted(folders)))


def _read_from(folder: Path) -> str:
    return for_reader(f"file://{folder}")
