"""The sidecar: one daemon per host holds the claims of many local processes."""
