"""The past of the coordination log, which the state no longer has.

It is derived from entries and transitions in one pass, along with the production fold.
The audit on Spark uses the same rows.
"""
