"""The parts of benchmarks/gpu_one.py, each a program that prints what it has measured.

`python -m benchmarks.one_gpu.PART`:

cluster.py     workers that share a GPU and a router, in processes of their own, which a registry in a folder connects
worker.py      such a worker: the product's, with weights that are made up
drain.py       a decode worker is drained in the middle of its answers, which move to the other one
kept.py        a worker whose memory is kept is killed, idle and under streams; and the cost of keeping
kept_worker.py such a worker, with its keeper
supervised.py  a worker without one, that is started again
follow_ups.py  turns of agents, cached but for their last tokens: steps with prompts captured, or not
profile.py     `baton bench profile` of the embedded engine, and a sweep of it beside the simulated engine that reads it
"""
