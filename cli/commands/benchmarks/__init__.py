"""`baton bench`.

bench.py    the command: sweep, replay and profile
compare.py  several servers in turns
servers.py  the servers that its options name, the wait for them, and their warm-up
loads.py    the load that its options describe
reports.py  the files of its report
progress.py how far it has come
"""
