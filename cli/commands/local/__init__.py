"""The commands of the local cluster, which `cli/local/` plans and supervises.

up.py        starts it, and returns after its first completed request
down.py      stops it
status.py    lists its processes
logs.py      prints their logs
"""
