"""The past of the coordination log, which the state no longer has.

Derived from entries and transitions, in one pass, beside the production fold. The
audit on Spark uses the same rows.
"""
