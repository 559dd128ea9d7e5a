"""The fast transport: the same ports over confluent-kafka (librdkafka).

Optional (extra ``fast``). Only ``settings`` can be imported without the extra;
``kafka_io.transport`` uses it to choose a transport.
"""
