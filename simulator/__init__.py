"""A deterministic simulator of whole fleets: ``python -m simulator``.

It runs the production engine, and sidecars, over a cluster in memory on virtual time,
injects faults that a seed draws, and judges the run. It is not part of the wheel.
"""
