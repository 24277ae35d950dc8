"""A router of several processes, each with its own event loop, behind the same ports: `processes=N`.

In reading order: supervisor (ports, start, health, drain), process (one of them: started, watched, restarted), child (a
router in such a process), merging (the metrics of all as one), messages (calls
between the supervisor and a process), siblings (requests that may run in another process).
"""
