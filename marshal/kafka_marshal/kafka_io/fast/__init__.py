"""The fast transport: the same ports over confluent-kafka (librdkafka).

Optional (extra ``fast``). Only ``settings`` may be imported without it, which is
how ``kafka_io.transport`` finds out whether the others can be used.
"""
