"""A cluster in simulated time: real routing policies and prefix caches, workers of which only the scheduler is real.

Workers compute in steps as the simulated engine does, with the engine's own blocks; time is a number. What a router
sees of a worker is late: its load by a tenth of a second, its KV events by a network hop.

clock.py    time, and what the cluster's work takes
worker.py   a worker: its blocks, its steps, its load
router.py   places requests by a policy, and takes them from worker to worker
pull_back.py  predicted_seconds, if prefill workers pulled blocks from decode workers
prompts.py  the prompts of a trace, shortened
"""
