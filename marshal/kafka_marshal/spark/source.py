"""``format("marshal")``: the data source that Spark is given."""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from kafka_marshal.errors import ConfigurationError

from .needs import require_spark
from .options import Options, parse
from .rows import columns

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
    from pyspark.sql.types import StructType


class MarshalDataSource(DataSource):
    """Topics shared by claims, with the columns and options of Spark's Kafka source.

    See docs/SPARK.md for the options.

    Raises:
        ConfigurationError: An option is unknown, impossible, or contradicts another.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        require_spark()
        # Checked here, when the frame is made and not when it runs.
        self._parsed: Options = parse(dict(options.items()))

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "marshal"

    def schema(self) -> "StructType":
        """Return the columns."""
        parsed = self._parsed
        return columns(has_headers=parsed.has_headers, has_token=parsed.has_token)

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """Return the reader of ``spark.read``."""
        from .batch import MarshalBatchReader

        self._parsed.require_batch()
        self._require_own(schema)
        return MarshalBatchReader(self._parsed, schema)

    def streamReader(  # noqa: N802 - Spark's name
        self, schema: "StructType"
    ) -> "DataSourceStreamReader":
        """Return the reader of ``spark.readStream``."""
        from .stream import MarshalStreamReader

        self._parsed.require_stream()
        self._require_own(schema)
        return MarshalStreamReader(self._parsed, schema)

    def _require_own(self, schema: "StructType") -> None:
        own = self.schema()
        if own.simpleString() != schema.simpleString():
            raise ConfigurationError(
                f"format marshal has the columns {own.simpleString()}, and was given "
                f"{schema.simpleString()}; leave schema() out, and select columns",
                setting="schema",
            )
