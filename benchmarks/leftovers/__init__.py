"""Memory that requests leave behind in the router and in the workers, by how they ended.

cluster (the processes, and what they hold), heap (their memory), garbage (what only a collection frees), outcomes (how
a request comes to each of its ends), kept (the same of kept answers), __main__ (bytes a request of each outcome).
"""
