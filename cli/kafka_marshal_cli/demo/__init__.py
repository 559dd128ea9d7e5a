"""The demo: a real Kafka, three consumers, one killed, and a computed verdict.

- ``play``: runs a broker, both rounds and the verdicts.
- ``stage``: one round: starts, kills, pauses and resumes consumers.
- ``worker``: the program of a consumer process.
- ``journal``: the journal of a worker.
- ``evidence``: journals and log in one form; pure.
- ``verdict``: checks the guarantees on the evidence; pure.
- ``show``: output as a table or as lines.
"""
