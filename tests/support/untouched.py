"""Prints the changes that importing and using kafka_marshal make in library ``kafka``.

It is a separate program, so that nothing is imported before its first snapshot. Without
an address it imports every module of kafka_marshal; with one, it also opens clients
there. It prints a line for each attribute of a module or class that is another object,
or has other contents, than before.
"""

import importlib
import pkgutil
import sys
from contextlib import suppress

import kafka

WAIT_MS = 60_000
# Optional parts, whose libraries need not be installed.
EXTRAS = (ImportError,)
# Attributes that the library fills by itself at its first request.
CACHES = {"_VERSIONS", "_response_class_registry"}
# Attributes that each producer replaces when it is garbage-collected.
REPLACED = {("kafka.producer.kafka", "log")}
PYTHONS_OWN = {"__builtins__", "__warningregistry__"}


def import_all(package):
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not each.name.endswith("__main__"):
            with suppress(*EXTRAS):
                importlib.import_module(each.name)


def contents(value):
    """Return the identities of a plain container's items; None for other values."""
    if type(value) is dict:
        return {repr(key): id(item) for key, item in value.items()}
    if type(value) in {list, set, tuple}:
        return sorted(map(id, value))
    return None


def snapshot():
    """Return all attributes of the library's modules and classes, with references."""
    found, classes = {}, set()

    def look(where, owner):
        for name, value in list(vars(owner).items()):
            if name in PYTHONS_OWN or (where, name) in REPLACED:
                continue
            held = None if name in CACHES else contents(value)
            found[where, name] = (value, held)
            is_ours = isinstance(value, type) and value.__module__.startswith("kafka.")
            if is_ours and value not in classes:
                classes.add(value)
                look(f"{value.__module__}.{value.__qualname__}", value)

    for name, module in list(sys.modules.items()):
        if name == "kafka" or name.startswith("kafka."):
            look(name, module)
    return found


def differences(before, after):
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, (None, None)), after.get(key, (None, None))
        if old[0] is not new[0] or old[1] != new[1]:
            yield ".".join(key)


def use_plainly(servers, topic):
    """Use the library alone, so that its caches are filled."""
    from kafka.admin import KafkaAdminClient

    producer = kafka.KafkaProducer(bootstrap_servers=servers)
    producer.send(topic, b"x" * 200_000, partition=0).get(60)
    producer.close(timeout=60)
    consumer = kafka.KafkaConsumer(bootstrap_servers=servers, group_id=None)
    place = kafka.TopicPartition(topic, 0)
    consumer.assign([place])
    consumer.seek(place, 0)
    while not consumer.poll(200):
        pass
    consumer.close()
    admin = KafkaAdminClient(bootstrap_servers=servers)
    admin.describe_topics([topic])
    admin.close()


def use_ours(servers, topic, coordination_topic):
    from kafka_marshal import Marshal, TopicPartition
    from kafka_marshal.kafka_io.settings import ConnectionConfig
    from kafka_marshal.kafka_io.slices import SliceReader
    from kafka_marshal.protocol.types import OffsetRange

    with (
        Marshal(
            servers,
            group_id="untouched",
            client_id="a",
            coordination_topic=coordination_topic,
            transport="kafka-python",
            state_dir="",
        ) as marshal,
        marshal.consumer(topic) as consumer,
    ):
        assert consumer.poll(WAIT_MS), "no record came"
        consumer.commit()
        consumer.flush()
    reader = SliceReader(
        ConnectionConfig(servers), isolation_level="read_committed", client_rack=""
    )
    try:
        rows = list(
            reader.read(
                TopicPartition(topic, 0),
                OffsetRange(0, 1),
                timeout_ms=WAIT_MS,
                with_headers=True,
            )
        )
    finally:
        reader.close(WAIT_MS)
    assert rows, "no row came"


def main(servers=None, topic=None, coordination_topic=None):
    import_all(kafka)
    if servers is not None:
        use_plainly(servers, topic)
    before = snapshot()
    import kafka_marshal

    import_all(kafka_marshal)
    if servers is not None:
        use_ours(servers, topic, coordination_topic)
    found = list(differences(before, snapshot()))
    sys.stdout.writelines(f"{each}\n" for each in found)


if __name__ == "__main__":
    main(*sys.argv[1:])
