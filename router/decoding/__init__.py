"""A request while workers compute it: what is known of it, its decode as it is read, and where it continues.

state.py     ExecutionState: the state of one request on its workers, and what it holds there
reading.py   DecodeReading: one decode stream after another, read to the end of the answer
failover.py  Failover: the worker that a request continues on when one has failed or given it away
"""
