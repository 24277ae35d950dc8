"""Routing: which workers a policy chooses; router/placement asks it. docs/extending.md shows how to add a policy.

policy.py     the Policy interface, and what it sees and returns
filters.py    which workers are able to run a request, and why the others are not
policies.py   the simple policies, and how the configuration names one
scoring.py    load scores, session affinity, data-parallel ranks
retry.py      attempts and the retry budget
latency.py    the recent speed of a worker
prefix/       the policy predicted_seconds: prefix caches and learnt costs
"""
