"""Hosts in addresses that may also name a port."""


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: IPv6 has brackets."""
    return f"[{host}]" if ":" in host else host
