"""What one task reads, as it travels. Nothing of Kafka is loaded for it."""

from typing import TYPE_CHECKING

import attrs
from pyspark.sql.datasource import InputPartition

from kafka_marshal.protocol.types import TopicPartition

if TYPE_CHECKING:
    from kafka_marshal.tickets import ClaimRef


@attrs.frozen
class Task:
    """What one task reads; it travels to the executor.

    Attributes:
        partition: Data partition.
        first: First offset.
        end: Where it ends; not read.
        claim: Claim that it is read under; None for a batch read.
        topic_id: Kafka's id of the topic in hex; empty where it is not known.
    """

    partition: TopicPartition
    first: int
    end: int
    claim: "ClaimRef | None" = None
    topic_id: str = ""


class TaskPartition(InputPartition):
    """A task, as Spark carries it; None for a read of nothing."""

    def __init__(self, task: Task | None) -> None:
        super().__init__(None)
        self.task = task
