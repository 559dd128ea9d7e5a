"""The demo: a real Kafka, three consumers, one killed, and a computed verdict.

- ``worker``: the program that each consumer process runs.
- ``journal``: what a worker writes down of its work, line by line.
- ``evidence``: journals and log facts, brought into one shape; pure.
- ``verdict``: what the evidence proves; pure, and able to say no.
- ``stage``: starts, kills, pauses and waits; never without a deadline.
- ``show``: the table on a terminal, or plain lines.
"""
