"""The command ``marshal``."""
