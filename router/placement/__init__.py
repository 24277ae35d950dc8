"""Routing applied to the cluster's workers.

placer.py     Placer: filters the cluster's workers and asks the policy, again when a worker fails
encoders.py   the encoder version for a request's media, encode workers, and workers of roles without a policy
kv_events.py  subscribes to the workers' KV events
"""
