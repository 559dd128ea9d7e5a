"""Public test kit: a consumer without a cluster, a broker, checks of policies."""
