"""The client side of a sidecar, and the messages that client and sidecar exchange."""
