"""Ranks of a split model that are started for themselves, on any host: rank 0 is the worker, the others join it.

link.py      the connection between rank 0 and another, with a heartbeat in both directions; messages as bytes;
             what must be the same on all ranks
leader.py    rank 0's side: waits for the others, and tells them each step
follower.py  a rank above 0
"""
