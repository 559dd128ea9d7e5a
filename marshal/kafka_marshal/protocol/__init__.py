"""The pure core: records, fold and ladders. No IO, clock, chance or threads."""
