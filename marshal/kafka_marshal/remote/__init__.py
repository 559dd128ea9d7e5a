"""Works through the sidecar of this host: what both ends say, and the client's end."""
