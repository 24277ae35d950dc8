"""Routing: which workers run a request. docs/extending.md shows how to add a policy.

placement.py  Placer: filters the cluster's workers and asks the policy, again when a worker fails
policy.py     the Policy interface, and what it sees and returns
filters.py    which workers are able to run a request, and why the others are not
policies.py   the simple policies, and how the configuration names one
scoring.py    load scores, session affinity, data-parallel ranks
loras.py      prefers workers that have a request's adapter in memory
encoders.py   the encoder version for a request's media, and encode workers
retry.py      attempts and the retry budget
latency.py    the recent speed of a worker
explain.py    ExplainRoute: the candidates of a request and their costs
prefix/       the policy predicted_seconds: prefix caches and learnt costs
"""
