"""`baton bench`.

bench.py    the command: sweep, replay, profile, and compare, which measures several servers in turns
servers.py  the load and the servers that its options name, the wait for them, and their warm-up
reports.py  the files of its report, and how far it has come
"""
