"""The parts of the simulator; ``kafka_marshal.testing.simulator`` runs them."""
