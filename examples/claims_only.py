"""Hold a claim, and fetch its partition with another client: kafka-python.

    export MARSHAL_BOOTSTRAP_SERVER=localhost:9092
    python examples/claims_only.py payments 0 archive worker-1

For other frameworks (Faust, Bytewax, a native extension, a cron job): the claim decides
which process may work on the partition. The loop checks the claim before each record,
and sets its position afterwards. The claim is renewed in the background.
"""

import argparse
import os
import signal
from types import FrameType

from kafka import KafkaConsumer
from kafka import TopicPartition as Place

from kafka_marshal import (
    ClaimLost,
    ClaimRejected,
    HeldClaim,
    Marshal,
    TopicPartition,
)

POLL_MS = 200
TIMEOUT_MS = 2_000


class Ended:
    """Shows whether the process was asked to end by SIGTERM or SIGINT."""

    def __init__(self) -> None:
        """Handle SIGTERM and SIGINT."""
        self.is_set = False
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True


def claim_when_free(
    marshal: Marshal, place: TopicPartition, ended: Ended
) -> HeldClaim | None:
    """Wait until this process owns the partition; return None if asked to end."""
    while not ended.is_set:
        try:
            return marshal.claim(*place, timeout_ms=TIMEOUT_MS)
        except ClaimRejected as rejected:
            print(f"held by {rejected.holder}; waiting", flush=True)
    return None


def start(consumer: KafkaConsumer, claim: HeldClaim) -> None:
    """Seek to the position of the claim, or to the beginning if there is none."""
    place = Place(*claim.partition)
    if claim.position is None:
        consumer.seek_to_beginning(place)
    else:
        consumer.seek(place, claim.position)
    print(f"claimed {claim.partition} at {claim.position}", flush=True)


def work(consumer: KafkaConsumer, claim: HeldClaim, ended: Ended) -> None:
    """Fetch and process until asked to end, or until the claim is lost."""
    while not ended.is_set:
        for records in consumer.poll(timeout_ms=POLL_MS).values():
            for record in records:
                token = claim.check()  # raises ClaimLost if lost: stop at once
                print(f"handled offset {record.offset} under {token}", flush=True)
                claim.set_position(record.offset + 1)
        claim.check()


def main() -> None:
    """Claim one partition, wait if another process holds it, and work on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("partition", type=int)
    parser.add_argument("group")
    parser.add_argument("client_id")
    given = parser.parse_args()
    ended = Ended()
    server = os.environ.get("MARSHAL_BOOTSTRAP_SERVER", "localhost:9092")
    # Use neither groups nor committed offsets of Kafka: the claim replaces both.
    consumer = KafkaConsumer(bootstrap_servers=server, enable_auto_commit=False)
    place = TopicPartition(given.topic, given.partition)
    consumer.assign([Place(*place)])
    try:
        with Marshal(
            server, group_id=given.group, client_id=given.client_id
        ) as marshal:
            claim = claim_when_free(marshal, place, ended)
            if claim is not None:
                start(consumer, claim)
                work(consumer, claim, ended)
    except ClaimLost as lost:
        raise SystemExit(str(lost)) from lost
    finally:
        consumer.close(autocommit=False)


if __name__ == "__main__":
    main()
