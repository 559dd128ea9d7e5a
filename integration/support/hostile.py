"""Malformed and hostile records for the coordination topic."""

import random
import threading
from collections.abc import Iterable, Iterator
from typing import Self

import msgspec
from confluent_kafka import Producer

from kafka_marshal.protocol.codec import encode
from kafka_marshal.protocol.records import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    ReleaseGroup,
    ReleasingPartition,
)
from kafka_marshal.protocol.types import Key

SLICE_S = 0.02
END_S = 60.0


def hostile_values(keys: Iterable[Key], *, seed: int) -> Iterator[bytes | None]:
    """Yield values without end: garbage, cut frames, and records of an impostor.

    The impostor names the keys of other owners and guesses their epochs; it only
    lacks their incarnations.
    """
    chance = random.Random(seed)
    keys, me, seq = list(keys), chance.randbytes(16), 0
    while True:
        seq += 1
        key = chance.choice(keys)
        who = {
            "client_id": "w1",
            "group_id": key.group_id,
            "incarnation": me,
            "seq": seq,
        }
        where = {"topic": key.topic, "partition": key.partition}
        owned = {**who, **where, "epoch": chance.randrange(50)}
        claimed = ClaimingPartition(
            **who,
            **where,
            generation=1,
            topic_id=None,
            resume_hash=None,
            expected_epoch=None,
            resume=None,
        )
        honest = [
            Heartbeat(**owned, position=1 << 40, rewind=True),
            claimed,
            ReleasingPartition(**owned, position=1 << 40, successor=None, reason=None),
            ClaimingMessages(
                **owned, grantee=me, first=0, proposed_last_offset=1 << 30
            ),
            # The pause has ended before it is sent, so it has no effect.
            ReleaseGroup(
                **who, op_id=chance.randbytes(16), msg_expire_time=1, reason=None
            ),
            # Valid claims of many other groups, which use up the limits.
            msgspec.structs.replace(
                claimed, client_id="x", group_id=f"flood-{chance.randrange(500)}"
            ),
        ]
        frame = encode(chance.choice(honest))
        yield chance.choice(
            [
                frame,
                frame[: chance.randrange(len(frame))],
                frame + b"\0",
                b"\x02" + frame[1:],
                frame[:1] + bytes([chance.randrange(18, 128)]) + frame[2:],
                chance.randbytes(chance.randrange(2_000)),
                b"\x01\x01\x00" + b"\x91" * 40_000,
                b"",
                None,
            ]
        )


class Flood:
    """Writes values into every partition of a topic, at the given rate.

    Attributes:
        sent: How many so far.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        partitions: int,
        values: Iterator[bytes | None],
        each_second: int,
    ) -> None:
        self.sent = 0
        self._topic, self._partitions, self._values = topic, partitions, values
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 20})
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)
        self._each = max(1, round(each_second * SLICE_S))

    def _run(self) -> None:
        while not self._is_over.wait(SLICE_S):
            for _ in range(self._each):
                self._producer.produce(
                    self._topic,
                    next(self._values),
                    partition=self.sent % self._partitions,
                )
                self.sent += 1
            self._producer.poll(0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join(END_S)
        self._producer.flush(END_S)
