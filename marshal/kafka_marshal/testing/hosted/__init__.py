"""Hosts with sidecars, and their clients, in memory; ``simulator_hosted`` runs them."""
