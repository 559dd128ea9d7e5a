"""Positions are validated against leader epochs only after changes."""

import uuid
from types import SimpleNamespace

from kafka import TopicPartition as KafkaTopicPartition
from kafka.cluster import ClusterMetadata
from kafka.protocol.metadata import MetadataResponse

from kafka_marshal.kafka_io.patches import validate_after_changes


def metadata(leader, epoch):
    """Return metadata with a leader and leader epoch of the partition t-0."""
    return MetadataResponse(
        version=12,
        throttle_time_ms=0,
        brokers=[(1, "nobody", 1, None)],
        cluster_id="c",
        controller_id=1,
        topics=[
            MetadataResponse.MetadataResponseTopic(
                error_code=0,
                name="t",
                topic_id=uuid.UUID(int=3),
                is_internal=False,
                partitions=[
                    MetadataResponse.MetadataResponseTopic.MetadataResponsePartition(
                        error_code=0,
                        partition_index=0,
                        leader_id=leader,
                        leader_epoch=epoch,
                        replica_nodes=[1, 2],
                        isr_nodes=[1, 2],
                        offline_replicas=[],
                    )
                ],
            )
        ],
    )


def test_positions_are_validated_after_a_change_of_position_or_leader():
    place, compared = KafkaTopicPartition("t", 0), []
    cluster = ClusterMetadata(bootstrap_servers=["nobody:1"])

    def compare():
        compared.append(cluster.leader_epoch_for_partition(place))

    consumer = SimpleNamespace(
        _client=SimpleNamespace(cluster=cluster),
        _fetcher=SimpleNamespace(maybe_validate_positions=compare),
        assign=lambda places: None,
        seek=lambda place, offset: None,
    )
    validate_after_changes(consumer)
    changes = [
        lambda: None,
        lambda: cluster.update_metadata(metadata(1, 5)),
        lambda: cluster.update_metadata(metadata(1, 5)),
        lambda: cluster.update_partition_leader(place, 2, 6),
        lambda: consumer.assign([place]),
        lambda: consumer.seek(place, 3),
        lambda: cluster.update_metadata(metadata(1, 7)),
    ]
    for change in changes:
        change()
        for _ in range(3):
            consumer._fetcher.maybe_validate_positions()
    assert compared == [None, 5, 5, 6, 6, 6, 7]
