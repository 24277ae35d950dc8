"""Routing applied to the cluster's workers.

placer.py     Placer: filters the cluster's workers and asks the policy, again when a worker fails
encoders.py   the encoder version for a request's media, and encode workers
role_workers.py  the least loaded worker, for roles that no policy decides
kv_events.py  subscribes to the workers' KV events
"""
