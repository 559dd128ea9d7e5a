"""Hosts with sidecars, and their clients, in memory; ``simulate`` runs them."""
