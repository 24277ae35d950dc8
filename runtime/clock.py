"""The clocks of this process. Every module reads the time by these names, and nothing calls `time` for it.

A simulation that puts virtual time here, and into `baton_http2.clock`, before it imports the rest has the whole process
in it. Engines on a device read real time: their threads and kernels take it.
"""

from time import perf_counter_ns as perf_counter_ns
from time import process_time as process_time
from time import thread_time as thread_time
from time import time as wall_time
from time import time_ns as wall_time_ns

from baton_http2.clock import monotonic as monotonic
from baton_http2.clock import perf_counter as perf_counter

__all__ = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "wall_time", "wall_time_ns"]
