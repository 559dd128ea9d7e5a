"""Each row into Parquet files once, whatever is retried or replayed.

A batch is written aside first. What of it counts is decided by a manifest per topic
partition: a chain of small files, each of which says up to which offset the next
folder of rows goes, and under which token. A link of the chain can be made only once,
so that of two writers at the same place one wins, and the other starts where that
ends. Readers read what the chains name (``FileSink.read``), and nothing else.

The folder is on a file system whose ``link`` fails where a file is: a local or
mounted one. For object stores use a table format with conditional commits, with the
token and the position as ``sinks_table`` has them.
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

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.protocol.types import Token, TopicPartition
from kafka_marshal.spark.fencing import Fence, require_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DATA, CHAINS = "data", "chains"
# How often a link that somebody else made first is looked at again.
TRIES_MAX = 100
_DIGITS = 20
# Copies of the columns of these names, so that they stay in the files as well.
_FOLDERS = {
    "marshal_topic": "topic",
    "marshal_partition": "partition",
    "marshal_token": "token",
}

_LOGGER = logging.getLogger("kafka_marshal")


@attrs.frozen
class Link:
    """One folder of rows that count.

    Attributes:
        first: First offset that the folder may hold.
        end: Next offset after it.
        token: Token of the claim that it was read under.
        folder: Where the rows are, below the sink's folder.
    """

    first: int
    end: int
    token: str
    folder: str


@attrs.frozen
class Chain:
    """The manifest of one topic partition: links without a gap, each made once.

    Attributes:
        folder: Where the links are; named by where they begin.
    """

    folder: Path

    def links(self) -> list[Link]:
        """Return the links, in order."""
        if not self.folder.is_dir():
            return []
        files = sorted(self.folder.glob("*.json"))
        return [Link(**json.loads(file.read_text())) for file in files]

    def last(self) -> Link | None:
        """Return the last link, None before the first."""
        files = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        return Link(**json.loads(files[-1].read_text())) if files else None

    def add(self, link: Link) -> bool:
        """Append a link, unless somebody else made one at the same place.

        It must begin where the last one ends.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{link.first:0{_DIGITS}}.json"
        half = self.folder / f".{uuid.uuid4().hex}"
        with half.open("w") as file:
            json.dump(attrs.asdict(link), file)
            file.flush()
            os.fsync(file.fileno())
        try:
            # Whole or not at all, and never over another: unlike a rename.
            os.link(half, path)
        except FileExistsError:
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
        path: The sink's folder, which every executor and the driver can write.
        fence: Of the stream.
    """

    path: Path
    fence: Fence

    @classmethod
    def of(cls, options: Mapping[str, str], *, path: str | Path) -> "FileSink":
        """Return the sink of a stream, by the options that it was made with.

        Raises:
            ConfigurationError: An option is wrong, or the path is no folder's.
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
        """Write a batch; what was written before, or is stale, is left out.

        Raises:
            ConfigurationError: A column is missing.
        """
        from pyspark.sql import functions as f

        require_columns(df)
        aside = self.path / DATA / uuid.uuid4().hex
        # A folder for each claim: it counts as a whole, or not at all.
        copies = df.withColumns({name: f.col(of) for name, of in _FOLDERS.items()})
        copies.write.partitionBy(*_FOLDERS).parquet(f"file://{aside}")
        found = [
            self._found(df.sparkSession, leaf)
            for leaf in aside.glob("/".join(f"{name}=*" for name in _FOLDERS))
        ]
        for place, link in sorted(found, key=lambda each: (each[0], each[1].first)):
            self.publish(df.sparkSession, place, link=link, batch_id=batch_id)
        if not found:
            shutil.rmtree(aside)

    def _found(self, spark: "SparkSession", leaf: Path) -> tuple[TopicPartition, Link]:
        """Return what a folder that was written aside holds."""
        from pyspark.sql import functions as f

        rows = spark.read.parquet(f"file://{leaf}")
        (row,) = (
            rows.groupBy("topic", "partition", "token")
            .agg(f.min("offset").alias("first"), f.max("offset").alias("last"))
            .collect()
        )
        folder = str(leaf.relative_to(self.path))
        link = Link(row["first"], row["last"] + 1, row["token"], folder)
        return TopicPartition(row["topic"], row["partition"]), link

    def publish(
        self,
        spark: "SparkSession",
        place: TopicPartition,
        *,
        link: Link,
        batch_id: int,
    ) -> int:
        """Make rows that were written aside count, as far as none did before.

        Returns:
            From where on they count; ``link.end`` where none does.
        """
        chain = self.chain(place)
        for _ in range(TRIES_MAX):
            last = chain.last()
            first = 0 if last is None else last.end
            is_older = last is not None and Token.parse(last.token) > Token.parse(
                link.token
            )
            if is_older or not self.fence.holds(*place, token=link.token):
                _LOGGER.warning(
                    "batch %d: rows of %s under token %s do not count: the claim is "
                    "over, and whoever has the partition now processes them",
                    *(batch_id, place, link.token),
                )
                break
            if first >= link.end:
                break
            made = self._from(spark, link, first) if first > link.first else link
            is_made = chain.add(attrs.evolve(made, first=first))
            unused = link if is_made else made
            if made is not link:
                self._drop(unused)
            if is_made:
                return max(first, link.first)
        self._drop(link)
        return link.end

    def _from(self, spark: "SparkSession", link: Link, first: int) -> Link:
        """Return a folder with those rows only that come from an offset on."""
        folder = f"{DATA}/{uuid.uuid4().hex}"
        rows = spark.read.parquet(f"file://{self.path / link.folder}")
        rows.where(f"offset >= {first}").write.parquet(f"file://{self.path / folder}")
        return attrs.evolve(link, folder=folder)

    def _drop(self, link: Link) -> None:
        shutil.rmtree(self.path / link.folder, ignore_errors=True)

    def chain(self, place: TopicPartition) -> Chain:
        """Return the chain of a topic partition."""
        return Chain(self.path / CHAINS / place.topic / str(place.partition))

    def links(self) -> dict[TopicPartition, list[Link]]:
        """Return what counts, by topic partition; none of those without anything."""
        found = {
            TopicPartition(folder.parent.name, int(folder.name)): Chain(folder).links()
            for folder in sorted(self.path.glob(f"{CHAINS}/*/*"))
        }
        # A folder stands there a moment before its first link.
        return {partition: links for partition, links in found.items() if links}

    def read(self, spark: "SparkSession") -> Any:  # noqa: ANN401 - a DataFrame or None
        """Return the rows that count, as a frame; None before the first."""
        folders = {link.folder for links in self.links().values() for link in links}
        if not folders:
            return None
        return spark.read.parquet(*(f"file://{self.path / f}" for f in sorted(folders)))
