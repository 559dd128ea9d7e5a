"""Observers: they turn the engine's events into log lines and counters."""
