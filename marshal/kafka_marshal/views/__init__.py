"""Read-only views of the coordination log: now, at a past time, and live."""
