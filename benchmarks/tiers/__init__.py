"""KV tiers in simulated time: the pool, the tiers' directory, the rates, and the router's policy and index are real.

    python -m benchmarks.tiers agents [--pools 0.1 0.25] [--seeds 1 ...]
    python -m benchmarks.tiers trace --trace FILE [--speedup 2] [--pools 0.25]
    python -m benchmarks.tiers.gpu                    (on a machine with a GPU, in real time)

The lines of a trace are described in devtools/bench/traces.py.

worker.py      a worker: a real pool and directory, simulated computing and links
oracle.py      eviction that knows when each session returns, to compare with
cluster.py     four workers behind the router's policy
traffic.py     agents in a closed loop, and a trace in an open one
__main__.py    tables
copies.py      copies of loads and demotions on a GPU, and ways to start them
gpu.py         loads on a GPU: bandwidth, resuming, the cost of digests
engines.py     an engine of 8B shape, and requests to it
pairs.py       short prompts, computed and resumed in many pairs
streams.py     other streams' inter-token latency beside loads
breakdown.py   where the time of a step goes, on the host and on the device
"""
