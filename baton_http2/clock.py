"""The clocks of this process. Every module reads the time by these names, and nothing calls `time` for it.

A simulation that puts virtual time here before it imports the rest has the whole process in it.
"""

from time import monotonic as monotonic
from time import perf_counter as perf_counter
