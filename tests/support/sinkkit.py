"""A DataFrame for tests of sinks, without Spark."""

from operator import attrgetter

from kafka_marshal.spark.fencing import SINK_COLUMNS


class Frame:
    """The part of a DataFrame that sinks use; one task has all of its rows.

    Attributes:
        rows: Its rows.
        columns: Names of their columns.
        types: Types of some, by name.
    """

    def __init__(self, rows, columns=(*SINK_COLUMNS, "key", "value"), types=()):
        self.rows = list(rows)
        self.columns = list(columns)
        self.dtypes = list(dict(types).items())

    def repartition(self, *names):
        assert names == ("topic", "partition")
        return self

    def sortWithinPartitions(self, *names):  # noqa: N802 - Spark's name
        return Frame(sorted(self.rows, key=attrgetter(*names)), self.columns)

    def foreachPartition(self, write):  # noqa: N802 - Spark's name
        write(iter(self.rows))
