"""A deterministic simulator of whole fleets: ``python -m simulator``.

It runs the production engine, and sidecars, over a cluster in memory on virtual time,
injects faults that a seed draws, and judges what happened. It is no part of the wheel.
"""
