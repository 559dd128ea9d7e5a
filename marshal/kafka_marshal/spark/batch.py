"""``spark.read.format("marshal")``: a range of every partition, on nobody's behalf."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from kafka_marshal.errors import PositionError

from .offsets import Stretch
from .options import EARLIEST, LATEST, Bound, Options
from .planning import cut
from .task import Task, TaskPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from kafka_marshal.protocol.types import TopicPartition


class MarshalBatchReader(DataSourceReader):
    """Plans and reads a batch, as Spark's own Kafka source does."""

    def __init__(self, options: Options, schema: "StructType") -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[TaskPartition]:
        """Return what each task reads; the cluster is asked once, here."""
        from .starting import Cluster

        options = self._options
        cluster = Cluster(options)
        try:
            places = cluster.partitions()
            ids = cluster.topic_ids({place.topic for place in places})
            start = options.start or Bound(EARLIEST)
            firsts = cluster.resolve(start, places, name="startingOffsets")
            end = options.end or Bound(LATEST)
            ends = cluster.resolve(end, places, name="endingOffsets")
            starts = cluster.starts(places)
        finally:
            cluster.close()
        stretches = [
            Stretch(
                *(place, None),
                *(self._from(place, firsts[place], starts), ends[place]),
                ids.get(place.topic, ""),
            )
            for place in places
        ]
        stretches = [each for each in stretches if each.first < each.end]
        parts = cut(stretches, options.min_partitions, most=options.max_task_offsets)
        tasks = [
            Task(each.partition, each.first, each.end, topic_id=each.topic_id)
            for each in parts
        ]
        # Spark plans one task without a range where it is given none.
        return [TaskPartition(task) for task in tasks] or [TaskPartition(None)]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Read one range, in a worker."""
        if not isinstance(partition, TaskPartition) or partition.task is None:
            return iter(())
        from . import fetch

        return fetch.read(partition.task, self._options, schema=self._schema)

    def _from(
        self,
        place: "TopicPartition",
        first: int,
        starts: "dict[TopicPartition, int]",
    ) -> int:
        if first >= starts[place]:
            return first
        if self._options.fails_on_data_loss:
            raise PositionError(
                f"startingOffsets has {first} for {place}, whose log begins at "
                f"{starts[place]}; start later, or set failOnDataLoss to false",
                partition=place,
                requested=first,
                log_start=starts[place],
                log_end=-1,
            )
        return starts[place]
