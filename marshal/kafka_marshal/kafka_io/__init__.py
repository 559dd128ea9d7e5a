"""Where bytes meet Kafka: the only package that imports a Kafka client."""
